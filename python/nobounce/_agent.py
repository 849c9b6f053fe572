"""Agents, peers and transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import _logging, _nobounce
from ._addresses import bytes_of
from ._loop import Loop
from ._nobounce import Announcement, Memory, Remote
from ._numbers import check_words, flattened, words
from .errors import Error, ListError, PeerGone, RemoteAccessError, Timeout


@dataclass(frozen=True)
class Notification:
    """The end of a transfer with a tag, at the agent whose memory it used."""

    #: The peer that started it, and the generation of that peer.
    peer: str
    generation: int
    tag: bytes
    #: "complete": all bytes are visible, to the host and to kernels launched from now on. "failed": a part of it
    #: failed. "aborted": it was announced, and will not complete.
    outcome: Literal["complete", "failed", "aborted"]
    nbytes: int
    reason: str
    #: Whether it is aborted since the peer is gone.
    is_peer_gone: bool = False

    def check(self) -> "Notification":
        """Itself; raises if the transfer did not complete."""
        if self.outcome == "complete":
            return self
        raise (PeerGone if self.is_peer_gone else Error)(f"transfer {self.tag!r} of peer {self.peer} {self.outcome}: {self.reason}")


class Transfer:
    """A transfer in flight: await it, or `wait` for it. The result is the number of bytes."""

    def __init__(self, inner: _nobounce.Transfer, loop: Loop) -> None:
        self._inner, self._loop = inner, loop

    def __await__(self) -> Generator[object, None, int]:
        return self._loop.transfer(self._inner)

    def wait(self, timeout: float | None = None) -> int:
        """Waits at most `timeout` seconds, without the GIL."""
        try:
            return self._inner.wait(timeout)
        finally:
            _logging.flush()

    def done(self) -> bool:
        """Whether it has ended."""
        _logging.flush()
        return self._inner.done()

    def cancel(self) -> None:
        """Leaves out what is not posted yet. It ends with `Cancelled` when the rest has ended."""
        self._inner.cancel()


class Peer:
    """Another agent. When it is gone it stays gone."""

    def __init__(self, inner: _nobounce.Peer, agent: "Agent") -> None:
        self._inner, self._agent = inner, agent

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def generation(self) -> int:
        """A random number of that start of the agent."""
        return self._inner.generation

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def gone(self) -> str | None:
        """Why it is gone; None while it is not."""
        return self._inner.gone

    def __repr__(self) -> str:
        return repr(self._inner)

    def regions(self) -> list[str]:
        """The names that it exports now."""
        return self._inner.regions()

    def region(self, name: str, timeout: float | None = 10.0) -> Remote:
        """The memory that it exports by this name, as soon as it does."""
        try:
            return self._inner.region(name, timeout)
        finally:
            _logging.flush()

    async def aregion(self, name: str, timeout: float | None = 10.0) -> Remote:
        """As `region`, for event loops."""
        found = await self._agent._loop.until(lambda: self._inner if name in self.regions() or self.gone else None, timeout)
        return self._inner.region(name, 0.0 if found is None else 1.0)

    def add_metadata(self, metadata: bytes) -> None:
        """Adds regions of metadata that came by another channel."""
        self._inner.add_metadata(metadata)

    def announce(self, tag: bytes) -> Announcement:
        """Tells the peer that a transfer with this tag begins, which may consist of many."""
        return self._inner.announce(tag)

    def close(self) -> None:
        """Closes the connection; transfers in flight fail."""
        self._inner.close()

    def write_pages(self, local: Any, local_pages: Any, remote: Remote | Sequence[Remote], remote_pages: Any, page_bytes: int, **options: Any) -> Transfer:
        """Writes pages of `local` to pages of `remote`: page n begins at n * stride + offset.

        `local` and `remote` may be lists of the same length, for instance one array for each layer: all pages move in each.
        Options: tag, announcement; after, a CUDA stream (torch, cupy, or its number): no byte moves before the work that is in
        it now is done; local_stride, remote_stride [page_bytes]; local_offset, remote_offset [0]; repeats:
        further dimensions (count, local step, remote step).
        """
        return self._pages(False, local, local_pages, remote, remote_pages, page_bytes, **options)

    def read_pages(self, local: Any, local_pages: Any, remote: Remote | Sequence[Remote], remote_pages: Any, page_bytes: int, **options: Any) -> Transfer:
        """Reads pages of `remote` into pages of `local`; arguments as for `write_pages`."""
        return self._pages(True, local, local_pages, remote, remote_pages, page_bytes, **options)

    def write_list(self, local: Any, remote: Remote | Sequence[Remote], pieces: Any, *, tag: bytes | None = None, announcement: Announcement | None = None, after: Any = None) -> Transfer:
        """Writes pieces (local offset, remote offset, bytes): a list of them, or an integer array of shape (n, 3)."""
        return self._list(False, local, remote, pieces, tag, announcement, after)

    def read_list(self, local: Any, remote: Remote | Sequence[Remote], pieces: Any, *, tag: bytes | None = None, announcement: Announcement | None = None, after: Any = None) -> Transfer:
        """Reads pieces; arguments as for `write_list`."""
        return self._list(True, local, remote, pieces, tag, announcement, after)

    def write(self, local: Any, remote: Remote, offset: int = 0, *, tag: bytes | None = None, after: Any = None) -> Transfer:
        """Writes all of `local` to `offset` of `remote`."""
        memory = self._agent.register(local)
        return self.write_list(memory, remote, [(0, offset, memory.nbytes)], tag=tag, after=after)

    def read(self, local: Any, remote: Remote, offset: int = 0, *, tag: bytes | None = None, after: Any = None) -> Transfer:
        """Fills all of `local` from `offset` of `remote`."""
        memory = self._agent.register(local)
        return self.read_list(memory, remote, [(0, offset, memory.nbytes)], tag=tag, after=after)

    def _memory(self, local: Any, remote: Remote | Sequence[Remote]) -> list[tuple[Memory, Remote]]:
        if isinstance(remote, Remote):
            return [(self._agent.register(local), remote)]
        if len(local) != len(remote):
            raise ListError(f"{len(local)} local arrays and {len(remote)} remote regions: expected as many")
        return [(self._agent.register(one), other) for one, other in zip(local, remote)]

    def _pages(
        self, is_read: bool, local: Any, local_pages: Any, remote: Remote | Sequence[Remote], remote_pages: Any, page_bytes: int, *,
        local_stride: int | None = None, remote_stride: int | None = None, local_offset: int = 0, remote_offset: int = 0,
        repeats: Iterable[tuple[int, int, int]] = (), tag: bytes | None = None, announcement: Announcement | None = None, after: Any = None,
    ) -> Transfer:
        (here, held_here), (there, held_there) = words(local_pages), words(remote_pages)
        repeats = [(count, local_step, remote_step) for count, local_step, remote_step in repeats]
        check_words(page_bytes, local_stride, remote_stride, local_offset, remote_offset, *(number for repeat in repeats for number in repeat))
        strides = (page_bytes if local_stride is None else local_stride, page_bytes if remote_stride is None else remote_stride)
        inner = self._inner.submit_pages(
            is_read, self._memory(local, remote), (here, there), page_bytes, strides, (local_offset, remote_offset), repeats, tag, announcement, _stream(after))
        del held_here, held_there
        return Transfer(inner, self._agent._loop)

    def _list(self, is_read: bool, local: Any, remote: Remote | Sequence[Remote], pieces: Any, tag: bytes | None, announcement: Announcement | None, after: Any) -> Transfer:
        numbers, held = flattened(pieces)
        inner = self._inner.submit_list(is_read, self._memory(local, remote), numbers, tag, announcement, _stream(after))
        del held
        return Transfer(inner, self._agent._loop)


class Agent:
    """One end of transfers: it has a name, exports memory by name, and connects to other agents.

    listen: where other agents connect to, "host:port" (port 0: any). device: a hardware NIC, "auto", or "nb0", the
    software NIC [NOBOUNCE_DEVICE]. lanes: queue pairs for each peer. silence: seconds after which a silent peer is
    gone. require="direct": memory whose bytes would bounce through host memory is refused.
    """

    def __init__(self, name: str, listen: str | None = None, *, device: str | None = None, lanes: int = 1, silence: float = 5.0, require: Literal["direct"] | None = None) -> None:
        self._inner = _nobounce.Agent(name, listen, device, lanes, silence, require)
        self._loop = Loop(self._inner)
        _logging.flush()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Agent({self.name!r} at {self.address})"

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def generation(self) -> int:
        """A random number of this start."""
        return self._inner.generation

    @property
    def address(self) -> str | None:
        """Where it listens."""
        return self._inner.address

    @property
    def device(self) -> str:
        """The NIC in use."""
        return self._inner.device

    def register(self, memory: Any) -> Memory:
        """Registers the bytes of an array, tensor or buffer in place, and keeps it alive as long.

        Memory inside of a registration that is alive is not registered again. Read-only memory (bytes, arrays of jax) can be
        written from and exported for reading.
        """
        if isinstance(memory, Memory):
            return memory
        found = bytes_of(memory)
        registered = self._inner.register(found.address, found.nbytes, found.is_gpu, found.is_read_only, found.owner)
        _logging.flush()
        return registered

    def export(self, name: str, memory: Any) -> Memory:
        """Lets all peers read and write the memory, by this name."""
        registered = self.register(memory)
        self._inner.export(name, registered)
        _logging.flush()
        return registered

    def withdraw(self, name: str) -> bool:
        """Ends an export; whether there was one."""
        return self._inner.withdraw(name)

    def metadata(self) -> bytes:
        """Who this agent is, where it listens and what it exports, as bytes for any channel. Keep them private."""
        return bytes(self._inner.metadata(0)[0])

    def metadata_since(self, version: int) -> tuple[bytes, int]:
        """Only what was exported after that version, and the version now."""
        metadata, now = self._inner.metadata(version)
        return bytes(metadata), now

    def connect(self, address: str | bytes, timeout: float | None = 10.0) -> Peer:
        """Connects to the agent at "host:port", or to the one that these metadata are of."""
        try:
            return Peer(self._connecting(address, timeout).wait(), self)
        finally:
            _logging.flush()

    async def aconnect(self, address: str | bytes, timeout: float | None = 10.0) -> Peer:
        """As `connect`, for event loops. A cancelled task gives the attempt up."""
        connecting = self._connecting(address, timeout)
        try:
            return Peer(await asyncio.get_running_loop().run_in_executor(None, connecting.wait), self)
        except asyncio.CancelledError:
            connecting.abort()
            raise
        finally:
            _logging.flush()

    def _connecting(self, address: str | bytes, timeout: float | None) -> _nobounce.Connecting:
        if isinstance(address, bytes):
            return self._inner.connect_to(address, timeout)
        return self._inner.connect(address, timeout)

    def accept(self, timeout: float | None = None) -> Peer:
        """The next agent that connected to this one."""
        try:
            return Peer(self._inner.accept(timeout), self)
        finally:
            _logging.flush()

    async def aaccept(self, timeout: float | None = None) -> Peer:
        """As `accept`, for event loops."""

        def look() -> Peer | None:
            try:
                return self.accept(0.0)
            except Timeout:
                return None

        found = await self._loop.until(look, timeout)
        if found is None:
            raise Timeout(f"no peer connected within {timeout} s")
        return found

    def notification(self, timeout: float | None = None) -> Notification | None:
        """The next notification; None if none comes in time."""
        found = self._inner.notification(timeout)
        _logging.flush()
        return None if found is None else _notification(found)

    async def anotification(self, timeout: float | None = None) -> Notification | None:
        """As `notification`, for event loops."""
        return await self._loop.until(lambda: self.notification(0.0), timeout)

    async def notifications(self) -> AsyncIterator[Notification]:
        """All notifications, as they come."""
        while True:
            found = await self.anotification()
            if found is not None:
                yield found

    def stats(self) -> dict[str, Any]:
        """Counters of transfers; bytes and operations by direction and path."""
        _logging.flush()
        counters, paths = self._inner.stats()
        by_path = {direction: {path: {"bytes": size, "operations": count} for path, (size, count) in used.items()} for direction, used in paths.items()}
        return {**counters, "paths": by_path}

    def close(self) -> None:
        """Ends it: peers see that it closed, and transfers in flight fail."""
        self._inner.close()
        self._loop.close()
        _logging.flush()


def _stream(after: Any) -> int | None:
    """The number of a CUDA stream: torch.cuda.Stream, cupy.cuda.Stream, or the number itself."""
    if after is None or isinstance(after, int):
        return after
    for name in ("cuda_stream", "ptr"):
        if isinstance(number := getattr(after, name, None), int):
            return number
    raise ListError(f"after={after!r}: expected a CUDA stream of torch or cupy, or its number")


def _notification(found: tuple[str, int, bytes, str, int, str, bool]) -> Notification:
    peer, generation, tag, outcome, nbytes, reason, is_peer_gone = found
    return Notification(peer, generation, bytes(tag), outcome, nbytes, reason, is_peer_gone)  # type: ignore[arg-type]


__all__ = ["Agent", "Announcement", "Memory", "Notification", "Peer", "Remote", "RemoteAccessError", "Transfer"]
