"""Sending many messages to one room, topic or user without waiting for each one.

    async with px.room(42).writer() as writer:
        for payload in payloads:
            await writer.send(payload)              # waits only while the client's queue is full
                                                    # the end waits until all are accepted, and raises the first failure
Source: docs/sdk.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, Unpack

from pixiu.client.messages.drafts import Draft
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.send.streams import Receipt
from pixiu.client.timeouts import within
from pixiu.errors import OutcomeUnknown, PixiuError


class Writer:
    """Sends to one destination with backpressure: `async with px.room(42).writer() as writer: await writer.send(b"…")`.

    Args:
        draft: checks a message.
        submit: queues it, waiting for space.
    """

    def __init__(self, draft: Callable[..., Draft], submit: Callable[[Draft], Awaitable[Receipt]]) -> None:
        self._draft = draft
        self._submit = submit
        self._unfinished: deque[Receipt] = deque()
        self._first_failure: PixiuError | None = None

    async def send(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """Queue a message, waiting while the queue is full (`queue_records`, `queue_bytes`). Messages stay in order.

        Raises the errors of `Destination.send_soon` except `Overloaded`.
        """
        receipt = await self._submit(self._draft(payload, **options))
        while self._unfinished and self._unfinished[0].resolved:
            await self._finish_first()
        self._unfinished.append(receipt)
        return receipt

    async def wait_finished(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything sent is accepted or has failed. Raises the error of the first message that failed since the last
        call (the errors of others are in their receipts), and `OutcomeUnknown` after `timeout_s`."""

        def late() -> OutcomeUnknown:
            return OutcomeUnknown(f"{len(self._unfinished)} messages are not accepted after {timeout_s:g} s")

        async with within(timeout_s, late):
            while self._unfinished:
                await self._finish_first()
        failed, self._first_failure = self._first_failure, None
        if failed is not None:
            raise failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.wait_finished()

    async def _finish_first(self) -> None:
        first = self._unfinished[0]
        error = await first.outcome()
        if self._unfinished and self._unfinished[0] is first:  # else another task has handled it meanwhile
            self._unfinished.popleft()
            self._first_failure = self._first_failure or error
