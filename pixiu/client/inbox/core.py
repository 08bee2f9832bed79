"""The core of receiving mail: each mail goes to the application once, and its acknowledgement back to the gateway. Pure.

    envelopes ──▶ new? ──▶ lane's queue ──▶ taken by the application ──▶ acknowledged ──▶ ranges to the gateway
                   │ no: the application has it, or will                     ▲
                   └── acknowledged before: its acknowledgement was lost ────┘ sent again

A mail is identified by its MsgID, regardless of the gateway, connection or session that delivers it. Mail that the application
has not acknowledged is held. Of acknowledged mail, the last `REMEMBERED` MsgIDs of each lane are kept. That is enough: a relay
sends a lane at most 64 entries beyond the cursor that the cluster has stored, so while the acknowledgements of those are lost,
nothing follows, and only they can arrive again. The rest of the memory is for a cursor that went back because a cluster lost what
it had not replicated.

Source: docs/delivery.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from pixiu.client.messages.message import Message, message_of
from pixiu.errors import MalformedData
from pixiu.rpc.deadline_timer import NEVER
from pixiu.wire.cursor import MAP_BITS
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery, split
from pixiu.wire.record import INBOX_LANES, is_over

WINDOW: Final = MAP_BITS
"""Number of entries of a lane that are sent beyond the acknowledged ones."""
MAX_HELD: Final = 4 * WINDOW
"""Limit of unacknowledged mail of one lane. More than a window arrives if somebody else deletes or acknowledges mail that the
application still has. Policy: mail above the limit, and everything after it in the lane, is not taken; it is sent again."""
REMEMBERED: Final = 4096
"""Acknowledged MsgIDs of one lane that are recognized when they arrive again. Policy: the oldest is forgotten."""
ACKNOWLEDGE_AFTER_S: Final = 0.02
"""Time that acknowledgements wait for others to leave with, seconds."""
ACKNOWLEDGE_AT: Final = WINDOW // 2
"""Number of acknowledgements that leave at once: the relay continues when half a window is free."""
MAX_DAMAGED: Final = 3
"""Number of times a damaged mail is requested again before it is reported as a gap."""


class GapReason(Enum):
    """The reason why mail is missing."""

    DROPPED = "dropped"
    """The inbox no longer has it: it reached its limit, or the mail expired or was deleted, before this device had it."""
    GONE = "gone"
    """The inbox has the entry, but the cluster no longer has the message."""
    EXPIRED = "expired"
    """It arrived after its lifetime, by this machine's clock."""
    DAMAGED = "damaged"
    """It arrived damaged several times."""


class MailGap(NamedTuple):
    """Mail of one lane that this device does not get."""

    lane: int
    up_to: int
    """InboxSeq of the missing mail; with `DROPPED`, everything up to here that this device did not have yet is missing."""
    reason: GapReason
    msg_id: int = 0
    """MsgID of the missing mail; 0: several, or not known."""


class Held:
    """A mail, or a gap, that is not acknowledged yet."""

    __slots__ = ("acknowledged", "gap", "lane", "message", "msg_id", "record", "redelivered", "seq", "seqs", "stream")

    def __init__(self, lane: int, delivery: Delivery, stream: Hashable, message: Message | None, gap: MailGap | None) -> None:
        self.lane = lane
        self.msg_id = delivery.msg_id
        self.seq = delivery.seq
        self.seqs: tuple[int, ...] = (delivery.seq,)
        """Its InboxSeqs: one, unless the inbox has it twice."""
        self.redelivered = bool(delivery.flags & REDELIVERED)
        self.record = delivery.record
        self.message = message
        self.gap = gap
        self.stream = stream
        """Stream by which it arrived last, which can take its acknowledgement."""
        self.acknowledged = False


@dataclass(slots=True)
class MailIntakeCounters:
    """Totals of one inbox since it was opened."""

    received: int = 0
    """Mail that arrived for the first time."""
    repeated: int = 0
    """Mail that arrived again; the application got it once."""
    acknowledged: int = 0
    """Mail that the application acknowledged, without gaps and expired mail."""
    gaps: int = 0
    """Gaps reported to the application, with expired and damaged mail."""
    expired: int = 0
    damaged: int = 0
    """Mail, or whole batches, with wrong lengths or a wrong CRC."""
    load_test_blocked: int = 0
    """Mail acknowledged and not given by `load_test`: marked mail, or with "only" all other."""
    left: int = 0
    """Mail not taken because too much of its lane is unacknowledged; it is sent again."""
    foreign: int = 0
    """Mail of another user or of a lane that does not exist; ignored."""
    reconnects: int = 0
    """Connections that were lost and followed by another one. No mail is missing then."""
    moves: int = 0
    """Changes of gateway because the previous one was leaving."""
    retries: int = 0
    """Times that a handler was called again with a mail that it had failed with."""
    dead_letters: int = 0
    """Mail that a handler failed with every time, and which is in the dead-letter inbox."""
    dead_letter_failures: int = 0
    """Times that a dead letter could not be sent; it is tried again."""
    callback_errors: int = 0
    """Exceptions raised by `on_gap`."""


class _Lane:
    __slots__ = ("damaged", "done", "held", "highest", "left_at", "left_in", "queue")

    def __init__(self) -> None:
        self.queue: deque[Held] = deque()
        self.held: dict[int, Held] = {}
        """Held mail by MsgID; gaps by their InboxSeq, negative."""
        self.done: dict[int, None] = {}
        self.highest = 0
        """InboxSeq up to which everything that the device had not acknowledged has arrived in this process, or was reported as a
        gap."""
        self.left_at = 0
        """InboxSeq of the mail that was not taken: nothing more is taken until it arrives again; 0: none."""
        self.left_in: tuple[Hashable, int] | None = None
        self.damaged: dict[int, int] = {}
        """MsgID → number of damaged arrivals; at most a window of entries."""


class MailIntake:
    """The core of an inbox. A stream is any value by which the caller identifies it; `now` is monotonic seconds."""

    def __init__(self, uin: int) -> None:
        self.counters = MailIntakeCounters()
        self._uin = uin
        self._lanes = [_Lane() for _ in range(INBOX_LANES)]
        self._due: dict[Hashable, dict[int, set[int]]] = {}
        """Stream → lane → InboxSeqs to acknowledge."""
        self._due_count = 0
        self._due_at = NEVER

    # Input.

    def arrived(self, stream: Hashable, data: bytes, count: int, now: float) -> bool:
        """Take a batch of `count` envelopes. False: it was damaged; leave the stream, and another one sends again what was not
        taken.

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
            # Everything up to there has arrived already: nothing is missing.
            self._acknowledge_to(stream, delivery.lane, (delivery.seq,), now)
        elif self._leaves(lane, stream, delivery):
            self.counters.left += 1
        else:
            return self._hold(lane, stream, delivery, key)
        return True

    @staticmethod
    def _leaves(lane: _Lane, stream: Hashable, delivery: Delivery) -> bool:
        """True if there is no space for a mail; its lane then waits for it, so that the order is kept."""
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

    # Taken by the application.

    def waiting(self, lanes: Iterable[int] = range(INBOX_LANES)) -> bool:
        """True if `take` would return something."""
        return any(self._lanes[lane].queue for lane in lanes)

    def take(self, now_ms: int, lanes: Iterable[int] = range(INBOX_LANES)) -> Held | None:
        """Return the next mail or gap of these lanes, the first lane first. `now_ms`: Unix milliseconds.

        Mail whose lifetime is over is returned as a gap. The caller acknowledges gaps when it has reported them.
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
        """Return a mail that was taken and neither handled nor acknowledged: it is the next one again."""
        if not held.acknowledged:
            self._lanes[held.lane].queue.appendleft(held)

    def acknowledge(self, held: Held, now: float) -> bool:
        """Acknowledge a mail for the application. True if it was not acknowledged before."""
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
        """Number of mails and gaps here that are not acknowledged."""
        return sum(len(lane.held) for lane in self._lanes)

    # Sent back.

    def opened(self, stream: Hashable) -> None:
        """Add a stream that may deliver mail and take acknowledgements."""
        self._due.setdefault(stream, {})

    def closed(self, stream: Hashable) -> None:
        """Remove a stream that has ended. Mail whose acknowledgement it had not taken arrives again by another one, and is
        acknowledged there."""
        lanes = self._due.pop(stream, {})
        self._due_count -= sum(len(seqs) for seqs in lanes.values())
        if not self._due_count:
            self._due_at = NEVER

    def _acknowledge_to(self, stream: Hashable, lane: int, seqs: Sequence[int], now: float) -> None:
        lanes = self._due.get(stream)
        if lanes is None:
            return
        due = lanes.setdefault(lane, set())
        before = len(due)
        due.update(seqs)
        self._due_count += len(due) - before
        if self._due_at == NEVER:
            self._due_at = now + ACKNOWLEDGE_AFTER_S

    def next_deadline(self) -> float:
        """Time at which acknowledgements are due; `NEVER` if there are none."""
        return 0.0 if self._due_count >= ACKNOWLEDGE_AT else self._due_at

    def acknowledgements(self) -> list[tuple[Hashable, list[tuple[int, int, int]]]]:
        """Take all acknowledgements that are due: stream → (lane, first, last InboxSeq). They count as sent."""
        found = [
            (stream, [each for lane, seqs in sorted(lanes.items()) for each in _ranges(lane, seqs)])
            for stream, lanes in self._due.items()
            if lanes
        ]
        for stream, _ in found:
            self._due[stream] = {}
        self._due_count, self._due_at = 0, NEVER
        return found


def _ranges(lane: int, seqs: set[int]) -> list[tuple[int, int, int]]:
    """Join numbers to ranges (lane, first, last)."""
    found: list[tuple[int, int, int]] = []
    for seq in sorted(seqs):
        if found and found[-1][2] == seq - 1:
            found[-1] = (lane, found[-1][1], seq)
        else:
            found.append((lane, seq, seq))
    return found
