"""UCXX: `ucxx_peer.py target|initiator OPTIONS`. The target returns what the initiator sends. tests/clients/run starts both."""
import asyncio
import json
import sys

from memory import Memory
from peer import ADDRESS, measure, options, say, timed, until_error

SIZES = (1 << 20, 64 << 20)


async def target():
    import ucxx

    async def answer(endpoint):
        memories = {size: Memory(size, False) for size in SIZES}
        try:
            while True:
                memory = memories[int((await endpoint.recv_obj()).decode())]
                await endpoint.recv(memory.array)
                await endpoint.send(memory.array)
        except ucxx.exceptions.UCXError:
            pass  # the other end has gone

    listener = ucxx.create_listener(answer, 0)
    say(port=listener.port)
    await asyncio.Event().wait()


def initiator(args):
    import ucxx

    say(ready=True)
    port, loop = json.loads(sys.stdin.readline())["port"], asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    endpoint = loop.run_until_complete(connect(ucxx, port))
    here, there = ({size: Memory(size, False) for size in SIZES} for _ in range(2))

    async def exchange(size):
        await endpoint.send_obj(str(size).encode())
        await endpoint.send(here[size].array)
        await endpoint.recv(there[size].array)

    def move(size):
        loop.run_until_complete(asyncio.wait_for(exchange(size), args.until_error or None))

    if args.until_error:
        move(SIZES[0])
        say(connected=True)
        sys.stdin.readline()
        until_error(lambda: move(SIZES[0]), args.until_error)
        return
    for seed, size in enumerate(SIZES):
        here[size].fill(seed)
        there[size].fill(-1)
        first = timed(lambda: move(size))
        # Half a round trip: one of two directions.
        measure(lambda: timed(lambda: move(size)) / 2, args.seconds,
                operation="SEND", bytes=size, first_s=first, right=there[size].holds(seed))


async def connect(ucxx, port):
    return await ucxx.create_endpoint(ADDRESS, port)


def main():
    args = options()
    asyncio.run(target()) if args.role == "target" else initiator(args)


main()
