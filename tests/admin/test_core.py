"""The admin's core in single cases."""

from __future__ import annotations

import re

import pytest

from admin import events as ev
from admin import steps
from admin.core import Core
from admin.steps import Done
from admin.tracked import MAX_ASKED
from cluster.core.contract import TICK
from cluster.replication.replica import MAX_ENTRY_BYTES
from cluster.topics import entries as en
from pixiu.discovery.topics import Numbers, PartState, TopicChannel, TopicNode, TopicPart
from pixiu.placement.slots import SLOTS
from tests.admin.world import WALL_MS


def elected(*nodes: TopicNode, groups: int = 1, moves_per_hour: int = 0) -> tuple[Core, list[ev.Effect]]:
    """A core that leads in a cluster with these topics."""
    core = Core(moves_per_hour)
    core.step(ev.GroupsChanged(range(groups), range(groups)), 0.0)
    topics = {node.name: (0, node) for node in nodes}
    return core, core.step(ev.Elected(1, WALL_MS, Numbers(len(nodes) + 1, 0), topics), 0.0)


def loaded(core: Core, now: float, cpus: dict[int, float], rates: dict[int, float]) -> list[ev.Effect]:
    """Groups report their load; rates: number of a part of the first topic → bytes a second."""
    found: list[ev.Effect] = []
    nodes = list(core.nodes())
    for group, cpu in cpus.items():
        parts = {
            en.part_id(node.topic, each.number): ev.Load(each.state is PartState.SEALED, 0, 9, 0, rates.get(each.number, 0.0))
            for node in nodes
            for each in node.parts
            if each.group == group
        }
        found += core.step(ev.LoadRead(group, parts, cpu), now)
    return found


def halves() -> TopicNode:
    return TopicNode("orders", 1, 1, (part(1, 0, 100), part(2, 100, SLOTS)), settled=1)


def part(number: int, low: int = 0, high: int = SLOTS, group: int = 0) -> TopicPart:
    return TopicPart(number, low, high, group, PartState.OPEN)


def test_a_group_that_is_asked_for_enough_is_no_reason_to_wake_up() -> None:
    nodes = [TopicNode(f"t{number}", number, 2, (part(1),), settled=1) for number in range(1, 2 * MAX_ASKED)]
    core, out = elected(*nodes)
    first, *_ = (each for each in out if isinstance(each, ev.Append))
    core.step(TICK, 1.0)
    core.step(ev.Appended(first.token, failure="no answer"), 1.0)
    now = core.next_deadline()
    core.step(TICK, now)
    assert core.next_deadline() > now


def test_a_purge_that_is_being_written_is_no_reason_to_wake_up() -> None:
    node = TopicNode("gone", 1, 2, (part(1),), deleted_at_ms=WALL_MS - 1, purge_at_ms=WALL_MS + 1_000, settled=2)
    core, _ = elected(node)
    assert core.next_deadline() <= 1.0
    core.step(TICK, 0.0)
    assert any(isinstance(each, ev.WriteTopic) for each in core.step(TICK, 1.0))
    assert core.next_deadline() > 1.0


def test_a_change_is_refused_if_its_end_would_not_fit_into_the_registry() -> None:
    """What is sealed takes more bytes than what is to be sealed."""
    count, groups = 6_800, 20
    bounds = [SLOTS * at // count for at in range(count + 1)]
    parts = tuple(part(at + 1, bounds[at], bounds[at + 1], at % groups) for at in range(count))
    core, _ = elected(TopicNode("large", 1, 1, parts, settled=1), groups=groups)
    out = core.step(ev.ChangeRequested(1, "large", ev.Resize(tuple(range(1, 3_001)))), 1.0)
    (answer,) = (each for each in out if isinstance(each, ev.Answer))
    assert answer.refusal is not None
    assert "bytes in the registry" in answer.refusal.text


def test_any_number_of_writers_is_inherited_by_entries_that_the_log_takes() -> None:
    most = (1 << 64) - 1
    seals = [[en.KnownWriter((1 << 32) - at, most - writer, most >> 1, most) for writer in range(10_000)] for at in range(1, 6)]
    parents = tuple(TopicPart(at + 1, 0, 1, 0, PartState.SEALING) for at in range(5))
    child = TopicPart(6, 0, SLOTS, 0, PartState.OPENING, (1, 2, 3, 4, 5))
    node = TopicNode("merged", 1, 1, (*parents, child))
    done = {(en.SEAL, at + 1, 0): Done(1, writers) for at, writers in enumerate(seals)} | {(en.TOPIC, 0, 0): Done(1)}
    found, more = list[en.KnownWriter](), [True]
    while more[-1]:
        (step,) = steps.ready(node, done)
        assert len(step.payload) < MAX_ENTRY_BYTES - (512 << 10)  # a topic's channels take less than its node may have
        en.check(step.kind, step.payload)
        opening = en.Opening.decode(step.payload)
        found += opening.writers
        more.append(opening.more)
        done[step.key] = Done(1)
    assert more == [True, True, True, False]
    assert [tuple(each) for each in found] == sorted(tuple(each) for seal in seals for each in seal)
    assert not list(steps.ready(node, done))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (ev.SetChannel("any", ordered=True), "cannot become ordered"),
        (ev.SetChannel("any", from_end=True), "pixiu topic seek orders any --to end"),
        (ev.SetChannel("ordered", max_attempts=3), ""),
        (ev.SetChannel("ordered", ordered=True, from_end=True), ""),
    ],
)
def test_what_only_a_new_channel_gets_is_refused_for_one_that_is_there(asked: ev.SetChannel, text: str) -> None:
    channels = (TopicChannel(1, "any", max_attempts=1, timeout_ms=9_000), TopicChannel(2, "ordered", True, True, 1, 9_000))
    core, _ = elected(TopicNode("orders", 1, 2, (part(1),), channels, settled=2))
    out = core.step(ev.ChangeRequested(1, "orders", asked), 1.0)
    refused = [each.refusal.text for each in out if isinstance(each, ev.Answer) and each.refusal is not None]
    assert [text in each for each in refused] == ([True] if text else [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (ev.RestoreTopic(), "topic orders is not deleted: there is nothing to restore, and nothing was changed"),
        (ev.Resize((1,), (50,)), "part 1 of topic orders is sealed; .*; its slots went to 2, 3$"),
        (ev.AlterTopic(store="foo://bar"), "the protocol foo, which fsspec does not know"),
    ],
)
def test_a_refusal_says_what_is_there(change: ev.Change, text: str) -> None:
    sealed = TopicPart(1, 0, SLOTS, 0, PartState.SEALED)
    children = [TopicPart(2, 0, 100, 0, PartState.OPEN, (1,)), TopicPart(3, 100, SLOTS, 0, PartState.OPEN, (1,))]
    core, _ = elected(TopicNode("orders", 1, 2, (sealed, *children), settled=2))
    out = core.step(ev.ChangeRequested(1, "orders", change), 1.0)
    (refusal,) = [each.refusal for each in out if isinstance(each, ev.Answer)]
    assert refusal is not None
    assert re.search(text, refusal.text)


def test_a_plan_waits_for_all_groups_and_moves_nothing() -> None:
    core, _ = elected(halves(), groups=2)
    assert core.step(ev.PlanRequested(7), 1.0) == [ev.AskLoad(0), ev.AskLoad(1)]
    assert not loaded(core, 1.1, {0: 0.5}, {1: 1e6, 2: 1e6})
    (planned,) = loaded(core, 1.2, {1: 0.0}, {})
    assert isinstance(planned, ev.Planned)
    assert [(move.topic, move.part, move.source, move.target) for move in planned.moves] == [("orders", 2, 0, 1)]
    assert [(group.group, group.parts, round(group.load), round(group.after)) for group in planned.groups] == [
        (0, 2, 502, 251), (1, 0, 0, 251),
    ]  # fmt: skip


def test_a_plan_leaves_groups_out_that_do_not_answer() -> None:
    core, _ = elected(halves(), groups=3)
    core.step(ev.PlanRequested(7), 1.0)
    core.step(ev.PlanRequested(8, drain=2), 1.0)
    core.step(ev.LoadRead(2, None), 1.1)
    planned, refused = loaded(core, 1.2, {0: 0.5, 1: 0.0}, {})
    assert isinstance(planned, ev.Planned)
    assert isinstance(refused, ev.Planned)
    assert [group.group for group in planned.groups] == [0, 1]
    assert refused.refusal is not None
    assert "group 2 does not answer" in refused.refusal.text
    core.step(ev.PlanRequested(9), 2.0)
    (gone,) = (each for each in core.step(ev.Deposed(), 2.0) if isinstance(each, ev.Planned))
    assert gone.refusal is not None
    assert gone.refusal.code == "NOT_LEADER"


def test_the_admin_moves_a_part_by_load_and_then_lets_both_groups_rest() -> None:
    core, _ = elected(halves(), groups=2, moves_per_hour=60)
    rates = {1: 1e6, 2: 1e6, 3: 1e6}
    assert not loaded(core, 1.0, {0: 0.9, 1: 0.0}, rates)  # it knows nothing of the moves of its predecessor
    (write,) = loaded(core, 1_000.0, {0: 0.9, 1: 0.0}, rates)
    assert isinstance(write, ev.WriteTopic)
    assert write.node is not None
    assert [(each.number, each.group, each.state) for each in write.node.parts] == [
        (1, 0, PartState.OPEN), (2, 0, PartState.SEALING), (3, 1, PartState.OPENING),
    ]  # fmt: skip
    parts = (part(1, 0, 100), TopicPart(2, 100, SLOTS, 0, PartState.SEALED), TopicPart(3, 100, SLOTS, 1, PartState.OPEN, (2,)))
    core.step(ev.Written(write.token, 1, TopicNode("orders", 1, 3, parts, settled=3)), 1_000.0)
    assert not loaded(core, 1_100.0, {0: 0.0, 1: 0.9}, rates)
    assert core.counters.moves == 1


def test_an_admin_that_is_not_asked_to_moves_nothing() -> None:
    core, _ = elected(halves(), groups=2)
    assert not loaded(core, 1_000.0, {0: 0.9, 1: 0.0}, {1: 1e6, 2: 1e6})
