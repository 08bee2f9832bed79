"""Which roles `pixiu up` puts into which process, and the arguments that a node gets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from onebox.grouping import NUMBERS, PLAIN, Entry, Grouping, grouping_of
from onebox.up import Child, LocalCluster, UpOptions
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.errors import ConfigurationError


def shape(grouping: Grouping, secure: bool = False, **numbers: int) -> dict[str, list[str]]:
    """Each process with its roles."""
    options = UpOptions.of(grouping, numbers, secure=secure)
    options.validate()
    return {spec.name: [entry.name for entry in spec.entries] for spec in options.specs()}


def test_two_nodes_have_a_replica_of_each_role_and_stores_are_apart() -> None:
    assert shape(Grouping.NODES) == {
        **{name: [name] for name in ("xiu-0-0", "xiu-0-1")},
        **{f"store-0-{number}": [f"pi-0-{number}", f"topic-0-{number}"] for number in (0, 1)},
        "node-0": ["router-0-0", "relay-0-0", "broker-0-0", "admin-0", "proxy-0", "gateway-0"],
        "node-1": ["router-0-1", "relay-0-1", "broker-0-1", "admin-1", "proxy-1", "gateway-1"],
    }


def test_topics_share_the_process_of_a_pi_as_far_as_there_is_one() -> None:
    found = shape(Grouping.NODES, topics=3, topic_replicas=1, pis=2)
    assert {name: roles for name, roles in found.items() if "node" not in name and "xiu" not in name} == {
        "store-0-0": ["pi-0-0", "topic-0-0"],
        "store-1-0": ["pi-1-0", "topic-1-0"],
        **{name: [name] for name in ("pi-0-1", "pi-1-1", "topic-2-0")},
    }
    assert "topic-0-1" in shape(Grouping.NODES, pis=0)
    without = shape(Grouping.NODES, topics=0)
    assert not [role for roles in without.values() for role in roles if role.startswith(("topic", "admin"))]


def test_topics_have_any_number_of_groups_up_to_a_limit() -> None:
    assert UpOptions.of(PLAIN, {"topics": 3}).layout()["topic"] == RoleLayout(3, 3, 2)
    with pytest.raises(ConfigurationError, match=r"--topics 129: the number of groups must be from 0 to 128"):
        UpOptions.of(PLAIN, {"topics": 129}).validate()


def test_client_facing_roles_of_a_guarded_cluster_are_apart() -> None:
    found = shape(Grouping.NODES, secure=True)
    assert found["node-0"] == ["router-0-0", "relay-0-0", "broker-0-0", "admin-0"]
    assert list(found) == [
        *("xiu-0-0", "xiu-0-1", "pi-0-0", "pi-0-1", "topic-0-0", "topic-0-1", "node-0", "node-1"),
        *("proxy-0", "proxy-1", "gateway-0", "gateway-1"),
    ]


def test_a_small_cluster_is_one_node_of_everything_guarded_or_not() -> None:
    everything = ["xiu-0-0", "pi-0-0", "topic-0-0", "router-0-0", "relay-0-0", "broker-0-0", "admin-0", "proxy-0", "gateway-0"]
    assert shape(Grouping.SMALL) == shape(Grouping.SMALL, secure=True) == {"node-0": everything}
    assert shape(Grouping.SMALL, xiu_replicas=2, proxies=2)["node-1"] == ["xiu-0-1", "proxy-1"]


@pytest.mark.parametrize("grouping", [Grouping.NODES, Grouping.SMALL])
def test_the_nth_replica_is_in_the_nth_node_so_that_no_node_has_two_of_a_partition(grouping: Grouping) -> None:
    options = UpOptions.of(grouping, {"brokers": 4, "broker_replicas": 3, "gateways": 2, "relay_replicas": 2, "xius": 2})
    for spec in options.specs():
        keys = Counter(entry.key for entry in spec.entries)
        assert set(keys.values()) == {1}, spec
        assert spec.module == ("node" if len(keys) > 1 else spec.entries[0].role)
    assert [entry.name for spec in options.specs() for entry in spec.entries if entry.role == "gateway"] == [
        "gateway-0",
        "gateway-1",
    ]


def test_what_is_alone_in_its_node_is_a_process_of_its_role() -> None:
    assert shape(Grouping.NODES, proxies=3)["proxy-2"] == ["proxy-2"]


def test_partitions_of_a_doubling_are_in_the_nodes_of_the_next_start() -> None:
    options = UpOptions.of(Grouping.NODES, {})
    layout = Layout(3, {**options.layout(), "broker": RoleLayout(1, 2, 2, ("b" * 16,))})
    (first, second) = (spec for spec in options.grown(layout) if spec.name.startswith("node"))
    assert [entry.key for entry in first.entries] == ["router-0", "relay-0", "broker-0", "broker-1", "admin", "proxy", "gateway"]
    assert {entry.number for entry in second.entries} == {1}


def test_one_flag_chooses_and_two_are_refused() -> None:
    assert grouping_of({Grouping.SMALL: True, Grouping.SEPARATE: False}) is Grouping.SMALL
    assert grouping_of({Grouping.SMALL: False, Grouping.SEPARATE: False}) is PLAIN
    with pytest.raises(ConfigurationError, match=r"--small and --separate: give one of them"):
        grouping_of({Grouping.SMALL: True, Grouping.SEPARATE: True})


def test_numbers_that_are_not_given_are_those_of_the_grouping() -> None:
    for grouping, numbers in NUMBERS.items():
        options = UpOptions.of(grouping, {"gateways": 3, "brokers": None})
        assert (options.gateways, options.brokers) == (3, numbers["brokers"])
    assert replace(UpOptions.of(PLAIN, {}), defaulted=frozenset()) == UpOptions()


def test_a_cluster_that_exists_keeps_its_partitions_where_none_are_given() -> None:
    there = Layout(3, UpOptions.of(Grouping.SEPARATE, {"xius": 0}).layout())
    found = UpOptions.of(Grouping.NODES, {"relays": 1}).of_cluster(there)
    assert (found.routers, found.brokers, found.relays, found.xius, found.broker_replicas) == (2, 2, 1, 1, 2)


def test_too_many_roles_are_refused_whatever_their_processes() -> None:
    with pytest.raises(ConfigurationError, match=r"these are 267 proxies, gateways, admins and replicas; .* at most 256"):
        UpOptions.of(Grouping.SMALL, {"brokers": 128, "broker_replicas": 2, "routers": 4}).validate()


def arguments(cluster: LocalCluster, name: str) -> dict[str, str]:
    """The options of a process, by table and key; its gateway had a port before."""
    spec = next(spec for spec in cluster.options.specs() if spec.name == name)
    child = Child(ports={Entry("gateway", -1, 0): {"port": 7003}})
    words = cluster._arguments(spec, child)
    assert words[::2] == ["--set"] * (len(words) // 2)
    return dict(word.split("=", 1) for word in words[1::2])


def test_a_node_gets_the_options_of_each_of_its_roles(tmp_path: Path) -> None:
    settings = ("gateway.max_connections=10", "broker.log_level=debug", "cluster.dead_after=3")
    cluster = LocalCluster(UpOptions.of(Grouping.SMALL, {}, mqtt_port=1990, settings=settings, data=tmp_path))
    found = arguments(cluster, "node-0")
    assert found["node.roles"] == "xiu-0,pi-0,topic-0,router-0,relay-0,broker-0,admin,proxy,gateway"
    assert (found["gateway.mqtt_port"], found["gateway.port"], found["gateway.max_connections"]) == ("1990", "7003", "10")
    assert (found["broker-0.log_level"], found["cluster.dead_after"]) == ("debug", "3")
    assert found["xiu-0.data_dir"] == str(tmp_path / "xiu-0-0")
    assert "broker-0.partition" not in found


def test_a_role_has_the_same_folder_and_options_in_a_process_of_its_own(tmp_path: Path) -> None:
    node, apart = (
        arguments(LocalCluster(UpOptions.of(grouping, {}, mqtt_port=1990, data=tmp_path)), name)
        for grouping, name in ((Grouping.SMALL, "node-0"), (Grouping.SEPARATE, "gateway-0"))
    )
    assert apart == {key.removeprefix("gateway."): value for key, value in node.items() if key.startswith("gateway.")}
