"""The core of probes: every path is passed, percentiles, and the name of what failing paths have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID, MAX_ROOM, PROBE_ROOM, PROBE_UIN, EndpointID
from pixiu.placement.partition import rendezvous, weighted_rendezvous
from pixiu.placement.weights import STEPS
from pixiu.wire.trace import Hop, Stamp
from tools.probe import paths
from tools.probe.paths import (
    HopTimes,
    Member,
    Path,
    Probe,
    Prober,
    PseudoUser,
    diagnose,
    hop_times,
    percentile,
    probe_rooms,
    probe_users,
)

BROKERS = [(0, 1), (0, 2), (1, 3), (1, 4)]
RELAYS = [(0, 5), (1, 6), (1, 7)]


def node(role: str, partition: int, replica: int) -> Node:
    port = 7000 + replica + {"proxy": 100, "broker": 0, "relay": 50, "gateway": 200}[role]
    return Node(role, partition, replica, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(port * 7919), 1, "", "", 0)


def view(brokers: list[tuple[int, int]] = BROKERS, gateways: int = 2, relays: list[tuple[int, int]] | None = None) -> View:
    """`relays`: None: the layout has none."""
    nodes = [node("proxy", -1, 1), node("proxy", -1, 2), *(node("broker", *broker) for broker in brokers)]
    nodes += [node("gateway", -1, replica) for replica in range(1, gateways + 1)]
    roles = {"broker": RoleLayout(2, 2, 2)}
    if relays is not None:
        roles["relay"] = RoleLayout(2, 2, 2)
        nodes += [node("relay", *relay) for relay in relays]
    return View(Layout(1, roles), tuple(nodes))


def prober(failures: int = 2, relays: list[tuple[int, int]] | None = None) -> Prober:
    made = Prober(failures, 1.0, first_user=2**20 - 3)
    made.set_view(view(relays=relays))
    return made


def stamps(middle: Member, start: int = 0) -> list[Stamp]:
    """Publisher → proxy takes 10, proxy 1, → broker 20, broker 2, → gateway 30, gateway 3, → subscriber 40."""
    hop = Hop.RELAY if middle.role == "relay" else Hop.BROKER
    return [
        Stamp(Hop.PUBLISHER, 0, 0, start, start),
        Stamp(Hop.PROXY, 0, 1, start + 10, start + 11),
        Stamp(hop, middle.partition, middle.replica, start + 31, start + 33),
        Stamp(Hop.GATEWAY, 0, 1, start + 63, start + 66),
        Stamp(Hop.SUBSCRIBER, 0, 0, start + 106, start + 106),
    ]


def middle_of(found: Prober, probe: Probe) -> Member:
    """By what proxies do."""
    role = "relay" if probe.to_user else "broker"
    there = {path.middle.endpoint: path.middle for path in found.paths if path.middle.role == role}
    partition = probe.key % 2
    return there[rendezvous(probe.key, [m.endpoint for m in there.values() if m.partition == partition])]


def gateways_of(found: Prober, probe: Probe) -> list[Member]:
    """Where whom it is for is connected."""
    if not probe.to_user:
        return list(found.gateways)
    return [gateway for gateway in found.gateways if PseudoUser(gateway.endpoint, probe.key) in found.users]


def run_round(found: Prober, now: float, stopped: set[str]) -> None:
    """A round in which whatever passes a stopped process does not arrive."""
    for probe in found.begin_round(now):
        middle = middle_of(found, probe)
        if {probe.proxy.name, middle.name} & stopped:
            continue
        for gateway in gateways_of(found, probe):
            if gateway.name not in stopped:
                found.arrived(probe.number, gateway.endpoint, stamps(middle))
    found.expire(now + 1.0)


def test_every_path_of_the_cluster_is_probed() -> None:
    found = prober()
    probes = found.begin_round(0.0)
    assert len(probes) == 2 * 4
    assert len(found.paths) == 2 * 4 * 2
    assert {(probe.proxy.replica, middle_of(found, probe).replica) for probe in probes} == {
        (proxy, broker) for proxy in (1, 2) for _, broker in BROKERS
    }


@settings(deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=8, unique=True))
def test_a_probe_room_is_reserved_and_leads_to_its_replica(bits: int, endpoints: list[int]) -> None:
    partitions = 1 << bits
    brokers = [Member("broker", number % partitions, number, endpoint, "") for number, endpoint in enumerate(endpoints)]
    rooms = probe_rooms(brokers, partitions)
    assert rooms.keys() == set(endpoints)
    for broker in brokers:
        room = rooms[broker.endpoint]
        assert PROBE_ROOM <= room <= MAX_ROOM
        assert room % partitions == broker.partition
        others = [other.endpoint for other in brokers if other.partition == broker.partition]
        assert rendezvous(room, others) == broker.endpoint
        for step in STEPS:
            assert weighted_rendezvous(room, [(e, step if e == broker.endpoint else 1.0) for e in others]) == broker.endpoint


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7], 0.99) == 7
    assert percentile(range(1, 101), 0.5) == 50
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([3, 1, 2], 0.99) == 3


def test_the_table_has_every_hop_in_order() -> None:
    found = prober()
    run_round(found, 0.0, set())
    assert found.table() == [
        HopTimes("publisher → proxy", 16, 10, 10),
        HopTimes("proxy", 16, 1, 1),
        HopTimes("proxy → broker", 16, 20, 20),
        HopTimes("broker", 16, 2, 2),
        HopTimes("broker → gateway", 16, 30, 30),
        HopTimes("gateway", 16, 3, 3),
        HopTimes("gateway → subscriber", 16, 40, 40),
        HopTimes("total", 16, 106, 106),
    ]
    assert found.pending == 0
    assert found.findings() == []
    assert all((state.sent, state.arrived, state.failed) == (1, 1, 0) for state in found.paths.values())


def test_a_trace_of_one_stamp_has_no_hops() -> None:
    assert hop_times([Stamp(Hop.PROXY, 0, 1, 2, 3)]) == []


@pytest.mark.parametrize(
    "name",
    [
        "broker partition 1 replica 3 at 127.0.0.1:7003",
        "broker partition 0 replica 1 at 127.0.0.1:7001",
        "gateway 2 at 127.0.0.1:7202",
        "proxy 1 at 127.0.0.1:7101",
    ],
)
def test_the_process_that_failing_paths_have_in_common_is_named(name: str) -> None:
    found = prober()
    run_round(found, 0.0, set())
    run_round(found, 1.0, {name})
    assert found.findings() == []
    run_round(found, 2.0, {name})
    (finding,) = found.findings()
    assert finding.text.startswith(f"{name} seems stopped")
    assert [member.name for member in finding.members] == [name]
    assert finding.paths == len(found.failing()) == sum(name in path.name for path in found.paths)
    run_round(found, 3.0, set())
    assert found.findings() == []


def test_two_stopped_processes_are_both_named() -> None:
    names = {"broker partition 1 replica 4 at 127.0.0.1:7004", "gateway 1 at 127.0.0.1:7201"}
    found = prober()
    for now in range(3):
        run_round(found, now, names)
    assert {member.name for finding in found.findings() for member in finding.members} == names


def test_when_everything_fails_no_process_is_blamed() -> None:
    found = prober()
    for now in range(3):
        run_round(found, now, {"proxy 1 at 127.0.0.1:7101", "proxy 2 at 127.0.0.1:7102"})
    (finding,) = found.findings()
    assert finding.members == ()
    assert finding.text.startswith("all 16 paths fail")


def test_a_cut_between_two_processes_is_named_as_one() -> None:
    paths = list(prober().paths)
    cut = [path for path in paths if (path.proxy.replica, path.middle.replica) == (1, 3)]
    (finding,) = diagnose(paths, [], reasons=Counter({"refused by the proxy: NOT_ALLOWED": 3, "did not arrive": 1}))
    assert "refused by the proxy: NOT_ALLOWED; probes need a login" in finding.text
    (finding,) = diagnose(cut, [path for path in paths if path not in cut])
    assert finding.text.startswith("the way from proxy 1 at 127.0.0.1:7101 to broker partition 1 replica 3 at 127.0.0.1:7003")


def test_one_failing_path_is_named_whole() -> None:
    paths = list(prober().paths)
    (finding,) = diagnose(paths[:1], paths[1:])
    assert paths[0].name in finding.text


@settings(deadline=None)
@given(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_a_diagnosis_never_blames_what_works(failing: set[int], good: set[int]) -> None:
    paths = list(prober().paths)
    bad = [paths[number] for number in sorted(failing - good)]
    fine = [paths[number] for number in sorted(good)]
    findings = diagnose(bad, fine)
    for finding in findings:
        for path in fine:
            assert not finding.members or not set(finding.members) <= set(path)
    if bad and fine:
        assert sum(finding.paths for finding in findings) == len(bad)


@pytest.mark.parametrize("relays", [None, []])
def test_a_cluster_without_relays_has_the_brokers_paths_alone(relays: list[tuple[int, int]] | None) -> None:
    found = prober(relays=relays)
    assert {path.middle.role for path in found.paths} == {"broker"}
    assert found.users == frozenset()
    assert not any(probe.to_user for probe in found.begin_round(0.0))


def test_every_relay_replica_is_passed_to_every_gateway_by_a_user_of_its_own() -> None:
    found = prober(relays=RELAYS)
    probes = [probe for probe in found.begin_round(0.0) if probe.to_user]
    assert len(found.users) == len({user.uin for user in found.users}) == 3 * 2
    assert len(probes) == 2 * 3 * 2
    passed = [Path(probe.proxy, middle_of(found, probe), gateways_of(found, probe)[0]) for probe in probes]
    assert len(set(passed)) == len(passed)
    assert set(passed) == {path for path in found.paths if path.middle.role == "relay"}
    assert len(found.paths) == 2 * (4 + 3) * 2


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=6, unique=True),
    st.integers(0, 2**20),
    st.randoms(use_true_random=False),
)
def test_a_pseudo_user_leads_to_its_relay_whatever_the_weights_are(
    bits: int, endpoints: list[int], first: int, random: Random
) -> None:
    partitions = 1 << bits
    relays = [Member("relay", number % partitions, number, endpoint, "") for number, endpoint in enumerate(endpoints)]
    gateways = [Member("gateway", -1, number, 100 + number, "") for number in range(3)]
    users = probe_users(relays, gateways, partitions, first, {})
    assert users.keys() == {(relay.endpoint, gateway.endpoint) for relay in relays for gateway in gateways}
    assert len(set(users.values())) == len(users)
    for relay in relays:
        others = [other.endpoint for other in relays if other.partition == relay.partition]
        for gateway in gateways:
            uin = users[relay.endpoint, gateway.endpoint]
            assert PROBE_UIN <= uin <= MAX_ID
            assert uin % partitions == relay.partition
            assert weighted_rendezvous(uin, [(other, random.choice(STEPS)) for other in others]) == relay.endpoint
    assert probe_users(relays, gateways, partitions, first + 1, users) == users
    fewer = probe_users(relays, gateways[:2], partitions, first, users)
    assert fewer == {pair: uin for pair, uin in users.items() if pair[1] != gateways[2].endpoint}


def test_a_user_that_no_longer_leads_to_its_relay_gets_another_number() -> None:
    found = prober(relays=RELAYS)
    before = found.users
    found.set_view(view(relays=[*RELAYS, (1, 8), (1, 9)]))
    assert len(found.users) == 5 * 2
    for probe in [probe for probe in found.begin_round(0.0) if probe.to_user]:
        (gateway,) = gateways_of(found, probe)
        found.arrived(probe.number, gateway.endpoint, stamps(middle_of(found, probe)))
    assert all(state.arrived == 1 for path, state in found.paths.items() if path.middle.role == "relay")
    assert {user for user in before if user.uin % 2 == 0} <= found.users


def test_a_stopped_relay_is_named_and_the_table_has_its_hops() -> None:
    found = prober(relays=RELAYS)
    name = "relay partition 1 replica 7 at 127.0.0.1:7057"
    for now in range(2):
        run_round(found, now, {name})
    (finding,) = found.findings()
    assert finding.text == f"{name} seems stopped: all 4 probed paths through it fail, 24 others do not"
    run_round(found, 2.0, set())
    assert found.findings() == []
    assert [row.hop for row in found.table()] == [
        "publisher → proxy",
        "proxy",
        "proxy → broker",
        "proxy → relay",
        "broker",
        "broker → gateway",
        "relay",
        "relay → gateway",
        "gateway",
        "gateway → subscriber",
        "total",
    ]


def test_a_room_probe_through_relays_is_counted_for_its_broker() -> None:
    found = prober(relays=RELAYS)
    probe = next(probe for probe in found.begin_round(0.0) if not probe.to_user)
    broker, gateway = middle_of(found, probe), found.gateways[0]
    trace = stamps(broker)
    trace.insert(3, Stamp(Hop.RELAY, 0, 5, 40, 41))
    found.arrived(probe.number, gateway.endpoint, trace)
    assert found.paths[Path(probe.proxy, broker, gateway)].arrived == 1
    assert "broker → relay" in [row.hop for row in found.table()]


def test_a_stopped_relay_that_rooms_messages_pass_is_named_and_no_broker() -> None:
    found = prober(failures=1, relays=RELAYS)
    relay = next(path.middle for path in found.paths if path.middle.replica == 6)

    def go(now: float, *, stops: bool) -> None:
        for probe in found.begin_round(now):
            middle = middle_of(found, probe)
            trace = stamps(middle)
            if not probe.to_user:
                trace.insert(3, Stamp(Hop.RELAY, relay.partition, relay.replica, 40, 41))
            for gateway in gateways_of(found, probe):
                if not stops or (probe.to_user and middle != relay):
                    found.arrived(probe.number, gateway.endpoint, trace)
        found.expire(now + 1.0)

    go(0.0, stops=False)
    go(2.0, stops=True)
    (finding,) = found.findings()
    assert finding.members == (relay,)
    assert finding.paths == 2 * (4 + 1) * 2


def divert(found: Prober, now: float, of: int, to: int) -> None:
    """A round in which proxies send around a replica, through another."""
    for probe in found.begin_round(now):
        middle = middle_of(found, probe)
        took = middle._replace(replica=to) if middle.replica == of else middle
        for gateway in gateways_of(found, probe):
            found.arrived(probe.number, gateway.endpoint, stamps(took))


@pytest.mark.parametrize(("of", "to"), [(3, 4), (6, 7)])
def test_a_probe_that_went_around_arrived_on_the_path_that_it_took(of: int, to: int) -> None:
    found = prober(failures=2, relays=RELAYS)
    divert(found, 0.0, of, to)
    assert found.findings() == []
    states = {replica: [s for path, s in found.paths.items() if path.middle.replica == replica] for replica in (of, to)}
    assert {(s.sent, s.arrived, s.failed, s.around) for s in states[of]} == {(1, 0, 0, 1)}
    assert {(s.sent, s.arrived, s.failed, s.around) for s in states[to]} == {(1, 2, 0, 0)}
    assert {s.reason.replace("broker", "relay") for s in states[of]} == {f"bypassed it, through relay partition 1 replica {to}"}
    divert(found, 1.0, of, to)
    (finding,) = found.findings()
    assert finding.members[0].replica == of
    assert finding.text.endswith(" seems stopped: proxies bypass it on all 4 probed paths through it, 24 others do not")
    assert {(s.failed, s.around) for s in states[of]} == {(0, 2)}
    run_round(found, 2.0, set())
    assert found.findings() == []


def test_what_fails_before_proxies_send_around_it_goes_on_being_named() -> None:
    found = prober(failures=2)
    for now in range(2):
        run_round(found, now, {"broker partition 1 replica 3 at 127.0.0.1:7003"})
    divert(found, 2.0, 3, 4)
    (finding,) = found.findings()
    assert finding.text.startswith(
        "broker partition 1 replica 3 at 127.0.0.1:7003 seems stopped: all 4 probed paths through it fail"
    )


def test_a_probe_through_a_replica_that_is_unknown_went_around() -> None:
    found = prober(failures=1)
    divert(found, 0.0, 3, 9)
    assert {(s.around, s.arrived) for path, s in found.paths.items() if path.middle.replica == 3} == {(1, 0)}


def test_a_probe_that_was_passed_on_to_the_replica_that_was_meant_arrived() -> None:
    found = prober()
    probe = found.begin_round(0.0)[0]
    broker, gateway = middle_of(found, probe), found.gateways[0]
    trace = stamps(broker)
    trace.insert(2, Stamp(Hop.BROKER, 1, 99, 12, 13))
    found.arrived(probe.number, gateway.endpoint, trace)
    state = found.paths[Path(probe.proxy, broker, gateway)]
    assert (state.arrived, state.around) == (1, 0)


def test_a_proxy_that_takes_no_messages_to_users_is_no_part_of_their_paths() -> None:
    found = prober(failures=1, relays=RELAYS)
    for probe in found.begin_round(0.0):
        if probe.to_user and probe.proxy.replica == 1:
            found.not_taken(probe.number)
        else:
            for gateway in gateways_of(found, probe):
                found.arrived(probe.number, gateway.endpoint, stamps(middle_of(found, probe)))
    assert {(path.proxy.replica, path.middle.role) for path in found.paths} == {(1, "broker"), (2, "broker"), (2, "relay")}
    assert (found.findings(), found.pending) == ([], 0)
    assert not any(probe.to_user and probe.proxy.replica == 1 for probe in found.begin_round(1.0))
    found.not_taken(999)
    assert len(found.paths) == 2 * 4 * 2 + 3 * 2


def test_a_probe_without_a_trace_and_one_that_was_refused_have_failed() -> None:
    found = prober(failures=1)
    first, second, *_ = found.begin_round(0.0)
    gateway = found.gateways[0]
    found.arrived(first.number, gateway.endpoint, None)
    found.lost(second.number, "refused")
    found.lost(second.number, "refused")
    assert sorted(found.paths[path].reason for path in found.failing()) == [
        "came without the stamp of a broker",
        "refused",
        "refused",
    ]


def test_a_repetition_or_a_stranger_changes_nothing() -> None:
    found = prober()
    probe = found.begin_round(0.0)[0]
    broker, gateway = middle_of(found, probe), found.gateways[0]
    for _ in range(2):
        found.arrived(probe.number, gateway.endpoint, stamps(broker))
    found.arrived(999, gateway.endpoint, stamps(broker))
    found.arrived(probe.number, 12345, stamps(broker))
    assert found.paths[Path(probe.proxy, broker, gateway)].arrived == 1


def test_a_new_view_keeps_what_is_known_of_paths_that_stay() -> None:
    found = prober()
    run_round(found, 0.0, set())
    found.set_view(view(brokers=BROKERS[:3], gateways=3))
    assert len(found.paths) == 2 * 3 * 3
    known = [state for path, state in found.paths.items() if path.gateway.replica < 3]
    assert all(state.arrived == 1 for state in known)
    assert all(not state.sent for path, state in found.paths.items() if path.gateway.replica == 3)


def test_what_is_under_way_when_a_process_goes_is_forgotten() -> None:
    found = prober(failures=1)
    found.begin_round(0.0)
    found.set_view(view(brokers=BROKERS[1:]))
    found.expire(1.0)
    assert len(found.failing()) == 2 * 3 * 2


def test_too_many_paths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_PATHS", 15)
    with pytest.raises(InvalidArgument, match="too many to probe"):
        prober()


def test_too_many_probes_under_way_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_PENDING", 3)
    found = prober(failures=1)
    found.begin_round(0.0)
    assert found.pending == 3
    assert len(found.failing()) == 5 * 2


def test_only_running_processes_are_probed() -> None:
    nodes = tuple(replace(n, state=NodeState.DRAINING) if n.replica == 3 else n for n in view().nodes)
    found = Prober(1, 1.0)
    found.set_view(View(view().layout, nodes))
    assert {path.middle.replica for path in found.paths} == {1, 2, 4}
