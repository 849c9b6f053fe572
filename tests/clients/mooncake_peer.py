"""One end of a transfer of Mooncake's transfer engine: `mooncake_peer.py target|initiator OPTIONS`. tests/clients/run starts both."""
import json
import sys

from memory import Memory
from peer import measure, options, say, timed, until_error


def target(engine, memory):
    say(segment=f"127.0.0.1:{engine.get_rpc_port()}", address=memory.address)
    # Lines of the other end: what the bytes should be, or what to fill in.
    for line in sys.stdin:
        order = json.loads(line)
        if "fill" in order:
            memory.fill(order["fill"])
            say(filled=True)
        elif "check" in order:
            say(right=memory.holds(order["check"]))
            memory.fill(-1)


def transfers(engine, segment, memory, there, count):
    """Two calls that move everything in so many parts."""
    parts = [place for place, _, _ in memory.parts(count)]
    remote = [there + (place - memory.address) for place in parts]
    lengths = [memory.length // count] * count

    def move(operation):
        code = operation(segment, parts, remote, lengths)
        if code != 0:
            raise RuntimeError(f"transfer: {code}")

    operations = {"WRITE": engine.batch_transfer_sync_write, "READ": engine.batch_transfer_sync_read}
    return {name: lambda operation=operation: move(operation) for name, operation in operations.items()}


def initiator(args, engine, memory):
    say(ready=True)
    there = json.loads(sys.stdin.readline())
    segment, seed = there["segment"], 1000
    if args.until_error:
        move = transfers(engine, segment, memory, there["address"], 16)["WRITE"]
        move()
        say(connected=True)
        sys.stdin.readline()
        until_error(move, args.until_error)
        return
    for count in args.counts:
        for operation, move in transfers(engine, segment, memory, there["address"], count).items():
            seed += 1
            if operation == "WRITE":
                memory.fill(seed)
            else:
                say(fill=seed)
                sys.stdin.readline()
                memory.fill(-1)
            first = timed(move)
            if operation == "WRITE":
                say(check=seed)
                right = json.loads(sys.stdin.readline())["right"]
            else:
                right = memory.holds(seed)
            measure(lambda: timed(move), args.seconds,
                    operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=right)


def main():
    args = options("rdma")
    memory = Memory(args.bytes, args.gpu)  # loads the CUDA runtime that the engine is linked with
    memory.fill(-1)
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    device = "nb0" if args.protocol == "rdma" else ""
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", args.protocol, device)
    if code != 0:
        sys.exit(f"initialize: {code}")
    code = engine.register_memory(memory.address, memory.length)
    if code != 0:
        sys.exit(f"register_memory: {code}")
    target(engine, memory) if args.role == "target" else initiator(args, engine, memory)


main()
