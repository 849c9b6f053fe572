"""Two NIXL agents that exchange their metadata by NIXL's own listener thread, as the example of its documentation does:
the initiator READs rows of the target.

    nixl_two_peers.py target --port PORT
    nixl_two_peers.py initiator --ip ADDRESS --port PORT
"""
import argparse
import time

from memory import Memory
from nixl_calls import api, transfer, wait_for
from peer import say

ROWS, LENGTH, SEED = 10, 10 << 20, 7


def until(condition, what, limit=60):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {limit} s")
        time.sleep(0.001)


def target(agent, memory):
    memory.fill(SEED)
    say(listening=True)
    until(lambda: agent.check_remote_metadata("initiator"), "metadata of the initiator")
    rows = agent.get_xfer_descs(memory.parts(ROWS), mem_type=memory.kind)
    agent.send_notif("initiator", agent.get_serialized_descs(rows))
    wait_for(agent, "initiator", b"read")
    until(lambda: not agent.check_remote_metadata("initiator"), "invalidation by the initiator")
    say(done=True)


def initiator(agent, memory, peer):
    agent.fetch_remote_metadata("target", *peer)
    agent.send_local_metadata(*peer)
    until(lambda: agent.check_remote_metadata("target"), "metadata of the target")
    there = agent.deserialize_descs(wait_for(agent, "target", b""))
    here = agent.get_xfer_descs(memory.parts(ROWS), mem_type=memory.kind)
    handle = agent.initialize_xfer("READ", here, there, "target", b"read")
    transfer(agent, handle)
    say(right=memory.holds(SEED), rows=ROWS)
    agent.remove_remote_agent("target")
    agent.release_xfer_handle(handle)
    agent.invalidate_local_metadata(*peer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--ip", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5555)
    args = parser.parse_args()
    is_target = args.role == "target"
    nixl = api()
    config = nixl.nixl_agent_config(True, True, args.port if is_target else 0)
    agent, memory = nixl.nixl_agent(args.role, config), Memory(LENGTH, False)
    registered = agent.register_memory([(memory.address, memory.length, memory.device, "")], mem_type=memory.kind)
    if is_target:
        target(agent, memory)
    else:
        initiator(agent, memory, (args.ip, args.port))
    agent.deregister_memory(registered)


main()
