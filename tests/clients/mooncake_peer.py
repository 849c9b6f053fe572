"""One end of a transfer of Mooncake's transfer engine: `mooncake_peer.py target|initiator OPTIONS`. tests/clients/run starts both."""
import argparse
import json
import sys
import time

from memory import Memory, say


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

    def call(operation):
        return lambda: operation(segment, parts, remote, lengths)

    return {"WRITE": call(engine.batch_transfer_sync_write), "READ": call(engine.batch_transfer_sync_read)}


def timed(call):
    begin = time.perf_counter()
    code = call()
    if code != 0:
        raise RuntimeError(f"transfer: {code}")
    return time.perf_counter() - begin


def initiator(args, engine, memory):
    say(ready=True)
    there = json.loads(sys.stdin.readline())
    segment, seed = there["segment"], 1000
    if args.until_error:
        call = transfers(engine, segment, memory, there["address"], 16)["WRITE"]
        timed(call)
        say(connected=True)
        sys.stdin.readline()
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < args.until_error:
                timed(call)
            say(error=None, after_s=time.monotonic() - begin)
        except RuntimeError as error:
            say(error=str(error), after_s=time.monotonic() - begin)
        return
    for count in args.counts:
        for operation, call in transfers(engine, segment, memory, there["address"], count).items():
            seed += 1
            if operation == "WRITE":
                memory.fill(seed)
            else:
                say(fill=seed)
                sys.stdin.readline()
                memory.fill(-1)
            first = timed(call)
            if operation == "WRITE":
                say(check=seed)
                good = json.loads(sys.stdin.readline())["right"]
            else:
                good = memory.holds(seed)
            times = []
            end = time.monotonic() + args.seconds
            while len(times) < 3 or time.monotonic() < end and len(times) < 200:
                times.append(timed(call))
            times.sort()
            say(operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=good,
                gb_s=memory.length / times[len(times) // 2] / 1e9, best_gb_s=memory.length / times[0] / 1e9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--protocol", default="rdma")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--counts", type=lambda text: [int(part) for part in text.split(",")], default=[1, 256, 4096])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--until-error", type=float, default=0, help="transfer until it fails, at most so long")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    device = "nb0" if args.protocol == "rdma" else ""
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", args.protocol, device)
    if code != 0:
        sys.exit(f"initialize: {code}")
    memory = Memory(args.bytes, args.gpu)
    memory.fill(-1)
    code = engine.register_memory(memory.address, memory.length)
    if code != 0:
        sys.exit(f"register_memory: {code}")
    target(engine, memory) if args.role == "target" else initiator(args, engine, memory)


main()
