"""The core of probes: every path is passed, percentiles, and the name of what failing paths have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu import probing
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, PROBE_ROOM, EndpointID
from pixiu.partition import rendezvous
from pixiu.probing import HopTimes, Member, Path, Probe, Prober, diagnose, hop_times, percentile, probe_rooms
from pixiu.trace import Hop, Stamp

BROKERS = [(0, 1), (0, 2), (1, 3), (1, 4)]


def node(role: str, partition: int, replica: int) -> Node:
    port = 7000 + replica + {"proxy": 100, "broker": 0, "gateway": 200}[role]
    return Node(role, partition, replica, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(port * 7919), 1, "", "", 0)


def view(brokers: list[tuple[int, int]] = BROKERS, gateways: int = 2) -> View:
    nodes = [node("proxy", -1, 1), node("proxy", -1, 2), *(node("broker", *broker) for broker in brokers)]
    nodes += [node("gateway", -1, replica) for replica in range(1, gateways + 1)]
    return View(Layout(1, {"broker": RoleLayout(2, 2, 2)}), tuple(nodes))


def prober(failures: int = 2) -> Prober:
    made = Prober(failures, 1.0)
    made.set_view(view())
    return made


def stamps(broker: Member, start: int = 0) -> list[Stamp]:
    """Publisher → proxy takes 10, proxy 1, → broker 20, broker 2, → gateway 30, gateway 3, → subscriber 40."""
    return [
        Stamp(Hop.PUBLISHER, 0, 0, start, start),
        Stamp(Hop.PROXY, 0, 1, start + 10, start + 11),
        Stamp(Hop.BROKER, broker.partition, broker.replica, start + 31, start + 33),
        Stamp(Hop.GATEWAY, 0, 1, start + 63, start + 66),
        Stamp(Hop.SUBSCRIBER, 0, 0, start + 106, start + 106),
    ]


def broker_of(found: Prober, probe: Probe) -> Member:
    return next(path.broker for path in found.paths if found.rooms[path.broker.endpoint] == probe.room)


def run_round(found: Prober, now: float, stopped: set[str]) -> None:
    """A round in which whatever passes a stopped process does not arrive."""
    for probe in found.begin_round(now):
        broker = broker_of(found, probe)
        if {probe.proxy.name, broker.name} & stopped:
            continue
        for gateway in found.gateways:
            if gateway.name not in stopped:
                found.arrived(probe.number, gateway.endpoint, stamps(broker))
    found.expire(now + 1.0)


def test_every_path_of_the_cluster_is_probed() -> None:
    found = prober()
    probes = found.begin_round(0.0)
    assert len(probes) == 2 * 4
    assert len(found.paths) == 2 * 4 * 2
    assert {(probe.proxy.replica, broker_of(found, probe).replica) for probe in probes} == {
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
    cut = [path for path in paths if (path.proxy.replica, path.broker.replica) == (1, 3)]
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


def test_a_probe_that_took_another_replica_has_failed_on_its_path() -> None:
    found = prober(failures=1)
    for probe in found.begin_round(0.0):
        broker = broker_of(found, probe)
        wrong = broker._replace(replica=4) if broker.replica == 3 else broker
        for gateway in found.gateways:
            found.arrived(probe.number, gateway.endpoint, stamps(wrong))
    (finding,) = found.findings()
    assert finding.text.startswith("broker partition 1 replica 3 at")
    assert {found.paths[path].reason for path in found.failing()} == {"went through broker partition 1 replica 4 instead"}


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
    broker, gateway = broker_of(found, probe), found.gateways[0]
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
    monkeypatch.setattr(probing, "MAX_PATHS", 15)
    with pytest.raises(InvalidArgument, match="too many to probe"):
        prober()


def test_too_many_probes_under_way_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MAX_PENDING", 3)
    found = prober(failures=1)
    found.begin_round(0.0)
    assert found.pending == 3
    assert len(found.failing()) == 5 * 2


def test_only_running_processes_are_probed() -> None:
    nodes = tuple(replace(n, state=NodeState.DRAINING) if n.replica == 3 else n for n in view().nodes)
    found = Prober(1, 1.0)
    found.set_view(View(view().layout, nodes))
    assert {path.broker.replica for path in found.paths} == {1, 2, 4}
