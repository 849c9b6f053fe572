"""What a prefill worker knows of its readers, and which heads workers read from each other."""
import time

import nobounce
import pytest
from nobounce._heads import Split
from nobounce._leases import Lease, Leases, microseconds


def note(tag, outcome="complete", peer="decode 0"):
    return nobounce.Notification(peer, 1, tag, outcome, 0, "")


def leased(number, slot=0, seconds=60.0):
    return Lease(number, slot, time.time() + seconds)


@pytest.mark.parametrize("total, here, there", [(8, 1, 1), (8, 2, 4), (8, 4, 2), (2, 8, 2), (2, 2, 8), (2, 8, 8), (1, 4, 2), (4, 8, 16)])
def test_every_head_is_read_once_and_every_worker_is_notified(total, here, there):
    mine, theirs = Split(total, here), Split(total, there)
    readers = mine.readers(theirs)
    for rank in range(here):
        assert mine.heads(rank)[-1] < total
        held = [head for source in mine.sources(theirs, rank) for head in theirs.heads(source) if head in mine.heads(rank)]
        assert sorted(held) == list(mine.heads(rank)), "each head once"
        assert all(rank in readers[source] for source in mine.sources(theirs, rank))
    assert all(readers), "no prefill worker waits for the end of the lease"


def test_splits_that_no_model_has():
    for total, ranks in ((8, 3), (3, 8), (0, 1), (8, 0), (8, 1 << 20)):
        with pytest.raises(nobounce.ListError):
            Split(total, ranks)


def test_a_note_that_comes_before_its_lease_counts_once():
    leases, now = Leases(), microseconds()
    leases.note(note(b"1 %d" % (now + 10**9)))
    assert leases.take_ended() == set()
    leases.add({"a": leased(now + 10**9)})
    assert leases.take_ended() == {"a"}
    assert leases.take_ended() == set(), "reported once"


def test_only_readers_that_are_done_count_each_once():
    leases, now = Leases(), microseconds()
    leases.add({"a": leased(now + 10**9, 3)})
    leases.note(note(b"2 %d" % (now + 10**9), "failed", "decode 0"))
    leases.note(note(b"2 %d" % (now + 10**9), "complete", "decode 1"))
    leases.note(note(b"2 %d" % (now + 10**9), "complete", "decode 1"))
    assert leases.take_ended() == set() and leases.table()[3] < now + 10**9
    leases.note(note(b"2 %d" % (now + 10**9), "complete", "decode 0"))
    assert leases.take_ended() == {"a"} and leases.table()[3] == now + 10**9


def test_tags_of_strangers_are_ignored():
    leases = Leases()
    for tag in (b"", b"1", b"x y", b"1 2 3", b"\xff\xfe", b"1 \xff"):
        leases.note(note(tag))
    assert leases.take_ended() == set()


def test_a_lease_ends_by_itself_and_readers_see_it():
    now, leases = microseconds(), Leases()
    assert min(leases.table()) >= now, "leases of an earlier start have ended"
    leases.add({"a": leased(now + 10**9, 7, -1.0), "b": leased(now + 10**9 - 1, 7)})
    assert leases.take_ended() == {"a"} and leases.table()[7] == now + 10**9
