"""Offsets of a topic's parts through splits, merges, moves and drops: what micro-batches read, and in which order. No Java."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from pipeline.spark.offsets import EARLIEST, LATEST
from pipeline.topics.lineage import BY_TIME, Bounds, Node, Parts, Place, Wanted, parse_wanted
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS, Lineage, Range
from tests.support.for_each import for_each

STEP = SLOTS // 8
"""Parts of these tests have eighths of the slots."""


@dataclass
class Topic:
    """A topic in memory: what is written to its slots, and where it is."""

    lineage: Lineage = field(default_factory=lambda: Lineage.new([Range(0, SLOTS, 0)]))
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Part → (slot, number of the message in its slot)."""
    first: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    written: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    looked: list[int] = field(default_factory=list)

    def write(self, slot: int) -> None:
        self.rows[self.lineage.open_part(slot).number].append((slot, self.written[slot]))
        self.written[slot] += 1

    def look(self, part: int) -> Bounds:
        self.looked.append(part)
        return Bounds(self.first[part], len(self.rows[part]), self.lineage.parts[part].sealed)

    @property
    def parts(self) -> Parts:
        nodes = {number: Node(number, part.parents) for number, part in self.lineage.parts.items()}
        return Parts(nodes, self.look)

    def resize(self, sealed: list[int], *bounds: int) -> None:
        """Seal adjoining parts; their children begin at the lowest slot and at these eighths."""
        parts = [self.lineage.parts[number] for number in sealed]
        cuts = [min(part.low for part in parts), *(bound * STEP for bound in bounds), max(part.high for part in parts)]
        self.lineage = self.lineage.resized(sealed, [Range(low, high, 0) for low, high in itertools.pairwise(cuts)])

    def drop(self, part: int) -> None:
        self.lineage = self.lineage.without(part)


def at_start(_part: int) -> int:
    return 0


def done(offsets: dict[int, int], *finished: int) -> Place:
    return Place(offsets, frozenset(finished))


def test_a_split_is_read_after_its_parent() -> None:
    topic = Topic()
    for slot in (0, 1, SLOTS - 1, 0):
        topic.write(slot)
    topic.resize([1], 4)
    topic.write(0)
    place = topic.parts.begin(Wanted(EARLIEST), at_start)
    assert place == done({1: 0})
    _, place = topic.parts.next(place, 3)
    assert place == done({1: 3})
    _, place = topic.parts.next(place, 3)
    assert place == done({1: 4}, 1), "none of its children's rows are in this micro-batch"
    _, place = topic.parts.next(place, 3)
    assert place == done({2: 1, 3: 0})
    assert topic.parts.next(place, 3) == ({}, place)


def test_a_part_with_two_parents_waits_for_both() -> None:
    topic = Topic()
    topic.resize([1], 4)
    topic.write(0)
    topic.write(SLOTS - 1)
    topic.write(SLOTS - 1)
    topic.resize([2, 3])
    topic.write(0)
    _, place = topic.parts.next(done({1: 0}), 2)
    assert place == done({2: 1, 3: 1}, 2), "part 1 has nothing, which is known before anything is read"
    _, place = topic.parts.next(place, 2)
    assert place == done({2: 1, 3: 2}, 2, 3)
    _, place = topic.parts.next(place, 2)
    assert place == done({4: 1})
    assert topic.parts.begin(Wanted(LATEST), at_start) == done({4: 1})
    assert topic.parts.begin(Wanted(EARLIEST), at_start) == done({2: 0, 3: 0})
    at_three = topic.parts.begin(Wanted(EARLIEST, ((3, 1),)), at_start)
    assert at_three == done({2: 0, 3: 1})
    assert topic.parts.ranges(at_three) == {2: (0, 1), 3: (1, 2), 4: (0, 1)}
    assert topic.parts.behind(at_three)[0] == 3


def test_drops_that_a_query_has_passed_are_no_loss() -> None:
    topic = Topic()
    topic.write(0)
    topic.resize([1], 4)
    topic.drop(1)
    assert topic.parts.next(done({1: 1}, 1), 0) == ({}, done({2: 0, 3: 0}))
    assert topic.parts.next(done({1: 1}), 0) == ({1: 1}, done({2: 0, 3: 0})), "whether it ended there is not known any more"
    topic.resize([2], 2)
    topic.write(0)
    topic.drop(2)
    assert topic.parts.next(done({1: 1}, 1), 0) == ({}, done({3: 0, 4: 1, 5: 0}))


def test_only_what_matters_is_asked() -> None:
    topic = Topic()
    topic.resize([1], 4)
    topic.resize([2], 2)
    topic.resize([3], 6)
    topic.parts.next(done({4: 0, 5: 0, 6: 0, 7: 0}), 0)
    assert sorted(topic.looked) == [4, 5, 6, 7]


def test_an_end_that_is_fixed_stays() -> None:
    topic = Topic()
    topic.write(0)
    fixed = topic.parts
    target = fixed.ends()
    topic.write(0)
    topic.resize([1], 4)
    topic.write(0)
    parts = Parts(fixed.nodes, topic.look)
    _, place = parts.next(done({1: 0}), 0, target)
    assert place == done({1: 1})
    assert parts.next(place, 0, target) == ({}, place)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("begin", "startingOffsets is earliest, latest, or an offset for each part like"),
        ("[1]", "startingOffsets is earliest"),
        ("{}", "startingOffsets is earliest"),
        ('{"0": 1}', "startingOffsets is earliest"),
        ('{"1": "1"}', "startingOffsets is earliest"),
        ('{"1": true}', "startingOffsets is earliest"),
        ('{"1": -3}', "startingOffsets is earliest"),
        ('{"1": 281474976710656}', "startingOffsets is earliest"),
    ],
)
def test_an_option_that_is_no_offset(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_wanted("startingOffsets", text, LATEST)


def test_offsets_of_an_option() -> None:
    place = Place({1: 5, 2: 0}, frozenset({1}), 7, 3, "a" * 16)
    text = '{"1": 5, "2": 0, "finished": [1], "version": 7, "topic": 3, "cluster": "aaaaaaaaaaaaaaaa"}'
    assert parse_wanted("startingOffsets", text, LATEST) == Wanted(LATEST, ((1, 5), (2, 0)))
    assert Place.from_json(place.to_json()) == place
    for other in ({"0": 5, "cluster": "a" * 16}, place.to_json() | {"1": -1}, {"version": 1, "topic": 2, "1": 0}):
        with pytest.raises(InvalidArgument, match="holds no offset of a topic"):
            Place.from_json(other)
    topic = Topic()
    topic.write(0)
    topic.resize([1], 4)
    for offsets, said in (
        (((1, 0), (2, 0)), "names part 2 and one before it that is not finished"),
        (((9, 0),), "there is no part 9, or it is dropped; there are 1, 2, 3"),
        (((1, 2),), "part 1 ends at offset 1, and 2 was asked for"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            topic.parts.begin(Wanted(EARLIEST, offsets), at_start)
    assert topic.parts.begin(Wanted(LATEST, ((1, 1), (2, 0), (3, -2))), at_start) == done({2: 0, 3: 0}), "as a checkpoint has it"
    topic.write(0)
    assert topic.parts.begin(Wanted(LATEST, ((1, 1),)), at_start) == done({2: 0, 3: 0}), "latest is for parts that it does not name"
    assert topic.parts.begin(Wanted(LATEST, ((2, 0),)), at_start) == done({2: 0, 3: 0})
    assert topic.parts.begin(Wanted(BY_TIME), lambda part: 1 if part == 1 else 0) == done({2: 0, 3: 0})
    with pytest.raises(InvalidArgument, match="is at offset 2 of part 1, which ends at 1"):
        topic.parts.next(done({1: 2}), 0)


def resize_at_random(topic: Topic, rng: random.Random) -> None:
    parts = topic.lineage.open_parts()
    at = rng.randrange(len(parts))
    chosen = parts[at : at + rng.randint(1, 2)]
    low, high = chosen[0].low // STEP, chosen[-1].high // STEP
    topic.resize(
        [part.number for part in chosen], *sorted(rng.sample(range(low + 1, high), min(rng.randint(0, 2), high - low - 1)))
    )


def oldest_sealed(topic: Topic) -> list[int]:
    parts = topic.lineage.parts
    return [number for number, part in parts.items() if part.sealed and not any(parent in parts for parent in part.parents)]


@for_each("seed", range(40))
def test_every_row_is_read_once_and_in_the_order_of_its_slot(seed: int) -> None:
    """A query that is killed anywhere, with a topic that is resized, and whose finished parts are dropped."""
    rng, topic = random.Random(seed), Topic()
    place, read = topic.parts.begin(Wanted(EARLIEST), at_start), defaultdict[int, list[int]](list)
    for _ in range(300):
        match rng.randrange(8):
            case 0 if len(topic.lineage.parts) < 60:
                resize_at_random(topic, rng)
            case 1:
                for part in oldest_sealed(topic):
                    if part in topic.parts.ancestors(place.offsets) | place.finished and rng.random() < 0.5:
                        topic.drop(part)
            case 2 | 3:
                gone, behind = topic.parts.next(place, rng.choice((0, 1, 3, 50)))
                assert not gone
                found = rows_between(topic, place.offsets, behind.offsets)
                if rng.random() < 0.8:  # else it dies before its commit, and plans again
                    place = behind
                    for slot, numbers in found.items():
                        read[slot] += numbers
            case _:
                for _ in range(rng.randrange(4)):
                    topic.write(rng.randrange(8) * STEP + rng.randrange(2))
    while (behind := topic.parts.next(place, 0)[1]) != place:
        for slot, numbers in rows_between(topic, place.offsets, behind.offsets).items():
            read[slot] += numbers
        place = behind
    assert {slot: list(range(count)) for slot, count in topic.written.items()} == dict(read)
    assert topic.parts.behind(place)[0] == 0


def rows_between(topic: Topic, begins: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, list[int]]:
    """Slot → numbers of its rows in a micro-batch; of one part only, so that the order of tasks does not matter."""
    found, parts = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set)
    for part, end in ends.items():
        for slot, number in topic.rows[part][begins.get(part, 0) : end]:
            found[slot].append(number)
            parts[slot].add(part)
    assert all(len(each) == 1 for each in parts.values())
    return found
