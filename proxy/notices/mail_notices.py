"""Notices that inboxes have grown: batches to the relays that own the users, with retries. Pure.

    inboxes grew ─▶ of one turn, by owner ─▶ Notify ─▶ taken: forgotten
                         ▲                      └────▶ not answered, stream broken, or "served elsewhere":
                         └── 50, 200, 800 ms ───────── again, to the owner of that moment; then given up

A notice that is given up is counted, and sent again when the owners change, without its record. A relay reads inboxes once a minute
in any case, so a mail's delivery never depends on a notice alone.

Source: docs/architecture.md, "A mail is sent", "A mail is delivered".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.core.contract import NEVER, EndOfTurn, EventTable, Tick
from pixiu.placement.partition import rendezvous
from proxy import mail_events as ev

RETRY_S: Final[tuple[float, ...]] = (0.05, 0.2, 0.8)
"""Pauses before a notice is sent again, seconds; after the last one it is given up."""
UNKNOWN_S: Final = 0.05
"""Delay of notices for mail confirmed below level replicated, seconds: it is in the inbox only a moment later."""
ANSWER_S: Final = 2.0
"""Time limit for a relay's answer, seconds; then it gets another stream."""
MAX_RECORD_BYTES: Final = 1024
"""A larger record is not in the notice: the relay fetches it."""
MAX_BATCH: Final = 4096
"""Notices of one batch."""
MAX_BATCH_BYTES: Final = 512 << 10
"""Bytes of the records in one batch. Policy: further notices in it come without their records."""
MAX_NOTICES: Final = 100_000
"""Entries that wait for an answer or their time. Policy: further ones are counted and not reported."""
MAX_BYTES: Final = 16 << 20
"""Bytes of their records. Policy: further entries are reported without their records."""
MAX_GIVEN_UP: Final = 10_000
"""Inboxes whose last notice was given up. Policy: the oldest is forgotten."""
GIVEN_UP_S: Final = 60.0
"""Time for which they are remembered, seconds: by then their relay has read them."""


@dataclass(slots=True)
class NoticeCounters:
    """Totals of notices since the start."""

    notices: int = 0
    """Inboxes that grew."""
    notices_sent: int = 0
    """Notices sent, repeats included."""
    notices_retried: int = 0
    notices_given_up: int = 0
    notices_overflowed: int = 0
    """Entries not reported because too many waited."""


class Notices:
    """The core of notices to relays. `step` never raises on what relays send."""

    def __init__(self) -> None:
        self.counters = NoticeCounters()
        self._owners: Mapping[int, Sequence[int]] = {}
        self._partitions = 0
        self._turn: dict[int, ev.Notice] = {}
        """UIN << 2 | lane → entries of this turn."""
        self._later: tuple[deque[tuple[float, ev.Notice]], ...] = tuple([deque() for _ in (UNKNOWN_S, *RETRY_S)])
        """Queue for each pause, so that each is in order of time."""
        self._unanswered: dict[int, dict[int, tuple[float, Sequence[ev.Notice]]]] = {}
        """Relay → number of a batch → its time of sending, and its notices."""
        self._number = 0
        self._count = self._bytes = 0
        self._given_up: dict[tuple[int, int], tuple[float, ev.Notice]] = {}
        """(UIN, lane) → time when its last notice was given up, and that notice."""

        self._events: EventTable[ev.NoticesEffect] = EventTable()
        self._events.on(ev.InboxesGrew, self._on_grown)
        self._events.on(ev.OwnersChanged, self._on_owners)
        self._events.on(ev.NoticesTaken, self._on_taken)
        self._events.on(ev.RelayLost, self._on_lost)
        self._events.on(EndOfTurn, self._flush)
        self._events.on(Tick, self._flush)

    def step(self, event: ev.NoticesEvent, now: float) -> list[ev.NoticesEffect]:
        """Take one event; `now` is monotonic seconds. Returns the effects, in order."""
        return self._events.step(event, now)

    def next_deadline(self) -> float:
        """Time at which a `Tick` is due, monotonic seconds; `NEVER` while no notice waits."""
        found = NEVER
        for waiting in self._later:
            if waiting:
                found = min(found, waiting[0][0])
        for batches in self._unanswered.values():
            if batches:
                found = min(found, next(iter(batches.values()))[0] + ANSWER_S)
        return found

    @property
    def waiting(self) -> int:
        """Number of entries that are not answered."""
        return self._count

    @property
    def waiting_bytes(self) -> int:
        """Bytes of their records."""
        return self._bytes

    def _on_owners(self, event: ev.OwnersChanged, now: float, out: list[ev.NoticesEffect]) -> None:
        """Use new owners: drop the relays that are gone, and send given-up notices to the present owners."""
        changed = (event.partitions, event.relays) != (self._partitions, self._owners)
        self._partitions, self._owners = event.partitions, event.relays
        running = {relay for found in event.relays.values() for relay in found}
        for relay in [relay for relay in self._unanswered if relay not in running]:
            self._lost(relay, now)
            out.append(ev.LeaveRelay(relay))
        if changed and self._partitions:
            given_up, self._given_up = self._given_up, {}
            for at, notice in given_up.values():
                if now < at + GIVEN_UP_S and self._count < MAX_NOTICES:
                    self._keep(notice, 1, now)

    def _on_grown(self, event: ev.InboxesGrew, now: float, out: list[ev.NoticesEffect]) -> None:
        """Note grown inboxes, to be reported at the end of the turn. In a cluster without relays they are dropped."""
        if not self._partitions:
            return
        turn = self._turn
        for uin, lane, seq, msg_id, record in event.items():
            self.counters.notices += 1
            if self._count >= MAX_NOTICES:
                self.counters.notices_overflowed += 1
                continue
            if not seq:
                self._keep(ev.Notice(uin, lane, [0], [msg_id], [b""], 0), 0, now)
                continue
            if len(record) > MAX_RECORD_BYTES or self._bytes + len(record) > MAX_BYTES:
                record = b""
            self._count += 1
            self._bytes += len(record)
            notice = turn.get(uin << 2 | lane)
            if notice is None:
                turn[uin << 2 | lane] = ev.Notice(uin, lane, [seq], [msg_id], [record], 0)
            else:
                notice.seqs.append(seq)
                notice.msg_ids.append(msg_id)
                notice.records.append(record)

    def _on_taken(self, event: ev.NoticesTaken, now: float, out: list[ev.NoticesEffect]) -> None:
        _, notices = self._unanswered.get(event.relay, {}).pop(event.number, (0.0, ()))
        elsewhere = set(event.elsewhere)
        for notice in notices:
            self._drop(notice)
            if notice.uin in elsewhere:
                self._retry(notice, now)

    def _on_lost(self, event: ev.RelayLost, now: float, out: list[ev.NoticesEffect]) -> None:
        self._lost(event.relay, now)

    def _lost(self, relay: int, now: float) -> None:
        for _, notices in self._unanswered.pop(relay, {}).values():
            for notice in notices:
                self._drop(notice)
                self._retry(notice, now)

    def _flush(self, event: EndOfTurn | Tick, now: float, out: list[ev.NoticesEffect]) -> None:
        """Send this turn's notices, and those that are due again."""
        for relay, batches in list(self._unanswered.items()):
            if batches and next(iter(batches.values()))[0] + ANSWER_S <= now:
                self._lost(relay, now)
                out.append(ev.LeaveRelay(relay))
        turn = list(self._turn.values())
        self._turn.clear()
        for waiting in self._later:
            while waiting and waiting[0][0] <= now:
                turn.append(waiting.popleft()[1])
        by_owner: dict[int, list[ev.Notice]] = {}
        for notice in turn:
            relays = self._owners.get(notice.uin % self._partitions if self._partitions else 0, ())
            if relays:
                by_owner.setdefault(rendezvous(notice.uin, relays), []).append(notice)
            else:
                self._drop(notice)
                self._retry(notice, now)
        for relay, notices in by_owner.items():
            out += [self._batch(relay, batch, now) for batch in _batches(notices)]

    def _batch(self, relay: int, notices: Sequence[ev.Notice], now: float) -> ev.SendNotices:
        took = 0
        for notice in notices:
            self.counters.notices_sent += len(notice.seqs)
            for at, record in enumerate(notice.records):
                if took + len(record) > MAX_BATCH_BYTES:
                    self._bytes -= len(record)
                    notice.records[at] = b""
                else:
                    took += len(record)
        self._number += 1
        self._unanswered.setdefault(relay, {})[self._number] = now, notices
        return ev.SendNotices(relay, self._number, notices)

    def _drop(self, notice: ev.Notice) -> None:
        self._count -= len(notice.seqs)
        self._bytes -= notice.size

    def _keep(self, notice: ev.Notice, queue: int, now: float) -> None:
        self._count += len(notice.seqs)
        self._bytes += notice.size
        self._later[queue].append((now + (UNKNOWN_S, *RETRY_S)[queue], notice))

    def _retry(self, notice: ev.Notice, now: float) -> None:
        if notice.tries < len(RETRY_S):
            self.counters.notices_retried += len(notice.seqs)
            self._keep(notice._replace(tries=notice.tries + 1), 1 + notice.tries, now)
            return
        self.counters.notices_given_up += len(notice.seqs)
        inbox = notice.uin, notice.lane
        self._given_up.pop(inbox, None)
        if len(self._given_up) >= MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[inbox] = now, notice.without_records(0)


def _batches(notices: Sequence[ev.Notice]) -> Iterator[list[ev.Notice]]:
    """Batches of at most `MAX_BATCH` entries; a notice with more than are left in a batch continues in the next."""
    batch: list[ev.Notice] = []
    room = MAX_BATCH
    for notice in notices:
        rest = notice
        while len(rest.seqs) > room:
            if room:
                batch.append(rest.part(0, room))
                rest = rest.part(room, len(rest.seqs))
            yield batch
            batch, room = [], MAX_BATCH
        batch.append(rest)
        room -= len(rest.seqs)
    if batch:
        yield batch
