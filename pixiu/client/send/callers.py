"""Callers that wait for a sender: for space, in order of arrival, and for conditions of its core."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from pixiu.errors import NotConnected, Overloaded

MAX_WAITING: Final = 100_000
"""Coroutines that may wait for a sender; more are refused as `Overloaded`."""
Check = Callable[[], bool]


class Callers:
    """Those who wait. The shell calls `let_in` and `check` when its core has changed.

    Args:
        has_space: True if a message of this size may be offered, beside reserved bytes and records.
    """

    def __init__(self, has_space: Callable[[int, int, int], bool]) -> None:
        self._has_space = has_space
        self._loop = asyncio.get_running_loop()
        self._admitting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._reserved_records = 0
        self._reserved_bytes = 0
        self._waiting: list[tuple[Check, asyncio.Future[None]]] = []
        self._closed = False

    def try_admit(self, size: int) -> bool:
        """True if a record of `size` bytes may be offered now."""
        if self._closed:
            raise NotConnected("the client is closed; open it again with `async with pixiu.connect(…)`")
        return not self._admitting and self._has_space(size, self._reserved_bytes, self._reserved_records)

    async def admit(self, size: int) -> None:
        """Wait, in order of arrival, until a record of `size` bytes may be offered; the caller must offer it at once.

        Raises `Overloaded` when too many wait already.
        """
        if self.try_admit(size):
            return
        if len(self._admitting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} sends wait for space already: await each `send` before the next one")
        future: asyncio.Future[None] = self._loop.create_future()
        entry = (size, future)
        self._admitting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(size)
                self.let_in()
            elif entry in self._admitting:
                self._admitting.remove(entry)
            raise
        self._give_back(size)
        if self._closed:
            raise NotConnected("the client was closed while the message waited for space; it was not sent")

    async def wait(self, check: Check) -> None:
        """Wait for a condition, or until the shell is closed."""
        if check() or self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} callers wait already: await each before the next one")
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((check, future))
        await future

    def _give_back(self, size: int) -> None:
        self._reserved_records -= 1
        self._reserved_bytes -= size

    def let_in(self) -> None:
        """Let in those for whom there is space now."""
        while self._admitting and not self._closed:
            size, future = self._admitting[0]
            if not future.done():
                if not self._has_space(size, self._reserved_bytes, self._reserved_records):
                    return
                self._reserved_records += 1
                self._reserved_bytes += size
                future.set_result(None)
            self._admitting.popleft()

    def check(self) -> None:
        """Wake those whose condition holds now."""
        if self._waiting:
            waiting = []
            for check, future in self._waiting:
                if not (future.done() or self._closed or check()):
                    waiting.append((check, future))
                elif not future.done():
                    future.set_result(None)
            self._waiting = waiting

    def close(self) -> None:
        """Refuse those who wait for space; `check` wakes the others."""
        self._closed = True
        for _, future in self._admitting:
            if not future.done():
                future.set_result(None)
