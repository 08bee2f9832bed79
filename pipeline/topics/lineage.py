"""Places of a query in a topic's parts, and its next micro-batch. Pure.

    offset   {"1": 500, "4": 80, "finished": [1], "version": 12, "topic": 7, "cluster": "0123456789abcdef"}
             the next offset of each part; the parts of them that have nothing more; the version of the topic that has these parts;
             the IDs of the topic and of its cluster
    option   earliest | latest | the same JSON, with -2 for earliest and -1 for latest

A part is begun at 0 once all of its parents are finished, and never in the same micro-batch as rows of them. A finished part leaves
the offset when its children are in it: the ancestors of its parts are finished, and may be dropped meanwhile.

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pipeline.spark.offsets import EARLIEST, LATEST, is_whole, share_bytes, share_out
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import MAX_PARTS
from pixiu.wire.block import MAX_OFFSET

MAX_PART: Final = (1 << 32) - 1
BY_TIME: Final = -3
"""The offset of the first message that was appended at a time or later."""
FINISHED, VERSION, TOPIC, CLUSTER = WORDS = ("finished", "version", "topic", "cluster")

Offsets = dict[int, int]
"""Part → offset."""


class Node(NamedTuple):
    """A part that is kept and open for use, by the topic's description."""

    number: int
    parents: tuple[int, ...]


class Bounds(NamedTuple):
    """Bounds of a part, by its leader."""

    first: int
    """Lowest offset that is kept."""
    end: int
    """Offset behind the last committed message."""
    sealed: bool
    """Nothing follows `end`."""
    mean_bytes: int = 0
    """About what a message takes; 0: not known."""


@dataclass(frozen=True, slots=True)
class Place:
    """A query's place in a topic: an offset of Spark's."""

    offsets: Mapping[int, int]
    finished: frozenset[int] = frozenset()
    """Those of the parts that are sealed and read."""
    version: int = 0
    topic: int = 0
    cluster: str = ""

    def to_json(self) -> dict[str, object]:
        """Encode as in Spark's checkpoint."""
        parts: dict[str, object] = {str(part): offset for part, offset in sorted(self.offsets.items())}
        return {
            **parts, FINISHED: sorted(self.finished), VERSION: self.version, TOPIC: self.topic, CLUSTER: self.cluster,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Place:
        """Decode from a checkpoint. Raises `InvalidArgument` for one of another source."""
        finished, version, topic, cluster = (found.get(word) for word in WORDS)
        offsets = {key: value for key, value in found.items() if key not in WORDS}
        if not (isinstance(finished, list) and isinstance(version, int) and isinstance(topic, int) and _are_offsets(offsets, 0)):
            raise InvalidArgument(
                f"the checkpoint holds no offset of a topic: {dict(found)!r:.200}; use another checkpointLocation"
            )
        numbers = {int(key): int(str(value)) for key, value in offsets.items()}
        return cls(numbers, frozenset(map(int, finished)), version, topic, str(cluster))


def _are_offsets(found: Mapping[str, object], least: int) -> bool:
    return len(found) <= MAX_PARTS and all(
        is_whole(key, 1, MAX_PART) and type(value) is int and least <= value <= MAX_OFFSET for key, value in found.items()
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Value of an option: one word for all parts, or an offset for some."""

    word: int
    """EARLIEST, LATEST or BY_TIME, for parts without an offset."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Those of some parts; BY_TIME is one."""
    time_ms: int = 0
    """Unix milliseconds, for BY_TIME."""
    times_ms: tuple[tuple[int, int], ...] = ()
    """The same for some parts."""

    def of(self, part: int) -> int:
        """The offset of a part, or its word."""
        return dict(self.offsets).get(part, self.word)

    def at_us(self, part: int) -> int:
        """The time from which a part is wanted, Unix microseconds."""
        return dict(self.times_ms).get(part, self.time_ms) * 1000

    def by_time(self, time_ms: int, times_ms: tuple[tuple[int, int], ...]) -> Wanted:
        """The same with times, Unix milliseconds: 0: none for all parts."""
        offsets = self.offsets or tuple((part, BY_TIME) for part, _ in times_ms)
        return Wanted(BY_TIME if time_ms else self.word, offsets, time_ms, times_ms)


def parse_wanted(option: str, text: str, default: int) -> Wanted:
    """Parse an option's value; a checkpoint's offset is one. Raises `InvalidArgument`, which describes the format."""
    words = {"": default, "earliest": EARLIEST, "latest": LATEST}
    if text.lower() in words:
        return Wanted(words[text.lower()])
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    offsets = {key: value for key, value in found.items() if key not in WORDS} if type(found) is dict else {}
    if not offsets or not _are_offsets(offsets, EARLIEST):
        raise InvalidArgument(
            f'{option} is earliest, latest, or an offset for each part like {{"1": 500, "2": -2}}, not {text!r:.200}'
        )
    return Wanted(default, tuple(sorted((int(key), value) for key, value in offsets.items())))


class Ahead(NamedTuple):
    """Everything that is not finished at a place."""

    begun: Offsets
    """The parts that may be read now, from these offsets."""
    later: tuple[int, ...]
    """Those that follow them, by number."""
    finished: frozenset[int]
    gone: Offsets
    """Those that are dropped and were not finished, from these offsets on."""


@dataclass(slots=True)
class Parts:
    """The parts of one topic, as far as they are kept.

    Args:
        nodes: those that are open for use, sealed ones included.
        look: asks the leader of a part; called once for each part that matters.
    """

    nodes: Mapping[int, Node]
    look: Callable[[int], Bounds]
    _seen: dict[int, Bounds] = field(default_factory=dict)
    _followed: set[int] = field(default_factory=set)
    """Parts that have children."""

    def __post_init__(self) -> None:
        self._followed.update(parent for node in self.nodes.values() for parent in node.parents)

    def bounds(self, part: int) -> Bounds:
        """The bounds of a part; the same for as long as this object lives."""
        if part not in self._seen:
            self._seen[part] = self.look(part)
        return self._seen[part]

    def ancestors(self, parts: Iterable[int]) -> set[int]:
        """The kept parts before these."""
        found, todo = set[int](), list(parts)
        while todo:
            node = self.nodes.get(todo.pop())
            for parent in node.parents if node else ():
                if parent in self.nodes and parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def ahead(self, place: Place) -> Ahead:
        """Find what is not finished at a place. Numbers rise from parents to children, so one pass is enough."""
        finished = self.ancestors(place.offsets) | place.finished
        begun, later = Offsets(), list[int]()
        for number in sorted(self.nodes.keys() - finished):
            if not self._may_begin(number, finished):
                later.append(number)
                continue
            offset = place.offsets.get(number, 0)
            if number in self._followed and self._is_finished(number, offset):
                finished.add(number)
            else:
                begun[number] = offset
        lost = {part: offset for part, offset in place.offsets.items() if part not in self.nodes and part not in finished}
        return Ahead(begun, tuple(later), frozenset(finished), lost)

    def _may_begin(self, part: int, finished: Set[int]) -> bool:
        return all(parent in finished or parent not in self.nodes for parent in self.nodes[part].parents)

    def _is_finished(self, part: int, offset: int) -> bool:
        self._check(part, offset)
        bounds = self.bounds(part)
        return bounds.sealed and offset == bounds.end

    # --- places

    def begin(self, wanted: Wanted, at: Callable[[int], int]) -> Place:
        """The first place of a query. `at`: the offset of a part by the option with a time. Parts after one that has an offset of
        its own are read from 0 on, whatever others begin with.

        Raises InvalidArgument for a part that is not there, and for one that cannot be read yet.
        """
        named = dict(wanted.offsets)
        for part in named:
            if part not in self.nodes:
                raise InvalidArgument(f"there is no part {part}, or it is dropped; there are {_some(self.nodes)}")
        finished, begun, following = self.ancestors(named) - named.keys(), Offsets(), set(named)
        for number in sorted(self.nodes.keys() - finished):
            if number not in named and not following.isdisjoint(self.nodes[number].parents):
                following.add(number)
            if self._may_begin(number, finished):
                follows = number in following and number not in named
                begun[number] = 0 if follows else self.resolved(number, wanted.of(number), at)
                if self._is_finished(number, begun[number]):
                    finished.add(number)
            elif number in named:
                raise InvalidArgument(
                    f"startingOffsets names part {number} and one before it that is not finished: leave part {number} out, it is "
                    "begun when its turn comes"
                )
        return self._place(begun, finished)

    def _place(self, offsets: Mapping[int, int], finished: Set[int]) -> Place:
        done = self.ancestors(offsets)
        left = {part: offset for part, offset in offsets.items() if part not in done}
        return Place(left, frozenset(part for part in left if part in finished))

    def resolved(self, part: int, wanted: int, at: Callable[[int], int]) -> int:
        """The offset of a part that an option's value means. Raises InvalidArgument for one beyond the part's end."""
        bounds = self.bounds(part)
        if wanted > bounds.end:
            raise InvalidArgument(f"part {part} ends at offset {bounds.end}, and {wanted} was asked for")
        words = {EARLIEST: lambda: bounds.first, LATEST: lambda: bounds.end, BY_TIME: lambda: at(part)}
        return words[wanted]() if wanted in words else wanted

    def ends(self) -> Offsets:
        """The current ends of the parts that are not sealed."""
        found = {number: self.bounds(number) for number in self.nodes if number not in self._followed}
        return {number: bounds.end for number, bounds in found.items() if not bounds.sealed}

    def next(self, place: Place, limit: int, target: Mapping[int, int] | None = None, max_bytes: int = 0) -> tuple[Offsets, Place]:
        """The next micro-batch after a place: what is lost before it, as in `Ahead.gone`, and the place behind it, which is equal
        if there is nothing new.

        limit: of rows; 0: none. max_bytes: the same of bytes, by the parts' mean sizes of messages.
        target: the ends of the parts that were not sealed when the query's end was fixed; None: it has none.
        """
        ahead, ends = self.ahead(place), Offsets()
        for part, begin in ahead.begun.items():
            self._check(part, begin)
            ends[part] = max(begin, min(self.bounds(part).end, (target or {}).get(part, MAX_OFFSET)))
        available = {part: max(0, end - max(ahead.begun[part], self._first(part))) for part, end in ends.items()}
        taken = share_out(limit, available) if limit else dict(available)

        def take(part: int, wanted: int) -> int:
            mean = self.bounds(part).mean_bytes or 1
            taken[part] = min(taken[part], max(1, wanted // mean))
            return taken[part] * mean

        if max_bytes:
            share_bytes(max_bytes, taken, take)
        for part, share in taken.items():
            if share < available[part]:
                begin = ahead.begun[part]
                ends[part] = max(begin, self._first(part)) + share if share else begin
        finished = {part for part, offset in ends.items() if self._is_finished(part, offset)}
        waiting = {part: offset for part, offset in place.offsets.items() if part in self.nodes and part in ahead.finished}
        return ahead.gone, self._place({**waiting, **ends}, finished | waiting.keys())

    def _check(self, part: int, begin: int) -> None:
        if begin > self.bounds(part).end:
            raise InvalidArgument(
                f"the checkpoint is at offset {begin} of part {part}, which ends at {self.bounds(part).end}: messages that were "
                "read are no longer stored; use another checkpointLocation"
            )

    def _first(self, part: int) -> int:
        bounds = self.bounds(part)
        return min(bounds.first, bounds.end)

    def behind(self, place: Place) -> tuple[int, int]:
        """The number of rows after a place, and about their bytes."""
        rows = {part: max(0, end - max(begin, self._first(part))) for part, (begin, end) in self.ranges(place).items()}
        return sum(rows.values()), sum(count * self.bounds(part).mean_bytes for part, count in rows.items())

    def ranges(self, place: Place) -> dict[int, tuple[int, int]]:
        """Everything after a place, parts that follow included: part → offsets."""
        ahead = self.ahead(place)
        return {part: (ahead.begun.get(part, 0), self.bounds(part).end) for part in (*ahead.begun, *ahead.later)}


def _some(parts: Iterable[int]) -> str:
    found = [str(part) for part in sorted(parts)]
    return ", ".join(found[:8]) + (" …" if len(found) > 8 else "")
