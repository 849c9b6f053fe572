"""What the scripts with NIXL share."""
import importlib
import sys
import time


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


def transfer(agent, handle, limit=120):
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
