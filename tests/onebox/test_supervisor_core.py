"""What `pixiu up` decides: starts, back-off, giving up, the order of the end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.grouping import Grouping, ProcessSpec, wanted_processes
from onebox.supervisor import (
    FIRST_TRIES,
    MAX_BACKOFF_S,
    SLOW_START_S,
    START_SLOTS,
    STEADY_S,
    Effect,
    Fail,
    Kill,
    ProcessState,
    Start,
    SupervisorCore,
    Terminate,
)
from onebox.up import UpOptions
from pixiu.discovery.paths import DRAIN_ORDER, START_ORDER
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.rpc.deadline_timer import NEVER
from tests.support.effort import runs


def specs() -> list[ProcessSpec]:
    return wanted_processes({"proxy": (1, 1), "gateway": (1, 1), "broker": (2, 1), "router": (1, 1)})


def all_up(core: SupervisorCore, now: float = 0.0) -> None:
    todo: list[Effect] = core.tick(now)
    while todo:
        effect = todo.pop()
        assert isinstance(effect, Start)
        todo += core.running(effect.name, now)
    assert core.all_running


def separate(**numbers: int) -> UpOptions:
    return UpOptions.of(Grouping.SEPARATE, numbers)


def test_a_cluster_of_separate_roles_has_twenty_four_processes_in_the_order_of_their_start() -> None:
    names = [spec.name for spec in separate().specs()]
    assert names == [
        *("xiu-0-0", "xiu-0-1", "pi-0-0", "pi-0-1", "topic-0-0", "topic-0-1"),
        *(f"{role}-{partition}-{number}" for role in ("router", "relay", "broker") for number in (0, 1) for partition in (0, 1)),
        *("admin-0", "admin-1", "proxy-0", "proxy-1", "gateway-0", "gateway-1"),
    ]
    assert [name for name in names if "relay" not in name] == [spec.name for spec in separate(relays=0).specs()]


def test_a_few_start_at_once_and_each_that_runs_makes_room_for_the_next() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    first = core.tick(0.0)
    assert first == [Start("router-0-0"), Start("broker-0-0"), Start("broker-1-0"), Start("proxy-0")][:START_SLOTS]
    assert core.tick(0.1) == []
    assert core.running("broker-0-0", 0.5) == [Start("gateway-0")]


def test_one_that_never_gets_ready_holds_up_the_others_only_for_a_while() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    core.tick(0.0)
    assert core.next_deadline() == SLOW_START_S
    assert core.tick(SLOW_START_S) == [Start("gateway-0")]


def test_a_crashed_process_comes_back_after_a_back_off_that_doubles_to_its_limit() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    now, waits = 1.0, []
    for _ in range(9):
        assert core.exited("proxy-0", -9, now) == []
        deadline = core.next_deadline()
        waits.append(round(deadline - now, 6))
        assert core.tick(deadline - 0.001) == []
        assert core.tick(deadline) == [Start("proxy-0")]
        core.running("proxy-0", deadline)
        now = deadline + 1
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert core.processes["proxy-0"].restarts == 9


def test_the_back_off_is_shortened_by_chance_by_up_to_a_half() -> None:
    core = SupervisorCore(specs(), lambda: 0.999)
    all_up(core)
    core.exited("proxy-0", 1, 10.0)
    assert core.next_deadline() == pytest.approx(10.1, abs=0.001)


def test_a_steady_time_starts_the_back_off_anew() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    for now in (1.0, 2.0, 3.0):
        core.exited("proxy-0", 1, now)
        core.tick(now + 0.9)
        core.running("proxy-0", now + 0.9)
    core.exited("proxy-0", 1, 4.0 + STEADY_S)
    assert core.next_deadline() == pytest.approx(4.2 + STEADY_S)


def test_a_wrong_option_fails_the_start_at_once() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    core.tick(0.0)
    assert core.exited("router-0-0", 2, 0.5) == [Fail("router-0-0", 2)]


def test_a_process_that_was_never_running_fails_the_start_after_its_tries() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    core.tick(0.0)
    for name in ("broker-0-0", "broker-1-0", "proxy-0", "gateway-0"):
        core.running(name, 0.1)
    now = 0.5
    for _ in range(FIRST_TRIES - 1):
        assert Fail("router-0-0", 1) not in core.exited("router-0-0", 1, now)
        now += 5
        core.tick(now)
    assert core.exited("router-0-0", 1, now) == [Fail("router-0-0", 1)]


def test_one_that_ran_before_is_started_again_whatever_its_code() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    for turn in range(10):
        assert core.exited("broker-0-0", 2, turn * 20.0) == []
        assert core.tick(turn * 20.0 + 15) == [Start("broker-0-0")]


def test_all_end_in_order_gateways_proxies_brokers_relays_routers() -> None:
    relay = wanted_processes({"relay": (1, 1)})
    core = SupervisorCore([*specs(), *relay], lambda: 0.0)
    all_up(core)
    assert core.stop(1.0) == [Terminate("gateway-0")]
    assert core.stop(1.1) == []
    assert core.exited("gateway-0", 0, 2.0) == [Terminate("proxy-0")]
    assert core.exited("proxy-0", 0, 3.0) == [Terminate("broker-0-0"), Terminate("broker-1-0")]
    assert core.exited("broker-1-0", 0, 4.0) == []
    assert core.exited("broker-0-0", 0, 4.0) == [Terminate("relay-0-0")]
    assert core.exited("relay-0-0", 0, 4.5) == [Terminate("router-0-0")]
    assert not core.all_stopped
    assert core.exited("router-0-0", 0, 5.0) == []
    assert core.all_stopped
    assert core.next_deadline() == NEVER


def test_one_that_does_not_end_is_killed_after_its_grace() -> None:
    core = SupervisorCore(specs(), lambda: 0.0, grace_s=5.0)
    all_up(core)
    core.stop(1.0)
    assert core.next_deadline() == 6.0
    assert core.tick(5.9) == []
    assert core.tick(6.0) == [Kill("gateway-0")]
    assert core.tick(6.1) == []
    assert core.exited("gateway-0", -9, 6.2) == [Terminate("proxy-0")]


def test_a_second_interrupt_kills_everything_at_once() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    core.stop(1.0)
    killed = core.kill(1.5)
    assert {effect.name for effect in killed} == set(core.processes)
    assert all(isinstance(effect, Kill) for effect in killed)
    for name in core.processes:
        core.exited(name, -9, 2.0)
    assert core.all_stopped


def test_an_end_during_the_start_starts_nothing_more() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    core.tick(0.0)
    core.exited("proxy-0", 1, 0.1)
    effects = core.stop(0.2)
    while effects:
        assert not any(isinstance(effect, Start) for effect in effects)
        effects = [later for effect in effects for later in core.exited(effect.name, -15, 0.3)]
    assert core.all_stopped


@given(st.integers(0, 1 << 32))
@settings(max_examples=runs("PIXIU_EXAMPLES", local=25, ci=100), deadline=None)
def test_whatever_happens_all_come_up_again_and_all_end(seed: int) -> None:
    chance = random.Random(seed)
    core, now = SupervisorCore(specs(), chance.random), 0.0
    alive: set[str] = set()

    def apply(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                assert effect.name not in alive
                alive.add(effect.name)
            else:
                assert not isinstance(effect, Fail)
                assert effect.name in alive

    apply(core.tick(now))
    while not core.all_running:
        now += 0.1
        for name in sorted(alive):
            apply(core.running(name, now))
    for _ in range(200):
        now += chance.random()
        apply(core.tick(now))
        if alive:
            name = chance.choice(sorted(alive))
            if chance.random() < 0.5:
                alive.discard(name)
                apply(core.exited(name, -9, now))
            else:
                apply(core.running(name, now))
    for _ in range(100):
        now += 5
        apply(core.tick(now))
        for name in sorted(alive):
            apply(core.running(name, now))
    assert core.all_running
    apply(core.stop(now))
    while alive:
        now += 0.1
        name = chance.choice(sorted(name for name in alive if core.processes[name].state is ProcessState.STOPPING))
        alive.discard(name)
        apply(core.exited(name, 0, now))
    assert core.all_stopped


def test_stores_start_first_and_end_last() -> None:
    names = [spec.name for spec in separate(xius=0, pis=2, pi_replicas=2).specs()]
    assert names[:4] == ["pi-0-0", "pi-1-0", "pi-0-1", "pi-1-1"]
    assert UpOptions(pis=2).layout()["pi"].n == 2
    assert START_ORDER[:3] == DRAIN_ORDER[:-4:-1] == ("xiu", "pi", "topic")


def brokers(core: SupervisorCore) -> list[str]:
    return [name for name in core.processes if name.startswith("broker")]


def test_more_wanted_replicas_start_and_fewer_end_the_last_ones() -> None:
    core = SupervisorCore(specs(), lambda: 0.0, grace_s=10.0)
    all_up(core)
    assert core.set_replicas("broker", 2, 1.0) == [Start("broker-0-1"), Start("broker-1-1")]
    assert not core.all_running
    core.running("broker-0-1", 2.0)
    core.running("broker-1-1", 2.0)
    assert core.all_running
    assert core.set_replicas("broker", 2, 3.0) == []
    assert core.set_replicas("broker", 1, 4.0) == [Terminate("broker-0-1"), Terminate("broker-1-1")]
    assert core.exited("broker-0-1", 0, 5.0) == []
    assert brokers(core) == ["broker-0-0", "broker-1-0", "broker-1-1"]
    assert core.next_deadline() == 14.0
    assert core.tick(13.9) == []
    assert core.tick(14.0) == [Kill("broker-1-1")]
    core.exited("broker-1-1", -9, 14.1)
    assert brokers(core) == ["broker-0-0", "broker-1-0"]
    assert core.all_running
    assert core.next_deadline() == NEVER


def test_one_that_ends_and_is_wanted_again_is_started_anew() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    core.set_replicas("gateway", 2, 1.0)
    core.running("gateway-1", 1.5)
    assert core.set_replicas("gateway", 1, 2.0) == [Terminate("gateway-1")]
    assert core.set_replicas("gateway", 2, 3.0) == []
    assert core.exited("gateway-1", 0, 4.0) == [Start("gateway-1")]
    assert core.running("gateway-1", 5.0) == []
    assert core.all_running


def test_one_that_rests_is_forgotten_at_once_when_it_is_no_longer_wanted() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    core.set_replicas("gateway", 2, 1.0)
    core.running("gateway-1", 1.5)
    core.exited("gateway-1", 1, 2.0)
    assert core.set_replicas("gateway", 1, 2.0) == []
    assert core.all_running
    assert core.tick(1000.0) == []


def test_a_new_replica_that_fails_is_tried_again_and_does_not_end_a_cluster_that_runs() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    core.set_replicas("gateway", 2, 1.0)
    now = 1.0
    for _ in range(2 * FIRST_TRIES):
        assert core.exited("gateway-1", 2, now) == []
        now = core.next_deadline()
        assert core.tick(now) == [Start("gateway-1")]


def test_a_cluster_that_ends_starts_no_replicas() -> None:
    core = SupervisorCore(specs(), lambda: 0.0)
    all_up(core)
    core.stop(1.0)
    assert core.set_replicas("broker", 5, 2.0) == []
    assert brokers(core) == ["broker-0-0", "broker-1-0"]


def test_partitions_that_a_doubling_adds_start_and_end_when_it_is_taken_back() -> None:
    core = SupervisorCore(specs(), lambda: 0.0, grace_s=5.0)
    all_up(core)
    assert core.set_replicas("broker", 1, 1.0, 4) == [Start("broker-2-0"), Start("broker-3-0")]
    assert core.set_replicas("broker", 1, 1.1, 4) == []
    core.running("broker-2-0", 2.0)
    assert core.set_replicas("broker", 1, 30.0, 2) == [Terminate("broker-2-0"), Terminate("broker-3-0")]
    assert core.exited("broker-2-0", 0, 31.0) == []
    assert core.tick(35.0) == [Kill("broker-3-0")]
    core.exited("broker-3-0", -9, 35.1)
    assert brokers(core) == ["broker-0-0", "broker-1-0"]
    assert core.all_running


def test_a_cluster_runs_as_many_partitions_as_its_layout_has_and_those_that_are_coming() -> None:
    options = separate(pis=0, topics=0)
    layout = Layout(3, {**options.layout(), "router": RoleLayout(4, 4, 2, ("a" * 16,)), "broker": RoleLayout(2, 4, 2, ("b" * 16,))})
    counts = Counter(entry.role for spec in options.grown(layout) for entry in spec.entries)
    assert counts == {"xiu": 2, "router": 8, "broker": 8, "relay": 4, "proxy": 2, "gateway": 2}
    assert replace(options, grow=False).grown(layout) == options.specs()


def nodes() -> SupervisorCore:
    """Two nodes of everything but stores."""
    core = SupervisorCore(UpOptions.of(Grouping.NODES, {"xius": 0, "pis": 0, "topics": 0}).specs(), lambda: 0.0, grace_s=10.0)
    all_up(core)
    return core


def roles_of(core: SupervisorCore, name: str) -> list[str]:
    return [entry.name for entry in core.processes[name].spec.entries]


def test_a_node_ends_with_its_first_role_and_before_what_is_apart() -> None:
    core = SupervisorCore(UpOptions.of(Grouping.NODES, {"pis": 0, "topics": 0}).specs(), lambda: 0.0)
    all_up(core)
    core.set_replicas("broker", 2, 1.0, 2)
    assert core.stop(2.0) == [Terminate("node-0"), Terminate("node-1")]
    core.exited("node-0", 0, 3.0)
    assert core.exited("node-1", 0, 3.0) == [Terminate("broker-1-0"), Terminate("broker-1-1")]
    core.exited("broker-1-0", 0, 3.0)
    assert core.exited("broker-1-1", 0, 3.0) == [Terminate("xiu-0-0"), Terminate("xiu-0-1")]


def test_what_is_added_runs_beside_the_nodes_and_ends_by_itself() -> None:
    core = nodes()
    assert core.set_replicas("broker", 2, 1.0, 2) == [Start("broker-1-0"), Start("broker-1-1")]
    assert core.set_replicas("gateway", 3, 1.0) == [Start("gateway-2")]
    for name in ("broker-1-0", "broker-1-1", "gateway-2"):
        core.running(name, 2.0)
    assert core.set_replicas("gateway", 2, 3.0) == [Terminate("gateway-2")]
    assert core.set_replicas("broker", 2, 3.0, 1) == [Terminate("broker-1-0"), Terminate("broker-1-1")]
    for name in ("gateway-2", "broker-1-0", "broker-1-1"):
        core.exited(name, 0, 4.0)
    assert list(core.processes) == ["node-0", "node-1"]
    assert core.all_running


def test_a_pi_stays_when_its_replica_of_topics_is_no_longer_wanted() -> None:
    core = SupervisorCore(UpOptions.of(Grouping.NODES, {"xius": 0}).specs(), lambda: 0.0)
    all_up(core)
    assert core.set_replicas("topic", 1, 1.0) == [Terminate("store-0-1")]
    assert core.exited("store-0-1", 0, 2.0) == [Start("store-0-1")]
    assert (roles_of(core, "store-0-1"), core.processes["store-0-1"].spec.module) == (["pi-0-1"], "pi")
    core.running("store-0-1", 3.0)
    assert core.set_replicas("topic", 1, 4.0, 2) == [Start("topic-1-0")], "a group that is added is a process of its own"
    core.running("topic-1-0", 5.0)
    assert core.stop(6.0) == [Terminate("node-0"), Terminate("node-1")]
    core.exited("node-0", 0, 7.0)
    assert core.exited("node-1", 0, 7.0) == [Terminate("store-0-0"), Terminate("topic-1-0")], "it ends with its first role"


def test_a_node_is_started_again_without_the_replica_that_is_no_longer_wanted() -> None:
    core = nodes()
    assert core.set_replicas("relay", 1, 1.0) == [Terminate("node-1")]
    assert core.exited("node-1", 0, 2.0) == [Start("node-1")]
    assert roles_of(core, "node-1") == ["router-0-1", "broker-0-1", "proxy-1", "gateway-1"]
    core.running("node-1", 3.0)
    assert core.all_running
    assert core.set_replicas("relay", 2, 4.0) == [Start("relay-0-1")], "a running node takes no role"


def test_nodes_lose_a_partition_one_after_the_other_and_only_while_all_others_run() -> None:
    core = SupervisorCore(
        UpOptions.of(Grouping.NODES, {"xius": 0, "pis": 0, "topics": 0, "brokers": 2}).specs(), lambda: 0.0, grace_s=10.0
    )
    all_up(core)
    core.exited("node-1", -9, 1.0)
    assert core.set_replicas("broker", 2, 1.1, 1) == []
    assert core.tick(1.2) == [Start("node-1")]
    assert "broker-1-1" not in roles_of(core, "node-1"), "what rests is changed at once"
    assert core.running("node-1", 2.0) == [Terminate("node-0")]
    assert core.tick(51.9) == [], "its five kinds of roles drain one after the other"
    assert core.tick(52.0) == [Kill("node-0")]
    assert core.exited("node-0", -9, 52.1) == [Start("node-0")]
    assert "broker-1-0" not in roles_of(core, "node-0")
    assert core.running("node-0", 53.0) == []


def test_a_replica_that_is_wanted_again_stays_in_its_node() -> None:
    core = nodes()
    core.exited("node-0", -9, 1.0)
    core.set_replicas("relay", 1, 1.1)
    assert core.set_replicas("relay", 2, 1.1) == [], "node-1 had not been ended yet"
    core.tick(1.2)
    assert core.running("node-0", 2.0) == []
    core.set_replicas("relay", 1, 3.0)
    core.set_replicas("relay", 2, 3.1)
    assert core.exited("node-1", 0, 4.0) == [Start("node-1")]
    assert "relay-0-1" in roles_of(core, "node-1")
