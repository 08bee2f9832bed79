"""One walk over a history: calls with their ends, messages with their numbers, what was shown to whom.

Places in the history are indexes of its events, which is also the order of time. Whatever is looked up later is in a dict or in a
sorted list, so that the rules stay linear or n log n.

Source: docs/identifiers.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.history.record import (
    ALL_DEVICES,
    APP,
    ENDS,
    FAIL,
    FAULT,
    GAP,
    INVOKE,
    OK,
    REPLICATED,
    UNKNOWN,
    WIRE,
    Acknowledge,
    Acknowledged,
    Drop,
    Event,
    Fault,
    Gap,
    Listed,
    LoggedIn,
    Login,
    Mail,
    Operation,
    Read,
    Result,
    Send,
    Sent,
)
from tests.history.violation import Limits, Rule, Violation

NEVER = 1 << 62
Inbox = tuple[int, int]
"""(UIN, lane)."""
Place = tuple[int, int, int]
"""(UIN, device, lane): what has a cursor."""
STORES = ("xiu", "pi")
OWNERS = ("relay", "zookeeper")
"""With a fault of these, a user may get another relay."""


@dataclass(slots=True)
class Doing:
    """A call with its end."""

    process: str
    operation: Operation
    begun: int
    ended: int = NEVER
    how: str = UNKNOWN
    result: Result | None = None


@dataclass(slots=True)
class Message:
    """All calls that sent one message."""

    sent: Send
    writer: str
    """Which process sent it first."""
    first: int
    """When its first call began."""
    last: int
    """When its last one began."""
    ok: int = NEVER
    """When a call first ended well."""
    possible: int = NEVER
    """When the first call began that did not certainly fail."""
    lossy: bool = False
    """Its level promised nothing, by what happened to the stores."""

    @property
    def owed(self) -> bool:
        """Its sender was promised it."""
        return self.ok != NEVER and not self.lossy


@dataclass(slots=True)
class Copy:
    """One message where it was seen, with the numbers that were known there or elsewhere."""

    index: int
    kind: str
    """APP, WIRE, or OK: in a list."""
    process: str
    place: Place
    id: int
    seq: int
    msg_id: int
    mail: Mail | None = None
    sound: bool = True
    """It may be where it is."""

    @property
    def inbox(self) -> Inbox:
        """Where it lies."""
        return self.place[0], self.place[2]


class Acks:
    """When each entry was first acknowledged."""

    __slots__ = ("_indexes", "_singly", "_up_tos")

    def __init__(self) -> None:
        self._singly: dict[int, int] = {}
        self._up_tos: list[int] = []
        self._indexes: list[int] = []

    def take(self, index: int, up_to: int, singly: Sequence[int]) -> None:
        """Another acknowledgement, later than all before."""
        for seq in singly:
            self._singly.setdefault(seq, index)
        if up_to > (self._up_tos[-1] if self._up_tos else 0):
            self._up_tos.append(up_to)
            self._indexes.append(index)

    def first(self, seq: int) -> int:
        """When; `NEVER` if it was not."""
        at = bisect_left(self._up_tos, seq)
        return min(self._singly.get(seq, NEVER), self._indexes[at] if at < len(self._indexes) else NEVER)


@dataclass(slots=True)
class Device:
    """One device of a user, from its first login until it is dropped."""

    known: int
    """When its first login ended well."""
    dropped: int = NEVER
    starts: dict[int, int] = field(default_factory=dict)
    """By lane: it is owed what comes after."""


class Survey:
    """What the rules look at."""

    def __init__(self, events: Sequence[Event], limits: Limits) -> None:
        self.events = events
        self.limits = limits
        self.violations: list[Violation] = []
        self.doings: list[Doing] = []
        self.messages: dict[int, Message] = {}
        self.copies: list[Copy] = []
        """In the order of the history."""
        self.gaps: list[tuple[int, Gap]] = []
        self.faults: list[int] = []
        """When something was broken."""
        self.devices: dict[int, dict[int, list[Device]]] = defaultdict(lambda: defaultdict(list))
        """By UIN and number: one after the other, where a number is used again."""
        self.begun: dict[Place, Acks] = defaultdict(Acks)
        """Acknowledgements that may have had their effect."""
        self.done: dict[Place, Acks] = defaultdict(Acks)
        """Those that certainly had."""
        self.named: dict[Place, set[int]] = defaultdict(set)
        """Messages that a device may have acknowledged by name."""
        self.deleted: dict[Inbox, Acks] = defaultdict(Acks)
        """Acknowledgements for all devices that may have had their effect."""
        self.msg_ids: dict[int, tuple[int, int]] = {}
        """Message → MsgID, where it was said."""
        self.ids: dict[int, tuple[int, int]] = {}
        """MsgID → message, where it was said."""
        self.seqs: dict[Inbox, dict[int, tuple[int, int]]] = defaultdict(dict)
        """Message → InboxSeq, where it was said. A message of which only the MsgID is known stands under the negative of that."""
        self.entries: dict[Inbox, dict[int, tuple[int, int]]] = defaultdict(dict)
        """InboxSeq → message, where it was said."""
        self._relays_hit: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Target → when it broke, and until when (in time) relays may have changed by that."""
        self._stores_hit: list[tuple[int, int]] = []
        self._broken: dict[str, int] = {}
        self._calls: dict[tuple[str, int], Doing] = {}
        self._walk()
        self._name()
        self._number()
        self._take_acknowledgements()
        self._weigh()

    def blame(self, rule: Rule, text: str, *indexes: int) -> None:
        """A violation, and the events that show it."""
        lines = tuple(sorted({index + 1 for index in indexes if 0 <= index < len(self.events)}))
        self.violations.append(Violation(rule, text, lines))

    def at_us(self, index: int) -> int:
        """When an event happened."""
        return self.events[index].at_us

    def ended_well(self, *kinds: type[Operation]) -> Iterator[Doing]:
        """The calls of some kinds that did."""
        return (doing for doing in self.doings if doing.how == OK and isinstance(doing.operation, kinds))

    def relay_changes(self, first: int, last: int) -> int:
        """How often a user may have got another relay between two events: at a fault, and when it has healed."""
        hits = (hit for one in self._relays_hit.values() for hit in one)
        return 2 * sum(begun <= last and until_us >= self.at_us(first) for begun, until_us in hits)

    def _walk(self) -> None:
        before = 0
        for index, event in enumerate(self.events):
            if event.at_us < before:
                self.blame(Rule.HISTORY, "time goes back", index - 1, index)
            before = event.at_us
            body = event.body
            if event.kind == INVOKE and isinstance(body, Operation):
                self._begin(index, event, body)
            elif event.kind in ENDS:
                self._end(index, event)
            elif event.kind in (APP, WIRE) and isinstance(body, Mail):
                place = (body.uin, body.device, body.lane)
                self.copies.append(Copy(index, event.kind, event.process, place, body.id, body.seq, body.msg_id, body))
            elif event.kind == GAP and isinstance(body, Gap):
                self.gaps.append((index, body))
            elif event.kind == FAULT and isinstance(body, Fault):
                self._fault(index, body)
            else:
                self.blame(Rule.HISTORY, f"{event.kind} with {type(body).__name__}", index)

    def _begin(self, index: int, event: Event, operation: Operation) -> None:
        if (event.process, event.call) in self._calls:
            self.blame(Rule.HISTORY, "a call begins twice", self._calls[event.process, event.call].begun, index)
            return
        doing = self._calls[event.process, event.call] = Doing(event.process, operation, index)
        self.doings.append(doing)
        if isinstance(operation, Send):
            message = self.messages.setdefault(operation.id, Message(operation, event.process, index, index))
            message.last = index
            if message.sent != operation:
                self.blame(Rule.HISTORY, f"message {operation.id:#x} is sent again as another", message.first, index)
        elif isinstance(operation, Drop):
            for device in self.devices[operation.uin][operation.device][-1:]:
                device.dropped = min(device.dropped, index)

    def _end(self, index: int, event: Event) -> None:
        doing = self._calls.get((event.process, event.call))
        if doing is None or doing.ended != NEVER:
            self.blame(Rule.HISTORY, "the end of no call", index, doing.begun if doing else index)
            return
        doing.ended, doing.how = index, event.kind
        operation, result = doing.operation, event.body
        if isinstance(operation, Send):
            message = self.messages[operation.id]
            message.ok = min(message.ok, index) if event.kind == OK else message.ok
        if event.kind != OK:
            return
        if isinstance(result, Sent | Acknowledged | Listed | LoggedIn):
            doing.result = result
        if isinstance(operation, Login):
            known = self.devices[operation.uin][operation.device]
            if not known or known[-1].dropped != NEVER:
                known.append(Device(index))
            if isinstance(result, LoggedIn):
                known[-1].starts.update(result.starts)
        elif isinstance(operation, Read) and isinstance(result, Listed):
            place = (operation.uin, operation.device, operation.lane)
            self.copies += [Copy(index, OK, event.process, place, id_, seq, msg_id) for seq, msg_id, id_ in result.entries]

    def _fault(self, index: int, fault: Fault) -> None:
        if not fault.heals:
            self.faults.append(index)
        if fault.target.startswith(OWNERS):
            hit = self._relays_hit[fault.target]
            if not fault.heals:
                hit.append((index, NEVER))
            elif hit:
                hit[-1] = (hit[-1][0], self.at_us(index) + self.limits.handover_us)
        if fault.target.startswith(STORES):
            self._stores_hit.append((self.at_us(index), index))
            if fault.heals:
                self._broken.pop(fault.target, None)
            else:
                self._broken[fault.target] = index

    def _name(self) -> None:
        """Every message's MsgID, from whatever told both."""
        for doing in self.ended_well(Send):
            if isinstance(doing.operation, Send) and isinstance(doing.result, Sent):
                self._pair(doing.operation.id, doing.result.msg_id, doing.ended)
        for copy in self.copies:
            self._pair(copy.id, copy.msg_id, copy.index)
        for copy in self.copies:
            copy.msg_id = copy.msg_id or self.msg_ids.get(copy.id, (0, 0))[0]
            copy.id = copy.id or self.ids.get(copy.msg_id, (-copy.msg_id, 0))[0]

    def _pair(self, id_: int, msg_id: int, index: int) -> None:
        if not id_ or not msg_id:
            return
        known, where = self.msg_ids.setdefault(id_, (msg_id, index))
        if known != msg_id:
            self.blame(Rule.ONE_TO_ONE, f"message {id_:#x} has the MsgIDs {known:#x} and {msg_id:#x}", where, index)
        other, where = self.ids.setdefault(msg_id, (id_, index))
        if other != id_:
            self.blame(Rule.ONE_TO_ONE, f"MsgID {msg_id:#x} names the messages {other:#x} and {id_:#x}", where, index)

    def _number(self) -> None:
        """Every entry's InboxSeq, from whatever told it."""
        for doing in self.ended_well(Send):
            if isinstance(doing.operation, Send) and isinstance(doing.result, Sent):
                for uin, seq in doing.result.seqs:
                    self._enter((uin, doing.operation.lane), seq, doing.operation.id, doing.ended)
        for copy in self.copies:
            if copy.seq and copy.id:
                # A second MsgID of a message is a message of its own here: it was said already that there are two.
                second = copy.msg_id and self.msg_ids.get(copy.id, (copy.msg_id, 0))[0] != copy.msg_id
                self._enter(copy.inbox, copy.seq, -copy.msg_id if second else copy.id, copy.index)
        for copy in self.copies:
            copy.seq = copy.seq or self.seqs[copy.inbox].get(copy.id, (0, 0))[0]

    def _enter(self, inbox: Inbox, seq: int, id_: int, index: int) -> None:
        known, where = self.seqs[inbox].setdefault(id_, (seq, index))
        if known != seq:
            self.blame(Rule.ENTRY, f"message {id_:#x} has InboxSeqs {known} and {seq} in the inbox {inbox}", where, index)
        other, where = self.entries[inbox].setdefault(seq, (id_, index))
        if other != id_:
            self.blame(Rule.ENTRY, f"InboxSeq {seq} of the inbox {inbox} is of {other:#x} and {id_:#x}", where, index)

    def _take_acknowledgements(self) -> None:
        asked = [doing for doing in self.doings if isinstance(doing.operation, Acknowledge) and doing.how != FAIL]
        for doing in asked:
            self._take(self.begun, doing, doing.begun)
            call = doing.operation
            assert isinstance(call, Acknowledge)
            self.named[call.uin, call.device, call.lane].update(call.ids)
            if call.device == ALL_DEVICES:
                self.deleted[call.uin, call.lane].take(doing.begun, call.up_to, self._singly(call))
        for doing in sorted((doing for doing in asked if doing.how == OK), key=lambda doing: doing.ended):
            self._take(self.done, doing, doing.ended)

    def _take(self, acks: dict[Place, Acks], doing: Doing, index: int) -> None:
        asked = doing.operation
        assert isinstance(asked, Acknowledge)
        devices = list(self.devices[asked.uin]) if asked.device == ALL_DEVICES else [asked.device]
        for device in devices:
            acks[asked.uin, device, asked.lane].take(index, asked.up_to, self._singly(asked))

    def _singly(self, asked: Acknowledge) -> tuple[int, ...]:
        numbers = self.seqs[asked.uin, asked.lane]
        return (*asked.seqs, *(numbers[id_][0] for id_ in asked.ids if id_ in numbers))

    def _weigh(self) -> None:
        """When each may have been stored, and what was promised: below `replicated` nothing where a leader may have changed."""
        for doing in self.doings:
            if isinstance(doing.operation, Send) and doing.how != FAIL:
                message = self.messages[doing.operation.id]
                message.possible = min(message.possible, doing.begun)
        last_us = max((at_us for at_us, _ in self._stores_hit), default=-NEVER)
        for message in self.messages.values():
            since_us = self.at_us(message.first) - self.limits.settle_us
            message.lossy = message.sent.level != REPLICATED and (last_us >= since_us or bool(self._broken))
