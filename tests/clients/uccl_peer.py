"""One end of a transfer of UCCL's p2p engine, GPU memory only: `uccl_peer.py target|initiator OPTIONS`. tests/clients/run starts both."""
import ctypes
import glob
import json
import os
import sys

from memory import Memory
from peer import measure, options, say, timed


def engine():
    """The module, with the CUDA runtime that it is linked with and that PyTorch may not have."""
    for folder in sys.path:
        for library in glob.glob(os.path.join(folder, "nvidia", "cuda_runtime", "lib", "libcudart.so.12")):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    from uccl import p2p

    return p2p


def must(answer):
    """What a call gives besides its success."""
    ok, *rest = answer if isinstance(answer, tuple) else (answer,)
    if not ok:
        raise RuntimeError("refused")
    return rest


def pieces(memory, count):
    """Addresses and lengths of the parts."""
    parts = memory.parts(count)
    return [place for place, _, _ in parts], [size for _, size, _ in parts]


def target(endpoint, memory, region):
    say(endpoint=bytes(endpoint.get_metadata()).hex())
    *_, connection = must(endpoint.accept())
    # Lines of the other end: how many parts to offer, what the bytes should be, what to fill in.
    for line in sys.stdin:
        order = json.loads(line)
        if count := order.get("offer"):
            places, sizes = pieces(memory, count)
            offers, = must(endpoint.advertisev(connection, [region] * count, places, sizes, count))
            say(offers=[bytes(offer).hex() for offer in offers])
        elif "fill" in order:
            memory.fill(order["fill"])
            say(filled=True)
        elif "check" in order:
            say(right=memory.holds(order["check"]))
            memory.fill(-1)


def ask(**order):
    """The other end's answer."""
    say(**order)
    return json.loads(sys.stdin.readline())


def initiator(args, p2p, endpoint, memory, region):
    say(ready=True)
    there = bytes.fromhex(json.loads(sys.stdin.readline())["endpoint"])
    address, port, gpu = p2p.Endpoint.parse_metadata(there)
    connection, = must(endpoint.connect(address, gpu, remote_port=port))
    seed = 1000
    for count in args.counts:
        places, sizes = pieces(memory, count)
        offers = [bytes.fromhex(offer) for offer in ask(offer=count)["offers"]]
        for operation, call in (("WRITE", endpoint.writev), ("READ", endpoint.readv)):
            def move():
                must(call(connection, [region] * count, places, sizes, offers, count))

            seed += 1
            if operation == "WRITE":
                memory.fill(seed)
                first = timed(move)
                right = ask(check=seed)["right"]
            else:
                ask(fill=seed)
                memory.fill(-1)
                first = timed(move)
                right = memory.holds(seed)
            measure(lambda: timed(move), args.seconds, operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=right)
    os._exit(0)  # its threads do not end


def main():
    args = options("rdma")
    memory = Memory(args.bytes, args.gpu)
    memory.fill(-1)
    p2p = engine()
    endpoint = p2p.Endpoint(0)
    region, = must(endpoint.reg(memory.address, memory.length))
    if args.role == "target":
        target(endpoint, memory, region)
    else:
        initiator(args, p2p, endpoint, memory, region)


main()
