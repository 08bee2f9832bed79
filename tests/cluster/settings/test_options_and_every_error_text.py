"""Options: where they come from, what wins, and what each mistake is told."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from cluster.settings.command import parse
from cluster.settings.fields import bounded, choice, choices, specs
from cluster.settings.options import (
    WIRE_DEFAULTS,
    ClusterOptions,
    PartitionedOptions,
    RoleOptions,
    example_toml,
    link_options,
    load_options,
)
from pixiu.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SampleOptions(PartitionedOptions):
    kinds: tuple[str, ...] = choices(("room", "chat"), "room", "chat", "mail")
    """Kinds served."""
    mode: str = choice("fast", "fast", "slow")
    """How."""
    ratio: float = bounded(0.5, 0.0, 1.0)
    """How much."""
    strict: bool = False
    """Whether."""
    level: Literal["a", "b"] = "a"
    folder: Path = Path("x")
    names: tuple[str, ...] = ()
    ports: tuple[int, ...] = (1, 2)


def load(
    tmp_path: Path, toml: str, environ: dict[str, str] | None = None, overrides: dict[str, str] | None = None
) -> tuple[ClusterOptions, SampleOptions]:
    path = tmp_path / "pixiu.toml"
    path.write_text(toml)
    return load_options("router", SampleOptions, path, environ or {}, overrides or {})


def failure(tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, toml, environ, overrides)
    return str(caught.value).replace(str(tmp_path / "pixiu.toml"), "FILE")


def test_without_a_file_the_defaults_are_right() -> None:
    cluster, options = load_options("router", SampleOptions, None, {}, {})
    assert (cluster, options) == (ClusterOptions(), SampleOptions())


def test_values_of_each_type_come_out_of_a_file(tmp_path: Path) -> None:
    cluster, options = load(
        tmp_path,
        "[cluster]\nbig_rooms = [100, 200]\n"
        '[router]\npartition = 3\nkinds = ["mail"]\n'
        'ratio = 1\nstrict = true\nlevel = "b"\nfolder = "y"\nnames = ["n"]\nports = []\n'
        '[proxy]\nkinds = "another role\'s table is not looked into"\n'
        '[node]\nroles = "nor is that of a node"\n',
    )
    assert cluster.big_rooms == (100, 200)
    assert options == SampleOptions(
        partition=3, kinds=("mail",), ratio=1.0, strict=True, level="b", folder=Path("y"), names=("n",), ports=()
    )
    assert isinstance(options.ratio, float)


def test_the_environment_wins_over_the_file_and_set_over_both(tmp_path: Path) -> None:
    toml = "[cluster]\nmtu_bytes = 1300\npush_back_ms = 5\n[router]\npartition = 1\nport = 1\nratio = 0.1\n"
    environ = {"PIXIU_CLUSTER_MTU_BYTES": "1250", "PIXIU_ROUTER_PARTITION": "2", "PIXIU_ROUTER_PORT": "2", "PIXIU_PROXY_X": "?"}
    overrides = {"port": "3", "router.strict": "true", "cluster.push_back_ms": "7", "kinds": "room, mail", "ports": "[4, 5]"}
    cluster, options = load(tmp_path, toml, environ, overrides)
    assert (cluster.mtu_bytes, cluster.push_back_ms) == (1250, 7)
    assert (options.partition, options.port, options.ratio, options.strict) == (2, 3, 0.1, True)
    assert (options.kinds, options.ports) == (("room", "mail"), (4, 5))


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        (
            "[router]\npartitoin = 1\n",
            'FILE: [router]: there is no option "partitoin". Did you mean partition? Known: advertised_host',
        ),
        (
            "[clutser]\n",
            'FILE: there is no table "clutser". Did you mean cluster? Known: admin, bridge, broker, cluster, gateway, pi, proxy',
        ),
        ("router = 5\n", "FILE: router = 5: must be a table, [router]"),
        ("[router]\npartition = 128\n", "FILE: [router] partition = 128: must be an integer from 0 to 127"),
        ('[router]\npartition = "1"\n', 'FILE: [router] partition = "1": must be an integer from 0 to 127'),
        ("[router]\npartition = true\n", "FILE: [router] partition = true: must be an integer from 0 to 127"),
        ("[router]\npartition = 1.0\n", "FILE: [router] partition = 1.0: must be an integer from 0 to 127"),
        ("[router]\nratio = nan\n", "FILE: [router] ratio = NaN: must be a number from 0.0 to 1.0"),
        ("[router]\nratio = inf\n", "FILE: [router] ratio = Infinity: must be a number from 0.0 to 1.0"),
        ("[router]\nstrict = 1\n", "FILE: [router] strict = 1: must be true or false"),
        ('[router]\nmode = "quick"\n', 'FILE: [router] mode = "quick": must be one of: fast, slow'),
        ('[router]\nlevel = "c"\n', 'FILE: [router] level = "c": must be one of: a, b'),
        ('[router]\nkinds = "room"\n', "must be a list, without repetition, of at least one of: room, chat, mail"),
        ("[router]\nkinds = []\n", "must be a list, without repetition, of at least one of: room, chat, mail"),
        ('[router]\nkinds = ["room", "room"]\n', "must be a list, without repetition, of at least one of: room, chat, mail"),
        (
            '[router]\nkinds = ["talk"]\n',
            'kinds = ["talk"]: must be a list, without repetition, of at least one of: room, chat, mail',
        ),
        ("[router]\nnames = [1]\n", "FILE: [router] names = [1]: must be a list of texts, at most 1024"),
        ('[router]\nports = ["1"]\n', 'FILE: [router] ports = ["1"]: must be a list of integers, at most 1024'),
        ('[router]\nfolder = ""\nhost = 5\n', "FILE: [router] host = 5: must be a text of at most 4096 characters without control"),
        ('[router]\nhost = "a\\u001bb"\n', 'FILE: [router] host = "a\\u001bb": must be a text of at most 4096 characters'),
        ('[router]\nhost = ""\n', 'FILE: [router] host = "": must be an address, such as 127.0.0.1'),
        ('[router]\nhost = "0.0.0.0"\n', 'host = "0.0.0.0": must be an address at which others reach the process; with a wildcard'),
        ('[router]\nadvertised_udp_host = "0.0.0.0"\n', "must be an address at which datagrams reach the process, or empty"),
        ("[router]\nadvertised_udp_port = 65536\n", "advertised_udp_port = 65536: must be an integer from 0 to 65535"),
        ('[router]\nadvertised_host = "::"\n', 'advertised_host = "::": must be an address at which others reach the process'),
        (
            '[router]\nregistry = "localhost"\n',
            "must be where the registry is: the registry's address 'localhost' must begin with zk://",
        ),
        ('[router]\nregistry = "zk://:1/x"\n', "has no host in ':1'; an example: zk://10.0.0.1:2181"),
        ('[router]\nregistry = "zk://h:70000/x"\n', "has port '70000'; a port is 1 to 65535"),
        ('[router]\nregistry = "zk://h:1/a//b"\n', "the registry's root '/a//b' must look like /pubsub"),
        ("[router]\nport = 5\nhttp_port = 5\n", "FILE: [router] http_port = 5: must be another port than port"),
        ("[router]\nport = 65535\n", "default: [router] http_port = 0: must be given, because port + 1 is not a port"),
        ("[cluster]\nbig_rooms = [5]\n", "FILE: [cluster] big_rooms = [5]: must be a list of 2 integers"),
        ("[cluster]\nbig_rooms = [0, 9]\n", "FILE: [cluster] big_rooms = [0, 9]: must be [0, 0] for none, or [low, high]"),
        ("[cluster]\nbig_rooms = [9, 9]\n", "must be [0, 0] for none, or [low, high] with 0 < low < high <= 64 * low"),
        ("[cluster]\nbig_rooms = [2, 129]\n", "must be [0, 0] for none, or [low, high] with 0 < low < high <= 64 * low"),
        (f"[cluster]\nbig_rooms = [{2**55}, {2**56 + 1}]\n", "and 64 * high at most 2^62 - 2^20"),
        ("[cluster]\ndead_after = 2\n", "FILE: [cluster] dead_after = 2: must be above suspect_after, which is 2"),
        (
            "[cluster]\nmtu_bytes = 9000\n",
            "default: [cluster] loopback_mtu_bytes = 8192: must be at least mtu_bytes, which is 9000",
        ),
        ('[cluster]\nkey_dir = "/nowhere/at/all"\n', "[cluster] key_dir = /nowhere/at/all: cannot be read: No such file"),
        ("[cluster\n", "FILE: the configuration file is not TOML: Expected ']'"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_table_key_value_and_what_is_allowed(tmp_path: Path, toml: str, text: str) -> None:
    assert text in failure(tmp_path, toml)


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    text = failure(tmp_path, environ={"PIXIU_ROUTER_PORT": "tcp://10.0.0.1:80", "PIXIU_CLUSTER_MTU": "1"})
    assert 'environment variable PIXIU_ROUTER_PORT: [router] port = "tcp://10.0.0.1:80": must be an integer from 0 to 65535' in text
    assert 'environment variable PIXIU_CLUSTER_MTU: [cluster]: there is no option "mtu".' in text


def test_a_mistake_in_set_names_it(tmp_path: Path) -> None:
    text = failure(tmp_path, overrides={"strict": "maybe", "cluter.mtu_bytes": "1", "cluster.mtu_bites": "1", "ports": "1,x"})
    assert '--set strict: [router] strict = "maybe": must be true or false' in text
    assert '--set cluter.mtu_bytes: there is no table "cluter". Did you mean cluster?' in text
    assert '--set cluster.mtu_bites: [cluster]: there is no option "mtu_bites". Did you mean mtu_bytes?' in text
    assert '--set ports: [router] ports = "1,x": must be a list of integers' in text


def test_all_mistakes_are_told_at_once_and_long_values_are_cut(tmp_path: Path) -> None:
    text = failure(tmp_path, f'[cluster]\nmtu_bytes = 1\n[router]\nport = -1\nmode = "{"y" * 500}"\n')
    assert len(text.splitlines()) == 3
    assert "…" in text
    assert "y" * 200 not in text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml: the configuration file cannot be read: No such file"):
        load_options("router", RoleOptions, tmp_path / "none.toml", {}, {})
    (tmp_path / "latin").write_bytes(b"# \xff")
    with pytest.raises(ConfigurationError, match="latin: the configuration file is not UTF-8"):
        load_options("router", RoleOptions, tmp_path / "latin", {}, {})
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigurationError, match="large: the configuration file is larger than 1048576 bytes"):
        load_options("router", RoleOptions, tmp_path / "large", {}, {})


def test_validate_alone_names_key_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"^port = -1: must be an integer from 0 to 65535$"):
        RoleOptions(port=-1).validate()
    RoleOptions().validate()


def test_a_role_that_overrides_validate_is_heard(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Picky(RoleOptions):
        def validate(self) -> None:
            super().validate()
            raise ConfigurationError("data_dir = '': must be given")

    with pytest.raises(ConfigurationError, match=r"^\[router\] data_dir = '': must be given$"):
        load_options("router", Picky, None, {}, {})


@pytest.mark.parametrize("size", [0, 15, 65, 5000])
def test_a_key_of_a_wrong_size_is_refused_and_never_shown(tmp_path: Path, size: int) -> None:
    (tmp_path / "1.key").write_text("s" * size + "\n")
    with pytest.raises(ConfigurationError, match=r"key_dir.*must be 16 to 64") as caught:
        load_options("router", RoleOptions, None, {}, {"cluster.key_dir": str(tmp_path)})
    assert "ssss" not in str(caught.value)


OTHER_CLUSTERS = (
    ("heartbeat_interval_ms", 500), ("suspect_after", 1), ("dead_after", 5), ("max_record_bytes", 2048), ("mtu_bytes", 1300),
    ("loopback_mtu_bytes", 9000), ("push_back_ms", 100), ("fanout", "relay"), ("login_policy", "newest"),
    ("big_rooms", (10, 20)), ("weighted_routing", True), ("router_root", "/pubsub"), ("trace_fraction", 0.5),
    ("important_topics", ("orders/#",)),
)  # fmt: skip
"""Every cluster setting but files, with another value than its default."""


def test_the_wire_hash_covers_what_must_agree_and_nothing_else() -> None:
    base = ClusterOptions()
    files = {"tls_dir", "key_dir", "ticket_key_dir", "registry_credentials_file"}
    others: list[tuple[str, Any]] = [*OTHER_CLUSTERS, ("topic_rooms", "devices=2")]
    assert {key for key, _ in others} | files | {"guests"} == set(specs(ClusterOptions))
    changing = {key for key, value in others if replace(base, **{key: value}).wire_hash() != base.wire_hash()}
    assert changing == set(WIRE_DEFAULTS)
    assert len({replace(base, **{key: value}).wire_hash() for key, value in others}) == len(WIRE_DEFAULTS) + 1
    keys = [replace(base, key_dir=folder).wire_hash() for folder in ("/a", "/b")]
    assert (keys[0] == keys[1], keys[0] == base.wire_hash()) == (True, False), "all have keys, or none"


@dataclass(frozen=True, kw_only=True)
class NextRelease(ClusterOptions):
    """With a key that this release does not have."""

    new_key: str = "as before"


def test_a_new_key_changes_no_hash_until_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    now, after = ClusterOptions(big_rooms=(10, 20)), NextRelease(big_rooms=(10, 20))
    before = now.wire_hash()
    assert after.wire_hash() == before
    monkeypatch.setattr("cluster.settings.options.WIRE_DEFAULTS", {**WIRE_DEFAULTS, "new_key": "as before"})
    assert after.wire_hash() == before
    assert replace(after, new_key="otherwise").wire_hash() != before


def test_the_example_file_holds_every_option_with_its_help_and_loads_as_the_defaults(tmp_path: Path) -> None:
    text = example_toml("router", SampleOptions)
    tables = tomllib.loads(text)
    assert list(tables) == ["cluster", "router"]
    assert list(tables["cluster"]) == list(specs(ClusterOptions))
    assert list(tables["router"]) == list(specs(SampleOptions))
    assert "# Milliseconds after which ZooKeeper removes a silent process. (an integer from 1000 to 120000)" in text
    assert load(tmp_path, text) == (ClusterOptions(), SampleOptions())


def test_a_start_reads_no_help_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("router", SampleOptions, ["--help"])
    assert "Kinds served." in capsys.readouterr().out
    monkeypatch.delattr(inspect, "getsource")
    assert parse("router", SampleOptions, ["--set", "mode=slow"]).overrides == {"mode": "slow"}


def test_a_root_of_routers_must_be_one_and_is_not_for_routers_and_gateways(tmp_path: Path) -> None:
    path = tmp_path / "pixiu.toml"
    path.write_text('[cluster]\nrouter_root = "/pubsub"\n')
    for role in ("broker", "proxy"):
        assert load_options(role, SampleOptions, path, {}, {})[0].router_root == "/pubsub"
    for role in ("router", "gateway"):
        with pytest.raises(ConfigurationError, match=f"a {role} belongs to the cluster that has the routers: start it at /pubsub"):
            load_options(role, SampleOptions, path, {}, {})
    text = failure(tmp_path, '[cluster]\nrouter_root = "pubsub"\n')
    assert '[cluster] router_root = "pubsub": must be empty, or where the other cluster is' in text


def test_a_registry_that_is_read_more_often_than_it_notices_anything_is_doubtful() -> None:
    assert RoleOptions().doubtful_settings() == []
    assert RoleOptions(poll_interval_s=4.0, session_timeout_ms=4000).doubtful_settings() == []
    (said,) = RoleOptions(poll_interval_s=0.1).doubtful_settings()
    assert said.startswith("poll_interval_s = 0.1: ")


def test_links_get_the_clusters_and_the_roles_values() -> None:
    options = link_options(ClusterOptions(mtu_bytes=1300), RoleOptions(link_queue_bytes=2 << 20))
    options.validate()
    assert (options.mtu_bytes, options.max_queue_bytes) == (1300, 2 << 20)
