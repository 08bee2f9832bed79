"""The core of a channel's member: what counts, what is void, and what is reported together."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest

from pixiu.client.options import ClientOptions
from pixiu.client.topics.reading.member_core import (
    MAX_REJECTED,
    REJOIN_S,
    REJOIN_SOON_S,
    AskTopic,
    CloseMember,
    Effect,
    MemberCore,
    OpenMember,
    Outcomes,
    Place,
    Report,
    Reportable,
    ranges_of,
)
from pixiu.errors import Overloaded, Refusal
from pixiu.placement.slots import SLOTS, Range
from tests.pixiu.client.topics.groups import Cluster


def joined(cluster: Cluster, credit: int = 10) -> tuple[MemberCore, list[int]]:
    """A member, and its streams."""
    core = MemberCore(ClientOptions(), cluster.topic(), credit, lambda: 0.5)
    streams = [each.stream for each in core.begin(0.0) if isinstance(each, OpenMember)]
    for stream in streams:
        core.answered(stream)
    return core, streams


def reports(core: MemberCore, stream: int, now: float = 0.0) -> list[Report]:
    found = core.next_report(stream, now)
    return [] if found is None else found[1]


def outcomes(effects: list[Effect]) -> dict[int, bool]:
    return {place.offset: counts for each in effects if isinstance(each, Outcomes) for place, counts in each.found}


def test_it_joins_each_group_and_shares_its_credit() -> None:
    core = MemberCore(ClientOptions(), Cluster(4, 2).topic(), 11, lambda: 0.5)
    assert core.begin(0.0) == [OpenMember("g0a", 1, 6), OpenMember("g1a", 2, 6)]


def test_acknowledgements_of_a_turn_are_one_report_of_ranges() -> None:
    core, (stream,) = joined(Cluster(1, 1))
    assert core.delivered(stream, 1, 10, 8, 0)
    assert core.acknowledge(Place(stream, 1, 12)) == [Reportable(stream)]
    assert core.acknowledge_all(Place(stream, 1, offset) for offset in (10, 11, 12, 15)) == [Reportable(stream)]
    assert core.counters.void == 1
    core.counters.void = 0
    core.refuse(Place(stream, 1, 13), 500)
    core.touch(Place(stream, 1, 14))
    (report,) = reports(core, stream)
    assert (report.acknowledged, report.refused, report.touched) == ([10, 13, 15, 16], [13, 500], [14])
    effects = core.reported(stream, report.request, 1, [10, 12], [13], None, 0.0)
    assert outcomes(effects) == {10: True, 11: True, 12: False, 13: True, 15: False}
    assert core.idle()
    assert (core.counters.acknowledged, core.counters.refused, core.counters.void) == (2, 1, 2)


def test_rejected_messages_are_reported_with_their_reasons_in_reports_of_a_bounded_size() -> None:
    core, (stream,) = joined(Cluster(1, 1))
    core.delivered(stream, 1, 0, MAX_REJECTED + 2, 0)
    for offset in range(MAX_REJECTED + 1):
        core.refuse(Place(stream, 1, offset), f"too large: {offset}")
    core.refuse(Place(stream, 1, MAX_REJECTED + 1), 7)
    first, second = reports(core, stream)
    assert (len(first.rejected), first.rejected[3], first.refused) == (MAX_REJECTED, (3, "too large: 3"), [MAX_REJECTED + 1, 7])
    assert (second.rejected, second.refused) == ([(MAX_REJECTED, f"too large: {MAX_REJECTED}")], [])
    effects = core.reported(stream, second.request, 1, [], [MAX_REJECTED], None, 0.0)
    assert outcomes(effects) == {MAX_REJECTED: True}


def test_a_message_is_reported_once() -> None:
    core, (stream,) = joined(Cluster(1, 1))
    core.delivered(stream, 1, 0, 1, 0)
    assert core.acknowledge(Place(stream, 1, 0)) is not None
    assert core.acknowledge(Place(stream, 1, 0)) is None
    assert core.refuse(Place(stream, 1, 0), 0) is None


def test_what_a_dead_stream_delivered_is_void_also_after_it_came_again() -> None:
    core, (stream,) = joined(Cluster(1, 1))
    core.delivered(stream, 1, 0, 3, 0)
    core.acknowledge(Place(stream, 1, 0))
    (report,) = reports(core, stream)
    core.acknowledge(Place(stream, 1, 1))
    effects = core.stream_died(stream, 0.0, "g0b")
    assert outcomes(effects) == {0: False, 1: False}
    (again,) = [each for each in effects if isinstance(each, OpenMember)]
    assert again.address == "g0b"
    core.answered(again.stream)
    core.delivered(again.stream, 1, 0, 3, 3)
    assert core.acknowledge(Place(stream, 1, 2)) is None
    assert core.reported(stream, report.request, 1, [0, 1], [], None, 0.0) == []
    assert core.acknowledge(Place(again.stream, 1, 2)) is not None


def test_a_report_that_is_refused_for_now_is_made_again() -> None:
    core, (stream,) = joined(Cluster(1, 1))
    core.delivered(stream, 1, 0, 2, 0)
    core.acknowledge(Place(stream, 1, 0))
    core.refuse(Place(stream, 1, 1), 7)
    (report,) = reports(core, stream)
    assert core.reported(stream, report.request, 1, [], [], Refusal(Overloaded.code, "", 1000), 0.0) == []
    assert reports(core, stream, 0.9) == []
    assert core.next_deadline() == 1.0
    assert core.tick(1.0) == [Reportable(stream)]
    (again,) = reports(core, stream, 1.0)
    assert (again.acknowledged, again.refused) == (report.acknowledged, report.refused)


def test_it_joins_the_groups_of_new_parts_and_leaves_those_that_are_finished() -> None:
    cluster = Cluster(1, 2)
    core, (stream,) = joined(cluster)
    cluster.resize([1], [Range(0, SLOTS, 1)])
    effects = core.set_topic(cluster.topic(), 0.0)
    (joining,) = [each for each in effects if isinstance(each, OpenMember)]
    assert joining.address == "g1a"
    core.delivered(stream, 1, 0, 1, 0)
    effects = core.finished([1], 0.0)
    assert AskTopic() in effects
    assert CloseMember(stream) not in effects  # a message of it is not reported yet
    core.acknowledge(Place(stream, 1, 0))
    (report,) = reports(core, stream)
    core.reported(stream, report.request, 1, [0, 1], [], None, 0.0)
    assert CloseMember(stream) in core.set_topic(cluster.topic(), 0.0)


def test_it_comes_back_to_a_group_that_it_left_when_a_seek_went_back_into_a_sealed_part() -> None:
    cluster = Cluster(1, 2)
    core, (stream,) = joined(cluster)
    cluster.resize([1], [Range(0, SLOTS, 1)])
    core.set_topic(cluster.topic(), 0.0)
    assert CloseMember(stream) in core.finished([1], 0.0)
    (again,) = [each for each in core.tick(core.next_deadline()) if isinstance(each, OpenMember)]
    assert again.address == "g0a"
    core.answered(again.stream)
    assert CloseMember(again.stream) in core.finished([1], 100.0)  # no seek yet: it leaves at once
    assert 100.0 < core.next_deadline() <= 100.0 + 1.25 * REJOIN_S
    (again,) = [each for each in core.tick(core.next_deadline()) if isinstance(each, OpenMember)]
    core.answered(again.stream)
    assert core.delivered(again.stream, 1, 0, 1, 1)
    assert core.acknowledge(Place(again.stream, 1, 0)) == [Reportable(again.stream)]


def test_it_comes_back_soon_when_a_leader_says_that_the_channel_was_moved() -> None:
    cluster = Cluster(1, 2)
    core, (stream,) = joined(cluster)
    cluster.resize([1], [Range(0, SLOTS, 1)])
    core.set_topic(cluster.topic(), 0.0)
    core.finished([1], 0.0)
    core.rejoin(5.0)
    assert 5.0 <= core.next_deadline() <= 5.0 + REJOIN_SOON_S
    (again,) = [each for each in core.tick(core.next_deadline()) if isinstance(each, OpenMember)]
    assert (again.address, again.stream != stream) == ("g0a", True)


def test_a_part_whose_messages_come_again_is_not_finished() -> None:
    cluster = Cluster(2, 1)
    core, (stream,) = joined(cluster)
    cluster.resize([1], [Range(0, SLOTS // 2, 0)])
    core.set_topic(cluster.topic(), 0.0)
    core.finished([1], 0.0)
    core.delivered(stream, 1, 0, 1, 1)
    core.stream_died(stream, 1.0, "g0b")
    cluster.groups = 2
    cluster.resize([2, 3], [Range(0, SLOTS, 1)])
    core.set_topic(cluster.topic(), 1.0)
    assert not [each for each in core.finished([2, 3], 1.0) if isinstance(each, CloseMember)]


@pytest.mark.parametrize("seed", range(5))
def test_ranges_have_each_offset_once(seed: int) -> None:
    rng = random.Random(seed)
    offsets = {rng.randrange(100) for _ in range(rng.randint(0, 80))}
    bounds = ranges_of(offsets)
    pairs = list(zip(bounds[::2], bounds[1::2], strict=True))
    assert {offset for low, high in pairs for offset in range(low, high)} == offsets
    assert all(high < low for (_, high), (low, _) in pairwise(pairs))


def test_a_part_that_is_finished_before_its_seal_is_known_keeps_its_group_joined() -> None:
    cluster = Cluster(1, 1)
    core, (stream,) = joined(cluster)
    assert core.finished([1], 0.0) == [AskTopic(newer=True)]
    cluster.resize([1], [Range(0, SLOTS, 0)])
    assert core.set_topic(cluster.topic(), 0.0) == []
    assert core.delivered(stream, 2, 0, 1, 0)


def test_a_member_without_credit_joins_nothing_and_one_that_pauses_keeps_what_it_has() -> None:
    core = MemberCore(ClientOptions(), Cluster(1, 1).topic(), 0, lambda: 0.5)
    assert core.begin(0.0) == []
    assert core.next_deadline() == inf
    assert core.set_credit(4, 1.0) == [OpenMember("g0a", 1, 4)]
    core.answered(1)
    assert core.next_report(1, 1.0) is None
    core.delivered(1, 1, 0, 2, 0)
    assert core.set_credit(0, 2.0) == [Reportable(1)]
    assert core.next_report(1, 2.0) == (0, [])
    assert core.acknowledge(Place(1, 1, 0)) == [Reportable(1)]
    assert core.next_report(1, 2.0) == (None, [Report(2, 1, [0, 1], [], [], [])])
    assert core.stream_died(1, 3.0) == [Outcomes([(Place(1, 1, 0), False)]), AskTopic()]
    assert core.next_deadline() == inf
    assert [type(each) for each in core.set_credit(1, 9.0)] == [OpenMember]
