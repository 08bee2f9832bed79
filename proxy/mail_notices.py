"""Who delivers a user's mail is told that the inbox has grown: batches to the relays that own the users, and again. Pure.

    inboxes grew ─▶ of one turn, by owner ─▶ Notify ─▶ taken: forgotten
                         ▲                      └────▶ not answered, stream broken, or "served elsewhere":
                         └── 50, 200, 800 ms ───────── again, to the owner of that moment; then given up

What is given up is counted, and told again when the owners change, without its record. A relay reads inboxes once a minute
in any case, so that a notice is never all that a mail's delivery depends on.

Source: DESIGN section 9 ("Mail", "Delivery of mail").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pixiu.ids import msg_lane
from pixiu.placement.partition import rendezvous
from proxy.mail_events import InboxesGrew

RETRY_S: Final = (0.05, 0.2, 0.8)
"""Pauses before a notice is sent again; after the last one it is given up."""
UNKNOWN_S: Final = 0.05
"""Mail that was confirmed below level replicated is in the inbox a moment later, and told of so much later."""
ANSWER_S: Final = 2.0
"""A relay that does not answer for so long gets another stream."""
MAX_RECORD_BYTES: Final = 1024
"""A larger record is not in the notice: the relay fetches it."""
MAX_BATCH: Final = 4096
"""Notices of one batch."""
MAX_BATCH_BYTES: Final = 512 << 10
"""Records of one batch. Policy: further notices of it are without theirs."""
MAX_NOTICES: Final = 100_000
"""That wait for their answer or their time. Policy: what comes beyond is counted and not told."""
MAX_BYTES: Final = 16 << 20
"""Records of these. Policy: what comes beyond is told without its record."""
MAX_GIVEN_UP: Final = 10_000
"""Inboxes whose last notice was given up. Policy: the oldest is forgotten."""
GIVEN_UP_S: Final = 60.0
"""So long they are remembered: by then their relay has read them."""


class Notice(NamedTuple):
    """An inbox has a new entry."""

    uin: int
    seq: int
    """InboxSeq; 0: not known."""
    msg_id: int
    record: bytes
    """Empty: not in the notice."""
    tries: int

    @property
    def inbox(self) -> tuple[int, int]:
        """Whose, and which lane."""
        return self.uin, msg_lane(self.msg_id)


@dataclass(frozen=True, slots=True)
class SendNotices:
    """Tell a relay, on the stream that is open to it, or on a new one."""

    relay: int
    number: int
    notices: Sequence[Notice]


@dataclass(frozen=True, slots=True)
class LeaveRelay:
    """End the stream to a relay, if there is one."""

    relay: int


@dataclass(slots=True)
class NoticeCounters:
    """Since the start."""

    notices: int = 0
    """Inboxes that grew."""
    notices_sent: int = 0
    """Repeats included."""
    notices_retried: int = 0
    notices_given_up: int = 0
    notices_overflowed: int = 0
    """Not told: too many waited."""


class Notices:
    """See the module. Nothing here raises on what relays say."""

    def __init__(self) -> None:
        self.counters = NoticeCounters()
        self._owners: Mapping[int, Sequence[int]] = {}
        self._partitions = 0
        self._turn: list[Notice] = []
        self._later: tuple[deque[tuple[float, Notice]], ...] = tuple(deque() for _ in (UNKNOWN_S, *RETRY_S))
        """By pause, so that each is in order of time."""
        self._unanswered: dict[int, dict[int, tuple[float, Sequence[Notice]]]] = {}
        """Relay → number of a batch → when it was sent, and what is in it."""
        self._number = 0
        self._count = self._bytes = 0
        self._given_up: dict[tuple[int, int], tuple[float, Notice]] = {}

    @property
    def waiting(self) -> int:
        """Notices that are not answered."""
        return self._count

    @property
    def waiting_bytes(self) -> int:
        """Bytes of their records."""
        return self._bytes

    def owners(self, partitions: int, relays: Mapping[int, Sequence[int]], now: float) -> list[LeaveRelay]:
        """Who runs: partition → endpoints. Relays that are gone are told nothing more."""
        changed = (partitions, relays) != (self._partitions, self._owners)
        self._partitions, self._owners = partitions, relays
        there = {relay for found in relays.values() for relay in found}
        gone = [relay for relay in self._unanswered if relay not in there]
        for relay in gone:
            self.broken(relay, now)
        if changed and partitions:
            again, self._given_up = self._given_up, {}
            for at, notice in again.values():
                if now < at + GIVEN_UP_S and self._count < MAX_NOTICES:
                    self._keep(notice._replace(record=b"", tries=0), 1, now)
        return [LeaveRelay(relay) for relay in gone]

    def grown(self, event: InboxesGrew, now: float) -> None:
        """These inboxes have more; `flush` tells of it. In a cluster without relays nobody is told."""
        if not self._partitions:
            return
        for uin, _lane, seq, msg_id, record in event.items():
            self.counters.notices += 1
            if self._count >= MAX_NOTICES:
                self.counters.notices_overflowed += 1
                continue
            whole = len(record) <= MAX_RECORD_BYTES and self._bytes + len(record) <= MAX_BYTES and seq
            notice = Notice(uin, seq, msg_id, record if whole else b"", 0)
            if seq:
                self._count += 1
                self._bytes += len(notice.record)
                self._turn.append(notice)
            else:
                self._keep(notice, 0, now)

    def taken(self, relay: int, number: int, elsewhere: Iterable[int], now: float) -> None:
        """A relay has answered for a batch."""
        _, notices = self._unanswered.get(relay, {}).pop(number, (0.0, ()))
        others = set(elsewhere)
        for notice in notices:
            self._drop(notice)
            if notice.uin in others:
                self._retry(notice, now)

    def broken(self, relay: int, now: float) -> None:
        """What was not answered may be lost."""
        for _, notices in self._unanswered.pop(relay, {}).values():
            for notice in notices:
                self._drop(notice)
                self._retry(notice, now)

    def flush(self, now: float) -> list[SendNotices | LeaveRelay]:
        """What to say now: what came in this turn, and what is due again."""
        out: list[SendNotices | LeaveRelay] = []
        for relay, batches in list(self._unanswered.items()):
            if batches and next(iter(batches.values()))[0] + ANSWER_S <= now:
                self.broken(relay, now)
                out.append(LeaveRelay(relay))
        for waiting in self._later:
            while waiting and waiting[0][0] <= now:
                self._turn.append(waiting.popleft()[1])
        turn, self._turn = self._turn, []
        by_owner: dict[int, list[Notice]] = {}
        for notice in turn:
            relays = self._owners.get(notice.uin % self._partitions if self._partitions else 0, ())
            if relays:
                by_owner.setdefault(rendezvous(notice.uin, relays), []).append(notice)
            else:
                self._drop(notice)
                self._retry(notice, now)
        for relay, notices in by_owner.items():
            out += [self._batch(relay, notices[at : at + MAX_BATCH], now) for at in range(0, len(notices), MAX_BATCH)]
        return out

    def next_deadline(self) -> float:
        """When `flush` has something to do, monotonic seconds."""
        later = min((waiting[0][0] for waiting in self._later if waiting), default=math.inf)
        sent = [next(iter(batches.values()))[0] for batches in self._unanswered.values() if batches]
        return min(later, min(sent, default=math.inf) + ANSWER_S)

    def _batch(self, relay: int, notices: list[Notice], now: float) -> SendNotices:
        took = 0
        for at, notice in enumerate(notices):
            took += len(notice.record)
            if took > MAX_BATCH_BYTES:
                self._bytes -= len(notice.record)
                took -= len(notice.record)
                notices[at] = notice._replace(record=b"")
        self._number += 1
        self.counters.notices_sent += len(notices)
        self._unanswered.setdefault(relay, {})[self._number] = now, notices
        return SendNotices(relay, self._number, notices)

    def _drop(self, notice: Notice) -> None:
        self._count -= 1
        self._bytes -= len(notice.record)

    def _keep(self, notice: Notice, queue: int, now: float) -> None:
        self._count += 1
        self._bytes += len(notice.record)
        self._later[queue].append((now + (UNKNOWN_S, *RETRY_S)[queue], notice))

    def _retry(self, notice: Notice, now: float) -> None:
        if notice.tries < len(RETRY_S):
            self.counters.notices_retried += 1
            self._keep(notice._replace(tries=notice.tries + 1), 1 + notice.tries, now)
            return
        self.counters.notices_given_up += 1
        self._given_up.pop(notice.inbox, None)
        if len(self._given_up) >= MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[notice.inbox] = now, notice._replace(record=b"")
