"""What a full collection has found alive is set aside, and what a map of members holds stays so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.process.collector import OLDEST, THRESHOLDS, Collector
from pixiu.ids import gateway_msg_id


@pytest.fixture
def collector() -> Iterator[Collector]:
    """One that sets aside after every full collection, of which there are those that a test asks for: one may have been due before.
    Afterwards all is as it was, but for what was set aside: to look at it again would take each later collection a second."""
    before = gc.get_threshold()
    gc.disable()
    found = Collector(set_aside_s=0.0)
    found.start()
    yield found
    found.stop()
    gc.set_threshold(*before)
    gc.enable()


class Held:
    """Something that the collector looks at."""


@pytest.mark.slow
def test_what_is_alive_after_a_full_collection_is_not_looked_at_again(collector: Collector) -> None:
    assert gc.get_threshold() == THRESHOLDS
    held = [Held() for _ in range(100)]
    gc.collect()
    assert (collector.full, collector.set_aside) == (1, 1)
    young = {id(each) for each in gc.get_objects()}
    assert not any(id(each) in young for each in held)
    collector.stop()
    gc.collect()
    assert collector.full == 1
    assert set(collector.samples()) == {"collections_full_total", "collections_set_aside_total", "collection_longest_seconds"}


@pytest.mark.slow
def test_a_circle_that_dies_before_a_full_collection_is_still_found(collector: Collector) -> None:
    gc.collect()
    one, other = Held(), Held()
    one.other, other.other = other, one  # type: ignore[attr-defined]
    del one, other
    assert gc.collect() >= 2


def test_a_map_of_members_does_not_come_back_to_the_young_ones_as_it_grows(collector: Collector) -> None:
    """The defect: a dict of plain tuples of numbers goes off the collector's list and comes back at each insertion, and all that it
    holds is looked at again."""
    store = LwwMap()
    for number in range(1, 300):
        store.apply([Update(gateway_msg_id(1, 1, number), number, 7, True)], 0.0)
    gc.collect()
    gc.collect(OLDEST)
    store.apply([Update(gateway_msg_id(1, 1, 300), 300, 7, True)], 0.0)
    assert not [each for each in gc.get_objects() if isinstance(each, dict) and each.get(299) == (1,)]
    assert store.gateways(300) == (1,)
    assert store.gateways(-1) == ()
