"""The core of a channel's member: what it has of which part, and what it reports. Pure.

    leader ──messages──▶ held ──ack, nack──▶ to report ──one report for each part and turn──▶ leader ──committed──▶ outcome
                          └── the stream died: nothing of it counts any more, and all of it comes again

A message is known by its stream, part and offset: after a change of leaders the same offset is another delivery.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from pixiu.client.options import ClientOptions
from pixiu.client.topics.leader_link import LeaderLink
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import OutcomeUnknown, Overloaded, Refusal, TooFewInSync, Unavailable

AGAIN: Final = frozenset(kind.code for kind in (OutcomeUnknown, Overloaded, TooFewInSync, Unavailable))
"""Refusals after which a report is made again."""
REPORT_AGAIN_S: Final = 0.2
"""Least wait before a refused report is made again, seconds."""
MAX_REPORTS: Final = 100
"""Reports of a stream that are not answered. Policy: what is to be reported waits, and shares a report."""
MAX_REJECTED: Final = 500
"""Rejected messages of a report. Policy: others are in the next one, because each has a text."""
REJOIN_SOON_S: Final = 2.0
"""Longest time after which such groups are joined again when a leader says that the channel was moved, seconds: not all members
come at once."""
REJOIN_S: Final = 60.0
"""Time after which a group that was left is joined again, seconds: a seek may have gone back into its sealed parts, which changes
nothing in the topic's description. Policy: one call for each such group and minute."""


class Place(NamedTuple):
    """A message as delivered."""

    stream: int
    part: int
    offset: int


class Report(NamedTuple):
    """A report on messages of one part."""

    request: int
    part: int
    acknowledged: Sequence[int] = ()
    """Pairs: ranges [low, high) of offsets."""
    refused: Sequence[int] = ()
    """Pairs: offset, delay in ms."""
    touched: Sequence[int] = ()
    rejected: Sequence[tuple[int, str]] = ()
    """(offset, reason)."""


@dataclass(frozen=True, slots=True)
class OpenMember:
    """Open a stream to a leader."""

    address: str
    stream: int
    credit: int


@dataclass(frozen=True, slots=True)
class CloseMember:
    """End a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Reportable:
    """A stream has something to report."""

    stream: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Reports that are answered: True, if they count."""

    found: Sequence[tuple[Place, bool]]


@dataclass(frozen=True, slots=True)
class AskTopic:
    """Ask for the topic's description. `newer`: for a newer version, and not only for the addresses of leaders."""

    newer: bool = False


Effect = OpenMember | CloseMember | Reportable | Outcomes | AskTopic


@dataclass(slots=True)
class MemberCounters:
    """Totals of a channel's member."""

    delivered: int = 0
    redelivered: int = 0
    """Those of them that were delivered before, to whomever."""
    acknowledged: int = 0
    refused: int = 0
    void: int = 0
    """Reports that did not count: the message is no longer this member's."""
    handler_failures: int = 0
    streams_opened: int = 0
    streams_died: int = 0
    malformed: int = 0


class PartHeld:
    """Messages of one part that a member has."""

    __slots__ = ("acknowledged", "refused", "reporting", "touched", "unreported")

    def __init__(self) -> None:
        self.unreported: set[int] = set()
        self.acknowledged: set[int] = set()
        """To report."""
        self.refused: dict[int, int | str] = {}
        """To report, with the delay in ms, or the reason of a rejection."""
        self.touched: set[int] = set()
        self.reporting: dict[int, tuple[frozenset[int], dict[int, int | str]]] = {}
        """Request → what was reported by it."""

    @property
    def to_report(self) -> bool:
        """True if there is something to report."""
        return bool(self.acknowledged or self.refused or self.touched)


@dataclass(slots=True)
class MemberStream:
    """The stream to a group's leader."""

    link: LeaderLink
    number: int = 0
    """0: there is none."""
    answered: bool = False
    credit: int = 0
    """As the leader knows it."""
    rest_until: float = 0.0
    """Time before which nothing is reported."""
    parts: dict[int, PartHeld] = field(default_factory=dict)
    turns: dict[int, None] = field(default_factory=dict)
    """Parts with something to report."""

    def under_way(self) -> int:
        """Number of reports that are not answered."""
        return sum(len(held.reporting) for held in self.parts.values())


class MemberCore:
    """Decides; see the module.

    Args:
        options: of the client.
        topic: as described last.
        credit: messages that may be unreported, of all streams together; each has at least 1. 0: nothing comes until `set_credit`.
        uniform: returns random numbers in [0, 1).
    """

    def __init__(self, options: ClientOptions, topic: TopicMap, credit: int, uniform: Callable[[], float]) -> None:
        self._options, self._uniform, self._credit = options, uniform, credit
        self.topic = topic
        self.counters = MemberCounters()
        self._groups: dict[int, MemberStream] = {}
        self._by_number: dict[int, MemberStream] = {}
        self._finished: set[int] = set()
        self._rejoin_at = inf
        """Time at which groups that were left are joined again."""
        self._numbers = 0

    # --- groups

    def begin(self, now: float) -> list[Effect]:
        """Join the groups of the topic."""
        return self.set_topic(self.topic, now)

    def set_topic(self, topic: TopicMap, now: float) -> list[Effect]:
        """Take a description of the topic: join groups that hold new parts, leave those that hold none any more."""
        if topic.id != self.topic.id or topic.version < self.topic.version:
            return []
        self.topic = topic
        wanted = {part.group for part in topic.lineage.parts.values() if part.number not in self._finished}
        effects: list[Effect] = []
        for group in sorted(self._groups.keys() - wanted):
            stream = self._groups[group]
            if any(held.unreported or held.reporting or held.to_report for held in stream.parts.values()):
                continue
            del self._groups[group]
            self._rejoin_at = min(self._rejoin_at, now + REJOIN_S * (0.75 + 0.5 * self._uniform()))
            if stream.number:
                del self._by_number[stream.number]
                effects.append(CloseMember(stream.number))
        for group in sorted(wanted - self._groups.keys()):
            link = LeaderLink.new(self._options.backoff_s, self._options.max_backoff_s, self._uniform)
            self._groups[group] = MemberStream(link)
        for group, stream in self._groups.items():
            stream.link.set_addresses(topic.groups.get(group, ()))
        return effects + self._connect(now) + self._share_credit()

    def set_credit(self, credit: int, now: float) -> list[Effect]:
        """Take another number of messages at a time; 0: nothing more, while what is here may still be reported."""
        self._credit = credit
        return self._connect(now) + self._share_credit()

    def _share(self) -> int:
        return max(1, -(-self._credit // max(1, len(self._groups)))) if self._credit else 0

    def _share_credit(self) -> list[Effect]:
        share = self._share()
        return [Reportable(each.number) for each in self._groups.values() if each.answered and each.credit != share]

    def _connect(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for stream in self._groups.values():
            if stream.number or now < stream.link.rest_until or not self._credit:
                continue
            address = stream.link.address()
            if not address:
                stream.link.failed(now)
                effects.append(AskTopic())
                continue
            self._numbers += 1
            stream.number, stream.credit = self._numbers, self._share()
            self._by_number[stream.number] = stream
            self.counters.streams_opened += 1
            effects.append(OpenMember(address, stream.number, stream.credit))
        return effects

    def answered(self, number: int) -> list[Effect]:
        """Handle the first reply of a stream."""
        stream = self._by_number.get(number)
        if stream is None or stream.answered:
            return []
        stream.answered = True
        stream.link.answered()
        return self._share_credit()

    def stream_died(self, number: int, now: float, leader: str = "", retry_after_s: float = 0.0) -> list[Effect]:
        """Handle the end of a stream: what was delivered on it and is not confirmed comes again, to whomever."""
        stream = self._by_number.pop(number, None)
        if stream is None:
            return []
        self.counters.streams_died += 1
        effects = self._void(stream)
        stream.link.failed(now, leader, retry_after_s)
        if not leader:
            effects.append(AskTopic())
        return effects + self._connect(now)

    def _void(self, stream: MemberStream) -> list[Effect]:
        """Forget what a stream delivered."""
        void: list[tuple[Place, bool]] = []
        for part, held in stream.parts.items():
            waiting = {*held.acknowledged, *held.refused}
            for acknowledged, refused in held.reporting.values():
                waiting |= acknowledged | refused.keys()
            void += [(Place(stream.number, part, offset), False) for offset in sorted(waiting)]
        self.counters.void += len(void)
        stream.number, stream.answered, stream.rest_until = 0, False, 0.0
        stream.parts.clear()
        stream.turns.clear()
        return [Outcomes(void)] if void else []

    def finished(self, parts: Iterable[int], now: float) -> list[Effect]:
        """The channel has everything of sealed parts."""
        parts = set(parts)
        self._finished |= parts
        known = self.topic.lineage.parts
        if any(part in known and not known[part].sealed for part in parts):
            return [AskTopic(newer=True)]  # the parts that follow them may be in the same group: they are not known yet
        return [*self.set_topic(self.topic, now), AskTopic()]

    def rejoin(self, now: float) -> None:
        """The channel was moved: groups that were left may have something for it again."""
        self._rejoin_at = min(self._rejoin_at, now + REJOIN_SOON_S * self._uniform())

    # --- messages

    def delivered(self, number: int, part: int, base: int, count: int, again: int) -> bool:
        """Take messages; `again`: number of those that were delivered before. False: the stream is over."""
        stream = self._by_number.get(number)
        if stream is None:
            return False
        self.counters.delivered += count
        self.counters.redelivered += again
        self._finished.discard(part)  # a seek went back
        stream.parts.setdefault(part, PartHeld()).unreported.update(range(base, base + count))
        return True

    def holds(self, place: Place) -> bool:
        """True if a message is still this member's, and not reported."""
        stream = self._by_number.get(place.stream)
        held = stream.parts.get(place.part) if stream is not None else None
        return held is not None and place.offset in held.unreported

    def acknowledge(self, place: Place) -> list[Effect] | None:
        """Report a message as done. None: it is no longer this member's, or was reported."""
        if not self.holds(place):
            self.counters.void += 1
            return None
        held = self._reports(place)
        held.acknowledged.add(place.offset)
        return [Reportable(place.stream)]

    def acknowledge_all(self, places: Iterable[Place]) -> list[Effect]:
        """Report messages as done. Those that are no longer this member's, or were reported, are left out."""
        touched = dict[int, None]()
        for place in places:
            number, part, offset = place
            stream = self._by_number.get(number)
            held = stream.parts.get(part) if stream is not None else None
            if stream is None or held is None or offset not in held.unreported:
                self.counters.void += 1
                continue
            held.unreported.discard(offset)
            held.touched.discard(offset)
            held.acknowledged.add(offset)
            stream.turns[part] = touched[number] = None
        return [Reportable(number) for number in touched]

    def refuse(self, place: Place, how: int | str) -> list[Effect] | None:
        """Report that a message failed: the delay before it comes again in ms, or why it goes to the dead letters at once. None: it
        is no longer this member's, or was reported."""
        if not self.holds(place):
            self.counters.void += 1
            return None
        held = self._reports(place)
        held.refused[place.offset] = how
        return [Reportable(place.stream)]

    def touch(self, place: Place) -> list[Effect]:
        """Ask for more time for a message."""
        if not self.holds(place):
            return []
        stream = self._by_number[place.stream]
        stream.parts[place.part].touched.add(place.offset)
        stream.turns[place.part] = None
        return [Reportable(place.stream)]

    def _reports(self, place: Place) -> PartHeld:
        stream = self._by_number[place.stream]
        held = stream.parts[place.part]
        held.unreported.discard(place.offset)
        held.touched.discard(place.offset)
        stream.turns[place.part] = None
        return held

    def next_report(self, number: int, now: float) -> tuple[int | None, list[Report]] | None:
        """(credit if it changes, 0 for a pause, else None; reports) to send on a stream; None: nothing."""
        stream = self._by_number.get(number)
        if stream is None or not stream.answered:
            return None
        share = self._share()
        credit = share if stream.credit != share else None
        stream.credit = share
        reports: list[Report] = []
        if now >= stream.rest_until:
            free = MAX_REPORTS - stream.under_way()
            while stream.turns and free > 0:
                part = next(iter(stream.turns))
                del stream.turns[part]
                reports.append(self._report(stream.parts[part], part))
                if stream.parts[part].to_report:
                    stream.turns[part] = None
                free -= 1
        return (credit, reports) if credit is not None or reports else None

    def _report(self, held: PartHeld, part: int) -> Report:
        self._numbers += 1
        acknowledged, refused, touched = frozenset(held.acknowledged), dict(held.refused), sorted(held.touched)
        texts = [offset for offset, how in refused.items() if isinstance(how, str)]
        left = {offset: refused.pop(offset) for offset in texts[MAX_REJECTED:]}
        if acknowledged or refused:
            held.reporting[self._numbers] = acknowledged, refused
        held.acknowledged.clear()
        held.refused = left
        held.touched.clear()
        pairs = [number for offset, how in sorted(refused.items()) if isinstance(how, int) for number in (offset, how)]
        rejected = [(offset, how) for offset, how in sorted(refused.items()) if isinstance(how, str)]
        return Report(self._numbers, part, ranges_of(acknowledged), pairs, touched, rejected)

    def reported(
        self,
        number: int,
        request: int,
        part: int,
        acknowledged: Sequence[int],
        refused: Iterable[int],
        refusal: Refusal | None,
        now: float,
    ) -> list[Effect]:
        """Handle the answer to a report: ranges that count as pairs, and offsets."""
        stream = self._by_number.get(number)
        held = stream.parts.get(part) if stream is not None else None
        found = held.reporting.pop(request, None) if held is not None else None
        if stream is None or held is None or found is None:
            return []
        if refusal is not None and refusal.code in AGAIN:
            held.acknowledged |= found[0]
            held.refused.update(found[1])
            stream.turns[part] = None
            stream.rest_until = now + max(REPORT_AGAIN_S, refusal.retry_after_ms / 1000)
            return []
        bounds = sorted(zip(acknowledged[::2], acknowledged[1::2], strict=False))
        lows, counted = [low for low, _ in bounds], set(refused)

        def counts(offset: int) -> bool:
            at = bisect_right(lows, offset) - 1
            return at >= 0 and offset < bounds[at][1]

        outcomes = [(Place(number, part, offset), counts(offset)) for offset in sorted(found[0])]
        outcomes += [(Place(number, part, offset), offset in counted) for offset in sorted(found[1])]
        self.counters.acknowledged += sum(done for _, done in outcomes[: len(found[0])])
        self.counters.refused += sum(done for _, done in outcomes[len(found[0]) :])
        self.counters.void += sum(not done for _, done in outcomes)
        effects: list[Effect] = [Outcomes(outcomes)]
        return [*effects, Reportable(number)] if stream.turns else effects

    # --- waiting

    def idle(self) -> bool:
        """True if everything that was reported is answered."""
        return not any(
            held.reporting or held.acknowledged or held.refused
            for stream in self._by_number.values()
            for held in stream.parts.values()
        )

    def next_deadline(self) -> float:
        """Time at which `tick` has something to do, monotonic seconds."""
        deadline = self._rejoin_at
        for stream in self._groups.values():
            if not stream.number:
                deadline = min(deadline, stream.link.rest_until if self._credit else inf)
            elif stream.turns and stream.rest_until:
                deadline = min(deadline, stream.rest_until)
        return deadline

    def tick(self, now: float) -> list[Effect]:
        """End back-offs, and join groups again that were left long ago: they say which parts are finished still."""
        effects: list[Effect] = []
        if now >= self._rejoin_at:
            self._rejoin_at, known = inf, self.topic.lineage.parts
            self._finished = {each for each in self._finished if each in known and known[each].group in self._groups}
            effects += self.set_topic(self.topic, now)
        effects += self._connect(now)
        for stream in self._groups.values():
            if stream.number and stream.turns and stream.rest_until and now >= stream.rest_until:
                stream.rest_until = 0.0
                effects.append(Reportable(stream.number))
        return effects

    def close(self) -> list[Effect]:
        """End all streams; unreported messages come again."""
        effects: list[Effect] = []
        for number, stream in self._by_number.items():
            effects += [*self._void(stream), CloseMember(number)]
        self._groups.clear()
        self._by_number.clear()
        self._rejoin_at = inf
        return effects


def ranges_of(offsets: Iterable[int]) -> list[int]:
    """Offsets as pairs: ranges [low, high)."""
    rising = sorted(offsets)
    if not rising:
        return []
    found = [rising[0]]
    for before, after in pairwise(rising):
        if after != before + 1:
            found += [before + 1, after]
    return [*found, rising[-1] + 1]
