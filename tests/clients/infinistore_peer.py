"""InfiniStore: `infinistore_peer.py target|initiator OPTIONS`. The target is the store, the initiator writes and reads blocks.

tests/clients/run starts both.
"""
import asyncio
import itertools
import json
import os
import sys

from memory import Memory
from peer import measure, options, say, timed, until_error
from ports import free_port


def target():
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

        self.is_tcp, self.loop, self.patience = args.protocol == "tcp", asyncio.new_event_loop(), args.until_error or None
        kind = infinistore.TYPE_TCP if self.is_tcp else infinistore.TYPE_RDMA
        config = infinistore.ClientConfig(
            host_addr="127.0.0.1", service_port=port, log_level="warning", connection_type=kind, ib_port=1,
            link_type=infinistore.LINK_ETHERNET, dev_name="nb0")
        self.connection, self.memory = infinistore.InfinityConnection(config), memory
        self.connection.connect()
        if not self.is_tcp:
            self.connection.register_mr(memory.address, memory.length)

    def move(self, operation, name, count):
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
        self.loop.run_until_complete(asyncio.wait_for(call(blocks, size, memory.address), self.patience))

    def forget(self, name, count):
        self.connection.delete_keys([f"{name}-{at}" for at in range(count)])


def initiator(args, memory):
    say(ready=True)
    store = Store(args, json.loads(sys.stdin.readline())["port"], memory)
    numbers = itertools.count()

    def write(count):
        """A name that exists is not written again."""
        name = f"k{next(numbers)}"
        seconds = timed(lambda: store.move("WRITE", name, count))
        store.forget(name, count)
        return seconds

    if args.until_error:
        write(4)
        say(connected=True)
        sys.stdin.readline()
        until_error(lambda: write(4), args.until_error)
        os._exit(0)  # its threads do not end
    for count in args.counts:
        memory.fill(count)
        first = {"WRITE": timed(lambda: store.move("WRITE", "first", count))}
        memory.fill(-1)
        first["READ"] = timed(lambda: store.move("READ", "first", count))
        right = memory.holds(count)
        moves = {"WRITE": lambda: write(count), "READ": lambda: timed(lambda: store.move("READ", "first", count))}
        for operation, move in moves.items():
            measure(move, args.seconds, operation=operation, descriptors=count, bytes=memory.length, first_s=first[operation], right=right)
        store.forget("first", count)
    os._exit(0)


def main():
    args = options("rdma")
    target() if args.role == "target" else initiator(args, Memory(args.bytes, args.gpu))


main()
