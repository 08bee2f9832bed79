"""The core of a reader: parents before children, and positions that go on where it stopped."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from pixiu.client.topics.reading.reader_core import ReaderCore
from pixiu.errors import InvalidArgument
from pixiu.placement.slots import SLOTS, Range
from tests.pixiu.client.topics.groups import Cluster
from tests.support.for_each import for_each


def numbers(core: ReaderCore) -> list[int]:
    return [each.part.number for each in core.ready()]


def test_children_wait_for_all_of_their_parents() -> None:
    cluster = Cluster(2, 1)
    core = ReaderCore(cluster.topic(), 0)
    assert numbers(core) == [1, 2]
    cluster.resize([1, 2], [Range(0, SLOTS, 0)])
    core.set_topic(cluster.topic())
    core.finish(1)
    assert numbers(core) == []
    assert core.position().keys() == {"1", "2"}
    core.finish(2)
    assert numbers(core) == [3]
    assert core.position() == {"3": 0}


def test_only_parts_of_wanted_slots_are_read() -> None:
    cluster = Cluster(2, 1)
    core = ReaderCore(cluster.topic(), 0, [SLOTS - 1])
    assert numbers(core) == [2]
    cluster.resize([2], [Range(SLOTS // 2, SLOTS - 1, 0), Range(SLOTS - 1, SLOTS, 0)])
    core.set_topic(cluster.topic())
    core.finish(2)
    assert numbers(core) == [4]


def test_the_latest_leaves_out_what_was_sealed() -> None:
    cluster = Cluster(1, 1)
    cluster.resize([1], [Range(0, SLOTS, 0)])
    assert numbers(ReaderCore(cluster.topic(), "end")) == [2]


def test_a_position_of_another_topic_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no part 9"):
        ReaderCore(Cluster(1, 1).topic(), {9: 4})


@for_each("seed", range(40))
def test_a_reader_that_goes_on_at_its_position_misses_and_repeats_nothing(seed: int) -> None:
    """Each part has some messages; at any moment the reader is replaced by one that begins at its position."""
    rng = random.Random(seed)
    cluster = Cluster(rng.choice((1, 2, 3)), 1)
    ends: dict[int, int] = {}
    read: dict[int, int] = {}
    core = ReaderCore(cluster.topic(), 0)
    for _ in range(400):
        for number in cluster.lineage.parts:
            ends.setdefault(number, rng.randint(0, 4))
        if rng.random() < 0.03:
            parts = cluster.lineage.open_parts()
            first = rng.randrange(len(parts))
            last = min(first + rng.choice((0, 1)), len(parts) - 1)
            middle = rng.randrange(parts[first].low, parts[last].high)
            cuts = sorted({parts[first].low, parts[last].high, *((middle,) if rng.random() < 0.5 else ())})
            cluster.resize([part.number for part in parts[first : last + 1]], [Range(*each, 0) for each in pairwise(cuts)])
        if rng.random() < 0.3:
            core.set_topic(cluster.topic())
        if rng.random() < 0.1:
            saved = {int(part): offset for part, offset in json.loads(json.dumps(core.position())).items()}
            core = ReaderCore(cluster.topic(), saved)
        core.ready()
        reading = [each for each in core.parts.values() if each.reading]
        if not reading:
            continue
        each = rng.choice(reading)
        number, at = each.part.number, each.next or 0
        assert at == read.get(number, 0)
        assert all(read.get(parent, 0) == ends[parent] for parent in each.part.parents)
        if at < ends[number]:
            read[number] = each.next = at + 1
        elif core.topic.lineage.parts[number].sealed:
            core.finish(number)
    while core.ready() or any(each.reading for each in core.parts.values()):
        core.set_topic(cluster.topic())
        left = [each for each in core.parts.values() if each.reading]
        for each in left:
            read[each.part.number] = ends.setdefault(each.part.number, 0)
            if core.topic.lineage.parts[each.part.number].sealed:
                core.finish(each.part.number)
            else:
                each.reading, each.finished = False, True
    assert {number: end for number, end in ends.items() if end} == {number: end for number, end in read.items() if end}
