"""The caller of a stream, without a network: a carrier of `pixiu.rpc.duplex`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sized
from typing import Any, NoReturn

from pixiu.errors import PixiuError


class Caller:
    """Sends some requests, and reads a reply for each `reads.release()`.

    Args:
        requests: without a length they may have no end.
        last: it says that it sends no more.
    """

    serves = True
    peer = ""

    def __init__(self, requests: Iterable[Any] = (), *, last: bool = True) -> None:
        self._requests, self._endless, self._last = iter(requests), not isinstance(requests, Sized), last
        self.sent = 0
        self.got: list[Any] = []
        """Replies, with one that it has not read yet."""
        self.reads = asyncio.Semaphore(0)

    def read_all(self) -> None:
        """Read whatever comes."""
        for _ in range(1000):
            self.reads.release()

    async def opened(self, timeout_s: float) -> None: ...
    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        """As of a carrier."""
        if self._endless:
            await asyncio.sleep(0)  # others have their turn
        for request in self._requests:
            self.sent += 1
            return request
        return None if self._last else await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        """As of a carrier."""
        self.got.append(message)
        await self.reads.acquire()

    async def refuse(self, error: PixiuError) -> NoReturn:
        """As of a carrier that serves."""
        raise error
