"""Awaiting receipts, and reporting the failures of receipts that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pixiu.client.send.events import Failure
from pixiu.errors import PixiuError
from pixiu.ids import SnowflakeID

log = logging.getLogger("pixiu.client")


@dataclass(frozen=True, slots=True)
class SendFailure:
    """The failure of a message whose receipt nobody awaited. `on_failure` is called with it."""

    id: SnowflakeID
    """The sender's ID of the message, as in its receipt; 0 if it never got one."""
    error: PixiuError
    """The reason for the failure."""


class FailureReports:
    """Reports failures of receipts that nobody awaited: to the application's callback, else to the log, each code once.

    The callback runs in the event loop and must not block.
    """

    def __init__(self, on_failure: Callable[[SendFailure], None] | None) -> None:
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._logged: set[str] = set()

    def watch(self, receipt: Awaited, failure: Failure) -> None:
        """Note the failure of a receipt that nobody awaits: it is reported if the receipt is dropped before anybody looks at it."""
        if not receipt.watched:
            receipt.unclaimed = _Unclaimed(receipt.id, failure, self)

    def lost(self, identity: SnowflakeID, failure: Failure) -> None:
        """Report a failure that nobody will look at any more; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._report, identity, failure)
        except RuntimeError:  # the loop is closed
            self._report(identity, failure)

    def _report(self, identity: SnowflakeID, failure: Failure) -> None:
        if self._on_failure is not None:
            try:
                self._on_failure(SendFailure(identity, failure.error()))
            except Exception:
                log.exception("on_failure_callback_failed")
        elif failure.code not in self._logged:
            self._logged.add(failure.code)
            log.warning(
                "sent_in_vain id=%016x code=%s error=%s (logged once for each code: await receipts, or connect(on_failure=…))",
                identity, failure.code, failure.text,
            )  # fmt: skip


class _Unclaimed:
    """The failure of a receipt that nobody has looked at yet."""

    __slots__ = ("_failure", "_id", "_reports")

    def __init__(self, identity: SnowflakeID, failure: Failure, reports: FailureReports) -> None:
        self._id, self._failure = identity, failure
        self._reports: FailureReports | None = reports

    def claim(self) -> None:
        """Mark the failure as seen."""
        self._reports = None

    def __del__(self) -> None:
        if self._reports is not None and not sys.is_finalizing():
            self._reports.lost(self._id, self._failure)


class Awaited:
    """Mixin that makes a ticket awaitable: `await` waits until it is resolved, and raises its failure.

    Source: docs/architecture.md: "a Future exists only for a message that is awaited".
    """

    if not TYPE_CHECKING:  # mypy does not know that the tickets and receipts have the slots
        __slots__ = ()
    message_id: int
    resolved: bool
    failure: Failure | None
    watched: bool
    unclaimed: _Unclaimed
    """Present after a failure that nobody awaited."""
    _waiters: list[asyncio.Future[None]] | None

    @property
    def id(self) -> SnowflakeID:
        """The sender's ID of the message, the same each time it is sent; 0 until it has one."""
        return SnowflakeID(self.message_id)

    @property
    def done(self) -> bool:
        """True if the outcome is known, or the message was given up."""
        return self.resolved

    @property
    def error(self) -> PixiuError | None:
        """The failure; None if there is none, or the outcome is not known yet."""
        unclaimed: _Unclaimed | None = getattr(self, "unclaimed", None)
        if unclaimed is not None:
            unclaimed.claim()
        return self._problem()

    async def wait(self, timeout_s: float | None = None) -> Self:
        """Wait for the outcome. Raises the failure, and TimeoutError if the outcome is not known after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            await self
        return self

    async def outcome(self) -> PixiuError | None:
        """Wait for the outcome without raising it: the failure, or None."""
        if not self.resolved:
            await self._resolution()
        return self.error

    def __repr__(self) -> str:
        outcome = "unresolved" if not self.resolved else "done" if self.failure is None else f"failed {self.failure.code}"
        return f"<{type(self).__name__} id={self.id:016x} {outcome}>"

    def fail(self, failure: Failure, reports: FailureReports) -> None:
        """Fail a message that never reached the core."""
        self.failure = failure
        self.resolved = True  # last: another thread may look
        reports.watch(self, failure)
        self.wake()

    def _problem(self) -> PixiuError | None:
        return self.failure.error() if self.resolved and self.failure is not None else None

    def _resolution(self) -> asyncio.Future[None]:
        self.watched = True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = [*(self._waiters or ()), future]
        return future

    def __await__(self) -> Generator[Any, None, None]:
        if not self.resolved:
            yield from self._resolution()
        error = self.error
        if error is not None:
            raise error

    def wake(self) -> None:
        """Called by the shell when a watched receipt is resolved."""
        waiters, self._waiters = self._waiters, None
        for future in waiters or ():
            if not future.done():
                future.set_result(None)
