"""Node data, the layout, the questions that a view answers, and the names of everything in ZooKeeper."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.discovery import paths
from pixiu.discovery.node import MAX_NODE_BYTES, Node, NodeState
from pixiu.discovery.target import RegistryAddress, parse_address
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import EndpointID
from tests.support.zookeeper import make_node


def test_a_node_is_read_back_as_it_was_written() -> None:
    node = make_node("gateway", instance=5, generation=1023, mqtt_host="::1", mqtt_port=1883, incarnation=(1 << 63) - 1)
    assert Node.from_json(node.to_json(), replica=7) == replace(node, replica=7)
    assert b"replica" not in node.to_json()


def test_datagrams_go_to_the_process_or_where_it_wants_them() -> None:
    node = make_node(host="10.0.0.5", port=7000)
    assert node.udp_address == ("10.0.0.5", 7000)
    translated = replace(node, udp_host="203.0.113.9", udp_port=17_000)
    assert Node.from_json(translated.to_json()).udp_address == ("203.0.113.9", 17_000)
    assert replace(node, udp_port=17_000).udp_address == ("10.0.0.5", 17_000)


def test_clients_go_to_their_own_listener() -> None:
    node = make_node("gateway", host="10.0.0.5", port=7000, client_port=7002)
    assert (node.address, node.client_address) == ("10.0.0.5:7000", "10.0.0.5:7002")
    assert Node.from_json(replace(node, client_host="::9").to_json()).client_address == "[::9]:7002"
    assert replace(node, client_port=0).client_address == ""


def test_roles_of_one_process_are_told_from_those_of_another_machine_or_pid() -> None:
    gateway, broker = make_node("gateway", host="10.0.0.5", pid=47), make_node("broker", host="10.0.0.5", pid=47)
    assert gateway.process == broker.process
    others = [replace(broker, pid=48), replace(broker, host="10.0.0.6"), replace(broker, started_ms=broker.started_ms + 1)]
    assert len({node.process for node in (gateway, *others)}) == 4
    assert replace(gateway, pid=0).process != replace(broker, pid=0, endpoint=EndpointID(9)).process


def test_ids_are_hex_and_unknown_keys_are_ignored() -> None:
    node = make_node(endpoint=EndpointID(255))
    fields = json.loads(node.to_json())
    assert fields["endpoint"] == "00000000000000ff"
    assert Node.from_json(json.dumps({**fields, "colour": "red"}).encode()) == node


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("role", "king"),
        ("role", 5),
        ("partition", -1),
        ("partition", 128),
        ("partition", True),
        ("state", "Dancing"),
        ("host", ""),
        ("host", "a\nb"),
        ("host", "x" * 257),
        ("port", 65_536),
        ("port", "7000"),
        ("port", 1.5),
        ("endpoint", "ff"),
        ("endpoint", "ffffffffffffffff"),
        ("endpoint", "+00000000000000f"),
        ("incarnation", None),
        ("instance", 32_768),
        ("generation", 1_024),
    ],
)
def test_a_node_with_a_bad_field_is_malformed(key: str, value: object) -> None:
    fields = {**json.loads(make_node().to_json()), key: value}
    with pytest.raises(MalformedData):
        Node.from_json(json.dumps(fields).encode())


@pytest.mark.parametrize("cluster", [7, None, "a" * 15, "A" * 16, ["a" * 16], "a" * 16 + "\n"])
def test_a_layout_with_a_bad_id_of_the_cluster_is_malformed(cluster: object) -> None:
    with pytest.raises(MalformedData, match="the cluster's ID in the layout is not 16 hex digits"):
        Layout.from_json(json.dumps({"version": 1, "cluster": cluster}).encode())
    assert Layout.from_json(Layout(1, {}, "a" * 16).to_json()).cluster == "a" * 16


@pytest.mark.parametrize("key", ["role", "partition", "state", "host", "port", "endpoint", "incarnation"])
def test_a_node_without_a_needed_field_is_malformed(key: str) -> None:
    fields = json.loads(make_node().to_json())
    del fields[key]
    with pytest.raises(MalformedData):
        Node.from_json(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 10_000, b" " * (MAX_NODE_BYTES + 1), b'{"port":' + b"9" * 5_000 + b"}"]
)
def test_data_that_is_no_json_object_is_malformed(data: bytes) -> None:
    for read in (Node.from_json, Layout.from_json):
        with pytest.raises(MalformedData):
            read(data)


@settings(deadline=None)
@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner))
)
@pytest.mark.slow
def test_whatever_a_node_holds_it_is_read_or_malformed(value: object) -> None:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    for read in (Node.from_json, Layout.from_json):
        # Nothing but MalformedData may come out of it.
        with contextlib.suppress(MalformedData):
            assert isinstance(read(data), Node | Layout)


def test_a_node_that_could_not_be_read_back_is_not_written() -> None:
    with pytest.raises(InvalidArgument, match="host"):
        make_node(host="").to_json()


def test_a_layout_is_read_back_and_answers_for_unknown_roles() -> None:
    layout = Layout(3, {"router": RoleLayout(2, 4, 3), "proxy": RoleLayout(1, 1, 2)}, "a" * 16)
    assert json.loads(layout.to_json())["router"] == {"n": 2, "next": 4, "replicas": 3}
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.partitions("router") == 2
    assert layout.partitions("broker") == 1
    foreign = {"version": 1, "cluster": "a" * 16, "map": {}, "router": {"n": 4}}
    assert Layout.from_json(json.dumps(foreign).encode()) == Layout(1, {"router": RoleLayout(4, 4, 0)}, "a" * 16)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 0},
        {"version": 1, "router": 7},
        {"version": 1, "router": {"n": 3}},
        {"version": 1, "router": {"n": 2, "next": 8}},
        {"version": 1, "topic": {"n": 0}},
        {"version": 1, "topic": {"n": 129}},
        {"version": 1, "topic": {"n": 3, "next": 6}},
    ],
)
def test_a_layout_that_cannot_be_is_malformed(data: dict[str, object]) -> None:
    with pytest.raises(MalformedData):
        Layout.from_json(json.dumps({**data, "cluster": "a" * 16}).encode())


def test_a_view_answers_by_role_partition_state_and_endpoint() -> None:
    first = make_node("router", 0, replica=4, state=NodeState.RUNNING)
    second = make_node("router", 0, replica=2, state=NodeState.RUNNING)
    starting = make_node("router", 0, replica=3)
    other = make_node("router", 1, replica=1, state=NodeState.RUNNING)
    proxy = make_node("proxy", replica=0, state=NodeState.DRAINING)
    view = View(Layout(), (first, second, starting, other, proxy))
    assert view.running("router") == (other, second, first)
    assert view.of_role("router") == (other, second, starting, first)
    assert view.replicas("router", 0) == (second, first)
    assert view.replicas("router", 0, (NodeState.RUNNING, NodeState.INIT)) == (second, starting, first)
    assert view.replicas("router", 9) == ()
    assert view.running("proxy") == ()
    assert view.by_endpoint(starting.endpoint) is starting
    assert view.by_endpoint(1) is None
    assert view == View(Layout(), (first, second, starting, other, proxy))


def test_paths_are_those_of_the_design() -> None:
    assert paths.layout("/pubsub") == "/pubsub/layout"
    assert paths.partition_num("/pubsub", "router") == "/pubsub/router/partition_num"
    assert paths.node_prefix("/pubsub", "proxy", -1) == "/pubsub/proxy/n"
    assert paths.node_prefix("/pubsub", "pi", 3) == "/pubsub/pi/partition3/n"
    assert paths.partition_state("/pubsub", "xiu", 0) == "/pubsub/xiu/partition0/state"
    assert paths.doubling("/pubsub", "relay") == "/pubsub/relay/doubling"
    assert paths.worker("/pubsub", 4095) == "/pubsub/worker/4095"
    assert paths.instance_holder("/pubsub", 9) == "/pubsub/instance/9/holder"
    assert paths.admin_lease("/pubsub") == "/pubsub/admin/leader"
    assert paths.topic("/pubsub", "Orders.v1_2-x") == "/pubsub/topics/Orders.v1_2-x"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "x" * 129])
def test_a_name_that_no_topic_can_have_has_no_path(name: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be the name of a topic"):
        paths.topic("/pubsub", name)


def test_names_that_are_no_nodes_are_not_taken_for_some() -> None:
    assert paths.replica_of("n0000000012") == 12
    assert [paths.replica_of(name) for name in ("n12", "state", "n00000000x2", "partition0")] == [None] * 4
    assert paths.partition_of("partition127") == 127
    assert [paths.partition_of(name) for name in ("partition128", "partition01", "partition", "partition_num")] == [None] * 4
    assert paths.number_of("4095", 4096) == 4095
    assert [paths.number_of(name, 4096) for name in ("4096", "01", "-1", "x", "²")] == [None] * 5


@pytest.mark.parametrize(("role", "partition"), [("proxy", 0), ("router", -1), ("router", 128), ("king", 0)])
def test_a_partition_that_cannot_be_has_no_path(role: str, partition: int) -> None:
    with pytest.raises(InvalidArgument):
        paths.node_directory("/pubsub", role, partition)


@pytest.mark.parametrize("root", ["", "/", "pubsub", "/pubsub/", "//a", "/a//b", "/a/../b", "/ä", "/a b", "/" + "x" * 300])
def test_a_root_that_cannot_be_is_refused(root: str) -> None:
    with pytest.raises(InvalidArgument, match="/pubsub"):
        paths.check_root(root)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("zk://127.0.0.1:2181/pubsub", RegistryAddress("127.0.0.1:2181", "/pubsub")),
        ("zk://a:1,b:2/team/x", RegistryAddress("a:1,b:2", "/team/x")),
        ("zk://host", RegistryAddress("host:2181", "/pubsub")),
        ("zk://host/", RegistryAddress("host:2181", "/pubsub")),
        ("zk://[::1]:2182,[::1]/r", RegistryAddress("[::1]:2182,[::1]:2181", "/r")),
    ],
)
def test_addresses_are_read(text: str, address: RegistryAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:2181", "http://a", "zk://", "zk:///pubsub", "zk://a:0", "zk://a:65536", "zk://a:b", "zk://a,,b", "zk://::1:2181",
     "zk://a b", "zk://a/..", "zk://a:²", "zk://" + ",".join(["a"] * 10)],
)  # fmt: skip
def test_addresses_that_cannot_be_are_refused_with_the_address(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value) or "root" in str(caught.value)
