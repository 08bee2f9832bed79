"""The options of a node: which roles, what they share, what each has of its own, and every mistake by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.settings.fields import specs
from cluster.settings.options import RoleOptions, SharedOptions
from node.options import Entry, Options, example, load
from pixiu.discovery.paths import ROLES, UNPARTITIONED_ROLES
from pixiu.errors import ConfigurationError

REGISTRY = "zk://127.0.0.1:2181/n"


def entries(path: Path | None = None, environ: dict[str, str] | None = None, **said: str) -> dict[str, Any]:
    """The options of each role by its name in `roles`. Of names in `said`, `__` is a dot and `_N__` is -N."""
    overrides = {key.replace("__", "."): value for key, value in said.items()}
    _, found = load(path, environ or {}, {"registry": REGISTRY, **overrides})
    return {entry.name: entry.options for entry in found}


def problem(path: Path | None = None, overrides: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(path, environ or {}, {"registry": REGISTRY, **(overrides or {})})
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_an_option_comes_from_the_nearest_table_and_the_strongest_source(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        [cluster]
        heartbeat_interval_ms = 500
        [node]
        roles = ["gateway", "broker-0", "broker-1", "relay-3"]
        registry = "{REGISTRY}"
        session_timeout_ms = 4000
        drain_timeout_s = 1.0
        pace_ms = 2.0
        log_level = "debug"
        [broker]
        max_entries = 10
        drain_timeout_s = 2.0
        [broker-1]
        max_entries = 11
        port = 7300
        [gateway]
        mqtt_port = 1883
        [xiu]
        table_mb = 8
        """,
    )
    environ = {"PIXIU_BROKER_DRAIN_TIMEOUT_S": "3", "PIXIU_BROKER_1_DRAIN_TIMEOUT_S": "4", "PIXIU_NODE_PACE_MS": "5"}
    cluster, found = load(path, environ, {"gateway.pace_ms": "6", "broker-1.link_queue_bytes": "2000000", "reflection": "true"})
    assert cluster.heartbeat_interval_ms == 500
    assert [(entry.name, entry.role) for entry in found] == [
        ("gateway", "gateway"), ("broker-0", "broker"), ("broker-1", "broker"), ("relay-3", "relay"),
    ]  # fmt: skip
    gateway, zero, one, relay = (entry.options for entry in found)  # type: Any, Any, Any, Any
    assert {options.registry for options in (gateway, zero, one, relay)} == {REGISTRY}
    assert {(options.session_timeout_ms, options.log_level, options.reflection) for options in (gateway, zero, one, relay)} == {
        (4000, "debug", True)
    }
    assert (gateway.drain_timeout_s, zero.drain_timeout_s, one.drain_timeout_s, relay.drain_timeout_s) == (1, 3, 4, 1)
    assert (gateway.pace_ms, zero.pace_ms, one.pace_ms) == (6, 5, 5)
    assert (zero.max_entries, one.max_entries, zero.port, one.port) == (10, 11, 0, 7300)
    assert (zero.partition, one.partition, relay.partition) == (0, 1, 3)
    assert (gateway.mqtt_port, zero.link_queue_bytes, one.link_queue_bytes) == (1883, 16 << 20, 2_000_000)


def test_a_roles_folder_is_in_the_nodes_unless_it_has_its_own(tmp_path: Path) -> None:
    found = entries(roles="router-0,router-1,proxy", data_dir=str(tmp_path), proxy__data_dir="/elsewhere")
    assert {name: options.data_dir for name, options in found.items()} == {
        "router-0": str(tmp_path / "router-0"), "router-1": str(tmp_path / "router-1"), "proxy": "/elsewhere",
    }  # fmt: skip
    assert {options.data_dir for options in entries(roles="proxy,broker-0").values()} == {""}


def test_roles_on_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, f'[node]\nroles = ["proxy"]\nregistry = "{REGISTRY}"\n')
    assert list(entries(path)) == ["proxy"]
    assert list(entries(path, {"PIXIU_NODE_ROLES": "relay-0"})) == ["relay-0"]
    assert list(entries(path, {"PIXIU_NODE_ROLES": "relay-0"}, node__roles="gateway,relay-1")) == ["gateway", "relay-1"]


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("gateways", 'there is no role "gateways". Did you mean gateway?'),
        ("gateways-0", 'there is no role "gateways". Did you mean gateway?'),
        ("broker", "broker has partitions: name one, such as broker-0"),
        ("proxy-0", "proxy has no partitions: name it proxy"),
        ("broker-128", "broker-128: a partition is a number from 0 to 127"),
        ("broker-00", 'there is no role "broker-00"'),
        ("proxy,gateway,proxy", "without repetition: proxy is given twice"),
        ("", "given: at least one role"),
    ],
)
def test_wrong_roles_are_named(roles: str, text: str) -> None:
    assert text in problem(overrides={"node.roles": roles})


def test_all_mistakes_are_told_together(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[node]\nroles = ["broker-0", "broker-1"]\nmqtt_port = 1\n[broker]\nprt = 1\n[broker-2]\nport = 1\n[brokers]\nx = 1\n',
    )
    overrides = {"xiu.table_mb": "8", "broker-7.port": "1", "broker-1.partition": "5", "broker-0.log_format": "json", "mo.x": "1"}
    said = problem(path, overrides).splitlines()
    for text in (
        f'{path}: [node]: there is no option "mqtt_port"',
        f'{path}: [broker-0]: there is no option "prt". Did you mean port?',
        f"{path}: [broker-2]: this node runs broker-0, broker-1",
        f'{path}: there is no table "brokers". Did you mean broker?',
        "--set xiu.…: this node runs broker-0, broker-1",
        "--set broker-7.…: this node runs broker-0, broker-1",
        '--set mo.…: there is no table "mo"',
        "--set broker-1.partition: [broker-1] partition: must be left out: broker-1 in roles says it",
        "--set broker-0.log_format: [broker-0] log_format: must be left out: a process has one, in [node]",
    ):
        assert [line for line in said if line.startswith(text)], text


def test_it_must_say_what_it_runs_and_where_the_cluster_is() -> None:
    assert "roles is not given: name the roles to run, such as --set node.roles=gateway,proxy" in problem()
    with pytest.raises(ConfigurationError, match="registry is not given"):
        load(None, {}, {"roles": "proxy"})
    with pytest.raises(ConfigurationError, match="registry is not given"):
        load(None, {}, {"roles": "proxy,broker-0", "proxy.registry": REGISTRY})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"proxy.port": "7000", "broker-0.port": "7001"}, "[broker-0] port = 7001: must be another port than [proxy] http_port"),
        ({"proxy.port": "7000", "broker-0.port": "7002"}, "[broker-0] port = 7002: must be another port than [proxy] client_port"),
        ({"gateway.mqtt_port": "1883", "broker-0.http_port": "1883"}, "[broker-0] http_port = 1883: must be another"),
        ({"broker-0.stream_port": "9", "proxy.stream_port": "9"}, "stream_port = 9: must be another port than"),
        (
            {"broker-0.data_dir": "/x", "proxy.data_dir": "/x"},
            '[broker-0] data_dir = "/x": must be another folder than that of proxy',
        ),
        ({"broker.host": "10.0.0.1"}, '[broker-0] host = "10.0.0.1": must be a loopback address'),
        ({"cluster.router_root": "/other"}, "a gateway belongs to the cluster that has the routers"),
    ],
)
def test_what_cannot_be_together_is_named(overrides: dict[str, str], text: str) -> None:
    assert text in problem(overrides={"roles": "gateway,proxy,broker-0", **overrides})


def test_the_same_port_at_other_addresses_is_another_one() -> None:
    said = {
        "registry": REGISTRY,
        "roles": "proxy,broker-0",
        "proxy.port": "7000",
        "proxy.host": "127.0.0.2",
        "broker-0.port": "7000",
    }
    assert [entry.options.port for entry in load(None, {}, said)[1]] == [7000, 7000]


def test_the_example_has_every_option_once_and_is_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, example())
    assert [Entry(entry.name, entry.role, entry.options) for entry in load(path, {}, {})[1]] == load(path, {}, {})[1]
    assert tuple(entries(path)) == Options.roles
    names = [role if role in UNPARTITIONED_ROLES else f"{role}-0" for role in ROLES]
    (tmp_path / "bridges.toml").write_text('[a]\nkind = "to-webhook"\ntopic = "t"\nurl = "http://h/"\n')
    bridges = str(tmp_path / "bridges.toml")
    everything = entries(path, roles=",".join(names), data_dir=str(tmp_path), bridge__bridges=bridges)
    assert len(everything) == len(ROLES)
    text = path.read_text()
    assert text.count("\nsession_timeout_ms = ") == 1, "what is shared is in [node] alone"
    assert specs(RoleOptions).keys() - specs(SharedOptions).keys() >= {"port", "http_port", "stream_port"}
