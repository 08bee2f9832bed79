"""What MQTT clients saw, and whether they may have seen it. Pure.

All clients are in one process, so the notes have one order. Each message has a number of its own, which is its payload. A client
subscribes to the same filter with the same QoS each time, and those of shared subscriptions have no others.

    delivered   what was accepted with QoS 1 or 2 reaches each subscriber whose SUBACK had come before it was sent, and who stayed;
                of a shared subscription one of those who stayed
    once        nothing comes twice within a connection, and QoS 2 once within a session
    order       of one publisher, topic and QoS; of what a publisher sent again the last copies are in order
    retained    a new subscription gets no value that was replaced before, and gets one if there is one
    wills       come once after a connection that was not ended by DISCONNECT, and never after one that was
    sessions    are there again; with them nothing of QoS 1 or 2 is missing in the end, whatever was killed

Rooms are real time: while a broker or a gateway is killed or stopped, and for `after_s` from then on, a message to a client
without a session may be lost. These are counted as `lost near a fault`.

Source: OASIS MQTT 3.1.1 and 5.0 section 4; docs/promises.md, docs/mqtt.md, docs/subscriptions.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple

STARTING, CONNECTED, ENDED = "starting", "connected", "ended"
SUBSCRIBING, SUBSCRIBED, UNSUBSCRIBING = "subscribing", "subscribed", "unsubscribing"
SENDING, AGAIN, ACCEPTED, GOT, WILL = "sending", "again", "accepted", "got", "will"
CLEAN, CUT, LOST = "clean", "cut", "lost"
"""How a connection ended: by DISCONNECT, by the client without one, by the server or the network."""
EXCUSES = ("broker", "gateway")
MAX_TOLD = 20
"""Violations that are named of each kind."""
CLEARED = 0
"""Number that is got with a message without a payload; the sender notes a negative one."""


class Note(NamedTuple):
    """What a client did or saw.

    starting: CONNECT is sent; `flag`: a clean start. connected: CONNACK has come; `flag`: session present. ended: `how`.
    subscribing, subscribed, unsubscribing: SUBSCRIBE is sent, SUBACK has come, UNSUBSCRIBE is sent; `topic` is a filter, `qos`
    what was granted. sending, accepted: PUBLISH is sent, its PUBACK or PUBREC has come; `flag`: retained. got: `flag`: RETAIN,
    `qos`: received. will: the connection has one. again: the message is sent again with a new connection of its session.
    """

    at: float
    kind: str
    who: str
    connection: int
    topic: str = ""
    number: int = 0
    qos: int = 0
    flag: bool = False
    how: str = ""


class Fault(NamedTuple):
    """A process of a kind was killed, or stopped and went on."""

    kind: str
    begin: float
    end: float


@dataclass
class Verdict:
    """Result of a judgement."""

    violations: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def violation(self, what: str, details: object) -> None:
        """Add a violation."""
        self.counts[what] += 1
        if self.counts[what] <= MAX_TOLD:
            self.violations.append(f"{what}: {details}")


@dataclass(slots=True)
class Message:
    """A published message, or a will."""

    number: int
    topic: str
    qos: int
    publisher: str
    sent: float
    place: int
    """Of its sending among all notes."""
    retain: bool = False
    accepted: float = inf
    again: bool = False


@dataclass(slots=True)
class Interest:
    """A subscription. `since`: SUBACK; `until`: UNSUBSCRIBE was sent, or the end."""

    filter: str
    qos: int
    since: float
    until: float = inf


@dataclass(slots=True)
class Carrier:
    """A connection without a session, or a session over all its connections."""

    who: str
    began: float
    persistent: bool
    ended: float = inf
    interests: list[Interest] = field(default_factory=list)
    filters: set[str] = field(default_factory=set)
    """All that it ever asked for."""
    got: list[Note] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Message → how often it came live."""
    here: bool = True
    """The session is connected."""


@lru_cache(1 << 18)
def matches(filter_: str, topic: str) -> bool:
    """Whether a filter, also of a shared subscription, covers a topic. Source: MQTT 3.1.1 section 4.7."""
    if filter_.startswith("$share/"):
        filter_ = filter_.split("/", 2)[2]
    wanted, has = filter_.split("/"), topic.split("/")
    if topic.startswith("$") and wanted[0] in ("+", "#"):
        return False
    for place, level in enumerate(wanted):
        if level == "#":
            return True
        if place >= len(has) or level not in ("+", has[place]):
            return False
    return len(wanted) == len(has)


def judge(
    notes: Sequence[Note], persistent: Iterable[str] = (), faults: Sequence[Fault] = (), late_s: float = 30.0, after_s: float = 10.0
) -> Verdict:
    """Judge.

    Args:
        notes: of all clients, in their order; at the end each session has been connected until nothing more came.
        persistent: clients with sessions that outlive their connections.
        faults: that were made.
        late_s: the longest time from a message's acceptance, or a connection's end, to its arrival or will.
        after_s: the longest time from the end of a fault to the last loss that it excuses.
    """
    return _Judge(notes, frozenset(persistent), faults, late_s, after_s).judge()


class _Judge:
    def __init__(
        self, notes: Sequence[Note], persistent: frozenset[str], faults: Sequence[Fault], late_s: float, after_s: float
    ) -> None:
        self._notes, self._persistent, self._late_s, self._found = notes, persistent, late_s, Verdict()
        self._excuses = [(each.begin - 1.0, each.end + after_s) for each in faults if each.kind in EXCUSES]
        self._messages: dict[int, Message] = {}
        self._carriers: list[Carrier] = []
        self._of: dict[int, Carrier] = {}
        """By connection."""
        self._sessions: dict[str, Carrier] = {}
        self._wills: dict[int, Note] = {}
        """By connection."""
        self._ends: dict[int, Note] = {}
        self._asked: dict[int, list[Note]] = defaultdict(list)
        """By connection: SUBSCRIBE and SUBACK."""
        self._end = notes[-1].at if notes else 0.0

    def judge(self) -> Verdict:
        self._read()
        ordered = sorted(self._messages.values(), key=lambda message: message.sent)
        sent = [message.sent for message in ordered]
        for carrier in self._carriers:
            mine = ordered[bisect_left(sent, carrier.began) : bisect_left(sent, carrier.ended)]
            self._judge_delivered(carrier, mine)
            self._judge_got(carrier)
        self._judge_shared(ordered)
        self._judge_retained(ordered)
        self._judge_wills()
        return self._found

    def _excused(self, begin: float, end: float) -> bool:
        return any(since <= end and begin <= until for since, until in self._excuses)

    def _unanswered(self, who: str, at: float) -> bool:
        """True if a client had sent a message that was not accepted at a time: a gateway reads a DISCONNECT behind it later."""
        sent = (each for each in self._messages.values() if each.publisher == who and each.qos)
        return any(each.sent <= at < each.accepted for each in sent)

    # --- what happened

    def _read(self) -> None:
        clean: dict[int, bool] = {}
        for place, note in enumerate(self._notes):
            carrier = self._of.get(note.connection)
            match note.kind:
                case "starting":
                    clean[note.connection] = note.flag
                    if note.flag and (before := self._sessions.pop(note.who, None)) is not None:
                        before.ended = note.at
                case "connected":
                    self._connected(note)
                case "will":
                    self._wills[note.connection] = note
                    will = Message(note.number, note.topic, note.qos, f"connection {note.connection}", note.at, place)
                    self._messages[note.number] = will
                case "sending":
                    message = Message(note.number, note.topic, note.qos, note.who, note.at, place, note.flag)
                    self._messages[note.number] = message
                case "again":
                    self._messages[note.number].again = True
                case "accepted":
                    self._found.counts["accepted"] += 1
                    self._messages[note.number].accepted = note.at
                case _ if carrier is None:
                    self._found.violation("a note of nobody", note)
                case "ended":
                    self._ends[note.connection] = note
                    carrier.here = False
                    if not carrier.persistent:
                        carrier.ended = note.at
                case "got":
                    carrier.got.append(note)
                case _:
                    self._asked[note.connection].append(note)
                    self._subscribed(carrier, note)

    def _connected(self, note: Note) -> None:
        self._found.counts["connections"] += 1
        keeps, before = note.who in self._persistent, self._sessions.get(note.who)
        if not keeps or not note.flag or before is None:
            if before is not None:
                before.ended = note.at
                self._found.violation("a session is gone", note)
            elif note.flag:
                self._found.violation("a session that must not be there", note)
            before = Carrier(note.who, note.at, keeps)
            self._carriers.append(before)
            if keeps:
                self._sessions[note.who] = before
        before.here = True
        self._of[note.connection] = before

    def _subscribed(self, carrier: Carrier, note: Note) -> None:
        there = [each for each in carrier.interests if each.filter == note.topic and each.until == inf]
        if note.kind == SUBSCRIBING:
            carrier.filters.add(note.topic)
        elif note.kind == SUBSCRIBED and not there:
            carrier.interests.append(Interest(note.topic, note.qos, note.at))
        elif note.kind == UNSUBSCRIBING:
            for each in there:
                each.until = note.at

    # --- one subscriber

    def _judge_delivered(self, carrier: Carrier, messages: Sequence[Message]) -> None:
        for note in carrier.got:
            if not note.flag:
                carrier.numbers[note.number] += 1
        plain = [each for each in carrier.interests if each.qos and not each.filter.startswith("$share/")]
        last = self._end - (0.0 if carrier.persistent and carrier.ended == inf else self._late_s)
        for message in messages:
            if not message.qos or message.accepted > last or message.number in carrier.numbers or message.number < 0:
                continue
            need = inf if carrier.persistent else message.accepted + self._late_s
            if carrier.ended < need or not any(
                each.since <= message.sent and each.until >= need and matches(each.filter, message.topic) for each in plain
            ):
                continue
            if carrier.persistent:
                self._found.violation("a session lacks a message", (carrier.who, message))
            elif self._excused(message.sent, message.accepted):
                self._found.counts["lost near a fault"] += 1
            else:
                self._found.violation("lost", (carrier.who, message))

    def _judge_got(self, carrier: Carrier) -> None:
        last: dict[tuple[str, str, int], Message] = {}
        seen: set[tuple[int, int]] = set()
        ever: set[int] = set()
        shared = any(each.startswith("$share/") for each in carrier.filters)
        copies = {note.number: place for place, note in enumerate(carrier.got) if not note.flag}
        """Message → place of its last copy."""
        for place, note in enumerate(carrier.got):
            self._found.counts["got"] += 1
            if note.number == CLEARED:
                continue
            message = self._messages.get(note.number)
            if message is None or message.topic != note.topic:
                self._found.violation("something that nobody sent", note)
                continue
            if not any(matches(each, note.topic) for each in carrier.filters):
                self._found.violation("nobody asked for it", note)
            if note.qos > message.qos:
                self._found.violation("with a higher QoS than it was sent", note)
            if note.flag or shared:
                continue
            if (note.connection, note.number) in seen and not (message.again and message.qos == 1):
                self._found.violation("twice within a connection", note)
            elif note.number in ever:
                self._found.counts["QoS 1 again in a later connection"] += 1
                if note.qos == 2:
                    self._found.violation("QoS 2 twice within a session", note)
            seen.add((note.connection, note.number))
            if note.number in ever:
                continue
            ever.add(note.number)
            key = message.publisher, message.topic, message.qos
            if key in last and last[key].place > message.place:
                if message.again and message.qos == 1 and copies[last[key].number] > place:
                    # The publisher sent both again, and the first copy came before this subscription, or was lost.
                    self._found.counts["QoS 1 again, with those after it"] += 1
                    continue
                self._found.violation("out of order", (note, last[key]))
            last[key] = message

    def _judge_shared(self, messages: Sequence[Message]) -> None:
        groups: dict[str, list[tuple[Carrier, Interest]]] = defaultdict(list)
        of_qos_0: dict[str, list[tuple[Carrier, Interest]]] = defaultdict(list)
        for carrier in self._carriers:
            for interest in carrier.interests:
                if interest.filter.startswith("$share/"):
                    (groups if interest.qos else of_qos_0)[interest.filter].append((carrier, interest))
        for name, members in groups.items():
            for message in messages:
                need = message.accepted + self._late_s
                if not message.qos or message.number < 0 or need > self._end or not matches(name, message.topic):
                    continue
                if any(message.number in carrier.numbers for carrier, _ in members):
                    self._found.counts["shared and given"] += 1
                elif any(
                    each.since <= message.sent and min(each.until, carrier.ended) >= need for carrier, each in members
                ):  # fmt: skip
                    if self._excused(message.sent, message.accepted):
                        self._found.counts["shared and lost near a fault"] += 1
                    elif any(
                        each.since <= need and message.sent <= min(each.until, carrier.ended) < need
                        for carrier, each in of_qos_0[name]
                    ):
                        # A member of QoS 0 may have had it on its way when its connection ended.
                        self._found.counts["shared and lost with a member of QoS 0"] += 1
                    else:
                        self._found.violation("no member of a group got it", (name, message))

    # --- retained messages

    def _judge_retained(self, messages: Sequence[Message]) -> None:
        writes: dict[str, list[Message]] = defaultdict(list)
        for message in messages:
            if message.retain:
                writes[message.topic].append(message)
        for connection, asked in self._asked.items():
            carrier = self._of[connection]
            got = [note for note in carrier.got if note.connection == connection]
            asking = [note for note in asked if note.kind == SUBSCRIBING and not note.topic.startswith("$share/")]
            for note in got:
                if note.flag and note.number in self._messages:
                    self._found.counts["retained"] += 1
                    times = [
                        each.at
                        for each in asking
                        if note.at - self._late_s <= each.at <= note.at and matches(each.topic, note.topic)
                    ]
                    if not times:
                        self._found.violation("retained without a subscription", note)
                    elif all(_replaced(self._messages[note.number], writes[note.topic], at) for at in times):
                        self._found.violation("an old value was retained", note)
            self._judge_retained_missing(connection, asked, got, writes)

    def _judge_retained_missing(
        self, connection: int, asked: Sequence[Note], got: Sequence[Note], writes: dict[str, list[Message]]
    ) -> None:
        ended = self._ends[connection].at if connection in self._ends else self._end
        asking = {}
        for note in asked:
            if note.kind == SUBSCRIBING:
                asking[note.topic] = note.at
                continue
            at, mine = asking.get(note.topic, note.at), writes.get(note.topic, [])
            if note.kind != SUBSCRIBED or ended < note.at + self._late_s or "+" in note.topic or "#" in note.topic:
                continue
            there = [each for each in mine if each.accepted <= at]
            possible = [each for each in mine if each.sent <= ended and not _replaced(each, mine, at)]
            if not there or any(each.number < 0 for each in possible):
                continue
            if not any(each.topic == note.topic and at <= each.at for each in got):
                self._found.violation("a retained message is missing", note)

    # --- wills

    def _judge_wills(self) -> None:
        came: dict[int, int] = defaultdict(int)
        by_will: dict[int, list[Carrier]] = defaultdict(list)
        for carrier in self._carriers:
            for number, times in carrier.numbers.items():
                came[number] += times
            for interest in carrier.interests:
                for connection, will in self._wills.items():
                    if interest.qos and interest.filter[:1] != "$" and matches(interest.filter, will.topic):
                        by_will[connection].append(carrier)
        for connection, will in self._wills.items():
            end = self._ends.get(connection)
            if end is None or end.how == CLEAN:
                if came[will.number] and end and self._unanswered(will.who, end.at):
                    self._found.counts["a DISCONNECT behind messages that were not passed on"] += 1
                elif came[will.number] and not (end and self._excused(end.at - self._late_s, end.at + 1.0)):
                    self._found.violation("a will of a connection that was ended in order", will)
                self._found.counts["wills that must not come"] += 1
                continue
            self._found.counts["wills that must come"] += 1
            due = end.at + self._late_s
            for carrier in by_will[connection]:
                stayed = any(
                    each.since <= will.at and min(each.until, carrier.ended) >= due and matches(each.filter, will.topic)
                    for each in carrier.interests
                )
                if due <= self._end and stayed and will.number not in carrier.numbers:
                    if self._excused(end.at, due) and not carrier.persistent:
                        self._found.counts["wills lost near a fault"] += 1
                    else:
                        self._found.violation("a will did not come", (carrier.who, will, end))


def _replaced(value: Message, writes: Sequence[Message], at: float) -> bool:
    """Whether another one was sent after this one was accepted, and accepted before `at`."""
    return any(value.accepted < each.sent and each.accepted <= at for each in writes)
