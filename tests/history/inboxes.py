"""What inboxes were seen to be: their numbers, their order, their lists and cursors.

Source: docs/identifiers.md, docs/pi.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator

from tests.history.record import OK, REPLICATED, UNTOLD, Acknowledge, Acknowledged, Drop, Listed, Read, Send
from tests.history.survey import NEVER, Copy, Doing, Inbox, Message, Place, Survey
from tests.history.violation import Rule

PAGE = 1000
"""Numbers that a page may leave out, as far as they are looked at one by one: the most that a page has."""
Numbered = tuple[Message, int]
"""A message and its InboxSeq."""


def check_inboxes(survey: Survey) -> None:
    """The rules about inboxes."""
    _check_numbers(survey)
    for inbox, numbers in survey.seqs.items():
        known = [(survey.messages[id_], seq) for id_, (seq, _) in numbers.items() if id_ in survey.messages]
        # What is weaker may have been lost and sent again behind what came later; what was refused is wrong already.
        sound = [item for item in known if item[0].sent.level == REPLICATED and item[0].possible != NEVER]
        _check_order(survey, inbox, sound)
    _Watch(survey).run()


def _check_numbers(survey: Survey) -> None:
    """No holes, in inboxes that were looked at in the end."""
    gone: dict[Inbox, list[tuple[int, int]]] = defaultdict(list)
    looked = set()
    for _, gap in survey.gaps:
        gone[gap.uin, gap.lane].append((gap.first, gap.last))
    for doing in survey.ended_well(Read):
        if isinstance(doing.operation, Read) and isinstance(doing.result, Listed):
            gone[doing.operation.uin, doing.operation.lane].append((1, doing.result.gap))
            if doing.operation.final:
                looked.add((doing.operation.uin, doing.operation.lane))
    for uin, devices in survey.devices.items():
        for device in (device for one_after_the_other in devices.values() for device in one_after_the_other):
            for lane, start in device.starts.items():
                gone[uin, lane].append((1, start))
    unnumbered: dict[Inbox, set[int]] = defaultdict(set)
    for copy in survey.copies:
        if not copy.seq:
            unnumbered[copy.inbox].add(copy.id)
    for inbox in looked:
        seqs = sorted(survey.entries[inbox])
        holes = list(_holes(seqs, _joined(gone[inbox])))
        # What came without its number, as by MQTT, may have the missing ones.
        if sum(last - first + 1 for first, last in holes) > len(unnumbered[inbox]):
            for first, last in holes:
                after = survey.entries[inbox][seqs[bisect_right(seqs, last)]][1]
                survey.blame(Rule.DENSE, f"no entry of the inbox {inbox} has the InboxSeqs {first} to {last}", after)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        elif last >= first:
            joined.append((first, last))
    return joined


def _holes(seqs: list[int], gone: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What lies between the numbers and in none of the ranges."""
    firsts = [first for first, _ in gone]
    before = 0
    for seq in seqs:
        first = before + 1
        while first < seq:
            at = bisect_right(firsts, first) - 1
            if at >= 0 and gone[at][1] >= first:
                first = gone[at][1] + 1
            else:
                last = min(seq, gone[at + 1][0] if at + 1 < len(gone) else seq) - 1
                yield first, last
                first = last + 1
        before = seq


def _check_order(survey: Survey, inbox: Inbox, known: list[Numbered]) -> None:
    """What was sent after something had to come behind it stands behind it."""
    by_writer: dict[str, list[Numbered]] = defaultdict(list)
    for message, seq in known:
        by_writer[message.writer].append((message, seq))
    for writer, items in by_writer.items():
        _sweep(survey, items, lambda message: message.last, f"{writer}'s messages in the inbox {inbox}")
    _sweep(survey, known, lambda message: message.ok, f"messages sent one after the other's end in the inbox {inbox}")


def _sweep(survey: Survey, items: list[Numbered], done: Callable[[Message], int], what: str) -> None:
    """Of each message: the highest number among those that were done when it was first sent must be lower than its own."""
    earlier = sorted(items, key=lambda item: done(item[0]))
    at, highest = 0, None
    for message, seq in sorted(items, key=lambda item: item[0].first):
        while at < len(earlier) and done(earlier[at][0]) < message.first:
            if highest is None or earlier[at][1] > highest[1]:
                highest = earlier[at]
            at += 1
        if highest and highest[1] > seq:
            text = f"{what}: {highest[0].sent.id:#x} has {highest[1]}, and {message.sent.id:#x}, sent later, {seq}"
            survey.blame(Rule.ORDER, text, highest[0].first, done(highest[0]), message.first)


class _Watch:
    """What lists and answers say, compared with what was known when they were asked for."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._cursors: dict[Place, tuple[int, int]] = {}
        """The highest cursor that was told or confirmed, and where."""
        self._ends: dict[Inbox, tuple[int, int]] = {}
        """The highest number that was given, and where that is known from."""
        self._asked: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        """What was known when a call began."""

    def run(self) -> None:
        """Go through the history once."""
        survey = self._survey
        timeline: list[tuple[int, int, Doing | Copy]] = [(copy.index, 2, copy) for copy in survey.copies if copy.sound]
        for doing in survey.doings:
            timeline.append((doing.begun, 0, doing))
            if doing.how == OK:
                timeline.append((doing.ended, 1, doing))
        for index, what, item in sorted(timeline, key=lambda step: step[:2]):
            if isinstance(item, Copy):
                self._raise_end(item.inbox, item.seq, index)
            elif what == 0:
                self._begin(item)
            else:
                self._end(item)

    def _begin(self, doing: Doing) -> None:
        call = doing.operation
        if isinstance(call, Read | Acknowledge):
            nothing = (0, -1)
            place, inbox = (call.uin, call.device, call.lane), (call.uin, call.lane)
            self._asked[doing.begun] = self._cursors.get(place, nothing), self._ends.get(inbox, nothing)
        elif isinstance(call, Drop):
            for place in [place for place in self._cursors if place[:2] == (call.uin, call.device)]:
                del self._cursors[place]

    def _end(self, doing: Doing) -> None:
        call, result = doing.operation, doing.result
        if isinstance(call, Send):
            for uin in call.receivers:
                seq, _ = self._survey.seqs[uin, call.lane].get(call.id, (0, 0))
                self._raise_end((uin, call.lane), seq, doing.ended)
        elif isinstance(call, Read) and isinstance(result, Listed):
            self._check_cursor(doing, call, result.cursor)
            _, (end, where) = self._asked[doing.begun]
            if UNTOLD != result.last < end:
                text = f"the inbox {(call.uin, call.lane)} ends at {result.last}, and InboxSeq {end} was known before"
                self._survey.blame(Rule.STALE, text, where, doing.begun, doing.ended)
            if not call.final:
                self._check_list(doing, call, result)
        elif isinstance(call, Acknowledge):
            if isinstance(result, Acknowledged):
                self._check_cursor(doing, call, result.cursor)
            self._raise_cursor((call.uin, call.device, call.lane), call.up_to, doing.ended)

    def _check_cursor(self, doing: Doing, call: Read | Acknowledge, cursor: int) -> None:
        (known, where), _ = self._asked[doing.begun]
        place = (call.uin, call.device, call.lane)
        if UNTOLD != cursor < known:
            text = f"the cursor of {place} is {cursor}, and was {known} before"
            self._survey.blame(Rule.CURSOR, text, where, doing.begun, doing.ended)
        self._raise_cursor(place, cursor, doing.ended)

    def _check_list(self, doing: Doing, call: Read, listed: Listed) -> None:
        """A list has everything from where it begins to its end, but what the device acknowledged or what is told to be gone."""
        survey = self._survey
        device = survey.devices[call.uin][call.device][-1:]
        starts = device[0].starts.get(call.lane, 0) if device else 0
        first = 1 + max(call.start if call.start != UNTOLD else listed.cursor, listed.floor, listed.gap, starts, 0)
        there = {seq for seq, _, _ in listed.entries}
        end = max(there, default=0) if listed.last == UNTOLD or len(there) >= call.num else listed.last
        if end - first + 1 == len(there):
            return
        acks = survey.begun[call.uin, call.device, call.lane]
        for seq in range(first, min(end + 1, first + PAGE)):
            id_, where = survey.entries[call.uin, call.lane].get(seq, (0, -1))
            message = survey.messages.get(id_)
            expired = message and 0 < message.sent.expires_us <= survey.at_us(doing.ended)
            if seq not in there and not expired and acks.first(seq) > doing.ended:
                text = f"a list for {(call.uin, call.device, call.lane)} leaves out InboxSeq {seq}"
                survey.blame(Rule.UNLISTED, text, where, doing.begun, doing.ended)

    def _raise_cursor(self, place: Place, cursor: int, index: int) -> None:
        if cursor > self._cursors.get(place, (0, 0))[0]:
            self._cursors[place] = (cursor, index)

    def _raise_end(self, inbox: Inbox, seq: int, index: int) -> None:
        if seq > self._ends.get(inbox, (0, 0))[0]:
            self._ends[inbox] = (seq, index)
