"""The core of sending mail: one writer, one stream at a time; when the stream ends, everything unconfirmed is sent again in order.
Pure.

    offer ──▶ fresh ──▶ under way, by position ──▶ confirmed, or failed
                 ▲              │
                 └── again ◀────┘ the stream ended: the next one has a higher generation, and begins with these

All mail of a client goes through one stream, whatever its receivers, so that its worker number has one generation. A client with
`mail_streams` has several senders, each with a worker number of its own.

Source: docs/architecture.md, "A mail is sent"; Swift (the write protocol).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pixiu.client.options import ClientOptions
from pixiu.client.send.events import LOOKED, CloseStream, Failure, RefreshCluster, Writable, in_doubt
from pixiu.errors import (
    Draining,
    InboxFull,
    InvalidArgument,
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    NotSent,
    NotServed,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    StaleWriter,
    Unavailable,
)
from pixiu.rpc.backoff import Backoff
from pixiu.wire.inbox_operations import next_generation
from pixiu.wire.levels import Level, Triple

STALL_S: Final = 30.0
"""A proxy that owes an answer and is silent for this time is left for another one, seconds. Above `proxy.mail_timeout_s`."""
MAX_BACKOFF_S: Final = 1.0
RESEND: Final = "`resend` it, which uses the same ID, so that it is stored once"
HOPELESS: Final = frozenset({InvalidArgument.code, MalformedData.code, NotAllowed.code, NotServed.code})
"""Reasons for the end of a stream that would end any other stream too."""
MAX_OPEN_SHOWN: Final = 1000


class MailTicket:
    """A mail from its offer until it is resolved."""

    __slots__ = (
        "attempts", "copies", "deadline", "failure", "level", "message_id", "more", "msg_id", "number", "open", "record",
        "resolved", "size", "watched",
    )  # fmt: skip

    def __init__(self, record: bytes, message_id: int, level: Level, more: tuple[int, ...] = ()) -> None:
        self.record = record
        self.message_id = message_id
        self.level = level
        self.more = more
        """Receivers besides the record's key."""
        self.size = len(record) + 8 * len(more)
        self.number = 0
        """Number of the offer, from 1."""
        self.deadline = 0.0
        self.attempts = 0
        self.resolved = False
        self.failure: Failure | None = None
        self.msg_id = 0
        self.copies = 0
        self.open: tuple[int, ...] = ()
        self.watched = False

    def problem(self) -> PixiuError | None:
        """The failure of the mail; None if there is none."""
        if self.failure is None:
            return None
        error = self.failure.error()
        if isinstance(error, OutcomeUnknown | InboxFull):
            error.open_inboxes = self.open
        return error


@dataclass(frozen=True, slots=True)
class OpenMailStream:
    """Open a stream to a proxy, with the writer's number and generation."""

    address: str
    stream: int
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class MailResolved:
    """Resolved tickets that are watched or have failed."""

    tickets: tuple[MailTicket, ...]


Effect = OpenMailStream | CloseStream | Writable | MailResolved | RefreshCluster


@dataclass(frozen=True, slots=True)
class MailBatch:
    """Mail that is sent together on a stream."""

    data: bytes
    count: int
    position: int
    level: Level
    more: Sequence[tuple[int, tuple[int, ...]]]


class MailOutcome(NamedTuple):
    """Outcome of consecutive mails, as a proxy reports it."""

    position: int
    number: int
    copies: int
    msg_ids: Sequence[int]
    failure: Failure | None
    open: Sequence[int]


@dataclass(slots=True)
class MailCounters:
    """Totals since the client connected."""

    offered: int = 0
    confirmed: int = 0
    failed: int = 0
    expired: int = 0
    """Those of `failed` that nobody confirmed within `mail_timeout_s`."""
    resent: int = 0
    """Mail sent again, with the same SnowflakeID."""
    batches: int = 0
    streams: int = 0
    failures_by_code: dict[str, int] = field(default_factory=dict)

    def add(self, other: MailCounters) -> None:
        """Add those of another stream."""
        for name in ("offered", "confirmed", "failed", "expired", "resent", "batches", "streams"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for code, count in other.failures_by_code.items():
            self.failures_by_code[code] = self.failures_by_code.get(code, 0) + count


class MailSender:
    """Decides for the mail of one client; see the module.

    Args:
        options: the client's options.
        proxies: their addresses.
        worker: returns the current worker number.
        clock_s: Unix seconds.
        uniform: numbers in [0, 1).
        first_proxy: number of the proxy of the first stream, modulo their number; None: drawn.
    """

    def __init__(
        self,
        options: ClientOptions,
        proxies: Sequence[str],
        worker: Callable[[], int],
        clock_s: Callable[[], float],
        uniform: Callable[[], float],
        first_proxy: int | None = None,
    ) -> None:
        self._options = options
        self._proxies = list(proxies)
        self._worker = worker
        self._clock_s = clock_s
        self._backoff = Backoff(options.backoff_s, min(MAX_BACKOFF_S, options.max_backoff_s), uniform)
        self._next_proxy = int(uniform() * len(proxies)) if first_proxy is None else first_proxy
        self._stream = 0
        self._last_stream = 0
        self._draining = False
        self._stream_worker = -1
        self._generation = 0
        self._position = 1
        self._taken = 0
        self._heard = False
        """True if a proxy has taken or answered anything on this stream."""
        self._batches = 0
        """Batches sent on this stream."""
        self._window_bytes = options.window_bytes
        self._batch_bytes = self._batch_records = 0
        """The largest batch that the proxy takes, further receivers counted as records; 0: not announced."""
        self._in_flight: dict[int, MailTicket] = {}
        """Mail under way by position, in order."""
        self._in_flight_bytes = 0
        self._again: deque[MailTicket] = deque()
        self._fresh: deque[MailTicket] = deque()
        self._progress_at = 0.0
        self._failures = 0
        self._rest_until = 0.0
        self._address = ""
        """Address of the stream's proxy."""
        self._logins_refused: set[str] = set()
        """Proxies that refused the login since their last answer; at most all that were ever listed."""
        self._last: Failure | None = None
        """The reason why the last stream ended."""
        self.unresolved = 0
        self.unresolved_bytes = 0
        self.triples: dict[tuple[str, int], Triple] = {}
        self.counters = MailCounters()

    def has_space(self) -> bool:
        """True if one more mail of any size may be offered."""
        return self.unresolved < self._options.queue_records and self.unresolved_bytes < self._options.queue_bytes

    def offer(self, ticket: MailTicket, now: float) -> list[Effect]:
        """Take a mail, or take a failed one again with the same ID."""
        self.counters.offered += 1
        ticket.number = self.counters.offered
        ticket.deadline = now + self._options.mail_timeout_s
        ticket.resolved, ticket.failure = False, None
        self.unresolved += 1
        self.unresolved_bytes += ticket.size
        self._fresh.append(ticket)
        if self._stream and self._worker() != self._stream_worker:
            # Another holder of the old number may use it as a writer from now on.
            return [*self._restart(now, 0.0), *self._open(now)]
        return self._open(now)

    def _open(self, now: float) -> list[Effect]:
        if self._stream:
            return [] if self._draining else [Writable(self._stream)]
        if not (self._again or self._fresh) or now < self._rest_until or not self._proxies:
            return []
        address = self._address = self._proxies[self._next_proxy % len(self._proxies)]
        self._last_stream += 1
        self._stream = self._last_stream
        worker = self._worker()
        jump = (1 << min(self._failures, 20)) - 1 if self._last is not None and self._last.code == StaleWriter.code else 0
        self._generation = next_generation(self._generation, self._clock_s(), jump)
        self._stream_worker, self._draining, self._position, self._taken = worker, False, 1, 0
        self._heard, self._batches = False, 0
        self._window_bytes, self._batch_bytes, self._batch_records = self._options.window_bytes, 0, 0
        self._progress_at = now
        self.counters.streams += 1
        return [OpenMailStream(address, self._stream, worker, self._generation)]

    def next_batch(self, stream: int, now: float) -> MailBatch | None:
        """Take the mail that a stream may send now."""
        if stream != self._stream or self._draining:
            return None
        options = self._options
        tickets: list[MailTicket] = []
        size = receivers = 0
        longest = min(self._batch_bytes or options.batch_bytes, options.batch_bytes)
        while len(tickets) < options.batch_records and len(self._in_flight) + len(tickets) < options.window_records:
            queue = self._again or self._fresh
            if not queue:
                break
            ticket = queue[0]
            receivers += 1 + len(ticket.more)
            if tickets and (ticket.level is not tickets[0].level or size + ticket.size > longest):
                break
            if tickets and receivers > self._batch_records > 0:
                break
            if (self._in_flight or tickets) and self._in_flight_bytes + size + ticket.size > self._window_bytes:
                break
            queue.popleft()
            if ticket.attempts:
                self.counters.resent += 1
            ticket.attempts += 1
            size += ticket.size
            tickets.append(ticket)
        if not tickets:
            return None
        if not self._in_flight:
            self._progress_at = now
        position = self._position
        self._in_flight.update(zip(range(position, position + len(tickets)), tickets, strict=True))
        self._position += len(tickets)
        self._in_flight_bytes += size
        self.counters.batches += 1
        self._batches += 1
        more = [(index, ticket.more) for index, ticket in enumerate(tickets) if ticket.more]
        data = b"".join([ticket.record for ticket in tickets])
        return MailBatch(data, len(tickets), position, tickets[0].level, more)

    def reply(
        self,
        stream: int,
        now: float,
        outcomes: Iterable[MailOutcome],
        taken: int = 0,
        window_bytes: int = 0,
        draining: bool = False,
        batch_bytes: int = 0,
        batch_records: int = 0,
    ) -> list[Effect]:
        """Process a proxy's answer: outcomes, positions taken, the window, the largest batch."""
        if stream != self._stream:
            return []
        self._progress_at = now
        self._logins_refused.discard(self._address)
        if window_bytes:
            self._window_bytes, self._batch_bytes, self._batch_records = window_bytes, batch_bytes, batch_records
        self._taken = max(self._taken, taken)
        self._draining = self._draining or draining
        woken: list[MailTicket] = []
        for outcome in outcomes:
            self._heard = True
            self._outcome(outcome, woken)
        self._heard = self._heard or taken > 0
        effects: list[Effect] = [MailResolved(tuple(woken))] if woken else []
        if self._draining:
            return effects + self._finish_drain(now)
        if self._again or self._fresh:
            effects.append(Writable(stream))
        return effects

    def _outcome(self, outcome: MailOutcome, woken: list[MailTicket]) -> None:
        failure = outcome.failure
        for index in range(min(outcome.number, self._position - outcome.position)):
            ticket = self._in_flight.get(outcome.position + index)
            if ticket is None:
                continue
            if index < len(outcome.msg_ids):
                ticket.msg_id = outcome.msg_ids[index]
            ticket.open = tuple(outcome.open[:MAX_OPEN_SHOWN])
            if failure is not None and failure.code == OutcomeUnknown.code:
                continue  # the stream is about to end: this mail is sent again
            told = failure
            if failure is not None and ticket.attempts > 1 and failure.code not in LOOKED:
                told = in_doubt(failure, RESEND)
            del self._in_flight[outcome.position + index]
            self._in_flight_bytes -= ticket.size
            ticket.copies = outcome.copies
            if failure is not None and told is failure:
                ticket.attempts = 0  # all attempts are answered: if the mail is sent again, counting starts over
            self._failures = 0
            self._settle(ticket, told, woken)

    def _settle(self, ticket: MailTicket, failure: Failure | None, woken: list[MailTicket]) -> None:
        ticket.failure = failure
        ticket.resolved = True  # last: another thread may look
        self.unresolved -= 1
        self.unresolved_bytes -= ticket.size
        if failure is None:
            ticket.record = b""  # a receipt that is kept must not keep the mail
            self.counters.confirmed += 1
        else:
            self.counters.failed += 1
            self.counters.failures_by_code[failure.code] = self.counters.failures_by_code.get(failure.code, 0) + 1
        if ticket.watched or failure is not None:
            woken.append(ticket)

    def ended(self, stream: int, now: float, why: Failure) -> list[Effect]:
        """Handle the end of a stream that the proxy ended with a reason."""
        if stream != self._stream:
            return []
        self._last = why
        if why.code in HOPELESS:
            return self._fail_all(why, now)
        if why.code in (Draining.code, Overloaded.code):
            self._next_proxy += 1
        return self._restart(now, why.retry_after_ms / 1000)

    def stream_died(self, stream: int, now: float, reason: str, login: str = "") -> list[Effect]:
        """Handle a broken stream: its proxy may be dead. `login`: the reason why the login was refused, before anything was taken;
        when all proxies have refused it, everything that waits fails."""
        if stream != self._stream:
            return []
        if login and not self._heard:
            self._logins_refused.add(self._address)
            for ticket in self._in_flight.values():
                ticket.attempts -= 1
            if self._logins_refused.issuperset(self._proxies):
                return [*self._fail_all(Failure(NotAuthenticated.code, login), now, answers=False), RefreshCluster()]
        self._last = Failure(Unavailable.code, reason)
        self._next_proxy += 1
        return [*self._restart(now, 0.0), RefreshCluster()]

    def _restart(self, now: float, rest_s: float) -> list[Effect]:
        """Leave the stream: its mail is sent again, first and in order."""
        stream, self._stream = self._stream, 0
        self._again.extendleft(reversed([ticket for ticket in self._in_flight.values() if not ticket.resolved]))
        self._in_flight, self._in_flight_bytes = {}, 0
        if self._worker() == self._stream_worker:
            self._failures += 1
            self._rest_until = now + max(rest_s, self._backoff.after_s(self._failures) if self._failures > 1 else 0.0)
        return [CloseStream(stream), *self._open(now)]

    def _finish_drain(self, now: float) -> list[Effect]:
        if self._in_flight:
            return []
        self._next_proxy += 1
        self._failures = 0
        return [*self._restart(now, 0.0), RefreshCluster()]

    def set_proxies(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Set the cluster's proxies. An empty list changes nothing."""
        if addresses:
            self._proxies = list(addresses)
        return self._open(now)

    def tick(self, now: float) -> list[Effect]:
        """Expire mail, leave a silent stream, and end a rest."""
        effects: list[Effect] = []
        woken: list[MailTicket] = []
        expired = [position for position, ticket in self._in_flight.items() if ticket.deadline <= now]
        for position in expired:
            ticket = self._in_flight.pop(position)
            self._in_flight_bytes -= ticket.size
            self._expire(ticket, woken)
        for queue in (self._again, self._fresh):
            while queue and queue[0].deadline <= now:
                self._expire(queue.popleft(), woken)
        if woken:
            effects.append(MailResolved(tuple(woken)))
        if self._stream and self._in_flight and now >= self._progress_at + STALL_S:
            effects += self.stream_died(self._stream, now, f"no answer for {STALL_S:g} s")
        elif self._draining and self._stream:
            effects += self._finish_drain(now)
        return effects + self._open(now)

    def _expire(self, ticket: MailTicket, woken: list[MailTicket]) -> None:
        self.counters.expired += 1
        seconds, last = f"{self._options.mail_timeout_s:g} s", self._last
        because = f" (last: {last.code}: {last.text})" if last is not None else ""
        if not ticket.attempts:
            text = f"the mail was not sent within {seconds}: no proxy took it{because}; send it again"
            failure = Failure(NotSent.code, text)
        else:
            text = f"the mail was not confirmed within {seconds}{because}: whether it is in the inbox is unknown; {RESEND}"
            failure = Failure(OutcomeUnknown.code, text)
        self._settle(ticket, failure, woken)

    def _fail_all(self, why: Failure, now: float, never: Failure | None = None, *, answers: bool = True) -> list[Effect]:
        """Fail everything unresolved; mail that was never sent with `never`, if given. `answers`: `why` may be an answer to what
        was sent on the stream."""
        # The end of a stream answers what was sent on it only if it is about the stream itself, or about its first and only batch.
        certain = answers and not self._heard and (why.code == NotServed.code or self._batches <= 1)
        woken: list[MailTicket] = []
        stream, self._stream = self._stream, 0
        for ticket in (*self._in_flight.values(), *self._again, *self._fresh):
            if not ticket.attempts:
                told = why if never is None else never
            else:
                told = why if certain and ticket.attempts == 1 else in_doubt(why, RESEND)
            self._settle(ticket, told, woken)
        self._in_flight, self._in_flight_bytes = {}, 0
        self._again.clear()
        self._fresh.clear()
        effects: list[Effect] = [MailResolved(tuple(woken))] if woken else []
        return [*effects, CloseStream(stream)] if stream else effects

    def abandon(self, text: str, now: float) -> list[Effect]:
        """Fail everything unresolved, because the client closes."""
        never = Failure(NotSent.code, f"{text}; it was not sent")
        return self._fail_all(Failure(OutcomeUnknown.code, f"{text}: its outcome is unknown"), now, never)

    def next_deadline(self) -> float | None:
        """Time at which `tick` is due, monotonic seconds; None for never."""
        if not self.unresolved:
            return self._progress_at if self._draining and self._stream else None
        due = min(ticket.deadline for ticket in self._firsts())
        if self._stream:
            return min(due, self._progress_at + STALL_S) if self._in_flight else due
        return min(due, self._rest_until) if self._proxies else due

    # Conditions of waits: everything offered up to a number.

    def finished(self, number: int) -> bool:
        """True if all of it is resolved."""
        return all(ticket.number > number for ticket in self._firsts())

    def sent(self, number: int) -> bool:
        """True if all of it is taken by a proxy or resolved."""
        untaken = next((ticket for position, ticket in self._in_flight.items() if position > self._taken), None)
        return (
            (untaken is None or untaken.number > number)
            and not (self._again and self._again[0].number <= number)
            and self.flushed(number)
        )

    def flushed(self, number: int) -> bool:
        """True if all of it was given to a stream or is resolved."""
        return not self._fresh or self._fresh[0].number > number

    def _firsts(self) -> list[MailTicket]:
        """The first unresolved ticket of each queue."""
        found = [queue[0] for queue in (self._again, self._fresh) if queue]
        if self._in_flight:
            found.append(next(iter(self._in_flight.values())))
        return found
