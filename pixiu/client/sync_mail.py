"""Mail for programs without asyncio: the synchronous twins of `MailReceipt` and `MailWriter`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from pixiu.client.mail import MailCounters
from pixiu.client.mail_writer import LevelName, MailReceipt, MailWriter
from pixiu.errors import PixiuError
from pixiu.ids import MsgID, SnowflakeID
from pixiu.wire.levels import Triple
from pixiu.wire.record import LANE_NORMAL

if TYPE_CHECKING:
    from pixiu.client.client import Client

T = TypeVar("T")


class Runner(Protocol):
    """The synchronous client: what it runs in its background thread."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it."""


class SyncMailReceipt:
    """What `SyncMailWriter.send` returns."""

    __slots__ = ("_runner", "receipt")

    def __init__(self, runner: Runner, receipt: MailReceipt) -> None:
        self._runner = runner
        self.receipt = receipt
        """The one of the background thread."""

    @property
    def id(self) -> SnowflakeID:
        """As `MailReceipt.id`."""
        return self.receipt.id

    @property
    def stored_as(self) -> MsgID:
        """As `MailReceipt.stored_as`."""
        return self.receipt.stored_as

    @property
    def replicas(self) -> int:
        """As `MailReceipt.replicas`."""
        return self.receipt.replicas

    @property
    def done(self) -> bool:
        """Whether the outcome is known, or was given up."""
        return self.receipt.done

    @property
    def error(self) -> PixiuError | None:
        """Why it failed."""
        return self.receipt.error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is confirmed. Raises as awaiting a `MailReceipt` does, and TimeoutError after `timeout_s`."""

        async def confirmed() -> None:
            async with asyncio.timeout(timeout_s):
                await self.receipt

        self._runner.run(confirmed())


class SyncMailWriter:
    """`MailWriter` for a thread: `with px.mail_writer() as writer`. `send` waits while too much is unconfirmed.

    Source: DESIGN sections 9 ("Mail") and 15 ("a synchronous twin").
    """

    def __init__(self, runner: Runner, client: Client) -> None:
        self._runner = runner

        async def make() -> MailWriter:
            return client.mail_writer()

        self._writer = runner.run(make())

    def __enter__(self) -> Self:
        self._runner.run(self._writer.room())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait_finished()

    def send(
        self,
        uin: int,
        payload: bytes,
        *,
        level: LevelName = "replicated",
        lane: int = LANE_NORMAL,
        expire: timedelta | None = None,
        to: Iterable[int] = (),
        type: int = 0,
        extension: bytes = b"",
    ) -> SyncMailReceipt:
        """As `MailWriter.send`, and waits for room."""

        async def send() -> MailReceipt:
            await self._writer.room()
            return self._writer.send(uin, payload, level=level, lane=lane, expire=expire, to=to, type=type, extension=extension)

        return SyncMailReceipt(self._runner, self._runner.run(send()))

    def resend(self, receipt: SyncMailReceipt) -> SyncMailReceipt:
        """As `MailWriter.resend`."""

        async def resend() -> None:
            await self._writer.room()
            self._writer.resend(receipt.receipt)

        self._runner.run(resend())
        return receipt

    def flush(self) -> None:
        """As `MailWriter.flush`."""
        self._runner.run(self._writer.flush())

    def wait_sent(self) -> None:
        """As `MailWriter.wait_sent`."""
        self._runner.run(self._writer.wait_sent())

    def wait_finished(self) -> None:
        """As `MailWriter.wait_finished`."""
        self._runner.run(self._writer.wait_finished())

    @property
    def triples(self) -> Mapping[tuple[str, int], Triple]:
        """As `MailWriter.triples`."""
        return self._writer.triples

    @property
    def counters(self) -> MailCounters:
        """As `MailWriter.counters`."""
        return self._writer.counters
