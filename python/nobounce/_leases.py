"""Blocks that wait for readers: who has read them, and which leases have ended, in memory that readers look at."""

from __future__ import annotations

import logging
import time
from array import array
from dataclasses import dataclass, field

from ._agent import Notification

_log = logging.getLogger(__name__)
#: Leases at a time; with more, a reader may fail that would have been right.
SLOTS = 4096
#: Leases of which readers are noted before they are known, and for how many seconds.
MAX_NOTED = 16384
NOTED = 120.0


def microseconds() -> int:
    """The wall clock: small enough for proxies that keep numbers as doubles."""
    return time.time_ns() // 1000


@dataclass(frozen=True)
class Lease:
    """Blocks of a finished prompt that wait for readers. Numbers increase, also from one start of an instance to the next."""

    number: int
    #: Where workers publish the last lease that has ended.
    slot: int
    #: By the wall clock, for readers on other machines.
    until: float


@dataclass
class _Readers:
    """Workers that have read the blocks of a lease, of so many."""

    expected: int
    since: float
    workers: set[tuple[str, int]] = field(default_factory=set)


class Leases:
    """The leases of one worker by request."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._readers: dict[int, _Readers] = {}
        # Those of an earlier start have ended.
        self._ended = array("Q", [microseconds()]) * SLOTS

    def table(self) -> memoryview:
        """The number of the last lease that has ended, for each slot. Peers may read it."""
        return memoryview(self._ended).toreadonly()

    def add(self, leases: dict[str, Lease]) -> None:
        self._leases.update(leases)

    def note(self, note: Notification) -> None:
        """A reader is done; notes may come before their lease."""
        try:
            expected, number = map(int, note.tag.split(b" "))
        except ValueError:
            _log.warning("peer %s sent the tag %r, which is not of this connector", note.peer, note.tag)
            return
        # A reader that failed may try again: the blocks wait for the end of their lease.
        if note.outcome == "complete":
            self._readers.setdefault(number, _Readers(expected, time.monotonic())).workers.add((note.peer, note.generation))
        while len(self._readers) > MAX_NOTED:
            del self._readers[next(iter(self._readers))]

    def take_ended(self) -> set[str]:
        """Requests whose blocks have been read, or whose lease is over. The table says so from now on."""
        now = time.time()
        ended = {request for request, lease in self._leases.items() if lease.until <= now or self._is_read(lease)}
        for request in ended:
            lease = self._leases.pop(request)
            self._readers.pop(lease.number, None)
            self._ended[lease.slot] = max(self._ended[lease.slot], lease.number)
        old = time.monotonic() - NOTED
        for number in [number for number, readers in self._readers.items() if readers.since < old]:
            del self._readers[number]
        return ended

    def _is_read(self, lease: Lease) -> bool:
        readers = self._readers.get(lease.number)
        return readers is not None and len(readers.workers) >= readers.expected
