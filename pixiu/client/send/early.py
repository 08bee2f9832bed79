"""Sends that wait, in order, because the client held no worker number for message IDs when they were made."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from pixiu.client.options import ClientOptions
from pixiu.client.send.awaited import Awaited, FailureReports
from pixiu.client.send.events import Failure
from pixiu.errors import NotSent, Overloaded, PixiuError


def failure_of(error: Exception) -> Failure:
    """Convert an error to the form that receipts keep."""
    if not isinstance(error, PixiuError):
        return Failure(PixiuError.code, f"{type(error).__name__}: {error}")
    return Failure(error.code, str(error), error.retry_after_ms if isinstance(error, Overloaded) else 0)


class EarlySends:
    """Sends that wait for a worker number, first come, first served; bounded like unresolved messages."""

    def __init__(self, options: ClientOptions, reports: FailureReports) -> None:
        self._options = options
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._size = 0
        self.items: deque[tuple[Callable[[], Awaitable[object]], Awaited, float, int]] = deque()
        """Send function, receipt, time of the call, bytes; the first one may be under way."""

    def put(self, send: Callable[[], Awaitable[object]], receipt: Awaited, size: int) -> None:
        """Send something as soon as possible. Raises `Overloaded`."""
        self.check_space(size)
        self.items.append((send, receipt, self._loop.time(), size))
        self._size += size
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name="pixiu-early-sends")

    def check_space(self, size: int, number: int = 1) -> None:
        """Raise `Overloaded` if this number of messages, of `size` bytes together, may not be put now."""
        options = self._options
        others = bool(self.items) or number > 1
        if len(self.items) + number > options.queue_records or (others and self._size + size > options.queue_bytes):
            raise Overloaded(f"{len(self.items)} messages wait for a worker number for their IDs: await send instead")

    async def idle(self) -> None:
        """Wait until everything has been handed on."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Fail everything that still waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, receipt, _, _ in self.items:
            receipt.fail(Failure(NotSent.code, "the client was closed before the message could be sent"), self._reports)
        self.items.clear()

    async def _run(self) -> None:
        try:
            while self.items:
                send, receipt, offered_at, size = self.items[0]
                try:
                    if self._loop.time() > offered_at + self._options.publish_timeout_s:
                        # An item that waited while the one before it got no number must not wait that long again.
                        raise NotSent("the message was not sent in time, because earlier ones could not be; send again")
                    await send()
                except Exception as error:
                    receipt.fail(failure_of(error), self._reports)
                self.items.popleft()
                self._size -= size
        finally:
            self._task = None
