"""What the doctor makes of what it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.doctor import diagnosis as d
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID

LAYOUT = Layout(3, {"broker": RoleLayout(2, 2, 1), "proxy": RoleLayout(1, 1, 1)})
ROOMY = d.Space("/data", 500 << 30, 1000 << 30, 1_000_000, writable=True)


def node(role: str, partition: int, endpoint: int, version: str = "0.1.0", settings: str = "aa") -> Node:
    host, port = "10.0.0.7", 7000 + endpoint
    return Node(role, partition, endpoint, NodeState.RUNNING, host, port, 8000, EndpointID(endpoint), 1, version, settings, 0)


WHOLE = View(LAYOUT, (node("broker", 0, 1), node("broker", 1, 2), node("proxy", -1, 3)))


def srvr(mode: str, version: str = "3.9.3") -> str:
    return f"Zookeeper version: {version}-c26634f34490bb0ea7a09cc51e05ede3b4e320ee, built on x\nMode: {mode}\n"


@pytest.mark.parametrize(
    ("answers", "grade", "word"),
    [
        ({"a:1": srvr("leader"), "b:1": srvr("follower"), "c:1": srvr("follower")}, d.Grade.OK, "ZooKeeper 3.9: a:1 leader"),
        ({"127.0.0.1:2181": srvr("standalone")}, d.Grade.OK, "standalone"),
        ({"10.0.0.1:2181": srvr("standalone")}, d.Grade.WARNING, "standalone"),
        ({"a:1": srvr("leader"), "b:1": ""}, d.Grade.WARNING, "b:1 does not answer"),
        ({"a:1": "srvr is not executed because it is not in the whitelist."}, d.Grade.WARNING, "of unknown version"),
        ({"a:1": srvr("leader", "3.4.14"), "b:1": srvr("follower", "3.4.14")}, d.Grade.FAILURE, "ZooKeeper 3.4"),
        ({"a:1": srvr("standalone"), "b:1": srvr("standalone")}, d.Grade.FAILURE, "standalone"),
        ({"a:1": "", "b:1": ""}, d.Grade.FAILURE, "no ZooKeeper answers at a:1, b:1"),
    ],
)
def test_the_registry(answers: dict[str, str], grade: d.Grade, word: str) -> None:
    found = d.check_registry(answers)
    assert (found.grade, word in found.said) == (grade, True), found
    assert bool(found.do) == (grade is not d.Grade.OK)


def test_a_layout_of_which_all_is_running_is_ok() -> None:
    assert d.check_layout(WHOLE).grade is d.Grade.OK
    for check in (d.check_versions, d.check_settings):
        assert check(WHOLE).grade is d.Grade.OK


def test_bridges_need_no_layout_and_the_same_files() -> None:
    one, other = (replace(node("bridge", -1, endpoint), files_digest=digest) for endpoint, digest in ((4, "aa"), (5, "bb")))
    assert d.check_layout(View(LAYOUT, (*WHOLE.nodes, one))).grade is d.Grade.OK
    assert d.check_bridges(WHOLE) == []
    assert [each.grade for each in d.check_bridges(View(LAYOUT, (one, replace(other, files_digest="aa"))))] == [d.Grade.OK]
    [found] = d.check_bridges(View(LAYOUT, (one, other)))
    assert found.grade is d.Grade.WARNING
    assert "bridge 4 at 10.0.0.7:7004; bridge 5 at 10.0.0.7:7005" in found.said


def test_a_layout_that_lacks_a_whole_partition_is_worse_than_one_that_lacks_a_replica() -> None:
    found = d.check_layout(View(LAYOUT, WHOLE.nodes[1:]))
    assert (found.grade, found.said) == (d.Grade.FAILURE, "broker partition 0: 0 of 1 Running")
    assert found.do == "start them, such as python -m broker --config FILE --set partition=0"
    two = View(Layout(3, {**LAYOUT.roles, "broker": RoleLayout(2, 2, 2)}), WHOLE.nodes)
    assert d.check_layout(two).grade is d.Grade.WARNING


def test_no_layout_strangers_and_a_doubling_are_named() -> None:
    assert "pixiu layout set" in d.check_layout(View()).do
    stranger = View(LAYOUT, (*WHOLE.nodes, node("relay", 0, 9)))
    assert (d.check_layout(stranger).grade, d.check_layout(stranger).said) == (
        d.Grade.FAILURE,
        "not in the layout: relay 0/9 at 10.0.0.7:7009",
    )
    beyond = View(LAYOUT, (*WHOLE.nodes, node("broker", 2, 9)))
    assert "broker 2/9" in d.check_layout(beyond).said
    doubled = View(Layout(3, {**LAYOUT.roles, "broker": RoleLayout(2, 4, 1)}), beyond.nodes)
    assert (d.check_layout(doubled).grade, "from 2 to 4" in d.check_layout(doubled).said) == (d.Grade.WARNING, True)


def test_other_versions_and_other_settings_are_named() -> None:
    nodes = (*WHOLE.nodes[:2], node("proxy", -1, 3, version="0.2.0", settings="bb"))
    versions, settings = d.check_versions(View(LAYOUT, nodes)), d.check_settings(View(LAYOUT, nodes))
    assert (versions.grade, "0.2.0: proxy 3 at 10.0.0.7:7003" in versions.said) == (d.Grade.WARNING, True)
    assert (settings.grade, settings.said.startswith("proxy 3 at")) == (d.Grade.FAILURE, True)


def test_settings_that_need_not_agree_and_an_upgrade_under_way_are_no_fault() -> None:
    first = replace(WHOLE.nodes[0], protocol_max=2)
    second = replace(WHOLE.nodes[1], protocol_max=2)
    assert d.check_settings(View(LAYOUT, (first, second))).said.endswith("protocol version 2")
    old = WHOLE.nodes[2]
    assert d.check_settings(View(LAYOUT, (second, old))).said.endswith("protocol version 1")


def test_who_does_not_answer_is_named() -> None:
    assert d.check_answers(WHOLE, {}).grade is d.Grade.OK
    assert d.check_answers(WHOLE, {2: "refused"}).said == "no answer by HTTP from broker 1/2 at 10.0.0.7:7002 (refused)"


@pytest.mark.parametrize(
    ("offsets", "grade"),
    [
        ([(3.0, 5.0)], d.Grade.OK),
        ([(-900.0, 1000.0)], d.Grade.OK),  # the question took two seconds: nothing is known to be wrong
        ([(0.0, 1.0), (-900.0, 1.0)], d.Grade.WARNING),
        ([(0.0, 1.0), (31_000.0, 1.0)], d.Grade.FAILURE),
        ([], d.Grade.WARNING),
    ],
)
def test_clocks(offsets: list[tuple[float, float]], grade: d.Grade) -> None:
    found = d.check_clocks([d.Clock(f"c{number}", *offset) for number, offset in enumerate(offsets)])
    assert found.grade is grade
    if len(offsets) > 1:
        assert "c1" in found.said
        assert "c0" not in found.said


@pytest.mark.parametrize(
    ("change", "grade"),
    [
        ({}, d.Grade.OK),
        ({"free_files": -1}, d.Grade.OK),
        ({"free_bytes": 1 << 30}, d.Grade.WARNING),
        ({"free_bytes": 40 << 30}, d.Grade.WARNING),
        ({"free_bytes": 255 << 20}, d.Grade.FAILURE),
        ({"free_files": 0}, d.Grade.FAILURE),
        ({"writable": False}, d.Grade.FAILURE),
    ],
)
def test_disks(change: dict[str, int], grade: d.Grade) -> None:
    found = d.check_space(replace(ROOMY, **change))  # type: ignore[arg-type]
    assert (found.grade, bool(found.do)) == (grade, grade is not d.Grade.OK)


@pytest.mark.parametrize(("mib", "grade"), [(64, d.Grade.FAILURE), (100, d.Grade.WARNING), (1000, d.Grade.OK)])
def test_shared_memory(mib: int, grade: d.Grade) -> None:
    assert d.check_shared_memory(replace(ROOMY, path="/dev/shm", free_bytes=mib << 20)).grade is grade
    assert d.check_shared_memory(replace(ROOMY, writable=False)).grade is d.Grade.FAILURE


def test_socket_buffers_below_what_is_asked_for_come_with_the_command() -> None:
    found = d.check_buffers({"net.core.rmem_max": 212_992, "net.core.wmem_max": 8 << 20}, 8 << 20)
    assert (found.grade, found.do.startswith("sysctl -w net.core.rmem_max=8388608: ")) == (d.Grade.WARNING, True)
    assert d.check_buffers({"net.core.rmem_max": 8 << 20}, 8 << 20).grade is d.Grade.OK
    assert d.check_buffers({}, 8 << 20).grade is d.Grade.WARNING


def test_an_interface_that_would_cut_datagrams_is_named_and_one_that_is_down_is_not() -> None:
    lo, eth0, off = d.Interface("lo", 65_536, 9), d.Interface("eth0", 1500, 0x1003), d.Interface("ifb0", 576, 0x82)
    assert d.check_mtu([lo, eth0, off], 1400, 8192).grade is d.Grade.OK
    found = d.check_mtu([lo, replace(eth0, mtu_bytes=1420)], 1400, 8192)
    assert (found.grade, found.do.startswith("ip link set eth0 mtu 1448")) == (d.Grade.WARNING, True)
    assert "loopback_mtu_bytes" in d.check_mtu([replace(lo, mtu_bytes=1500)], 1400, 8192).do
    assert d.check_mtu([off], 1400, 8192).grade is d.Grade.WARNING


@pytest.mark.parametrize(
    ("limit", "grade"), [(256, d.Grade.FAILURE), (1024, d.Grade.WARNING), (65_536, d.Grade.OK), (-1, d.Grade.OK)]
)
def test_open_files(limit: int, grade: d.Grade) -> None:
    assert d.check_open_files(limit).grade is grade


def test_no_java_is_a_warning_because_a_zookeeper_of_ones_own_needs_none_here() -> None:
    assert d.check_java("", "no Java 17").grade is d.Grade.WARNING
    assert d.check_java("21 at /java", "").said == "21 at /java"
