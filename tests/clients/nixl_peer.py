"""One end of a NIXL transfer: `nixl_peer.py target|initiator OPTIONS`. tests/clients/run starts both."""
import argparse
import importlib
import json
import sys
import time

from memory import Memory, say


def api():
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return importlib.import_module(name + "._api")
        except ImportError:
            pass
    sys.exit("no nixl")


def wait_for(agent, peer, wanted, limit=60):
    """The first notification of the peer that starts with `wanted`."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        for message in agent.get_new_notifs().get(peer, []):
            if message.startswith(wanted):
                return message
        time.sleep(0.0005)
    raise TimeoutError(f"no notification {wanted!r} within {limit} s")


def target(args, nixl, agent, memory):
    say(metadata=agent.get_agent_metadata().hex(), address=memory.address, device=memory.device)
    hello = json.loads(sys.stdin.readline())
    agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
    # The seed that the bytes should have, until the initiator says that it is done.
    while True:
        word, _, seed = wait_for(agent, "initiator", b"", 600).decode().partition(" ")
        if word == "done":
            break
        if word == "fill":
            memory.fill(int(seed))
        good = memory.holds(int(seed))
        agent.send_notif("initiator", f"seen {int(good)}".encode())
        if word == "check":
            memory.fill(-1)


def transfer(nixl, agent, handle, limit):
    """Posts and waits; returns seconds, or raises with what NIXL says."""
    begin = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        if time.perf_counter() - begin > limit:
            raise TimeoutError("still PROC")
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(state)
    return time.perf_counter() - begin


def initiator(args, nixl, agent, memory):
    say(metadata=agent.get_agent_metadata().hex())
    hello = json.loads(sys.stdin.readline())
    peer = agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    there = Memory.__new__(Memory)
    there.address, there.device, there.length = hello["address"], hello["device"], memory.length
    seed = 1000

    def ask(word):
        agent.send_notif(peer, f"{word} {seed}".encode())
        return wait_for(agent, peer, b"seen") == b"seen 1"

    if args.until_error:
        until_error(args, nixl, agent, memory, there, peer)
        return
    for count in args.counts:
        lists = [agent.get_xfer_descs(end.parts(count), mem_type=memory.kind) for end in (memory, there)]
        for operation in ("WRITE", "READ"):
            seed += 1
            if operation == "WRITE":
                memory.fill(seed)
                notice = f"check {seed}".encode()
            else:
                if not ask("fill"):
                    raise RuntimeError("the target could not fill its memory")
                memory.fill(-1)
                notice = b""
            handle = agent.initialize_xfer(operation, *lists, peer, notice)
            first = transfer(nixl, agent, handle, 120)
            agent.release_xfer_handle(handle)
            good = wait_for(agent, peer, b"seen") == b"seen 1" if operation == "WRITE" else memory.holds(seed)
            times = []
            end = time.monotonic() + args.seconds
            handle = agent.initialize_xfer(operation, *lists, peer, b"")
            while len(times) < 3 or time.monotonic() < end and len(times) < 200:
                times.append(transfer(nixl, agent, handle, 120))
            agent.release_xfer_handle(handle)
            times.sort()
            say(operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=good,
                gb_s=memory.length / times[len(times) // 2] / 1e9, best_gb_s=memory.length / times[0] / 1e9)
    agent.send_notif(peer, b"done 0")
    time.sleep(0.2)


def until_error(args, nixl, agent, memory, there, peer):
    """Transfers until one fails. The other end is killed or stopped at the word `now`."""
    lists = [agent.get_xfer_descs(end.parts(16), mem_type=memory.kind) for end in (memory, there)]
    handle = agent.initialize_xfer("WRITE", *lists, peer, b"")
    transfer(nixl, agent, handle, 60)
    say(ready=True)
    sys.stdin.readline()
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < args.until_error:
            transfer(nixl, agent, handle, args.until_error)
        say(error=None, after_s=time.monotonic() - begin)
    except Exception as error:  # NIXL's own classes, by version
        say(error=f"{type(error).__name__}: {error}", after_s=time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--counts", type=lambda text: [int(part) for part in text.split(",")], default=[1, 256, 4096])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--until-error", type=float, default=0, help="transfer until it fails, at most so long")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    nixl = api()
    agent = nixl.nixl_agent(args.role, nixl.nixl_agent_config(backends=["UCX"]))
    memory = Memory(args.bytes, args.gpu)
    memory.fill(-1)
    agent.register_memory([(memory.address, memory.length, memory.device, "")], memory.kind)
    (target if args.role == "target" else initiator)(args, nixl, agent, memory)


main()
