import itertools
import os

import nobounce
import pytest

_numbers = itertools.count(1)


@pytest.fixture
def pair(monkeypatch):
    """Two agents on an address of their own: the second is a peer of the first, and exports a bytearray as "kv"."""
    monkeypatch.setenv("NOBOUNCE_ADDR", f"127.{131 + os.getpid() % 60}.{os.getpid() // 60 % 250}.{next(_numbers) % 250 + 1}")
    with nobounce.Agent("target", listen="127.0.0.1:0", silence=2) as target, nobounce.Agent("initiator", silence=2) as initiator:
        memory = bytearray(64 * 4096)
        target.export("kv", memory)
        peer = initiator.connect(target.address)
        yield Pair(initiator, target, peer, memory)


class Pair:
    def __init__(self, initiator, target, peer, memory):
        self.initiator, self.target, self.peer, self.memory = initiator, target, peer, memory
        self.remote = peer.region("kv")
