"""The core of receiving mail: each mail once to the application, and what it has acknowledged back to the gateway. Pure.

    envelopes ──▶ new? ──▶ lane's queue ──▶ taken by the application ──▶ acknowledged ──▶ ranges to the gateway
                   │ no: the application has it, or will                     ▲
                   └── acknowledged before: its acknowledgement was lost ────┘ said again

A mail is known by its MsgID, whatever gateway, connection or session it comes by. What the application has not acknowledged is
held. Of what it has, the last `REMEMBERED` MsgIDs of each lane are remembered. That is enough: a relay sends a lane at most 64
entries beyond the cursor that the cluster has stored, so nothing follows while the acknowledgements of those are lost, and only
they can come again. The rest of the memory is for a cursor that went back because a cluster lost what it had not replicated.

Source: docs/delivery.md; docs/delivery.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from pixiu.client.message import Message, message_of
from pixiu.errors import MalformedData
from pixiu.wire.cursor import MAP_BITS
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery, split
from pixiu.wire.record import INBOX_LANES, is_over

WINDOW: Final = MAP_BITS
"""So many entries of a lane are sent beyond what is acknowledged."""
MAX_HELD: Final = 4 * WINDOW
"""Unacknowledged of one lane. More than a window come when somebody else deletes or acknowledges what the application still has.
Policy: what is above is left, and with it what follows in its lane; it comes again."""
REMEMBERED: Final = 4096
"""Acknowledged MsgIDs of one lane that are known when they come again. Policy: the oldest is forgotten."""
ACKNOWLEDGE_AFTER_S: Final = 0.02
"""Acknowledgements wait so long for others to leave with."""
ACKNOWLEDGE_AT: Final = WINDOW // 2
"""So many leave at once: the relay goes on when half a window is free."""
MAX_DAMAGED: Final = 3
"""How often a damaged mail is asked for again; then it is told as a gap."""


class GapReason(Enum):
    """Why mail is missing."""

    DROPPED = "dropped"
    """The inbox has it no longer: it reached its limit, or the mail expired, or was deleted, before this device had it."""
    GONE = "gone"
    """The inbox has it, but the cluster does not have the message any more."""
    EXPIRED = "expired"
    """It arrived after its lifetime, by this machine's clock."""
    DAMAGED = "damaged"
    """It arrived damaged, several times."""


class MailGap(NamedTuple):
    """Mail of one lane that this device does not get."""

    lane: int
    up_to: int
    """InboxSeq: of the missing mail; with `DROPPED` all that this device did not have yet, up to this one."""
    reason: GapReason
    msg_id: int = 0
    """Of the missing mail; 0: several, or not known."""


class Held:
    """A mail, or a gap, that is not acknowledged yet."""

    __slots__ = ("acknowledged", "gap", "lane", "message", "msg_id", "record", "redelivered", "seq", "seqs", "stream")

    def __init__(self, lane: int, delivery: Delivery, stream: Hashable, message: Message | None, gap: MailGap | None) -> None:
        self.lane = lane
        self.msg_id = delivery.msg_id
        self.seq = delivery.seq
        self.seqs: tuple[int, ...] = (delivery.seq,)
        """Where in the inbox it is: one place, unless the inbox has it twice."""
        self.redelivered = bool(delivery.flags & REDELIVERED)
        self.record = delivery.record
        self.message = message
        self.gap = gap
        self.stream = stream
        """By which it came last: what can take its acknowledgement."""
        self.acknowledged = False


@dataclass(slots=True)
class MailIntakeCounters:
    """Totals of one inbox since it was opened."""

    received: int = 0
    """Mail that came for the first time."""
    repeated: int = 0
    """That came again; the application got it once."""
    acknowledged: int = 0
    """By the application, gaps and expired mail not counted."""
    gaps: int = 0
    """That were told, expired and damaged mail counted."""
    expired: int = 0
    damaged: int = 0
    """Mail, or whole batches, whose lengths or CRC were wrong."""
    left: int = 0
    """Not taken, because too much of its lane is unacknowledged; it comes again."""
    foreign: int = 0
    """Of another user, or of a lane that there is not; left out."""
    reconnects: int = 0
    """Connections that were lost and followed by another one. No mail is missing then."""
    moves: int = 0
    """Changes of gateway because one was going."""
    retries: int = 0
    """Times that a handler was called again with a mail that it had failed with."""
    dead_letters: int = 0
    """Mail that a handler failed with every time, and which is in the dead-letter inbox."""
    dead_letter_failures: int = 0
    """Times that a dead letter could not be sent; it is tried again."""
    callback_errors: int = 0
    """Exceptions out of `on_gap`."""


class _Lane:
    __slots__ = ("damaged", "done", "held", "highest", "left_at", "left_in", "queue")

    def __init__(self) -> None:
        self.queue: deque[Held] = deque()
        self.held: dict[int, Held] = {}
        """By MsgID; gaps by their InboxSeq, negative."""
        self.done: dict[int, None] = {}
        self.highest = 0
        """InboxSeq: all of the lane up to here that the device had not acknowledged has come to this process, or was told."""
        self.left_at = 0
        """0, or from here nothing is taken until this one comes again."""
        self.left_in: tuple[Hashable, int] | None = None
        self.damaged: dict[int, int] = {}
        """MsgID → how often; at most a window of them."""


class MailIntake:
    """The core of an inbox. A stream is whatever the caller knows it by; `now` is monotonic seconds."""

    def __init__(self, uin: int) -> None:
        self.counters = MailIntakeCounters()
        self._uin = uin
        self._lanes = [_Lane() for _ in range(INBOX_LANES)]
        self._due: dict[Hashable, dict[int, set[int]]] = {}
        """Stream → lane → InboxSeqs to acknowledge."""
        self._due_count = 0
        self._due_at: float | None = None

    # What comes.

    def arrived(self, stream: Hashable, data: bytes, count: int, now: float) -> bool:
        """A batch of `count` envelopes. False: it was damaged; leave the stream, and what was not taken comes again by another.

        Never raises.
        """
        try:
            deliveries = split(data, min(count, len(data)))
        except MalformedData:
            self.counters.damaged += 1
            return False
        return all(self._take_in(stream, delivery, now) for delivery in deliveries)

    def _take_in(self, stream: Hashable, delivery: Delivery, now: float) -> bool:
        if delivery.uin != self._uin or delivery.lane >= INBOX_LANES:
            self.counters.foreign += 1
            return True
        lane = self._lanes[delivery.lane]
        key = delivery.msg_id or -delivery.seq
        held = lane.held.get(key)
        if held is not None:
            self.counters.repeated += 1
            held.stream = stream
            if delivery.seq not in held.seqs:
                held.seqs = (*held.seqs, delivery.seq)[-WINDOW:]
        elif key in lane.done:
            self.counters.repeated += 1
            self._acknowledge_to(stream, delivery.lane, (delivery.seq,), now)
        elif delivery.flags & GAP and not delivery.msg_id and delivery.seq <= lane.highest:
            # All up to there is here already: nothing is missing.
            self._acknowledge_to(stream, delivery.lane, (delivery.seq,), now)
        elif self._leaves(lane, stream, delivery):
            self.counters.left += 1
        else:
            return self._hold(lane, stream, delivery, key)
        return True

    @staticmethod
    def _leaves(lane: _Lane, stream: Hashable, delivery: Delivery) -> bool:
        """Whether there is no room; then its lane waits for it, so that order holds."""
        come_by = (stream, delivery.session)
        if lane.left_at and (come_by != lane.left_in or delivery.seq <= lane.left_at):
            lane.left_at = 0
        if not lane.left_at and len(lane.held) >= MAX_HELD:
            lane.left_at, lane.left_in = delivery.seq, come_by
        return bool(lane.left_at)

    def _hold(self, lane: _Lane, stream: Hashable, delivery: Delivery, key: int) -> bool:
        message = gap = None
        if delivery.flags & GAP:
            reason = GapReason.GONE if delivery.msg_id else GapReason.DROPPED
            gap = MailGap(delivery.lane, delivery.seq, reason, delivery.msg_id)
        else:
            try:
                message = message_of(delivery.record)
            except MalformedData:
                self.counters.damaged += 1
                times = lane.damaged.pop(key, 0) + 1
                if times <= MAX_DAMAGED:
                    if len(lane.damaged) >= WINDOW:
                        del lane.damaged[next(iter(lane.damaged))]
                    lane.damaged[key] = times
                    return False
                gap = MailGap(delivery.lane, delivery.seq, GapReason.DAMAGED, delivery.msg_id)
        self.counters.received += message is not None
        lane.damaged.pop(key, None)
        lane.held[key] = held = Held(delivery.lane, delivery, stream, message, gap)
        lane.queue.append(held)
        lane.highest = max(lane.highest, delivery.seq)
        return True

    # What the application takes.

    def waiting(self, lanes: Iterable[int] = range(INBOX_LANES)) -> bool:
        """Whether `take` has something."""
        return any(self._lanes[lane].queue for lane in lanes)

    def take(self, now_ms: int, lanes: Iterable[int] = range(INBOX_LANES)) -> Held | None:
        """What comes next of these lanes, a mail or a gap, the first lane first. `now_ms`: Unix milliseconds.

        Mail whose lifetime is over comes as a gap. The caller acknowledges gaps when it has told them.
        """
        for lane in lanes:
            queue = self._lanes[lane].queue
            if not queue:
                continue
            held = queue.popleft()
            found = held.message
            if found is not None and is_over(found.lifetime_min, found.sent_at_ms, now_ms):
                self.counters.expired += 1
                held.message, held.gap = None, MailGap(lane, held.seq, GapReason.EXPIRED, held.msg_id)
            self.counters.gaps += held.gap is not None
            return held
        return None

    def give_back(self, held: Held) -> None:
        """Taken, and neither handled nor acknowledged: it comes next again."""
        if not held.acknowledged:
            self._lanes[held.lane].queue.appendleft(held)

    def acknowledge(self, held: Held, now: float) -> bool:
        """The application has it. Whether that is new."""
        if held.acknowledged:
            return False
        held.acknowledged = True
        held.record = b""
        lane = self._lanes[held.lane]
        key = held.msg_id or -held.seq
        del lane.held[key]
        if len(lane.done) >= REMEMBERED:
            del lane.done[next(iter(lane.done))]
        lane.done[key] = None
        self.counters.acknowledged += held.gap is None
        self._acknowledge_to(held.stream, held.lane, held.seqs, now)
        return True

    @property
    def held(self) -> int:
        """Mail and gaps that are here and not acknowledged."""
        return sum(len(lane.held) for lane in self._lanes)

    # What goes back.

    def opened(self, stream: Hashable) -> None:
        """Mail may come by a stream, and acknowledgements go by it."""
        self._due.setdefault(stream, {})

    def closed(self, stream: Hashable) -> None:
        """A stream has ended. What was to go by it comes again by another one, and is acknowledged there."""
        lanes = self._due.pop(stream, {})
        self._due_count -= sum(len(seqs) for seqs in lanes.values())
        if not self._due_count:
            self._due_at = None

    def _acknowledge_to(self, stream: Hashable, lane: int, seqs: Sequence[int], now: float) -> None:
        lanes = self._due.get(stream)
        if lanes is None:
            return
        due = lanes.setdefault(lane, set())
        before = len(due)
        due.update(seqs)
        self._due_count += len(due) - before
        if self._due_at is None:
            self._due_at = now + ACKNOWLEDGE_AFTER_S

    def next_deadline(self, now: float) -> float | None:
        """When acknowledgements are due; None while there are none."""
        return now if self._due_count >= ACKNOWLEDGE_AT else self._due_at

    def acknowledgements(self) -> list[tuple[Hashable, list[tuple[int, int, int]]]]:
        """All that is to go: stream → (lane, first, last InboxSeq). It counts as gone."""
        found = [
            (stream, [each for lane, seqs in sorted(lanes.items()) for each in _ranges(lane, seqs)])
            for stream, lanes in self._due.items()
            if lanes
        ]
        for stream, _ in found:
            self._due[stream] = {}
        self._due_count, self._due_at = 0, None
        return found


def _ranges(lane: int, seqs: set[int]) -> list[tuple[int, int, int]]:
    """Numbers as (lane, first, last)."""
    found: list[tuple[int, int, int]] = []
    for seq in sorted(seqs):
        if found and found[-1][2] == seq - 1:
            found[-1] = (lane, found[-1][1], seq)
        else:
            found.append((lane, seq, seq))
    return found
