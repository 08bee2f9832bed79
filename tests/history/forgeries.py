"""Histories with one thing wrong: for every rule at least one way to break it, in a correct history from `model.py`.

A forgery replaces events and never changes them, so that a history can be forged again and again.

Source: docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import TypeVar

from tests.history.model import NOBODY, WINDOW
from tests.history.record import (
    APP,
    FAULT,
    GAP,
    INVOKE,
    OK,
    REPLICATED,
    UNKNOWN,
    WIRE,
    Acknowledge,
    Acknowledged,
    Body,
    Event,
    Gap,
    Listed,
    LoggedIn,
    Login,
    Mail,
    Operation,
    Read,
    Reason,
    Result,
    Send,
    Sent,
)
from tests.history.survey import NEVER, Copy, Message, Place, Survey
from tests.history.violation import Limits, Rule

LIMITS = Limits(sends=10, deliveries=10, acknowledgements=10, faults=1, window=WINDOW, handover_us=0)
GHOST = "ghost"
"""A run of an application that a forgery adds."""
T = TypeVar("T")


class Forged:
    """A correct history, and what a forgery needs to know of it to break one thing only."""

    def __init__(self, survey: Survey, random: Random) -> None:
        self.survey = survey
        self.events = list(survey.events)
        self.random = random
        self.final = [item for item in self._lists() if item[1].final]
        self.final_indexes = {index for index, _, _ in self.final}

    def _lists(self) -> Iterator[tuple[int, Read, Listed]]:
        for doing in self.survey.ended_well(Read):
            if isinstance(doing.operation, Read) and isinstance(doing.result, Listed):
                yield doing.ended, doing.operation, doing.result

    def choose(self, found: Iterable[T]) -> T:
        """One of several; a history without any is too short for this forgery."""
        return self.random.choice(list(found))

    def put(self, index: int, body: Body) -> None:
        """Another body in an event's place."""
        self.events[index] = replace(self.events[index], body=body)

    def insert(self, index: int, kind: str, body: Body, process: str = GHOST) -> None:
        """One more event; those from the index on move by one."""
        self.events.insert(index, Event(self.events[min(index, len(self.events) - 1)].at_us, process, kind, 0, body))

    def append(self, kind: str, body: Body) -> None:
        """One more event at the end."""
        self.insert(len(self.events), kind, body)

    def call(self, operation: Operation, result: Result | None) -> None:
        """One more call at the end, which ends well."""
        at_us, number = self.events[-1].at_us, len(self.events)
        self.events += [Event(at_us, GHOST, INVOKE, number, operation), Event(at_us, GHOST, OK, number, result)]

    def mails(self, kind: str) -> Iterator[tuple[int, Mail]]:
        """Copies with their places in the history."""
        return ((copy.index, copy.mail) for copy in self.survey.copies if copy.kind == kind and copy.mail)

    def listed_only(self) -> list[tuple[Message, Place, int, int]]:
        """Messages that a device knows by its last list alone, although they were sent with a good end when it was there: with
        their InboxSeq, which the sender was told, and the list."""
        shown = {(copy.place, copy.id) for copy in self.survey.copies if copy.index not in self.final_indexes}
        told = {
            (uin, doing.operation.lane, seq)
            for doing in self.survey.ended_well(Send)
            if isinstance(doing.operation, Send) and isinstance(doing.result, Sent)
            for uin, seq in doing.result.seqs
        }
        found = []
        for copy in self.survey.copies:
            message = self.survey.messages.get(copy.id)
            if copy.index in self.final_indexes and message and message.owed and not message.sent.expires_us:
                known = self.survey.devices[copy.place[0]][copy.place[1]]
                there = copy.place[0] == NOBODY or known[-1].known < message.first
                if there and (*copy.inbox, copy.seq) in told and (copy.place, copy.id) not in shown:
                    found.append((message, copy.place, copy.seq, copy.index))
        return found

    def unacknowledged(self) -> list[Copy]:
        """Copies that applications got with their numbers, and that the device still has to acknowledge in the end."""
        return [copy for copy in self.survey.copies if copy.kind == APP and self._is_open(copy)]

    def _is_open(self, copy: Copy) -> bool:
        known = self.survey.devices[copy.place[0]][copy.place[1]]
        begun = self.survey.begun[copy.place].first(copy.seq)
        return bool(copy.mail and copy.mail.seq and begun == NEVER and known[-1].dropped == NEVER)

    def unlist(self, index: int, seq: int) -> None:
        """Take an entry out of a list."""
        listed = self.events[index].body
        assert isinstance(listed, Listed)
        self.put(index, replace(listed, entries=tuple(entry for entry in listed.entries if entry[0] != seq)))


def lost(forged: Forged) -> None:
    """A message that a device never saw is not in its last list."""
    _, _, seq, index = forged.choose(item for item in forged.listed_only() if item[1][0] != NOBODY)
    forged.unlist(index, seq)


def lost_without_a_device(forged: Forged) -> None:
    """A message to somebody without a device is not in the inbox."""
    _, _, seq, index = forged.choose(item for item in forged.listed_only() if item[1][0] == NOBODY)
    forged.unlist(index, seq)


def dropped_by_the_gateway(forged: Forged) -> None:
    """A message was acknowledged for a device that never got it: the session counted as delivered what it had only taken on."""
    _, place, seq, index = forged.choose(item for item in forged.listed_only() if item[1][0] != NOBODY)
    forged.unlist(index, seq)
    forged.call(Acknowledge(*place, 0, (seq,)), Acknowledged())


def forgotten(forged: Forged) -> None:
    """A message that a device got and did not acknowledge is not listed any longer."""
    waiting = {(copy.place, copy.id): copy.seq for copy in forged.unacknowledged()}
    owed = [key for key in waiting if forged.survey.messages[key[1]].owed and not forged.survey.messages[key[1]].sent.expires_us]
    place, id_ = forged.choose(
        key for key in owed if forged.survey.devices[key[0][0]][key[0][1]][-1].known < _first(forged, key[1])
    )
    for index, call, _ in forged.final:
        if (call.uin, call.device, call.lane) == place:
            forged.unlist(index, waiting[place, id_])


def _first(forged: Forged, id_: int) -> int:
    return forged.survey.messages[id_].first


def untold_gap(forged: Forged) -> None:
    """A device is not told of an expired message."""
    numbered = set()
    for message in forged.survey.messages.values():
        if message.owed and message.sent.expires_us:
            for uin in message.sent.receivers:
                seq = forged.survey.seqs[uin, message.sent.lane].get(message.sent.id, (0, 0))[0]
                shown = {copy.place for copy in forged.survey.copies if copy.id == message.sent.id}
                for number, known in forged.survey.devices[uin].items():
                    place = (uin, number, message.sent.lane)
                    if seq and place not in shown and known[-1].known < message.first and known[-1].dropped == NEVER:
                        numbered.add((*place, seq))
    told = {index: gap for index, gap in forged.survey.gaps if (gap.uin, gap.device, gap.lane, gap.first) in numbered}
    chosen = forged.choose(told.values())
    forged.events = [event for event in forged.events if event.body != chosen]


def unfounded_gap(forged: Forged) -> None:
    """A device is told that a message is gone that has not expired."""
    _, place, seq, index = forged.choose(item for item in forged.listed_only() if item[1][0] != NOBODY)
    forged.unlist(index, seq)
    forged.append(GAP, Gap(*place, seq, seq))


def refused_and_delivered(forged: Forged) -> None:
    """A message arrives that certainly failed."""
    message = forged.choose(message for message in forged.survey.messages.values() if message.possible == NEVER)
    forged.append(APP, Mail(message.sent.receivers[0], 1, message.sent.lane, message.sent.id))


def refused_and_listed(forged: Forged) -> None:
    """A message is listed that certainly failed."""
    message = forged.choose(message for message in forged.survey.messages.values() if message.possible == NEVER)
    uin, lane = message.sent.receivers[0], message.sent.lane
    seq = max(forged.survey.entries[uin, lane], default=0) + 1
    forged.call(Read(uin, 1, lane, seq - 1), Listed(((seq, 1 << 50, message.sent.id),), seq))


def to_another(forged: Forged) -> None:
    """A message arrives at somebody else's device."""
    _, mail = forged.choose(forged.mails(APP))
    receivers = forged.survey.messages[mail.id].sent.receivers
    other = forged.choose(uin for uin in forged.survey.devices if uin not in receivers)
    forged.append(APP, replace(mail, uin=other, seq=0))


def from_nobody(forged: Forged) -> None:
    """A message arrives that nobody sent."""
    _, mail = forged.choose(forged.mails(APP))
    forged.append(APP, replace(mail, id=0xDEAD, seq=0, msg_id=0))


def before_it_was_sent(forged: Forged) -> None:
    """A message arrives before anybody sent it."""
    _, mail = forged.choose(forged.mails(APP))
    forged.insert(forged.survey.messages[mail.id].first, APP, replace(mail, seq=0))


def damaged(forged: Forged) -> None:
    """A message arrives with another body."""
    index, mail = forged.choose(forged.mails(APP))
    forged.put(index, replace(mail, crc=mail.crc + 1))


def in_another_lane(forged: Forged) -> None:
    """A message arrives in another lane."""
    _, mail = forged.choose(forged.mails(APP))
    forged.append(APP, replace(mail, lane=1 - mail.lane, seq=0))


def twice_to_a_run(forged: Forged) -> None:
    """An application gets a message again."""
    index, mail = forged.choose(forged.mails(APP))
    forged.insert(index + forged.choose((1, 1, 20)), APP, mail, forged.events[index].process)


def acknowledged_and_delivered(forged: Forged) -> None:
    """What a device acknowledged comes to its application again."""
    mail = forged.choose(_acknowledged(forged))
    forged.call(Login(mail.uin, mail.device), LoggedIn())
    forged.append(APP, mail)


def acknowledged_and_sent(forged: Forged) -> None:
    """What a device acknowledged comes on another connection."""
    mail = forged.choose(_acknowledged(forged))
    forged.call(Login(mail.uin, mail.device), LoggedIn())
    forged.append(WIRE, replace(mail, dup=True))


def _acknowledged(forged: Forged) -> Iterator[Mail]:
    for _, mail in forged.mails(APP):
        kept = forged.survey.devices[mail.uin][mail.device][-1].dropped == NEVER
        if kept and mail.seq and forged.survey.done[mail.uin, mail.device, mail.lane].first(mail.seq) != NEVER:
            yield mail


def out_of_order_to_a_run(forged: Forged) -> None:
    """Two messages change places on their way to an application."""
    _swap(forged, APP)


def out_of_order_on_the_wire(forged: Forged) -> None:
    """Two first copies change places on a connection."""
    _swap(forged, WIRE)


def _swap(forged: Forged, kind: str) -> None:
    """Exchange two neighbours of one way."""
    last: dict[tuple[str, Place], tuple[int, Mail]] = {}
    found = []
    for index, event in enumerate(forged.events):
        body = event.body
        if isinstance(body, Login):
            last = {key: item for key, item in last.items() if key[0] != event.process}
        elif event.kind == kind and isinstance(body, Mail) and body.seq and not body.dup:
            key = (event.process, (body.uin, body.device, body.lane))
            if key in last and forged.survey.messages[body.id].ok < last[key][0]:
                found.append((*last[key], index, body))
            last[key] = (index, body)
    index, mail, other, behind = forged.choose(found)
    forged.put(index, behind)
    forged.put(other, mail)


def _number_anew(forged: Forged, uin: int, lane: int, numbers: dict[int, int]) -> None:
    """Give entries other InboxSeqs wherever these are said, in the inbox of somebody who has no device."""
    for doing in forged.survey.ended_well(Send, Read):
        call, result = doing.operation, doing.result
        if isinstance(call, Send) and isinstance(result, Sent) and call.lane == lane:
            seqs = tuple((who, numbers.get(seq, seq) if who == uin else seq) for who, seq in result.seqs)
            forged.put(doing.ended, replace(result, seqs=seqs))
        elif isinstance(call, Read) and isinstance(result, Listed) and (call.uin, call.lane) == (uin, lane):
            entries = tuple(sorted((numbers.get(seq, seq), msg_id, id_) for seq, msg_id, id_ in result.entries))
            forged.put(doing.ended, replace(result, entries=entries, last=max(result.last, *numbers.values())))


def out_of_a_writers_order(forged: Forged) -> None:
    """Two messages of one writer change places in an inbox."""
    _swap_numbers(forged, lambda one, other: one.writer == other.writer and one.last < other.first)


def out_of_real_order(forged: Forged) -> None:
    """A message stands before one that was confirmed when it was sent, of another writer."""
    _swap_numbers(forged, lambda one, other: one.writer != other.writer and one.ok < other.first)


def _swap_numbers(forged: Forged, related: Callable[[Message, Message], bool]) -> None:
    found = []
    for lane in (0, 1):
        numbers = forged.survey.seqs[NOBODY, lane]
        # What is weaker than `replicated` keeps no order.
        known = [forged.survey.messages[id_] for id_ in numbers if id_ in forged.survey.messages]
        there = [message for message in known if message.sent.level == REPLICATED]
        found += [(lane, one.sent.id, other.sent.id) for one in there for other in there if related(one, other)]
    lane, one_id, other_id = forged.choose(found)
    seqs = forged.survey.seqs[NOBODY, lane]
    one, other = seqs[one_id][0], seqs[other_id][0]
    _number_anew(forged, NOBODY, lane, {one: other, other: one})


def stored_twice(forged: Forged) -> None:
    """A retry made a second message of what was sent."""
    _, mail = forged.choose(item for item in forged.mails(APP) if item[1].msg_id)
    seq = max(forged.survey.entries[mail.uin, mail.lane]) + 1
    forged.append(APP, replace(mail, msg_id=mail.msg_id + (1 << 40), seq=seq))


def unknown_and_stored_twice(forged: Forged) -> None:
    """The same, of what its sender knows nothing about."""
    _, mail = forged.choose(item for item in forged.mails(APP) if item[1].msg_id)
    for doing in forged.survey.ended_well(Send):
        if isinstance(doing.operation, Send) and doing.operation.id == mail.id:
            forged.events[doing.ended] = replace(forged.events[doing.ended], kind=UNKNOWN, body=Reason("timeout"))
    seq = max(forged.survey.entries[mail.uin, mail.lane]) + 1
    forged.append(WIRE, replace(mail, msg_id=mail.msg_id + (1 << 40), seq=seq))


def one_id_for_two(forged: Forged) -> None:
    """A message comes under another one's MsgID."""
    copy = forged.choose(forged.unacknowledged())
    _, other = forged.choose(item for item in forged.mails(APP) if item[1].msg_id and item[1].id != copy.id)
    assert copy.mail
    forged.append(APP, replace(copy.mail, seq=0, msg_id=other.msg_id))


def entered_twice(forged: Forged) -> None:
    """A message stands twice in an inbox."""
    index, call, listed = [item for item in forged.final if item[1].uin == NOBODY][-1]
    there = [entry for _, other, page in forged.final if (other.uin, other.lane) == (NOBODY, call.lane) for entry in page.entries]
    _, msg_id, id_ = forged.choose(there)
    forged.put(index, replace(listed, entries=(*listed.entries, (listed.last + 1, msg_id, id_))))


def hole(forged: Forged) -> None:
    """A number is left out."""
    _, call, listed = [item for item in forged.final if item[1].uin == NOBODY and item[2].entries][-1]
    _number_anew(forged, NOBODY, call.lane, {listed.last: listed.last + forged.choose((1, 2))})


def cursor_back(forged: Forged) -> None:
    """A list is told an older cursor."""
    _, call, listed = forged.choose(item for item in forged.final if item[2].cursor > 0)
    asked = Read(call.uin, call.device, call.lane, listed.cursor)
    forged.call(asked, Listed(cursor=listed.cursor - 1))


def cursor_behind_what_was_acknowledged(forged: Forged) -> None:
    """An acknowledgement answers with a cursor from before another one."""
    _, call, listed = forged.choose(item for item in forged.final if item[2].cursor > 0)
    place = (call.uin, call.device, call.lane)
    forged.call(Acknowledge(*place, listed.cursor), None)
    forged.call(Acknowledge(*place, 1), Acknowledged(listed.cursor - 1))


def old_list(forged: Forged) -> None:
    """A list ends before a message that was there before."""
    inbox = forged.choose(inbox for inbox, entries in forged.survey.entries.items() if entries)
    end = max(forged.survey.entries[inbox])
    forged.call(Read(inbox[0], 1, inbox[1], end), Listed(last=end - 1))


def hole_in_a_list(forged: Forged) -> None:
    """A list leaves out what its device has not acknowledged, and a later one has it again."""
    _, place, seq, index = forged.choose(item for item in forged.listed_only() if item[1][0] != NOBODY)
    listed = forged.events[index].body
    assert isinstance(listed, Listed)
    later = tuple(entry for entry in listed.entries if entry[0] > seq)
    forged.call(Read(*place, start=seq - 1), replace(listed, entries=later))


def unmarked_repeat(forged: Forged) -> None:
    """A repeated copy is not marked."""
    seen: dict[tuple[int, int, int], int] = {}
    found = []
    for index, mail in forged.mails(WIRE):
        first = seen.setdefault((mail.uin, mail.device, mail.id), index)
        if first != index and not forged.survey.relay_changes(first, index):
            found.append((index, mail))
    index, mail = forged.choose(found)
    forged.put(index, replace(mail, dup=False))


def marked_first(forged: Forged) -> None:
    """A first copy is marked, and nothing happened that could have cost one before it."""
    happened: dict[tuple[int, int], int] = {}
    fault = 0
    found = []
    for index, event in enumerate(forged.events):
        body = event.body
        if isinstance(body, Login):
            happened[body.uin, body.device] = index
        elif event.kind == FAULT:
            fault = index
        elif event.kind == WIRE and isinstance(body, Mail) and not body.dup:
            first = _first(forged, body.id)
            calm = first > max(fault, happened.get((body.uin, body.device), 0))
            found += [(index, body)] if calm and not forged.survey.relay_changes(first, index) else []
    index, mail = forged.choose(found)
    forged.put(index, replace(mail, dup=True))


def more_than_a_window(forged: Forged) -> None:
    """A connection repeats more than a window."""
    copy = forged.choose(forged.unacknowledged())
    assert copy.mail
    last = len(forged.events) - 1
    windows = 1 + forged.survey.relay_changes(last, last)
    forged.call(Login(copy.mail.uin, copy.mail.device), LoggedIn())
    for _ in range(LIMITS.window * windows + 1):
        forged.append(WIRE, replace(copy.mail, dup=True))


def end_of_nothing(forged: Forged) -> None:
    """A call ends twice."""
    forged.events.append(forged.choose(event for event in forged.events if event.kind == OK))
    forged.events[-1] = replace(forged.events[-1], at_us=forged.events[-2].at_us)


def time_back(forged: Forged) -> None:
    """Time goes back."""
    index = forged.random.randrange(20, len(forged.events))
    forged.events[index] = replace(forged.events[index], at_us=forged.events[index - 1].at_us - 1)


def another_message(forged: Forged) -> None:
    """A retry has the number of another message."""
    message = forged.choose(forged.survey.messages.values())
    forged.append(INVOKE, replace(message.sent, crc=1 << 31))


FORGERIES: dict[Rule, tuple[Callable[[Forged], None], ...]] = {
    Rule.HISTORY: (end_of_nothing, time_back, another_message),
    Rule.LOST: (lost, lost_without_a_device, dropped_by_the_gateway),
    Rule.KEPT: (forgotten,),
    Rule.EXPIRED_SILENTLY: (untold_gap,),
    Rule.GAP: (unfounded_gap,),
    Rule.REFUSED: (refused_and_delivered, refused_and_listed),
    Rule.ALIEN: (to_another, from_nobody, before_it_was_sent),
    Rule.CONTENT: (damaged, in_another_lane),
    Rule.ONCE: (twice_to_a_run,),
    Rule.ACKNOWLEDGED_AGAIN: (acknowledged_and_delivered, acknowledged_and_sent),
    Rule.ORDER: (out_of_order_to_a_run, out_of_order_on_the_wire, out_of_a_writers_order, out_of_real_order),
    Rule.ONE_TO_ONE: (stored_twice, unknown_and_stored_twice, one_id_for_two),
    Rule.ENTRY: (entered_twice,),
    Rule.DENSE: (hole,),
    Rule.CURSOR: (cursor_back, cursor_behind_what_was_acknowledged),
    Rule.STALE: (old_list,),
    Rule.UNLISTED: (hole_in_a_list,),
    Rule.DUP: (unmarked_repeat, marked_first),
    Rule.WINDOW: (more_than_a_window,),
}
"""Ways to break each rule, and no other."""
