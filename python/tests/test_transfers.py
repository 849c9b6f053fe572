"""Pages, lists, tags: what arrives, and what is refused."""
import array
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import nobounce
import pytest

numpy = pytest.importorskip("numpy")
PAGE = 4096


def test_pages_from_numpy_indices(pair):
    source = numpy.arange(64 * PAGE // 8, dtype=numpy.uint64)
    rng = numpy.random.default_rng(1)
    here, there = rng.permutation(64), rng.permutation(64)
    transfer = pair.peer.write_pages(source, here, pair.remote, there, PAGE, tag=b"all")
    assert transfer.wait(10) == 64 * PAGE and transfer.done()
    found = numpy.frombuffer(pair.memory, dtype=numpy.uint64).reshape(64, -1)
    assert (found[there] == source.reshape(64, -1)[here]).all()
    note = pair.target.notification(10)
    assert (note.peer, note.tag, note.outcome, note.nbytes) == ("initiator", b"all", "complete", 64 * PAGE)
    assert note.check() is note and note.generation == pair.initiator.generation
    back = numpy.zeros_like(source)
    pair.peer.read_pages(back, here.astype("int32"), pair.remote, list(there), PAGE).wait(10)
    assert (back == source).all()


def test_lists_and_whole_arrays(pair):
    source = numpy.random.default_rng(2).integers(0, 256, 4096, dtype=numpy.uint8)
    pair.peer.write_list(source, pair.remote, [(0, 100, 10), (50, 200, 20)]).wait(10)
    assert bytes(pair.memory[100:110]) == source[:10].tobytes() and bytes(pair.memory[200:220]) == source[50:70].tobytes()
    pair.peer.write_list(source, pair.remote, numpy.array([[0, 300, 10], [10, 310, 10]])).wait(10)
    assert bytes(pair.memory[300:320]) == source[:20].tobytes()
    pair.peer.write(source, pair.remote, 4096).wait(10)
    back = bytearray(4096)
    assert pair.peer.read(back, pair.remote, 4096).wait(10) == 4096
    assert back == source.tobytes()


def test_layers_are_lists_of_arrays_and_repeats(pair):
    layers = [numpy.full(4 * PAGE, layer + 1, dtype=numpy.uint8) for layer in range(3)]
    there = [pair.remote.part(layer * 4 * PAGE, 4 * PAGE) for layer in range(3)]
    pair.peer.write_pages(layers, [0, 2], there, [3, 1], PAGE, tag=b"layers").wait(10)
    for layer in range(3):
        found = pair.memory[layer * 4 * PAGE:][:4 * PAGE]
        assert [set(found[page * PAGE:][:PAGE]) for page in range(4)] == [{0}, {layer + 1}, {0}, {layer + 1}]
    assert pair.target.notification(10).nbytes == 6 * PAGE
    # Half of the heads of 16 tokens of 64 bytes.
    source = numpy.arange(16 * 64, dtype=numpy.uint32).astype(numpy.uint8)
    pair.peer.write_pages(source, [0], pair.remote, [0], 32, local_stride=1024, remote_stride=512, local_offset=32, repeats=[(16, 64, 32)]).wait(10)
    assert bytes(pair.memory[:512]) == source.reshape(16, 64)[:, 32:].tobytes()


@pytest.mark.parametrize("pages", [[-1], [2**70], ["a"], [64], numpy.array([-1]), numpy.array([1.5])])
def test_wrong_pages_are_refused(pair, pages):
    with pytest.raises(nobounce.ListError) as raised:
        pair.peer.write_pages(bytearray(64 * PAGE), pages, pair.remote, [0], PAGE)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(nobounce.ListError, match="same length"):
        pair.peer.write_pages(bytearray(64 * PAGE), [0, 1], pair.remote, [0], PAGE)
    assert pair.peer.write(bytearray(8), pair.remote).wait(10) == 8


def test_memory_that_cannot_be_registered_in_place(pair):
    for memory, words in ((numpy.zeros((8, 8))[:, ::2], "not contiguous"), (numpy.zeros((8, 8)).T, "not contiguous"), ("text", "no bytes"), (7, "no bytes")):
        with pytest.raises(nobounce.ListError, match=words):
            pair.initiator.register(memory)
    memory = pair.initiator.register(array.array("d", [0.0] * 8))
    assert memory.nbytes == len(memory) == 64 and not memory.is_gpu and "cpu" in memory.paths
    assert memory.part(8, 8).address == memory.address + 8


def test_read_only_memory_is_sent_and_never_written(pair):
    frozen = numpy.arange(64, dtype=numpy.uint8)
    frozen.flags.writeable = False
    for memory in (bytes(range(64)), frozen):
        registered = pair.initiator.register(memory)
        assert registered.is_read_only
        pair.memory[:64] = bytes(64)
        pair.peer.write(memory, pair.remote).wait(10)
        assert pair.memory[:64] == bytes(range(64))
        with pytest.raises(nobounce.ListError, match="read-only"):
            pair.peer.read(memory, pair.remote)
    with pytest.raises(nobounce.ListError, match="read-only"):
        pair.peer.read_list(b"12345678", pair.remote, [(0, 0, 8)])


def test_registered_memory_is_kept_alive(pair):
    memory = pair.initiator.register(numpy.full(1 << 20, 7, dtype=numpy.uint8))
    churn = [numpy.zeros(1 << 20, dtype=numpy.uint8) for _ in range(20)]
    pair.peer.write_list(memory, pair.remote, [(0, 0, 4096)]).wait(10)
    assert set(pair.memory[:4096]) == {7} and churn


def test_announcements(pair):
    announcement = pair.peer.announce(b"layers")
    for layer in range(3):
        pair.peer.write_list(bytearray(b"x" * 64), pair.remote, [(0, layer * 64, 64)], announcement=announcement).wait(10)
    assert pair.target.notification(0.05) is None
    announcement.complete()
    assert pair.target.notification(10).nbytes == 192
    with pytest.raises(nobounce.Error):
        announcement.complete()
    pair.peer.announce(b"given up").abort("no room")
    note = pair.target.notification(10)
    assert (note.outcome, note.reason) == ("aborted", "no room")
    with pytest.raises(nobounce.Error, match="no room"):
        note.check()


def test_a_peer_that_closes_is_gone(pair):
    pair.target.close()
    deadline = time.monotonic() + 5
    while pair.peer.gone is None:
        assert time.monotonic() < deadline
    with pytest.raises(nobounce.PeerGone, match="closed the connection") as raised:
        pair.peer.write(bytearray(8), pair.remote)
    assert isinstance(raised.value, ConnectionError)
    with pytest.raises(nobounce.Error, match="closed"):
        pair.target.metadata()


def test_timeouts_and_missing_regions(pair):
    with pytest.raises(nobounce.Timeout, match='"nothing".*"kv"') as raised:
        pair.peer.region("nothing", timeout=0.05)
    assert isinstance(raised.value, TimeoutError)
    with pytest.raises(nobounce.Timeout):
        pair.target.accept(timeout=0.05) and pair.target.accept(timeout=0.05)
    with pytest.raises(nobounce.ConnectError):
        pair.initiator.connect("127.0.0.1:1", timeout=1)


def test_metadata_as_bytes(pair):
    with nobounce.Agent("other") as other:
        peer = other.connect(pair.target.metadata())
        assert peer.regions() == ["kv"]
        peer.write(bytearray(b"hello"), peer.region("kv", 0)).wait(10)
        assert pair.memory[:5] == b"hello"
        _, version = pair.target.metadata_since(0)
        pair.target.export("more", bytearray(16))
        new, _ = pair.target.metadata_since(version)
        peer.add_metadata(new)
        assert peer.region("more", 0).nbytes == 16


def test_statistics_by_path(pair):
    pair.peer.write(bytearray(1000), pair.remote).wait(10)
    stats = pair.initiator.stats()
    assert (stats["transfers"], stats["bytes"], stats["failed"]) == (1, 1000, 0)
    assert stats["paths"]["out"]["cpu"]["bytes"] >= 1000


def test_waiting_releases_the_gil(pair):
    ran = threading.Event()
    threading.Timer(0.1, ran.set).start()
    assert pair.target.notification(1.0) is None and ran.is_set()


def test_ctrl_c_ends_a_wait(pair):
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.target.notification(30)
    assert time.monotonic() - start < 5


@pytest.fixture
def mute():
    """The address of a listener that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "127.0.0.1:%d" % listener.getsockname()[1]


def test_ctrl_c_ends_an_attempt_to_connect(pair, mute):
    threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.initiator.connect(mute, timeout=None)
    assert time.monotonic() - start < 5


def test_a_tag_beside_an_announcement_is_refused(pair):
    announcement = pair.peer.announce(b"one")
    with pytest.raises(nobounce.ListError, match="exclude each other"):
        pair.peer.write_list(bytearray(8), pair.remote, [(0, 0, 8)], tag=b"two", announcement=announcement)
    announcement.abort("refused")
    assert pair.target.notification(10).tag == b"one" and pair.target.notification(0.02) is None


@pytest.mark.parametrize("options", [{"local_offset": -1}, {"remote_stride": 2**64}, {"repeats": [(-1, 0, 0)]}, {"repeats": [(2**40, 0, 0)]}])
def test_wrong_numbers_are_list_errors(pair, options):
    with pytest.raises(nobounce.ListError):
        pair.peer.write_pages(bytearray(64), [0], pair.remote, [0], 8, **options)
    with pytest.raises(nobounce.ListError, match="-8"):
        pair.peer.write_pages(bytearray(64), [0], pair.remote, [0], -8)


def test_a_reason_of_the_peer_does_not_make_it_gone(pair):
    pair.peer.announce(b"t").abort("the peer is gone: no")
    with pytest.raises(nobounce.Error, match="is gone") as raised:
        pair.target.notification(10).check()
    assert not isinstance(raised.value, nobounce.PeerGone)


def test_a_forked_child_is_told(pair):
    program = (
        "import os, nobounce\n"
        "agent, other = nobounce.Agent('a'), nobounce.Agent('b', listen='127.0.0.1:0')\n"
        "other.export('kv', bytearray(8))\n"
        "peer = agent.connect(other.address)\n"
        "remote = peer.region('kv')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: agent.metadata()\n"
        "    except nobounce.Error as error: print(error, flush=True)\n"
        "    agent.close()\n"
        "    try: peer.write(bytearray(8), remote).wait(5)\n"
        "    except nobounce.Error as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(peer.write(bytearray(8), remote).wait(10), 'bytes in the parent')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ran.stdout.count("parent process") == 2 and "8 bytes in the parent" in ran.stdout and ran.returncode == 0, ran


def test_closing_while_another_thread_waits(pair):
    failed = []

    def wait():
        try:
            pair.target.notification()
        except nobounce.Error as error:
            failed.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for _ in range(3):
        pair.target.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len(failed) == 4 and all("closed" in text for text in failed)


def test_odd_arrays_and_times(pair):
    indices = numpy.frombuffer(bytearray(1 + 8 * 4), dtype="<i8", offset=1)
    pair.peer.write_pages(bytearray(64), indices, pair.remote, indices, 8).wait(1e19)
    assert pair.initiator.register(numpy.zeros(4, dtype="datetime64[s]")).nbytes == 32
    with pytest.raises(nobounce.Error, match="silence"):
        nobounce.Agent("silent", silence=0)
    memory = pair.target.register(bytearray(8))
    with pytest.raises(nobounce.ListError, match="another agent"):
        pair.peer.write(memory, pair.remote)


def test_log_lines_reach_logging(pair, caplog):
    caplog.set_level(10, "nobounce")
    pair.peer.close()
    deadline = time.monotonic() + 5
    while pair.peer.gone is None and time.monotonic() < deadline:
        time.sleep(0.01)
    pair.target.notification(0.2)
    assert any("the peer is gone" in record.getMessage() for record in caplog.records)


def test_a_stream_needs_cuda(pair):
    if not os.path.exists("/dev/nvidiactl"):
        with pytest.raises(nobounce.Error):
            pair.peer.write(bytearray(8), pair.remote, after=0)
    with pytest.raises(nobounce.ListError, match="expected a CUDA stream"):
        pair.peer.write(bytearray(8), pair.remote, after="stream")
