"""Writers: they send without waiting for each message, and know what is unfinished."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Generic, Self, TypeVar

from pixiu.client.send.awaited import Awaited
from pixiu.client.timeouts import within
from pixiu.errors import OutcomeUnknown

ReceiptT = TypeVar("ReceiptT", bound=Awaited)


class BaseWriter(Generic[ReceiptT]):
    """Base of writers; each kind has its own `send`. The end of `async with` waits until everything is finished."""

    def __init__(self) -> None:
        self._unfinished: deque[ReceiptT] = deque()
        self._first_failure: ReceiptT | None = None

    def _note(self, receipt: ReceiptT) -> ReceiptT:
        self._finish_resolved()
        self._unfinished.append(receipt)
        return receipt

    async def wait_finished(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything that this writer sent is accepted (mail: confirmed at its level) or has failed. Raises the error of
        the first message that failed since the last call (the errors of others are in their receipts), and `OutcomeUnknown` after
        `timeout_s`."""

        def late() -> OutcomeUnknown:
            return OutcomeUnknown(f"{len(self._unfinished)} messages are not accepted after {timeout_s:g} s")

        async with within(timeout_s, late):
            while self._unfinished:
                if not self._unfinished[0].resolved:
                    await self._unfinished[0].outcome()
                self._finish_resolved()
        failed, self._first_failure = self._first_failure, None
        if failed is not None and (error := failed.error) is not None:
            raise error

    def _finish_resolved(self) -> None:
        while self._unfinished and self._unfinished[0].resolved:
            first = self._unfinished.popleft()
            if first.failure is not None and self._first_failure is None:
                self._first_failure = first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            await self.wait_finished()
