"""Files into arrays, and back: of this machine, and of a file server (`nobounce serve`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _logging, _nobounce
from ._addresses import bytes_of
from .errors import ListError

#: Port of a server unless another is named.
_PORT = 9200


@dataclass(frozen=True)
class FileReport:
    """What moved, by path."""

    #: Bytes by path: "cpu" (host memory), "window" (page cache through BAR1), "copy-engine", "staged".
    paths: dict[str, int] = field(default_factory=dict)
    #: Staged bytes by reason.
    staged: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.paths.values())


def read_file(array: Any, path: str, offset: int = 0, *, require: Literal["direct"] | None = None) -> FileReport:
    """Fills all of `array` from `offset` of the file. On return, the host and kernels launched from now on see the bytes.

    require="direct": bytes for a GPU go from the page cache through its window, or NotDirect is raised.
    """
    found = bytes_of(array)
    if found.is_read_only:
        raise ListError("the array is read-only: a file cannot be read into it")
    _settle(array)
    return _move(True, path, offset, found, require)


def write_file(array: Any, path: str, offset: int = 0, *, require: Literal["direct"] | None = None) -> FileReport:
    """Writes all of `array` to `offset` of the file, which is created and grows as needed."""
    found = bytes_of(array)
    _settle(array)
    return _move(False, path, offset, found, require)


def _settle(array: Any) -> None:
    """Waits for the work of the current stream: it may still use the memory, or make the bytes that are written."""
    module = type(array).__module__
    if module.startswith("torch") and getattr(array, "is_cuda", False):
        import torch

        torch.cuda.current_stream(array.device).synchronize()
    elif module.startswith("cupy"):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def _move(is_read: bool, path: str, offset: int, found: Any, require: str | None) -> FileReport:
    if offset < 0:
        raise ListError(f"offset {offset}: expected a number of bytes from the beginning of the file")
    try:
        return _report(_nobounce.move_file(is_read, str(path), offset, (found.address, found.nbytes, found.is_gpu), require))
    finally:
        _logging.flush()


def _report(moved: tuple[dict[str, int], list[tuple[str, int]]]) -> FileReport:
    paths, staged = moved
    return FileReport(paths, dict(staged))


async def aread_file(array: Any, path: str, offset: int = 0, *, require: Literal["direct"] | None = None) -> FileReport:
    """As `read_file`, for event loops: it runs in the loop's executor."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: read_file(array, path, offset, require=require))


async def awrite_file(array: Any, path: str, offset: int = 0, *, require: Literal["direct"] | None = None) -> FileReport:
    """As `write_file`, for event loops."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: write_file(array, path, offset, require=require))


def file_stats() -> dict[str, FileReport]:
    """What local files of this process moved: "read" and "written"."""
    read, written = _nobounce.file_counters()
    return {"read": _report(read), "written": _report(written)}


class FileRequest:
    """A request to a file server: `wait` for it, or await it. The result is the number of bytes."""

    def __init__(self, inner: _nobounce.FileTicket) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: float | None = None) -> int:
        return self._inner.wait(timeout)

    def __await__(self) -> Any:
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()


class Files:
    """A connection with a file server. The server writes ranges of its files into arrays, of the host or a GPU.

    address: "host:port", or "nb://host:port"; port 9200 if none is named. device, lanes and silence are those of `Agent`.
    """

    def __init__(self, address: str, *, device: str | None = None, lanes: int = 1, silence: float = 5.0, timeout: float | None = 10.0) -> None:
        address = address.removeprefix("nb://").rstrip("/")
        if ":" not in address.rpartition("]")[2]:
            address += f":{_PORT}"
        self._inner = _nobounce.Files(address, device, lanes, silence, timeout)
        _logging.flush()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stat(self, path: str, timeout: float | None = 10.0) -> int:
        """The size of a file."""
        return self._inner.stat(path, timeout)

    def read(self, array: Any, path: str, offset: int = 0, *, require: Literal["direct"] | None = None) -> FileRequest:
        """Fills all of `array` from `offset` of the file. require="direct": memory of a GPU without a window raises NotDirect."""
        memory = self._register(array, require)
        return self._begin(True, memory, [(path, offset, memory.nbytes, 0)])

    def write(self, array: Any, path: str, offset: int = 0) -> FileRequest:
        """Writes all of `array` to `offset` of the file. The server must allow it."""
        memory = self._register(array)
        return self._begin(False, memory, [(path, offset, memory.nbytes, 0)])

    def read_list(self, array: Any, ranges: Iterable[tuple[str, int, int, int]], *, require: Literal["direct"] | None = None) -> FileRequest:
        """Reads ranges (path, offset in the file, bytes, offset in the array) with one request; `require` as for `read`."""
        return self._begin(True, self._register(array, require), ranges)

    def write_list(self, array: Any, ranges: Iterable[tuple[str, int, int, int]]) -> FileRequest:
        """Writes ranges (path, offset in the file, bytes, offset in the array) with one request."""
        return self._begin(False, self._register(array), ranges)

    def stats(self) -> dict[str, dict[str, int]]:
        """Bytes that this connection's device moved by path: "in" (read from the server) and "out"."""
        _logging.flush()
        return self._inner.stats()

    def staged(self) -> dict[str, dict[str, int]]:
        """Bytes of requests by the reason why the memory's path is staged: "in" and "out", where there are any."""
        return self._inner.staged()

    def close(self) -> None:
        self._inner.close()
        _logging.flush()

    def _register(self, array: Any, require: str | None = None) -> _nobounce.Memory:
        found = bytes_of(array)
        _settle(array)
        return self._inner.register(found.address, found.nbytes, found.is_gpu, found.is_read_only, found.owner, require)

    def _begin(self, is_read: bool, memory: _nobounce.Memory, ranges: Iterable[tuple[str, int, int, int]]) -> FileRequest:
        if is_read and memory.is_read_only:
            raise ListError("the array is read-only: a file cannot be read into it")
        by_path: dict[str, list[tuple[int, int, int]]] = {}
        for path, offset, nbytes, place in ranges:
            if min(offset, nbytes, place) < 0:
                raise ListError(f"range {(path, offset, nbytes, place)}: expected numbers of bytes that are not negative")
            by_path.setdefault(path, []).append((offset, nbytes, place))
        return FileRequest(self._inner.begin(is_read, memory, list(by_path.items())))


class FileServer:
    """Serves the files below `root` to `Files` of other processes, as `nobounce serve` does.

    listen: an address and a port. allow: networks that may connect, "10.0.0.0/24, 10.1.0.7"; needed for other addresses than
    loopback, which also need NOBOUNCE_KEY, and for write=True, which lets clients write and create files.
    """

    def __init__(self, root: str, listen: str = "127.0.0.1:9200", *, allow: str | None = None, write: bool = False, device: str | None = None) -> None:
        self._inner = _nobounce.FileServer(str(root), listen, allow, write, device)
        _logging.flush()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._inner.address

    def close(self) -> None:
        self._inner.close()
        _logging.flush()

    def __enter__(self) -> "FileServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["FileReport", "FileRequest", "FileServer", "Files", "aread_file", "awrite_file", "file_stats", "read_file", "write_file"]
