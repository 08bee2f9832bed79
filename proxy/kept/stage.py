"""Messages to rooms with kept filters: they wait here until the sessions that they are for have them. Pure.

    a room known to be kept ─────────────▶┐                      ┌─ none ────────────────────────────────┐
    a parcel that was not handled ───────▶┴─ ask the routers ────┴─ some ─▶ store ─▶ all inboxes have it ─┴─▶ send, marked KEPT

The messages of a room are stored, and sent, in the order in which they came; several may be asked for and stored at a time. One
that is refused for now takes those behind it along, so that its publisher can send it again without overtaking. When a room is
learnt by a parcel that was not handled, parcels that left before may still come back: its messages wait for them. A message that
comes back after a later one of its publisher to the room was handled is stored, but not sent: it would come out of order.
A message that is not stored in time is refused; it may be stored nevertheless, and sending it again stores it once.

Source: docs/architecture.md, "A message for sessions that are away".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from cluster.core.contract import NEVER
from pixiu import errors
from pixiu.errors import MalformedData, Refusal
from pixiu.wire.inbox_operations import MAX_RECEIVERS
from pixiu.wire.record import FLAGS_AT, KEY_AT, SENDER_AT
from proxy import kept_events as ev
from proxy import mail_events as mail_ev
from proxy.kept.messages import KEPT, mail_of, room_of, to_be_kept, topic_of, with_kept
from proxy.kept_events import KeptMail, Question
from proxy.records.destinations import NOBODY, Target

Owner = TypeVar("Owner")

TIMEOUT_S: Final = 4.0
"""Time for which a message may wait to be stored, seconds. Policy: it is refused with UNAVAILABLE. Publishers leave a silent proxy
after 5 s."""
MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 64 << 20
"""Messages that wait. Policy: further ones are refused with OVERLOADED; so are those of a room that has half of that."""
KNOWN_S: Final = 60.0
"""Time for which a room is known to be kept after the last message that was for a session, seconds."""
MAX_KNOWN: Final = 100_000
"""Rooms known to be kept. Policy: the one whose last such message is the oldest is forgotten, and learnt again."""
MAX_HANDLED: Final = 1_000
"""Handled parcels that are remembered while earlier ones are in flight. Policy: the oldest is forgotten."""
RETRY_MS: Final = 500
NOW: Final = -NEVER
_TEMPORARY: Final = frozenset({errors.Unavailable.code, errors.Overloaded.code, errors.Draining.code})
BUSY: Final = "too many messages wait to be stored for sessions that are away"
OVERTAKEN: Final = Refusal(
    errors.Dropped.code,
    "no broker confirmed it, and a later message to its room was delivered; sending it again may change their order",
)
LATE: Final = "the sessions that are away do not have it yet: routers, Xiu or Pi do not answer in time"


@dataclass(slots=True)
class KeptCounters:
    """Messages to be kept, since the start of the proxy."""

    kept_asked: int = 0
    """Messages for which the routers were asked."""
    kept_returned: int = 0
    """Those among them whose parcel was not handled."""
    kept_matched: int = 0
    """Messages that were for at least one session."""
    kept_sessions: int = 0
    """Sessions that messages were for, each counted for each message."""
    kept_stored: int = 0
    """Messages stored for all their sessions."""
    kept_refused: int = 0
    """Messages refused because they could not be kept; in records_refused too."""


class _Message(Generic[Owner]):
    """A message that waits."""

    __slots__ = ("left", "number", "overtaken", "owner", "record", "refusal", "session", "sessions", "token", "until")

    def __init__(self, record: bytes, owner: Owner | None, session: int, token: int) -> None:
        self.record, self.owner, self.session, self.token = record, owner, session, token
        self.number, self.until = 0, NEVER
        self.sessions: Sequence[int] | None = None
        """None: the routers have not answered."""
        self.left = 0
        """Its mails that are not stored yet."""
        self.overtaken = False
        self.refusal: Refusal | None = None


@dataclass(slots=True)
class _Room(Generic[Owner]):
    """The messages of a room that wait, in order."""

    queue: deque[_Message[Owner]] = field(default_factory=deque)
    awaited: set[int] = field(default_factory=set)
    """Tokens of parcels with messages of this room that may come back."""
    released: int = 0
    """Messages at the head of the queue that are being stored, or are finished and wait for those before them."""
    size: int = 0


@dataclass(slots=True)
class Due(Generic[Owner]):
    """Work that is due now."""

    questions: list[Question] = field(default_factory=list)
    mails: list[KeptMail] = field(default_factory=list)
    send: list[tuple[bytes, Owner | None]] = field(default_factory=list)
    """Records that go to brokers, in the order of each room."""
    refused: dict[Refusal, list[tuple[bytes, Owner | None]]] = field(default_factory=dict)


class KeptRooms(Generic[Owner]):
    """The messages that wait, and the rooms that are known to be kept. `Owner` is the type of a message's owner.

    Args:
        take: takes the messages of a room that is to be offered.
        reroute: called with a room that must be routed anew: its messages come here from now on, or do not any more.
        publisher: returns a number of a message's publisher.
    """

    def __init__(
        self,
        take: Callable[[list[bytes], Owner | None], None],
        reroute: Callable[[int], None],
        publisher: Callable[[bytes, Owner | None], int],
    ) -> None:
        self._reroute, self._publisher = reroute, publisher
        self.target: Target[Owner] = Target(NOBODY, divert=take)
        """Target of the rooms whose messages come here."""
        self.available = False
        """True if the cluster can keep messages; otherwise none comes here."""
        self.deadline = NEVER
        """Time at which `run` has something to do, monotonic seconds."""
        self._rooms: dict[int, _Room[Owner]] = {}
        self._known: dict[int, float] = {}
        """Room → time until which it counts as kept; the oldest first."""
        self._new: list[_Message[Owner]] = []
        self._direct: list[tuple[bytes, Owner | None]] = []
        self._touched: dict[int, None] = {}
        """Rooms in which something may go on."""
        self._waiting: dict[int, _Message[Owner]] = {}
        """Number → message, the oldest first."""
        self.awaited: dict[int, list[int]] = {}
        """Token of a parcel → rooms that wait for it."""
        self._handled: deque[tuple[int, Sequence[bytes], Owner | None]] = deque(maxlen=MAX_HANDLED)
        """Parcels that were handled while an earlier one was in flight: token, records, owner."""
        self._last = 0
        self._count = self._bytes = 0
        self.counters = KeptCounters()

    @property
    def under_way(self) -> int:
        """Number of messages that wait."""
        return self._count + len(self._direct)

    def samples(self) -> dict[str, object]:
        """Samples for metrics, besides the counters."""
        return {"kept_waiting": self._count, "kept_waiting_bytes": self._bytes, "kept_rooms_known": len(self._known)}

    def takes(self, room: int) -> bool:
        """True if a room's messages come here."""
        return room in self._known or room in self._rooms

    def on_available(self, event: ev.KeptAvailable, now: float, out: list[Any]) -> None:
        """Note whether the cluster can keep messages. What waits is stored, or refused in time."""
        self.available = event.available
        if not event.available:
            known, self._known = self._known, {}
            for room in known:
                self._reroute(room)

    # --- messages come

    def offer(self, record: bytes, owner: Owner | None, session: int, token: int) -> bool:
        """Take a message of a room that comes here, and pass one on that is not to be kept. Returns False if too much waits.

        Args:
            record: the message.
            owner: its owner, who waits for it from now on.
            session: of its publisher; 0: none.
            token: of its parcel that was not handled, or of the next one that leaves.
        """
        self.deadline = NOW
        if not to_be_kept(record):
            self._direct.append((record, owner))
            return True
        room, size = room_of(record), len(record)
        found = self._rooms.get(room)
        if self._count >= MAX_RECORDS or self._bytes + size > MAX_BYTES:
            return False
        if found is None:
            found = self._rooms[room] = _Room()
            self._reroute(room)
        elif 2 * len(found.queue) >= MAX_RECORDS or 2 * (found.size + size) > MAX_BYTES:
            return False
        message = _Message(record, owner, session, token)
        message.overtaken = any(self._overtakes(message, *parcel) for parcel in self._handled)
        queue = found.queue
        if queue and queue[-1].token > token:
            queue.insert(max(bisect_right(queue, token, key=_token_of), found.released), message)
        else:
            queue.append(message)
        found.size += size
        self._count += 1
        self._bytes += size
        self._new.append(message)
        return True

    def learn(self, lost: Iterable[int], in_flight: Mapping[int, tuple[object, Sequence[bytes]]]) -> None:
        """Learn rooms by parcels that were not handled: their later messages come here, and wait for the parcels in flight.

        Args:
            lost: tokens of these parcels.
            in_flight: token → (anything, records) of the parcels in flight, these included.
        """
        learnt: dict[bytes, int] = {}
        for token in lost:
            for record in in_flight[token][1] if token in in_flight else ():
                key = record[KEY_AT:SENDER_AT]
                if key not in learnt and _may_be_refused(record) and not self.takes(room := room_of(record)):
                    learnt[key] = room
        if not learnt:
            return
        for token, (_, records) in in_flight.items():
            for record in records:
                found = learnt.get(record[KEY_AT:SENDER_AT])
                if found is not None:
                    self._await(found, token)

    def _await(self, room: int, token: int) -> None:
        found = self._rooms.get(room)
        if found is None:
            found = self._rooms[room] = _Room()
            self._reroute(room)
        if token not in found.awaited:
            found.awaited.add(token)
            self.awaited.setdefault(token, []).append(room)

    def returned(self, records: Sequence[bytes]) -> list[bytes]:
        """Messages of a parcel that was not handled that are to be offered: a broker may have refused them."""
        found = [record for record in records if _may_be_refused(record)] if self.available else []
        self.counters.kept_returned += len(found)
        return found

    def settled(self, token: int, handled: bool, records: Sequence[bytes], owner: Owner | None) -> None:
        """Note that a parcel is settled; if it was not handled, its messages are offered in the same step."""
        for room in self.awaited.pop(token, ()):
            found = self._rooms.get(room)
            if found is not None:
                found.awaited.discard(token)
                self._touch(room)
                for message in found.queue if handled else ():
                    message.overtaken = message.overtaken or self._overtakes(message, token, records, owner)

    def handled(self, token: int, records: Sequence[bytes], owner: Owner | None, oldest: int) -> None:
        """Note that a parcel was handled. `oldest`: token of the oldest one in flight."""
        remembered = self._handled
        while remembered and remembered[0][0] < oldest:
            remembered.popleft()
        if token > oldest:
            remembered.append((token, records, owner))

    def _overtakes(self, message: _Message[Owner], token: int, records: Sequence[bytes], owner: Owner | None) -> bool:
        """True if a handled parcel has a later message of a message's publisher to its room."""
        if token <= message.token:
            return False
        key, publisher = message.record[KEY_AT:SENDER_AT], self._publisher(message.record, message.owner)
        return any(each[KEY_AT:SENDER_AT] == key and self._publisher(each, owner) == publisher for each in records)

    # --- answers come

    def on_matched(self, event: ev.KeptMatched, now: float, out: list[Any]) -> None:
        """Note the sessions that messages are for."""
        for number, sessions in event.answers:
            message = self._waiting.get(number)
            if message is None or message.sessions is not None:
                continue
            message.sessions = sessions
            room = room_of(message.record)
            self._touch(room)
            if sessions:
                self.counters.kept_matched += 1
                self.counters.kept_sessions += len(sessions)
                if self.available:
                    self._know(room, now)

    def on_refused(self, event: ev.KeptRefused, now: float, out: list[Any]) -> None:
        """Refuse messages for which the routers do not answer."""
        for number in event.numbers:
            message = self._waiting.get(number)
            if message is not None and message.sessions is None:
                message.refusal = event.why
                self._touch(room_of(message.record))

    def on_stored(self, event: ev.KeptStored, now: float, out: list[Any]) -> None:
        """Note the outcome of mails."""
        for number, why in event.outcomes:
            message = self._waiting.get(number)
            if message is None:
                continue
            message.left -= 1
            if why is not None:
                message.refusal = message.refusal or why
            self._touch(room_of(message.record))

    def _touch(self, room: int) -> None:
        """Note that something may go on in a room."""
        self._touched[room] = None
        self.deadline = NOW

    def _know(self, room: int, now: float) -> None:
        if self._known.pop(room, None) is None and len(self._known) >= MAX_KNOWN:
            self._forget(next(iter(self._known)))
        self._known[room] = now + KNOWN_S

    def _forget(self, room: int) -> None:
        self._known.pop(room, None)
        if room not in self._rooms:
            self._reroute(room)

    # --- work

    def run(self, now: float) -> Due[Owner]:
        """Do what can be done."""
        due: Due[Owner] = Due()
        due.send, self._direct = self._direct, []
        for message in self._new:
            self._ask(message, now, due)
        self._new = []
        while self._waiting and (oldest := next(iter(self._waiting.values()))).until <= now:
            oldest.refusal = oldest.refusal or Refusal(errors.Unavailable.code, LATE, RETRY_MS)
            self._touch(room_of(oldest.record))
            del self._waiting[oldest.number]
        while self._known and (first := next(iter(self._known))) is not None and self._known[first] <= now:
            self._forget(first)
        touched, self._touched = self._touched, {}
        for room in touched:
            found = self._rooms.get(room)
            if found is not None:
                self._advance(room, found, due)
        late = next(iter(self._waiting.values())).until if self._waiting else NEVER
        self.deadline = min(late, next(iter(self._known.values()), NEVER))
        return due

    def _ask(self, message: _Message[Owner], now: float, due: Due[Owner]) -> None:
        self._last += 1
        message.number, message.until = self._last, now + TIMEOUT_S
        room, topic = room_of(message.record), topic_of(message.record)
        if topic is None:
            message.refusal = Refusal(errors.MalformedData.code, "the record's lengths are wrong")
            self._touch(room)
            return
        self._waiting[message.number] = message
        self.counters.kept_asked += 1
        due.questions.append(Question(message.number, room, topic, message.session))

    def _advance(self, room: int, found: _Room[Owner], due: Due[Owner]) -> None:
        """Release the messages of a room that are next, and take those out that are finished."""
        awaited = min(found.awaited, default=NEVER)
        for message in islice(found.queue, found.released, None):
            if message.token > awaited or (message.sessions is None and message.refusal is None):
                break
            found.released += 1
            message.left = 0
            if message.refusal is None and message.sessions:
                self._store(room, message, due)
        while found.released and (found.queue[0].refusal is not None or not (found.queue[0].left or found.awaited)):
            message = found.queue.popleft()
            found.released -= 1
            found.size -= len(message.record)
            self._count -= 1
            self._bytes -= len(message.record)
            self._waiting.pop(message.number, None)
            if message.refusal is not None:
                self.counters.kept_refused += 1
                due.refused.setdefault(message.refusal, []).append((message.record, message.owner))
                if message.refusal.code in _TEMPORARY:
                    # Its publisher sends it again, and what came after it must not be accepted before.
                    for later in found.queue:
                        later.refusal = later.refusal or message.refusal
                    found.released = len(found.queue)
                continue
            self.counters.kept_stored += bool(message.sessions)
            if message.overtaken:
                due.refused.setdefault(OVERTAKEN, []).append((message.record, message.owner))
            else:
                due.send.append((with_kept(message.record), message.owner))
        if not found.queue and not found.awaited:
            del self._rooms[room]
            if room not in self._known:
                self._reroute(room)

    @staticmethod
    def _store(room: int, message: _Message[Owner], due: Due[Owner]) -> None:
        try:
            mail = mail_of(message.record)
        except (MalformedData, UnicodeDecodeError) as wrong:
            message.refusal = Refusal(errors.ChecksumWrong.code, str(wrong))
            return
        sessions = message.sessions or ()
        for begin in range(0, len(sessions), MAX_RECEIVERS):
            part = mail_ev.RoomMail(room, mail, sessions[begin : begin + MAX_RECEIVERS])
            due.mails.append(KeptMail(message.number, part, message.until))
            message.left += 1


def by_owner(
    sent: Iterable[tuple[bytes, Owner | None]], first: Callable[[Owner | None], int]
) -> Iterator[tuple[Owner | None, list[bytes]]]:
    """Records by owner, the owners in rising order of `first`: batches of a publisher one after the other."""
    found: dict[int, tuple[Owner | None, list[bytes]]] = {}
    for record, owner in sent:
        found.setdefault(id(owner), (owner, []))[1].append(record)
    yield from sorted(found.values(), key=lambda each: first(each[0]))


def _may_be_refused(record: bytes) -> bool:
    """True if a broker does not handle a message to a room with kept filters."""
    return to_be_kept(record) and not record[FLAGS_AT] & KEPT


def _token_of(message: _Message[Owner]) -> int:
    return message.token
