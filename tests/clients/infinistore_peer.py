"""InfiniStore: `infinistore_peer.py target|initiator OPTIONS`. The target is the store, the initiator writes and reads blocks.

tests/clients/run starts both.
"""
import argparse
import asyncio
import json
import os
import socket
import sys
import time

from memory import Memory, say


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def target(args):
    import infinistore
    import uvloop

    port = free_port()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    config = infinistore.ServerConfig(
        host="127.0.0.1", service_port=port, manage_port=free_port(), log_level="warning", prealloc_size=1, dev_name="nb0", ib_port=1,
        link_type="Ethernet", minimal_allocate_size=4, auto_increase=False, evict_min_threshold=0.6, evict_max_threshold=0.8, evict_interval=5,
        enable_periodic_evict=False)
    infinistore.register_server(loop, config)
    loop.call_soon(lambda: say(port=port))
    loop.run_forever()


class Store:
    """Blocks under names, by RDMA or by the store's own TCP."""

    def __init__(self, args, port, memory):
        import infinistore

        self.is_tcp = args.protocol == "tcp"
        kind = infinistore.TYPE_TCP if self.is_tcp else infinistore.TYPE_RDMA
        config = infinistore.ClientConfig(
            host_addr="127.0.0.1", service_port=port, log_level="warning", connection_type=kind, ib_port=1,
            link_type=infinistore.LINK_ETHERNET, dev_name="nb0")
        self.connection, self.memory = infinistore.InfinityConnection(config), memory
        self.connection.connect()
        if not self.is_tcp:
            self.connection.register_mr(memory.address, memory.length)

    async def move(self, operation, name, count):
        size, memory = self.memory.length // count, self.memory
        if self.is_tcp:
            for at in range(count):
                if operation == "WRITE":
                    self.connection.tcp_write_cache(f"{name}-{at}", memory.address + at * size, size)
                else:
                    block = self.connection.tcp_read_cache(f"{name}-{at}")
                    memory.array[at * size // 8:(at + 1) * size // 8] = block.view(memory.array.dtype)
            return
        blocks = [(f"{name}-{at}", at * size) for at in range(count)]
        call = self.connection.rdma_write_cache_async if operation == "WRITE" else self.connection.rdma_read_cache_async
        await call(blocks, size, memory.address)

    def forget(self, name, count):
        self.connection.delete_keys([f"{name}-{at}" for at in range(count)])


async def initiator(args, memory):
    say(ready=True)
    store = Store(args, json.loads(sys.stdin.readline())["port"], memory)
    if args.until_error:
        await until_error(args, store)
        return
    for seed, count in enumerate(args.counts):
        name, rounds, spent = f"k{count}", 0, {"WRITE": [], "READ": []}
        end, right = time.monotonic() + 2 * args.seconds, True
        while rounds < 3 or time.monotonic() < end and rounds < 100:
            memory.fill(seed + rounds)
            for operation in ("WRITE", "READ"):
                if operation == "READ":
                    memory.fill(-1)
                begin = time.perf_counter()
                await store.move(operation, name, count)
                spent[operation].append(time.perf_counter() - begin)
            right = right and memory.holds(seed + rounds)
            store.forget(name, count)
            rounds += 1
        for operation, times in spent.items():
            first = times[0]
            times.sort()
            say(operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=right,
                gb_s=memory.length / times[len(times) // 2] / 1e9, best_gb_s=memory.length / times[0] / 1e9)
    os._exit(0)  # its threads do not end


async def until_error(args, store):
    """Writes until that fails. The store is killed or stopped at the word `now`."""
    await store.move("WRITE", "first", 4)
    say(connected=True)
    sys.stdin.readline()
    begin, rounds = time.monotonic(), 0
    try:
        while time.monotonic() - begin < args.until_error:
            await asyncio.wait_for(store.move("WRITE", f"again{rounds % 8}", 4), args.until_error)
            store.forget(f"again{rounds % 8}", 4)
            rounds += 1
        say(error=None, after_s=time.monotonic() - begin)
    except Exception as error:  # a plain Exception, by this client
        told = None if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        say(error=told, after_s=time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--protocol", default="rdma")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--counts", type=lambda text: [int(part) for part in text.split(",") if int(part) > 1], default=[256, 4096])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--until-error", type=float, default=0, help="transfer until it fails, at most so long")
    args = parser.parse_args()
    if args.role == "target":
        target(args)
    else:
        memory = Memory(args.bytes, False)
        asyncio.run(initiator(args, memory))


main()
