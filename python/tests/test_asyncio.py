"""Awaiting: asyncio and uvloop, cancellation, many at once."""
import asyncio
import socket
import threading

import nobounce
import pytest

numpy = pytest.importorskip("numpy")


def loops():
    yield pytest.param(asyncio.new_event_loop, id="asyncio")
    try:
        import uvloop
        yield pytest.param(uvloop.new_event_loop, id="uvloop")
    except ImportError:
        yield pytest.param(None, id="uvloop", marks=pytest.mark.skip(reason="uvloop is not installed"))


@pytest.fixture(params=loops())
def run(request):
    def run(coroutine):
        loop = request.param()
        try:
            return loop.run_until_complete(asyncio.wait_for(coroutine, 20))
        finally:
            loop.close()
    return run


def test_transfers_and_notifications(pair, run):
    async def main():
        source = numpy.arange(64 * 4096, dtype=numpy.uint32).astype(numpy.uint8)
        transfers = [pair.peer.write_list(source, pair.remote, [(at * 4096, at * 4096, 4096)], tag=bytes([at])) for at in range(64)]
        assert await asyncio.gather(*transfers) == [4096] * 64
        assert await transfers[0] == 4096, "a second time as well"
        tags = [(await pair.target.anotification(10)).tag for _ in range(64)]
        assert sorted(tags) == [bytes([at]) for at in range(64)]
        assert pair.memory == source.tobytes()
        assert await pair.target.anotification(0.05) is None
    run(main())


def test_a_second_peer(pair, run):
    async def main():
        await pair.target.aaccept(10)  # the pair's own
        with nobounce.Agent("other") as other:
            accepting = asyncio.ensure_future(pair.target.aaccept(10))
            peer = await other.aconnect(pair.target.address)
            assert (await accepting).name == "other"
            waiting = asyncio.ensure_future(peer.aregion("late", 10))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            pair.target.export("late", bytearray(8))
            assert (await waiting).nbytes == 8
            with pytest.raises(nobounce.Timeout):
                await peer.aregion("never", 0.05)
            with pytest.raises(nobounce.ConnectError):
                await other.aconnect("127.0.0.1:1", 1)
    run(main())


def test_a_cancelled_task_cancels_its_transfer(pair, run):
    async def main():
        source = numpy.zeros(64 * 4096, dtype=numpy.uint8)
        pages = numpy.tile(numpy.arange(1024), 64)
        transfer = pair.peer.write_pages(source, pages, pair.remote, pages, 256, tag=b"long")
        task = asyncio.ensure_future(_awaiting(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.done(), "nothing of it reaches the memory any more"
        note = await pair.target.anotification(10)
        assert note.tag == b"long" and note.outcome in ("aborted", "complete")
        assert await pair.peer.write(bytearray(8), pair.remote) == 8
    run(main())


async def _awaiting(transfer):
    return await transfer


def test_a_peer_that_goes_ends_what_is_awaited(pair, run):
    async def main():
        pages = numpy.tile(numpy.arange(1024), 512)
        transfer = pair.peer.write_pages(numpy.zeros(64 * 4096, dtype=numpy.uint8), pages, pair.remote, pages, 256)
        asyncio.get_running_loop().call_later(0.01, pair.target.close)
        try:
            await transfer
        except nobounce.PeerGone:
            pass
        with pytest.raises(nobounce.PeerGone):
            while True:
                await pair.peer.write(bytearray(8), pair.remote)
    run(main())


def test_all_notifications_as_they_come(pair, run):
    async def main():
        for at in range(5):
            pair.peer.write(bytearray(8), pair.remote, tag=bytes([at]))
        tags = []
        async for note in pair.target.notifications():
            tags.append(note.tag[0])
            if len(tags) == 5:
                return tags
    assert run(main()) == [0, 1, 2, 3, 4]


def test_an_agent_goes_from_one_loop_to_the_next(pair):
    for make in (asyncio.new_event_loop, asyncio.new_event_loop):
        loop = make()
        assert loop.run_until_complete(asyncio.wait_for(_awaiting(pair.peer.write(bytearray(8), pair.remote)), 10)) == 8
        # The first one stays open.
    loop.close()


def test_closing_ends_what_is_awaited(pair, run):
    async def main():
        waiting = asyncio.ensure_future(pair.target.anotification())
        await asyncio.sleep(0.05)
        pair.target.close()
        with pytest.raises(nobounce.Error, match="closed"):
            await waiting
    run(main())


def test_a_cancelled_attempt_to_connect_leaves_nothing(pair, run):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async def main():
            task = asyncio.ensure_future(pair.initiator.aconnect("127.0.0.1:%d" % mute.getsockname()[1], None))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The executor's thread ends as well, and with it the loop's end.
            await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 10)
        run(main())


def test_a_descriptor_that_is_used_again_keeps_its_reader(pair, run):
    """Closing an agent and opening another one in the same tick."""
    async def main():
        for _ in range(5):
            other = nobounce.Agent("other")
            peer = await other.aconnect(pair.target.address)
            assert await peer.write(bytearray(8), await peer.aregion("kv")) == 8
            other.close()
    run(main())


def test_closing_in_another_thread_while_much_is_awaited(pair, run):
    async def main():
        async def wait():
            with pytest.raises(nobounce.Error):
                while True:
                    await pair.target.anotification()
        tasks = [asyncio.ensure_future(wait()) for _ in range(200)]
        await asyncio.sleep(0.05)
        threading.Thread(target=pair.target.close).start()
        await asyncio.gather(*tasks)
    run(main())
