"""What sending returns to programs without asyncio."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pixiu.client.blocking import Twin
from pixiu.client.mail_receipt import MailReceipt
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.errors import PixiuError
from pixiu.ids import SnowflakeID

Received = TypeVar("Received", bound=Receipt | SignalReceipt | MailReceipt)


class TwinReceipt(Twin[Received]):
    """A receipt to wait for. Not waiting for it costs nothing; a failure is then only counted."""

    __slots__ = ()

    @property
    def id(self) -> SnowflakeID:
        """The sender's ID of the message; 0 until the background thread has taken the message."""
        return self._wrapped.id

    @property
    def done(self) -> bool:
        """Whether the outcome is known, or was given up."""
        return self._wrapped.done

    @property
    def error(self) -> PixiuError | None:
        """Why it failed; None when it did not, or its outcome is not known yet."""
        return self._wrapped.error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the outcome. Raises why it failed, and TimeoutError after `timeout_s`."""

        async def resolved() -> None:
            async with asyncio.timeout(timeout_s):
                await self._wrapped

        self._background.run(resolved())


class SyncReceipt(TwinReceipt[Receipt | SignalReceipt]):
    """What `send` and `signal` return: `wait` waits for the cluster's acceptance, or a signal's delivery."""

    __slots__ = ()
