"""What senders were promised: everything that was sent is with every device, or is kept for it, or it is told that it is gone.

Source: docs/promises.md, docs/architecture.md, docs/promises.md, "Failure rules" 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tests.history.record import Listed, Read
from tests.history.survey import NEVER, Device, Inbox, Message, Place, Survey
from tests.history.violation import Rule


@dataclass(slots=True)
class _Last:
    """What was listed for a device in the end."""

    index: int = -1
    ids: set[int] = field(default_factory=set)
    seqs: set[int] = field(default_factory=set)


def _inbox(place: Place) -> Inbox:
    return place[0], place[2]


class Promises:
    """Each message that was sent with a good end, against each device of each of its receivers."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._shown: dict[Place, set[int]] = defaultdict(set)
        self._last: dict[Place, _Last] = defaultdict(_Last)
        self._looked: dict[int, set[int]] = defaultdict(set)
        """By UIN: the devices for which somebody looked in the end."""
        self._told: dict[Place, dict[int, int]] = defaultdict(dict)
        """InboxSeq → when the device was told that it is gone."""
        self._ends: dict[Inbox, int] = defaultdict(int)
        """The newest number that was told of an inbox, as far as lists and copies say."""
        for inbox, entries in survey.entries.items():
            self._ends[inbox] = max(entries, default=0)
        for doing in survey.ended_well(Read):
            if isinstance(doing.operation, Read) and isinstance(doing.result, Listed):
                inbox = doing.operation.uin, doing.operation.lane
                self._ends[inbox] = max(self._ends[inbox], doing.result.last)
        for copy in survey.copies:
            self._shown[copy.place].add(copy.id)
        self._take_lists()
        for index, gap in survey.gaps:
            self._tell((gap.uin, gap.device, gap.lane), gap.first, gap.last, index)
        nameless = {place: [seq for seq in told if seq not in survey.entries[_inbox(place)]] for place, told in self._told.items()}
        self._nameless = {place: len(seqs) for place, seqs in nameless.items()}
        """Of the told numbers, how many nothing says whose they are."""
        self._over = {place: sum(self._is_over(place, seq) for seq in seqs) for place, seqs in nameless.items()}
        """How many of these are over the cap."""

    def check(self) -> None:
        """The rules about promises."""
        for message in self._survey.messages.values():
            if message.owed:
                for uin in message.sent.receivers:
                    self._check_receiver(message, uin)

    def _take_lists(self) -> None:
        gaps: dict[Place, int] = defaultdict(int)
        for doing in self._survey.ended_well(Read):
            call, listed = doing.operation, doing.result
            if not isinstance(call, Read) or not isinstance(listed, Listed):
                continue
            place = (call.uin, call.device, call.lane)
            if listed.gap > gaps[place]:
                self._tell(place, gaps[place] + 1, listed.gap, doing.ended)
                gaps[place] = listed.gap
            if call.final:
                last = self._last[place]
                self._looked[call.uin].add(call.device)
                last.index = max(last.index, doing.ended)
                for seq, msg_id, id_ in listed.entries:
                    last.ids.add(id_ or self._survey.ids.get(msg_id, (0, 0))[0])
                    last.seqs.add(seq)

    def _tell(self, place: Place, first: int, last: int, index: int) -> None:
        told = self._told[place]
        for seq in range(max(first, 1), min(last, self._ends[place[0], place[2]]) + 1):
            told[seq] = min(index, told.get(seq, NEVER))

    def _is_over(self, place: Place, seq: int) -> bool:
        return self._ends[_inbox(place)] - seq >= self._survey.limits.inbox_cap

    def _is_nameless(self, place: Place) -> bool:
        """Take one of the told numbers that may be that of a message whose number is unknown."""
        left = self._nameless.get(place, 0)
        self._nameless[place] = left - 1
        return left > 0

    def _is_nameless_and_over(self, place: Place) -> bool:
        """The same, of those over the cap."""
        left = self._over.get(place, 0)
        self._over[place] = left - 1
        return left > 0 and self._is_nameless(place)

    def _check_receiver(self, message: Message, uin: int) -> None:
        had_one = False
        for number, one_after_the_other in self._survey.devices[uin].items():
            for device in one_after_the_other:
                had_one = had_one or device.known < message.first
                if device.known < message.first and device.dropped == NEVER:
                    self._check_device(message, device, (uin, number, message.sent.lane))
        if not had_one:
            self._check_inbox(message, uin)

    def _check_inbox(self, message: Message, uin: int) -> None:
        """A receiver without a device when it was sent: it must be there for whoever looked."""
        survey, id_, lane = self._survey, message.sent.id, message.sent.lane
        numbers = {*survey.devices[uin], *self._looked[uin]}
        places = [(uin, number, lane) for number in numbers]
        seq = survey.seqs[uin, lane].get(id_, (0, 0))[0]
        if seq and survey.deleted[uin, lane].first(seq) != NEVER:
            return
        devices = [device for one_after_the_other in survey.devices[uin].values() for device in one_after_the_other]
        if seq and any(device.starts.get(lane, 0) >= seq for device in devices):
            return  # its first device asked for what comes later only
        if any(id_ in self._shown[place] or seq in self._told[place] or seq in self._last[place].seqs for place in places):
            return
        where = (message.first, message.ok, *(self._last[place].index for place in places))
        expired = [self._expired(message, self._last[place]) for place in places]
        if not any(expired):
            if not seq and any(self._is_nameless_and_over(place) for place in places):
                return
            text = f"{id_:#x} was sent to {uin}, who had no device, and is in none of the lists of the inbox"
            survey.blame(Rule.LOST, text, *where)
        elif seq or not any(self._is_nameless(place) for place in places):
            survey.blame(Rule.EXPIRED_SILENTLY, f"{id_:#x} to {uin}, who had no device, expired, and nobody was told", *where)

    def _check_device(self, message: Message, device: Device, place: Place) -> None:
        survey, sent = self._survey, message.sent
        uin, _, lane = place
        seq = survey.seqs[uin, lane].get(sent.id, (0, 0))[0]
        shown, last = sent.id in self._shown[place], self._last.get(place, _Last())
        if sent.id in last.ids or seq in last.seqs or (seq and survey.deleted[uin, lane].first(seq) != NEVER):
            return
        if seq and seq <= device.starts.get(lane, 0):
            return
        acknowledged = sent.id in survey.named[place] or (seq and survey.begun[place].first(seq) != NEVER)
        if shown and (last.index < 0 or acknowledged):
            return  # nobody looked in the end, or the device has done with it
        where = (message.first, message.ok, device.known, last.index)
        told = self._told[place].get(seq, NEVER) if seq else NEVER
        name = f"{sent.id:#x} (InboxSeq {seq or 'unknown'}) for {place}"
        if told != NEVER:
            if not self._is_over(place, seq) and not 0 < sent.expires_us <= survey.at_us(told):
                survey.blame(Rule.GAP, f"{name} is told to be gone, and has not expired", *where, told)
        elif shown:
            if not self._expired(message, last):
                survey.blame(Rule.KEPT, f"{name} was shown, not acknowledged, and is not listed in the end", *where)
        elif self._expired(message, last):
            if not seq and self._is_nameless(place):
                return
            survey.blame(Rule.EXPIRED_SILENTLY, f"{name} expired, and the device was told of no gap", *where)
        elif seq or not self._is_nameless_and_over(place):
            survey.blame(Rule.LOST, f"{name} was never shown, and is not listed in the end", *where)

    def _expired(self, message: Message, last: _Last) -> bool:
        at = last.index if last.index >= 0 else len(self._survey.events) - 1
        return 0 < message.sent.expires_us <= self._survey.at_us(at)
