"""The core of a bridge from a channel to a target: batches, retries, order, dead letters. Pure.

    IDLE ──Begin──▶ OPENING ──Opened──▶ RUNNING ──WriteFailed──▶ CLOSED ──time over──▶ OPENING
      ▲                └──OpenFailed──▶ CLOSED                      │
      │                                                             └── LEAVE_AFTER_S away: it leaves the channel, so that
      └── End: everything that is being written is finished first       another process gets the messages

    Arrived ──▶ queue ──batch──▶ being written ──DONE──▶ Acknowledge
                  ▲                   │ ├────────NEVER──▶ Reject
                  └─────AGAIN, SPLIT──┘ └── a message of the same lane before it was refused for now: AGAIN

An unordered channel has a lane for each message.

A message at which the target ends the link has no outcome. So a batch that fails HALVE_AFTER times is halved until each suspect is
alone, and others are written between its tries. It is a dead letter after SUSPECT_TRIES failures with others confirmed between
them: while nothing at all goes through, the target is away, and no message is blamed.

Source: docs/bridges.md, "How a bridge works".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from bridge import events as ev
from bridge.connector import Verdict
from cluster.core.contract import NEVER, EndOfTurn, EventTable, Tick
from pixiu.rpc.backoff import Backoff

FIRST_BACKOFF_S: Final = 0.2
LEAVE_AFTER_S: Final = 60.0
"""Time for which the target may be away before the bridge leaves the channel, seconds: the messages that it has then go to others.
Policy: each time costs these messages one of the channel's attempts, so it is no shorter."""
MAX_LEAVE_AFTER_S: Final = 86_400.0
"""The time doubles up to this one, seconds, until the target has taken a message: some targets open although they are away, so a
bridge joins the channel again, and a long outage must not use the attempts up."""
HALVE_AFTER: Final = 3
"""Failures in a row, without any outcome, from which on the batches of a message are halved."""
SUSPECT_TRIES: Final = 5
"""Failures of a message that is alone, each after others were confirmed, with which it goes to the dead letters."""


class State(Enum):
    """State of a bridge."""

    IDLE = "paused"
    OPENING = "opening"
    RUNNING = "running"
    CLOSED = "waiting for the target"


@dataclass(frozen=True)
class Limits:
    """Limits of a bridge; see `TargetOptions`."""

    batch_messages: int = 100
    batch_bytes: int = 1 << 20
    linger_s: float = 0.0
    in_flight: int = 1
    max_tries: int = 0
    max_backoff_s: float = 60.0
    ordered: bool = False


class Entry:
    """A message that is not finished."""

    __slots__ = ("arrived", "blamed", "cuts", "group", "lane", "number", "size", "tries", "while_confirmed")

    def __init__(self, arrival: ev.Arrival, now: float, group: int) -> None:
        self.number, self.lane, self.size = arrival
        self.arrived = now
        self.tries = 0
        self.group = group
        """Most messages of a batch that has it."""
        self.cuts = 0
        """Failures without an outcome, in a row."""
        self.blamed = 0
        """Those of them alone, each after others were confirmed."""
        self.while_confirmed = -1
        """Batches that were confirmed when it failed alone last; -1: it did not."""


@dataclass(slots=True)
class Counters:
    """Totals of a bridge to a target."""

    messages: int = 0
    """Messages that the target has confirmed."""
    bytes: int = 0
    batches: int = 0
    retries: int = 0
    """Messages that are written again."""
    rejected: int = 0
    """Messages that went to the dead letters."""
    failures: int = 0
    """Times that the target could not be opened, or broke."""
    void: int = 0
    """Messages that the channel took back before they were written."""


class Core(EventTable[ev.Effect]):
    """A bridge to a target.

    Args:
        limits: of it.
        held: says whether a message is still this member's.
        uniform: returns random numbers in [0, 1).
    """

    def __init__(self, limits: Limits, held: Callable[[int], bool], uniform: Callable[[], float]) -> None:
        super().__init__()
        self._limits, self._held = limits, held
        self._backoff = Backoff(FIRST_BACKOFF_S, limits.max_backoff_s, uniform)
        self.state = State.IDLE
        self.counters = Counters()
        self.why = ""
        """Why it does not get on; empty: it does."""
        self._ending = self._joined = False
        self._queue: list[Entry] = []
        self._flights: dict[int, list[Entry]] = {}
        self._batches = self._confirmed = 0
        self._rest_until = self._linger_until = 0.0
        self._leave_at, self._leave_after_s = NEVER, LEAVE_AFTER_S
        self.on(ev.Begin, self._on_begin)
        self.on(ev.End, self._on_end)
        self.on(ev.Opened, self._on_opened)
        self.on(ev.OpenFailed, self._on_open_failed)
        self.on(ev.MemberFailed, self._on_member_failed)
        self.on(ev.Arrived, self._on_arrived)
        self.on(ev.Written, self._on_written)
        self.on(ev.WriteFailed, self._on_write_failed)
        self.on(EndOfTurn, lambda _event, now, out: self._go_on(now, out))
        self.on(Tick, self._on_tick)

    @property
    def idle(self) -> bool:
        """True if it does nothing, and nothing is being written."""
        return self.state is State.IDLE

    @property
    def waiting(self) -> int:
        """Messages that it has and has not finished."""
        return len(self._queue) + sum(len(each) for each in self._flights.values())

    def next_deadline(self) -> float:
        """Time at which a `Tick` is due, monotonic seconds."""
        if self.state is State.CLOSED and not self._flights:
            return min(self._rest_until, self._leave_at if self._joined else NEVER)
        if self.state is State.RUNNING and self._queue and len(self._flights) < self._limits.in_flight:
            return max(self._rest_until, self._linger_until) or NEVER
        return NEVER

    # --- life

    def _on_begin(self, event: ev.Begin, now: float, out: list[ev.Effect]) -> None:
        self._ending = False
        if self.state is State.IDLE:
            self.state = State.OPENING
            out.append(ev.OpenTarget())

    def _on_end(self, event: ev.End, now: float, out: list[ev.Effect]) -> None:
        self._ending = True
        self._end_when_written(out)

    def _end_when_written(self, out: list[ev.Effect]) -> None:
        if not self._ending or self._flights or self.state in (State.IDLE, State.OPENING):
            return
        self._leave(out)
        if self.state is not State.CLOSED:
            out.append(ev.CloseTarget())
        self._ended()

    def _ended(self) -> None:
        self.state, self.why, self._leave_at, self._rest_until = State.IDLE, "", NEVER, 0.0
        self._leave_after_s = LEAVE_AFTER_S
        self._backoff.reset()

    def _on_opened(self, event: ev.Opened, now: float, out: list[ev.Effect]) -> None:
        self.state = State.RUNNING
        if self._ending:
            self._end_when_written(out)
            return
        self._rest_until = 0.0
        if not self._joined:
            self._joined = True
            out.append(ev.Join())
        self._go_on(now, out)

    def _on_open_failed(self, event: ev.OpenFailed, now: float, out: list[ev.Effect]) -> None:
        out.append(ev.CloseTarget())
        self._broke(event.why, event.after_s, now, out)

    def _broke(self, why: str, after_s: float, now: float, out: list[ev.Effect]) -> None:
        self.state, self.why = State.CLOSED, why
        self.counters.failures += 1
        self._leave_at = min(self._leave_at, now + self._leave_after_s)
        self._rest_until = now + max(after_s, self._backoff.next_s())
        self._end_when_written(out)

    def _on_member_failed(self, event: ev.MemberFailed, now: float, out: list[ev.Effect]) -> None:
        if not self._joined:
            return
        self._leave(out)
        if self.state is State.RUNNING:
            out.append(ev.CloseTarget())
        self._broke(event.why, 0.0, now, out)

    def _leave(self, out: list[ev.Effect]) -> None:
        if self._joined:
            self._joined = False
            out.append(ev.Leave())
            self._again((), out)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if self.state is State.CLOSED and not self._flights:
            if self._joined and now >= self._leave_at:
                self._leave(out)
                self._leave_after_s = min(self._leave_after_s * 2, MAX_LEAVE_AFTER_S)
                self._leave_at = now + self._leave_after_s
            if now >= self._rest_until:
                self.state = State.OPENING
                out.append(ev.OpenTarget())
        else:
            self._go_on(now, out)

    # --- messages

    def _on_arrived(self, event: ev.Arrived, now: float, out: list[ev.Effect]) -> None:
        if self._joined:
            self._queue += [Entry(each, now, self._limits.batch_messages) for each in event.messages]
        else:
            out.append(ev.Forget([each.number for each in event.messages]))

    def _go_on(self, now: float, out: list[ev.Effect]) -> None:
        """Write what may be written now."""
        self._linger_until = 0.0
        if now >= self._rest_until:
            self._rest_until = 0.0
        while (
            self.state is State.RUNNING and not self._ending and self._queue
            and len(self._flights) < self._limits.in_flight and now >= self._rest_until
        ):  # fmt: skip
            batch = self._next_batch(now, out)
            if not batch:
                return
            self._batches += 1
            self._flights[self._batches] = batch
            out.append(ev.Write(self._batches, [entry.number for entry in batch]))

    def _next_batch(self, now: float, out: list[ev.Effect]) -> list[Entry]:
        """Take the next batch out of the queue; empty: it waits for more messages, or all of their lanes are busy."""
        limits = self._limits
        busy = {entry.lane for flight in self._flights.values() for entry in flight} if limits.ordered else set[int]()
        batch, left, gone = list[Entry](), list[Entry](), list[int]()
        suspects = list[Entry]()
        size, most, full = 0, limits.batch_messages, False
        for at, entry in enumerate(self._queue):
            if not self._held(entry.number):
                gone.append(entry.number)
            elif limits.ordered and entry.lane in busy:
                left.append(entry)
            elif entry.while_confirmed == self._confirmed:  # others first: they show whether the target is there
                suspects.append(entry)
                busy.add(entry.lane)
                left.append(entry)
            elif batch and (len(batch) >= min(most, entry.group) or size + entry.size > limits.batch_bytes):
                full = True
                left += self._queue[at:]
                break
            else:
                batch.append(entry)
                size += entry.size
                most = min(most, entry.group)
        if gone:
            self.counters.void += len(gone)
            out.append(ev.Forget(gone))
        if suspects and not batch and not self._flights:
            batch = [min(suspects, key=lambda entry: entry.cuts)]  # in turn: after an outage many are
            left.remove(batch[0])
        due = min((entry.arrived for entry in batch), default=now) + limits.linger_s
        if batch and not (full or len(batch) >= most or size >= limits.batch_bytes or now >= due or batch[0].tries):
            self._queue = sorted([*batch, *left], key=lambda entry: entry.number) if left else batch
            self._linger_until = due
            return []
        self._queue = left
        return batch

    def _on_written(self, event: ev.Written, now: float, out: list[ev.Effect]) -> None:
        entries = self._flights.pop(event.batch)
        done, letters, again = list[int](), list[tuple[int, str]](), list[Entry]()
        waits, held_up = NEVER, set[int]()
        self.counters.batches += 1
        for entry, outcome in zip(entries, event.outcomes, strict=True):
            verdict = outcome.verdict
            if self._limits.ordered and entry.lane in held_up and verdict is not Verdict.NEVER:
                again.append(entry)  # if the target has it, it has it before its turn
                continue
            if verdict is Verdict.DONE:
                done.append(entry.number)
                self.counters.messages += 1
                self.counters.bytes += entry.size
                continue
            why = outcome.why
            if verdict is Verdict.AGAIN:
                entry.tries += 1
                waits = max(outcome.after_s, waits if waits != NEVER else 0.0)
                self.why = why
                if 0 < self._limits.max_tries <= entry.tries:
                    verdict, why = Verdict.SPLIT, f"given up after {entry.tries} tries: {why}"
            if verdict is Verdict.NEVER or (verdict is Verdict.SPLIT and len(entries) == 1):
                letters.append((entry.number, why))
                continue
            if verdict is Verdict.SPLIT:
                entry.group = max(1, min(entry.group, len(entries)) // 2)
            again.append(entry)
            held_up.add(entry.lane)
        self.counters.rejected += len(letters)
        self.counters.retries += len(again)
        self._again(again, out)
        if done:
            self._confirmed += 1
            out.append(ev.Acknowledge(done))
        if letters:
            out.append(ev.Reject(letters))
        if waits != NEVER:
            self._rest_until = now + max(waits, self._backoff.next_s())
        elif done or letters:
            self._backoff.reset()
            self._leave_at, self._leave_after_s, self.why = NEVER, LEAVE_AFTER_S, ""
        self._end_when_written(out)
        self._go_on(now, out)

    def _on_write_failed(self, event: ev.WriteFailed, now: float, out: list[ev.Effect]) -> None:
        entries = self._flights.pop(event.batch)
        for entry in entries:
            entry.tries += 1
            entry.cuts += 1
            if entry.cuts >= HALVE_AFTER:
                entry.group = max(1, min(entry.group, len(entries)) // 2)
        if len(entries) == 1 and entries[0].cuts >= HALVE_AFTER and self._blame(entries[0]):
            why = f"the target failed {SUSPECT_TRIES} times at this message alone, and took others between: {event.why}"
            self.counters.rejected += 1
            out.append(ev.Reject([(entries[0].number, why)]))
            entries = []
        self.counters.retries += len(entries)
        self._again(entries, out)
        if self.state is State.RUNNING:
            out.append(ev.CloseTarget())
            self._broke(event.why, event.after_s, now, out)
        self._end_when_written(out)

    def _blame(self, entry: Entry) -> bool:
        """Count a failure of a message that was alone. Returns True if it is to be given up."""
        if entry.while_confirmed < self._confirmed:
            entry.blamed += entry.while_confirmed >= 0
            entry.while_confirmed = self._confirmed
        return entry.blamed >= SUSPECT_TRIES

    def _again(self, entries: Sequence[Entry], out: list[ev.Effect]) -> None:
        """Put messages back in their places; forget all if they come again by the channel."""
        if entries:
            self._queue = sorted([*entries, *self._queue], key=lambda entry: entry.number)
        if self._queue and not self._joined:
            out.append(ev.Forget([entry.number for entry in self._queue]))
            self._queue = []
