"""The shell of signals: a publisher for each copy, the receipts, and the timer of repeats.

Each copy has streams of its own, so that a slow or dead proxy holds up one copy and no other.

Source: docs/architecture.md, "A signal to a room".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final

from pixiu.client.options import ClientOptions
from pixiu.client.send.awaited import Awaited, FailureReports
from pixiu.client.send.events import Batch, Failure
from pixiu.client.send.events import Effect as SenderEffect
from pixiu.client.send.policy import room_policy
from pixiu.client.send.sender import Sender
from pixiu.client.send.signals import COPIES, MAX_UNRESOLVED, REPEAT_AFTER_S, Effect, SendCopies, Signal, SignalCore
from pixiu.client.send.streams import PublisherShell, Receipt, publish_call
from pixiu.errors import Overloaded
from pixiu.rpc.channels import Channels
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.v1 import wire_pb2

CHOICES = 1 << 20
"""Number of places among the proxies at which a client may begin."""
NO_NUMBER: Final = 0
"""Number that no gateway and no signal has."""


class SignalReceipt(Awaited, Signal):
    """Receipt of a signal. `await receipt` waits for the outcome.

    With `receipt=True`, awaiting returns None once a gateway has delivered the signal, and raises `Undelivered` when none has
    confirmed it after three repeats; `gateways` goes on counting. Otherwise it returns once a broker has a copy. It may raise
    another `PixiuError`. The failure of a receipt that nobody awaits is counted (`Client.stats()`), and reported
    (`connect(on_failure=…)`).
    """

    __slots__ = ("_waiters", "unclaimed", "watched")

    def __init__(self, record: bytes, message_id: int, lane: int, wants_receipt: bool) -> None:
        super().__init__(record, message_id, lane, wants_receipt)
        self._waiters: list[asyncio.Future[None]] | None = None
        self.watched = False

    @property
    def gateways(self) -> int:
        """Number of gateways that confirmed delivery to a client: 1 when awaiting returns, then more as they confirm. A lower
        bound, because confirmations may be lost; 0 without `receipt=True`. The number of gateways with members of the room is not
        known."""
        return len(self.delivered_by)


class _Copy(Receipt):
    """A copy on its way to one proxy."""

    __slots__ = ("_done", "_signal")

    def __init__(self, signal: Signal, record: bytes, proxy: int, done: Callable[[Signal, Failure | None], None]) -> None:
        super().__init__(record, proxy, signal.lane, signal.message_id)
        self._signal = signal
        self._done = done
        self.watched = True

    def wake(self) -> None:
        self._done(self._signal, self.failure)


class _CopyShell(PublisherShell):
    """The publisher of all copies with one number."""

    def __init__(self, copy: int, signals: SignalPublisher, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copy = copy
        self._signals = signals

    def request_of(self, batch: Batch) -> wire_pb2.PublishRequest:
        request = super().request_of(batch)
        request.copy, request.receipt = self._copy, self._signals.asks_for_receipts
        return request

    def heard(self, number: int, reply: wire_pb2.PublishReply, now: float) -> list[SenderEffect]:
        if reply.delivered:
            self._signals.delivered(reply.delivered, reply.gateways)
        return super().heard(number, reply, now)


class SignalPublisher:
    """Sends signals. `uniform` returns numbers in [0, 1); for the rest see `PublisherShell`."""

    def __init__(
        self,
        options: ClientOptions,
        proxies: Sequence[str],
        client: str,
        channels: Channels,
        on_refresh: Callable[[], None],
        uniform: Callable[[], float],
        reports: FailureReports,
    ) -> None:
        self.core = SignalCore()
        self._reports = reports
        self.asks_for_receipts = False
        """True if the proxies are asked for receipts: from the first signal with a receipt."""
        opens = partial(publish_call, channels)
        self._shells = [
            _CopyShell(copy, self, Sender(room_policy(options), proxies, uniform), client, channels, on_refresh, opens)
            for copy in range(COPIES)
        ]
        # Copy i goes to the i-th proxy from here, by the publishers' rule `key % proxies`; clients begin at different ones.
        self._first = int(uniform() * CHOICES)
        self._loop = asyncio.get_running_loop()
        self._alarm = DeadlineTimer(self._tick)
        self._idle = asyncio.Event()
        self._idle.set()

    def send(self, receipt: SignalReceipt) -> None:
        """Send a signal. Raises `Overloaded` and `NotConnected`."""
        if not self.core.has_space():
            text = f"the outcome of {MAX_UNRESOLVED} signals is not known yet: await receipts before sending more"
            raise Overloaded(text, retry_after_ms=int(REPEAT_AFTER_S * 1000))
        for shell in self._shells:
            shell.try_admit(0)  # raises when the client is closed
        self.asks_for_receipts = self.asks_for_receipts or receipt.wants_receipt
        self._idle.clear()
        self._apply(self.core.offer(receipt, self._loop.time()))

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Pass on a change of the cluster's proxies."""
        for shell in self._shells:
            shell.set_proxies(addresses)

    def delivered(self, ids: Iterable[int], gateways: Iterable[int]) -> None:
        """Process a proxy's report of delivered signals, each with its gateway in `gateways`; a proxy may name none."""
        words = zip_longest(ids, gateways, fillvalue=NO_NUMBER)
        self._apply([effect for id_, gateway in words for effect in self.core.delivered((id_,), gateway)])

    async def flush(self) -> None:
        """Wait until the outcome of every signal is known."""
        await self._idle.wait()

    async def close(self, grace_s: float) -> None:
        """End the streams; unresolved signals fail."""
        self._apply(self.core.abandon("the client was closed before a gateway confirmed the signal: its outcome is unknown"))
        await asyncio.gather(*(shell.close(grace_s) for shell in self._shells))
        self._alarm.cancel()

    def _copy_done(self, signal: Signal, failure: Failure | None) -> None:
        self._apply(self.core.copy_done(signal, failure))

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            signal = effect.signal
            if isinstance(effect, SendCopies):
                record = signal.record
                for number, shell in enumerate(self._shells):
                    if shell.try_admit(len(record)):
                        shell.offer(_Copy(signal, record, self._first + number, self._copy_done))
                    else:
                        text = "messages for the proxy of this copy fill the client's queue (queue_bytes, queue_records)"
                        self._copy_done(signal, Failure(Overloaded.code, text, int(REPEAT_AFTER_S * 1000)))
            elif isinstance(signal, SignalReceipt):
                if signal.failure is not None:
                    self._reports.watch(signal, signal.failure)
                signal.wake()
        if not self.core.unresolved:
            self._idle.set()
        self._alarm.set(self.core.next_deadline())

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))
