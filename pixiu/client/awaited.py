"""What a receipt is to whoever awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from pixiu.errors import PixiuError


class Awaited:
    """Beside a ticket: `await` waits until it is resolved, and raises why it failed.

    Source: docs/architecture.md: "a Future exists only for a message that is awaited".
    """

    if not TYPE_CHECKING:  # mypy does not know that the tickets and receipts have the slots
        __slots__ = ()
    resolved: bool
    watched: bool
    _waiters: list[asyncio.Future[None]] | None

    @property
    def done(self) -> bool:
        """Whether the outcome is known, or was given up."""
        return self.resolved

    @property
    def error(self) -> PixiuError | None:
        """Why it failed; None when it did not, or its outcome is not known yet."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, None]:
        if not self.resolved:
            self.watched = True
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters = [*(self._waiters or ()), future]
            yield from future
        error = self.error
        if error is not None:
            raise error

    def wake(self) -> None:
        """Called by the shell when a watched receipt is resolved."""
        waiters, self._waiters = self._waiters, None
        for future in waiters or ():
            if not future.done():
                future.set_result(None)
