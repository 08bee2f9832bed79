"""A sender's decisions on signals: repeats, and acceptance, delivery or giving up. Pure.

    offer ─▶ copies 0, 1, 2 ─▶ accepted: one copy is with a broker      ─▶ resolved without a receipt
                  ▲            │
                  │            └─ delivered: a gateway confirms it       ─▶ resolved with a receipt; further gateways are counted
                  └── 200 ms without it, three times, then Undelivered

Source: docs/architecture.md, "A signal to a room".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from pixiu.client.send.events import PERHAPS, Failure
from pixiu.errors import InvalidArgument, RecordTooLarge, Undelivered
from pixiu.rpc.deadline_timer import NEVER

COPIES: Final = 3
REPEAT_AFTER_S: Final = 0.2
REPEATS: Final = 3
"""Number of repeats of a signal with a receipt. They need no jitter: their times follow those of the sends."""
MAX_UNRESOLVED: Final = 10_000
"""Signals of a client whose outcome is not known; more are refused as `Overloaded`."""
RECENT_GENERATION: Final = 10_000
"""Number of signals after which a subscription begins a new generation of known signals."""
LASTING_FAILURES: Final = frozenset({InvalidArgument.code, RecordTooLarge.code})
"""Failures for which sending again does not help."""


class Signal:
    """A signal from its offer until it is resolved."""

    __slots__ = (
        "__weakref__",
        "accepted",
        "delivered_by",
        "due",
        "failure",
        "lane",
        "message_id",
        "open_copies",
        "record",
        "resolved",
        "tries",
        "wants_receipt",
    )

    def __init__(self, record: bytes, message_id: int, lane: int, wants_receipt: bool) -> None:
        self.record = record
        self.message_id = message_id
        self.lane = lane
        self.wants_receipt = wants_receipt
        self.tries = 0
        self.open_copies = 0
        self.accepted = False
        self.delivered_by: tuple[int, ...] = ()
        """Gateways that confirmed delivery; later ones are added as long as the receipt is kept."""
        self.due = 0.0
        self.failure: Failure | None = None
        """The failure of the signal; while it is unresolved, that of a copy."""
        self.resolved = False


@dataclass(frozen=True, slots=True)
class SendCopies:
    """Send the copies of a signal, each through a proxy of its own; `copy_done` reports the outcome of each."""

    signal: Signal


@dataclass(frozen=True, slots=True)
class SignalResolved:
    """The outcome of a signal is known."""

    signal: Signal


Effect = SendCopies | SignalResolved


@dataclass(slots=True)
class SignalCounters:
    """Totals since the client connected."""

    sent: int = 0
    accepted: int = 0
    """Signals without a receipt that are resolved: a broker has a copy."""
    delivered: int = 0
    """Signals with a receipt that are resolved: a gateway has delivered them."""
    failed: int = 0
    repeated: int = 0


class SignalCore:
    """Decides for one client; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.counters = SignalCounters()
        self.unresolved = 0
        self._awaited: dict[int, Signal] = {}
        """Unresolved signals with a receipt by ID, in the order in which they are due."""
        self._counted: WeakValueDictionary[int, Signal] = WeakValueDictionary()
        """Signals with a receipt by ID, as long as somebody holds the receipt."""

    def has_space(self) -> bool:
        """True if one more signal may be offered."""
        return self.unresolved < MAX_UNRESOLVED

    def next_deadline(self) -> float:
        """Time at which `tick` is due; `NEVER` if nothing waits for a receipt."""
        return next(iter(self._awaited.values())).due if self._awaited else NEVER

    def offer(self, signal: Signal, now: float) -> list[Effect]:
        """Take a new signal. The caller has asked `has_space`."""
        self.counters.sent += 1
        self.unresolved += 1
        return [self._send(signal, now)]

    def copy_done(self, signal: Signal, failure: Failure | None) -> list[Effect]:
        """Note that a copy was accepted by a broker, or failed."""
        signal.open_copies -= 1
        if signal.resolved:
            return []
        if failure is None:
            signal.accepted = True
            return [] if signal.wants_receipt else [self._resolve(signal, None)]
        if signal.failure is None or signal.failure.code not in PERHAPS:
            signal.failure = failure
        failure = signal.failure
        if not signal.open_copies and not signal.accepted and (not signal.wants_receipt or failure.code in LASTING_FAILURES):
            return [self._resolve(signal, failure)]
        return []

    def delivered(self, ids: Iterable[int], gateway: int) -> list[Effect]:
        """Note that a gateway delivered these. The first confirmation resolves a signal, further ones are counted; signals whose
        receipts nobody holds any more are ignored."""
        effects: list[Effect] = []
        for id_ in ids:
            signal = self._counted.get(id_)
            if signal is None or gateway in signal.delivered_by:
                continue
            signal.delivered_by += (gateway,)
            if not signal.resolved:
                effects.append(self._resolve(signal, None))
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Repeat signals that are due; give up those that were repeated often enough."""
        effects: list[Effect] = []
        due: list[Signal] = []
        for signal in self._awaited.values():
            if signal.due > now:
                break
            due.append(signal)
        for signal in due:
            if signal.tries > REPEATS:
                effects.append(self._resolve(signal, _undelivered(signal)))
            else:
                self.counters.repeated += 1
                effects.append(self._send(signal, now))
        return effects

    def abandon(self, text: str) -> list[Effect]:
        """Fail everything that still waits for a receipt, because the client closes."""
        return [self._resolve(signal, Failure(Undelivered.code, text)) for signal in list(self._awaited.values())]

    def _send(self, signal: Signal, now: float) -> SendCopies:
        signal.tries += 1
        signal.open_copies += COPIES
        if signal.wants_receipt:
            signal.due = now + REPEAT_AFTER_S
            self._counted[signal.message_id] = signal
            self._awaited.pop(signal.message_id, None)
            self._awaited[signal.message_id] = signal
        return SendCopies(signal)

    def _resolve(self, signal: Signal, failure: Failure | None) -> SignalResolved:
        signal.failure = failure
        signal.resolved = True  # last: another thread may look
        signal.record = b""  # a receipt that is kept must not keep the signal
        self.unresolved -= 1
        self._awaited.pop(signal.message_id, None)
        if failure is not None:
            self.counters.failed += 1
        elif signal.wants_receipt:
            self.counters.delivered += 1
        else:
            self.counters.accepted += 1
        return SignalResolved(signal)


def _undelivered(signal: Signal) -> Failure:
    why = "brokers have it" if signal.accepted else "no broker confirmed it"
    if signal.failure is not None and not signal.accepted:
        why += f" ({signal.failure.text})"
    return Failure(
        Undelivered.code,
        f"no gateway confirmed the signal, sent {signal.tries} times in {signal.tries * REPEAT_AFTER_S * 1000:.0f} ms; {why}. "
        "Perhaps the room is empty; the outcome is unknown, and sending it again may deliver it twice",
    )


class RecentSignals:
    """Signals that a subscription has received, in two generations: the tables of its gateways do not know of each other."""

    def __init__(self, generation: int = RECENT_GENERATION) -> None:
        self._generation = generation
        self._seen: set[tuple[int, int]] = set()
        self._before: set[tuple[int, int]] = set()

    def is_new(self, message_id: int, room: int) -> bool:
        """True if a signal has not arrived before; it is known from now on."""
        identity = (message_id, room)
        if identity in self._seen or identity in self._before:
            return False
        if len(self._seen) >= self._generation:
            self._before, self._seen = self._seen, set()
        self._seen.add(identity)
        return True
