"""Receipts for programs without asyncio."""

from __future__ import annotations

from typing import TypeVar

from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.send.signalling import SignalReceipt
from pixiu.client.send.streams import Receipt
from pixiu.client.sync.blocking import Twin
from pixiu.client.topics.writing.writer_shell import TopicReceipt
from pixiu.errors import NotConnected, PixiuError
from pixiu.ids import SnowflakeID

Received = TypeVar("Received", bound=Receipt | SignalReceipt | MailReceipt | TopicReceipt)


class TwinReceipt(Twin[Received]):
    """A receipt to wait for. Waiting is optional; a failure that nobody waited for is reported (`connect_sync(on_failure=…)`)."""

    __slots__ = ()

    @property
    def id(self) -> SnowflakeID:
        """The sender's ID of the message; 0 until the background thread has taken the message."""
        return self._wrapped.id

    @property
    def done(self) -> bool:
        """True if the outcome is known, or the message was given up."""
        return self._wrapped.done

    @property
    def error(self) -> PixiuError | None:
        """The failure; None if there is none, or the outcome is not known yet."""
        return self._wrapped.error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the outcome. Raises the failure, and TimeoutError if the outcome is not known after `timeout_s`."""
        try:
            self._background.run(self._wrapped.wait(timeout_s))
        except NotConnected:
            if not self.done:
                raise
            if (error := self.error) is not None:
                raise error from None

    def outcome(self) -> PixiuError | None:
        """Wait for the outcome without raising it: the failure, or None."""
        try:
            return self._background.run(self._wrapped.outcome())
        except NotConnected:
            if not self.done:
                raise
            return self.error


class SyncReceipt(TwinReceipt[Receipt]):
    """Receipt of a message: `wait` waits for the cluster's acceptance."""

    __slots__ = ()


class SyncSignalReceipt(TwinReceipt[SignalReceipt]):
    """Receipt of a signal: `wait` waits for its acceptance, or with `receipt=True` for its delivery."""

    __slots__ = ()

    @property
    def gateways(self) -> int:
        """Number of gateways that have confirmed delivery so far; see `SignalReceipt.gateways`."""
        return self._wrapped.gateways
