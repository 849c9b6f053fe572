"""One end of a NIXL transfer: `nixl_peer.py target|initiator OPTIONS`. tests/clients/run starts both."""
import json
import sys

from memory import Memory
from nixl_calls import api, transfer, wait_for
from peer import measure, options, say, until_error


def target(agent, memory):
    say(metadata=agent.get_agent_metadata().hex(), address=memory.address, device=memory.device)
    hello = json.loads(sys.stdin.readline())
    agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
    # The seed that the bytes should have, until tests/clients/run ends this process.
    while True:
        word, _, seed = wait_for(agent, "initiator", b"", 600).decode().partition(" ")
        if word == "fill":
            memory.fill(int(seed))
        good = memory.holds(int(seed))
        agent.send_notif("initiator", f"seen {int(good)}".encode())
        if word == "check":
            memory.fill(-1)


def initiator(args, agent, memory):
    say(metadata=agent.get_agent_metadata().hex())
    hello = json.loads(sys.stdin.readline())
    peer = agent.add_remote_agent(bytes.fromhex(hello["metadata"]))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    there = Memory.__new__(Memory)
    there.address, there.device, there.length = hello["address"], hello["device"], memory.length

    def lists(count):
        return [agent.get_xfer_descs(end.parts(count), mem_type=memory.kind) for end in (memory, there)]

    if args.until_error:
        handle = agent.initialize_xfer("WRITE", *lists(16), peer, b"")
        transfer(agent, handle)
        say(ready=True)
        sys.stdin.readline()
        until_error(lambda: transfer(agent, handle, args.until_error), args.until_error)
        return
    seed = 1000
    for count in args.counts:
        descriptors = lists(count)
        for operation in ("WRITE", "READ"):
            seed += 1
            if operation == "WRITE":
                memory.fill(seed)
                notice = f"check {seed}".encode()
            else:
                agent.send_notif(peer, f"fill {seed}".encode())
                if wait_for(agent, peer, b"seen") != b"seen 1":
                    raise RuntimeError("the target could not fill its memory")
                memory.fill(-1)
                notice = b""
            handle = agent.initialize_xfer(operation, *descriptors, peer, notice)
            first = transfer(agent, handle)
            agent.release_xfer_handle(handle)
            right = wait_for(agent, peer, b"seen") == b"seen 1" if operation == "WRITE" else memory.holds(seed)
            handle = agent.initialize_xfer(operation, *descriptors, peer, b"")
            measure(lambda: transfer(agent, handle), args.seconds,
                    operation=operation, descriptors=count, bytes=memory.length, first_s=first, right=right)
            agent.release_xfer_handle(handle)


def main():
    args, nixl = options(), api()
    agent = nixl.nixl_agent(args.role, nixl.nixl_agent_config(backends=["UCX"]))
    memory = Memory(args.bytes, args.gpu)
    memory.fill(-1)
    agent.register_memory([(memory.address, memory.length, memory.device, "")], memory.kind)
    target(agent, memory) if args.role == "target" else initiator(args, agent, memory)


main()
