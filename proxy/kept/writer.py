"""The proxy's own writer of mail, which stores messages for sessions. Pure.

    StoreKept ─▶ one stream of the mail core, in order ─▶ Answer ─▶ KeptStored
                     │ ended: a store refused, or was lost
                     └─▶ after a pause another one, with a higher generation: what is not answered is sent again, in order

Xiu stores a SnowflakeID once, and an inbox takes a MsgID once, so a message that is sent again is listed once.

Source: docs/mail.md, "How a writer's order is kept".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from cluster.core.contract import NEVER, EventTable, Tick
from pixiu import errors
from pixiu.errors import Refusal
from pixiu.wire.inbox_operations import MAX_GENERATION
from proxy import kept_events as ev
from proxy import mail_events as mail_ev

PAUSE_S: Final = 0.05
"""Pause before the first further stream, seconds; it doubles while nothing is stored."""
MAX_PAUSE_S: Final = 1.0
RETRY_MS: Final = 1_000
LOST_TO_SESSION: Final = errors.InboxFull.code
"""A session whose inbox is full loses the message alone: others must not wait for it to come back."""


class KeptWriter:
    """The core of the writer. What waits in it is bounded by `proxy.kept.stage`.

    Args:
        next_stream: returns a new number for a stream.
    """

    def __init__(self, next_stream: Callable[[], int]) -> None:
        self._next_stream = next_stream
        self._worker, self._generation, self._jump = -1, 0, 0
        self._stream = 0
        """0: none is open."""
        self._position = 1
        self._unanswered: dict[int, ev.KeptMail] = {}
        """Position → mail, in order."""
        self._waiting: deque[ev.KeptMail] = deque()
        """Mail that waits for a stream, in order."""
        self._open_at = NEVER
        self._pause_s = PAUSE_S
        self.streams = self.inboxes_full = 0
        """Totals."""
        self._events: EventTable[ev.WriterEffect] = EventTable()
        self._events.on(ev.StoreKept, self._on_store)
        self._events.on(ev.WriterLent, self._on_lent)
        self._events.on(mail_ev.Answer, self._on_answer)
        self._events.on(mail_ev.EndWriter, self._on_end)
        self._events.on(Tick, self._on_tick)

    def step(self, event: ev.WriterEvent, now: float) -> list[ev.WriterEffect]:
        """Take one event; `now` is monotonic seconds. Returns the effects, in order."""
        return self._events.step(event, now)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        return self._open_at

    @property
    def stream(self) -> int:
        """Number of the open stream; 0: none."""
        return self._stream

    @property
    def idle(self) -> bool:
        """True if no mail waits."""
        return not self._waiting and not self._unanswered

    def _on_store(self, event: ev.StoreKept, now: float, out: list[ev.WriterEffect]) -> None:
        if self._stream:
            self._send(event.mails, out)
            return
        while self._waiting and self._waiting[0].until <= now:
            self._waiting.popleft()
        self._waiting += event.mails
        if self._worker >= 0 and self._open_at == NEVER:
            self._open(now, out)

    def _on_lent(self, event: ev.WriterLent, now: float, out: list[ev.WriterEffect]) -> None:
        self._worker, self._generation = event.worker, max(self._generation, event.generation)
        if self._waiting and not self._stream:
            self._open(now, out)

    def _on_tick(self, event: Tick, now: float, out: list[ev.WriterEffect]) -> None:
        if self._open_at <= now:
            self._open(now, out)

    def _open(self, now: float, out: list[ev.WriterEffect]) -> None:
        """Open a stream for what waits, without what nobody waits for any more."""
        self._open_at = NEVER
        waiting = [mail for mail in self._waiting if mail.until > now]
        self._waiting.clear()
        if not waiting:
            return
        self._stream, self._position = self._next_stream(), 1
        self.streams += 1
        out.append(mail_ev.WriterOpened(self._stream, self._worker, self._generation, own=True))
        self._send(waiting, out)

    def _send(self, mails: Sequence[ev.KeptMail], out: list[ev.WriterEffect]) -> None:
        first = self._position
        self._position += len(mails)
        self._unanswered.update(enumerate(mails, first))
        out.append(mail_ev.RoomMailReceived(self._stream, first, [each.mail for each in mails]))

    def _on_answer(self, event: mail_ev.Answer, now: float, out: list[ev.WriterEffect]) -> None:
        if event.stream != self._stream:
            return
        outcomes: list[tuple[int, Refusal | None]] = []
        for result in event.results:
            if result.code == errors.OutcomeUnknown.code:
                continue  # the stream ends, and it is sent again
            why = None
            if result.code == LOST_TO_SESSION:
                self.inboxes_full += len(result.open)
            elif result.code == errors.DiskFull.code:
                why = Refusal(errors.Overloaded.code, result.text, RETRY_MS)
            elif result.code:
                why = Refusal(result.code, result.text, RETRY_MS if result.code == errors.Overloaded.code else 0)
            for position in range(result.position, result.position + result.count):
                mail = self._unanswered.pop(position, None)
                if mail is not None:
                    outcomes.append((mail.number, why))
        if outcomes:
            self._pause_s, self._jump = PAUSE_S, 0
            out.append(ev.KeptStored(outcomes))

    def _on_end(self, event: mail_ev.EndWriter, now: float, out: list[ev.WriterEffect]) -> None:
        """Begin again after a pause, with what is not answered before what waits."""
        if event.stream != self._stream:
            return
        self._stream = 0
        self._waiting.extendleft(reversed(self._unanswered.values()))
        self._unanswered = {}
        code, text, _ = event.why
        stale = code == errors.StaleWriter.code
        # The number's former holder may have counted further: leap, as writers of mail do.
        self._jump = 2 * self._jump + 1 if stale else 0
        self._generation = min(self._generation + 1 + self._jump, MAX_GENERATION)
        if code == errors.NotServed.code:
            gone = Refusal(errors.Unavailable.code, f"it cannot be stored for sessions that are away: {text}", RETRY_MS)
            out.append(ev.KeptStored([(mail.number, gone) for mail in self._waiting]))
            self._waiting.clear()
        if self._waiting:
            self._open_at = now + max(self._pause_s, min(event.why.retry_after_ms / 1000, MAX_PAUSE_S))
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
