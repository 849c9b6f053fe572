"""Awaiting in an event loop: the agent's descriptor wakes it, no thread polls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

from . import _logging, _nobounce
from .errors import Error

_T = TypeVar("_T")


class Loop:
    """The futures of one agent in one event loop."""

    def __init__(self, agent: _nobounce.Agent) -> None:
        self._agent = agent
        #: Of the loop and the descriptor, which `close` takes from another thread.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._is_closed = False
        self._transfers: dict[int, list[asyncio.Future[None]]] = {}
        self._others: set[asyncio.Future[None]] = set()

    def _future(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_closed:
                raise Error("the agent is closed")
            if self._loop is not loop:
                if self._is_in_use():
                    raise Error("this agent is awaited in another event loop: use one agent for each loop")
                self._leave()
                self._transfers, self._others = {}, set()
                # Of our own: its number is not used again before the loop has let it go.
                self._descriptor = os.dup(self._agent.event_fd())
                loop.add_reader(self._descriptor, self._take)
                self._loop = loop
        return loop.create_future()

    def _is_in_use(self) -> bool:
        return self._loop is not None and not self._loop.is_closed() and bool(self._transfers or self._others)

    def _leave(self) -> None:
        """Ends the reader in the loop that has it, which another thread may run: there, with all that is awaited."""
        loop, descriptor, transfers, others = self._loop, self._descriptor, self._transfers, self._others
        self._loop, self._descriptor = None, -1
        if loop is None:
            return

        def leave() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            for future in [*others, *(one for many in transfers.values() for one in many)]:
                _resolve(future)

        try:
            loop.call_soon_threadsafe(leave)
        except RuntimeError:  # the loop is closed
            os.close(descriptor)

    def _take(self) -> None:
        _logging.flush()
        if self._is_closed:
            return
        try:
            ended, others = self._agent.take_events()
        except Error:  # closed just now
            return
        for number in ended:
            for future in self._transfers.pop(number, ()):
                _resolve(future)
        if others:
            for future in list(self._others):
                _resolve(future)

    def transfer(self, transfer: _nobounce.Transfer) -> Generator[object, None, int]:
        """Waits for its end. A cancelled task cancels the transfer, and goes on when no request of it is left: its memory may be
        used again then."""
        cancelled: asyncio.CancelledError | None = None
        while not transfer.done():
            future = self._future()
            waiting = self._transfers.setdefault(transfer.id, [])
            waiting.append(future)
            try:
                if transfer.watch():
                    yield from future
            except asyncio.CancelledError as error:
                cancelled = error
                transfer.cancel()
            finally:
                if future in waiting:
                    waiting.remove(future)
                if not waiting and self._transfers.get(transfer.id) is waiting:
                    del self._transfers[transfer.id]
        if cancelled is not None:
            raise cancelled
        result = transfer.result()
        assert result is not None
        return result

    async def until(self, look: Callable[[], _T | None], timeout: float | None) -> _T | None:
        """What `look` gives, as soon as it gives something; None when the time is over."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            future = self._future()
            self._others.add(future)
            try:
                found = look()
                if found is not None:
                    return found
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    return None
                await asyncio.wait([future], timeout=left)
            finally:
                self._others.discard(future)

    def close(self) -> None:
        """The agent is closed: what is awaited has ended."""
        with self._lock:
            self._is_closed = True
            self._leave()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
