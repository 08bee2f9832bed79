"""The reducer alone: what takes a node out of a view, and what does not (docs/registry.md, static stability)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import (
    HOLD_S,
    MASS_WINDOW_S,
    Connected,
    Disconnected,
    Layout,
    PeerAlive,
    PeerDead,
    RoleLayout,
    Scan,
    Tick,
    View,
    ViewReducer,
)
from pixiu.ids import EndpointID
from pixiu.rpc.deadline_timer import NEVER
from tests.support.for_each import for_each


def node(number: int, role: str = "router", partition: int = 0, state: NodeState = NodeState.RUNNING, port: int = 0) -> Node:
    return Node(
        role=role,
        partition=partition,
        replica=number,
        state=state,
        host="10.0.0.1",
        port=port or 7000 + number,
        http_port=0,
        endpoint=EndpointID(1000 + number),
        incarnation=2000 + number,
        version="1",
        wire_hash="h",
        started_ms=number,
    )


def started(*nodes: Node, at: float = 0.0) -> ViewReducer:
    reducer = ViewReducer()
    reducer.step(Connected(), at)
    reducer.step(Scan(nodes), at)
    return reducer


TEN = tuple(node(number) for number in range(10))


def test_a_scan_gives_a_view_and_the_same_scan_gives_none() -> None:
    reducer = ViewReducer()
    reducer.step(Connected(), 0.0)
    view = reducer.step(Scan(TEN), 0.0)
    assert view is not None
    assert view.nodes == TEN
    assert reducer.step(Scan(tuple(reversed(TEN))), 1.0) is None
    assert reducer.view is view


def test_a_change_of_state_and_a_new_node_give_a_new_view() -> None:
    reducer = started(replace(TEN[0], state=NodeState.INIT))
    view = reducer.step(Scan(TEN[:1]), 1.0)
    assert view is not None
    assert view.running("router") == TEN[:1]
    view = reducer.step(Scan(TEN[:2]), 2.0)
    assert view is not None
    assert view.running("router") == TEN[:2]


def test_a_node_that_vanished_is_held_for_the_whole_time_with_a_live_connection() -> None:
    reducer = started(*TEN)
    assert reducer.step(Scan(TEN[1:]), 5.0) is None
    assert reducer.held == 1
    assert reducer.next_deadline() == 5.0 + HOLD_S
    assert reducer.step(Tick(), 5.0 + HOLD_S - 0.001) is None
    view = reducer.step(Tick(), 5.0 + HOLD_S)
    assert view is not None
    assert view.nodes == TEN[1:]
    assert reducer.next_deadline() == NEVER


def test_scans_that_miss_it_again_do_not_make_the_hold_longer() -> None:
    reducer = started(*TEN)
    for second in range(5, 65):
        assert reducer.step(Scan(TEN[1:]), float(second)) is None
    assert reducer.step(Scan(TEN[1:]), 5.0 + HOLD_S) is not None


def test_without_a_connection_the_hold_does_not_end_and_then_starts_anew() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(TEN[1:]), 5.0)
    reducer.step(Disconnected(), 10.0)
    assert reducer.next_deadline() == NEVER
    assert reducer.step(Tick(), 100_000.0) is None
    reducer.step(Connected(), 200_000.0)
    assert reducer.next_deadline() == 200_000.0 + HOLD_S
    assert reducer.step(Tick(), 200_000.0 + HOLD_S - 1) is None
    assert reducer.step(Tick(), 200_000.0 + HOLD_S) is not None


def test_connected_said_twice_does_not_start_the_hold_anew() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(TEN[1:]), 5.0)
    reducer.step(Connected(), 50.0)
    assert reducer.next_deadline() == 5.0 + HOLD_S


def test_an_outage_of_any_length_changes_nothing() -> None:
    reducer = started(*TEN)
    assert reducer.step(Disconnected(), 1.0) is None
    assert reducer.step(Tick(), 1e9) is None
    assert reducer.view.nodes == TEN


def test_the_same_endpoint_with_a_new_replica_and_incarnation_replaces_the_held_node() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(TEN[1:]), 5.0)
    again = replace(TEN[0], replica=77, incarnation=5)
    view = reducer.step(Scan((*TEN[1:], again)), 6.0)
    assert view is not None
    assert view.by_endpoint(TEN[0].endpoint) == again
    assert len(view.nodes) == 10
    assert reducer.held == 0
    assert reducer.next_deadline() == NEVER


def test_of_two_nodes_of_one_endpoint_the_later_one_counts_in_either_order() -> None:
    again = replace(TEN[0], replica=77, incarnation=5)
    for nodes in ((TEN[0], again), (again, TEN[0])):
        assert started(*nodes).view.nodes == (again,)


def test_another_endpoint_at_the_same_address_drops_the_held_node_at_once() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(TEN[1:]), 5.0)
    successor = node(50, port=TEN[0].port)
    view = reducer.step(Scan((*TEN[1:], successor)), 6.0)
    assert view is not None
    assert view.by_endpoint(TEN[0].endpoint) is None
    assert successor in view.nodes


def test_a_node_that_vanishes_while_another_took_its_address_is_never_held() -> None:
    reducer = started(*TEN)
    successor = node(50, port=TEN[0].port)
    view = reducer.step(Scan((*TEN[1:], successor)), 6.0)
    assert view is not None
    assert view.by_endpoint(TEN[0].endpoint) is None
    assert reducer.held == 0


def test_an_old_process_that_is_still_registered_goes_when_its_address_has_another() -> None:
    successor = node(50, port=TEN[0].port)
    assert set(started(*TEN, successor).view.nodes) == {*TEN[1:], successor}
    elsewhere = replace(node(0, "broker", port=TEN[5].port), endpoint=EndpointID(9), started_ms=10**9)
    assert elsewhere in started(*TEN, elsewhere).view.nodes
    assert TEN[5] not in started(*TEN, elsewhere).view.nodes


def test_nodes_without_a_port_share_no_address() -> None:
    nodes = tuple(replace(one, port=0) for one in TEN)
    assert started(*nodes).view.nodes == nodes


def test_a_draining_node_that_vanishes_is_dropped_at_once() -> None:
    reducer = started(*TEN[1:], replace(TEN[0], state=NodeState.DRAINING))
    view = reducer.step(Scan(TEN[1:]), 5.0)
    assert view is not None
    assert view.nodes == TEN[1:]


def test_heartbeats_drop_a_held_node_and_no_registered_one() -> None:
    reducer = started(*TEN)
    assert reducer.step(PeerDead(TEN[1].endpoint), 1.0) is None
    reducer.step(Scan((TEN[1], *TEN[2:])), 5.0)
    view = reducer.step(PeerDead(TEN[0].endpoint), 6.0)
    assert view is not None
    assert view.nodes == TEN[1:]


def test_a_node_that_was_said_dead_is_not_held_when_it_vanishes() -> None:
    reducer = started(*TEN)
    reducer.step(PeerDead(TEN[0].endpoint), 1.0)
    assert reducer.step(Scan(TEN[1:]), 10.0) is not None


@pytest.mark.parametrize("sign", ["alive", "written"])
def test_a_sign_of_life_takes_the_word_dead_back(sign: str) -> None:
    reducer = started(*TEN)
    reducer.step(PeerDead(TEN[0].endpoint), 1.0)
    if sign == "alive":
        reducer.step(PeerAlive(TEN[0].endpoint), 2.0)
    else:
        reducer.step(Scan((replace(TEN[0], replica=99, incarnation=1), *TEN[1:])), 2.0)
    assert reducer.step(Scan(TEN[1:]), 10.0) is None
    assert reducer.held == 1


def test_what_heartbeats_say_of_strangers_is_ignored() -> None:
    reducer = started(*TEN)
    assert reducer.step(PeerDead(EndpointID(5)), 1.0) is None
    assert reducer.step(PeerAlive(EndpointID(5)), 1.0) is None


def test_a_mass_disappearance_is_held_until_heartbeats_or_a_registration_say_otherwise() -> None:
    reducer = started(*TEN)
    assert reducer.step(Scan(TEN[6:]), 5.0) is None
    assert reducer.step(Tick(), 1e9) is None
    assert reducer.next_deadline() == NEVER
    view = reducer.step(PeerDead(TEN[0].endpoint), 1e9)
    assert view is not None
    assert view.nodes == TEN[1:]
    successor = node(50, port=TEN[1].port)
    view = reducer.step(Scan((*TEN[6:], successor)), 1e9)
    assert view is not None
    assert view.by_endpoint(TEN[1].endpoint) is None
    assert TEN[2] in view.nodes


def test_sessions_that_end_together_are_removed_over_some_seconds_and_still_count_as_one() -> None:
    reducer = started(*TEN, at=-100.0)
    for gone in range(1, 8):
        reducer.step(Scan(TEN[gone:]), gone * MASS_WINDOW_S / 10)
    assert reducer.step(Tick(), 1e9) is None
    assert reducer.view.nodes == TEN


def test_half_of_the_nodes_are_no_mass() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(TEN[5:]), 5.0)
    view = reducer.step(Tick(), 5.0 + HOLD_S)
    assert view is not None
    assert view.nodes == TEN[5:]


def test_two_nodes_are_no_mass_even_when_they_are_all() -> None:
    reducer = started(*TEN[:2])
    reducer.step(Scan(()), 5.0)
    view = reducer.step(Tick(), 5.0 + HOLD_S)
    assert view is not None
    assert view.nodes == ()


def test_newcomers_do_not_hide_a_mass_disappearance() -> None:
    reducer = started(*TEN)
    newcomers = tuple(node(number) for number in range(20, 40))
    reducer.step(Scan(newcomers), 5.0)
    assert reducer.step(Tick(), 1e9) is None
    assert set(reducer.view.nodes) == {*TEN, *newcomers}


def test_deaths_one_by_one_over_minutes_are_no_mass() -> None:
    reducer = started(*TEN)
    now = 0.0
    for gone in range(1, 10):
        now += HOLD_S / 2
        reducer.step(Scan(TEN[gone:]), now)
    view = reducer.step(Tick(), now + HOLD_S)
    assert view is not None
    assert view.nodes == TEN[9:]


def test_one_that_registered_anew_after_a_mass_disappearance_is_held_as_usual_the_next_time() -> None:
    reducer = started(*TEN)
    reducer.step(Scan(()), 5.0)
    reducer.step(Scan(TEN), 6.0)
    reducer.step(Scan(TEN[1:]), 100.0)
    assert reducer.next_deadline() == 100.0 + HOLD_S


def test_an_older_layout_is_ignored_and_a_missing_one_keeps_what_is_known() -> None:
    reducer = ViewReducer()
    newer = Layout(2, {"router": RoleLayout(2, 2, 1)})
    view = reducer.step(Scan((), newer), 0.0)
    assert view is not None
    assert view.layout == newer
    assert reducer.step(Scan((), Layout(1, {"router": RoleLayout(1, 1, 1)})), 1.0) is None
    assert reducer.step(Scan(()), 2.0) is None
    assert reducer.view.layout == newer
    newest = Layout(3, {"router": RoleLayout(2, 4, 1)})
    assert reducer.step(Scan((), newest), 3.0) == View(newest)


@for_each("seed", range(20))
def test_whatever_happens_a_registered_node_is_in_the_view_once_and_a_view_is_emitted_only_on_change(seed: int) -> None:
    chance = random.Random(seed)
    reducer = ViewReducer()
    now, last = 0.0, reducer.view
    registered: tuple[Node, ...] = ()
    for _ in range(300):
        now += chance.choice([0.1, 3.0, 40.0])
        kind = chance.randrange(6)
        if kind < 3:
            registered = tuple(one for one in TEN if chance.random() < 0.7)
            view = reducer.step(Scan(registered), now)
        elif kind == 3:
            view = reducer.step(PeerDead(chance.choice(TEN).endpoint), now)
        elif kind == 4:
            view = reducer.step(Connected() if chance.random() < 0.5 else Disconnected(), now)
        else:
            view = reducer.step(Tick(), now)
        assert (view is None) == (reducer.view == last), f"seed {seed}"
        last = reducer.view
        endpoints = [one.endpoint for one in last.nodes]
        assert len(set(endpoints)) == len(endpoints), f"seed {seed}"
        assert set(registered) <= set(last.nodes), f"seed {seed}"
        assert len(last.nodes) == len(registered) + reducer.held, f"seed {seed}"


def roles(n: int, following: int = 0, *doublings: str) -> dict[str, RoleLayout]:
    return {"router": RoleLayout(n, following or n, 1, doublings), "broker": RoleLayout(2, 2, 1)}


def test_a_layout_that_doublings_made_is_taken() -> None:
    reducer = ViewReducer()
    for version, wanted in enumerate([roles(2), roles(2, 4, "a" * 16), roles(4, 4, "a" * 16), roles(8, 8, "a" * 16, "b" * 16)], 1):
        view = reducer.step(Scan((), Layout(version, wanted)), 0.0)
        assert view is not None
        assert view.layout.roles == wanted
        assert not reducer.refused


@pytest.mark.parametrize("by_hand", [roles(4), roles(1), {"broker": RoleLayout(2, 2, 1)}])
def test_a_number_that_was_written_by_hand_is_refused_for_that_role_until_it_is_put_right(by_hand: dict[str, RoleLayout]) -> None:
    reducer = ViewReducer()
    reducer.step(Scan((), Layout(1, roles(2))), 0.0)
    view = reducer.step(Scan((), Layout(2, {**by_hand, "broker": RoleLayout(2, 2, 7)})), 1.0)
    assert view is not None
    assert view.layout.version == 2
    assert view.layout.roles["router"] == roles(2)["router"]
    assert view.layout.roles["broker"].replicas == 7
    assert list(reducer.refused) == ["router"]
    assert "Write 2 back" in reducer.refused["router"]
    assert reducer.step(Scan((), Layout(2, {**by_hand, "broker": RoleLayout(2, 2, 7)})), 2.0) is None
    assert list(reducer.refused) == ["router"]
    reducer.step(Scan((), Layout(3, roles(2))), 3.0)
    assert not reducer.refused


def test_a_role_with_groups_gets_any_number_of_further_ones_and_never_fewer() -> None:
    reducer = ViewReducer()
    for version, n in enumerate([1, 2, 3, 7], 1):
        view = reducer.step(Scan((), Layout(version, {"topic": RoleLayout(n, n, 2)})), 0.0)
        assert view is not None
        assert (view.layout.roles["topic"].n, reducer.refused) == (n, {})
    reducer.step(Scan((), Layout(5, {"topic": RoleLayout(6, 6, 2)})), 1.0)
    assert reducer.view.layout.roles["topic"].n == 7
    assert "topic has 6 group(s)" in reducer.refused["topic"]
    assert "Write 7 back; groups are added, never taken away" in reducer.refused["topic"]
