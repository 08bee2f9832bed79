"""The options of a cluster and of a role's process, and their sources.

    defaults  <  TOML file ([cluster] and one table per role)  <  PIXIU_CLUSTER_KEY, PIXIU_ROLE_KEY  <  --set key=value

Every option has its unit last in its name. No socket opens before all options were checked.

Source: docs/registry.md, docs/routing.md, docs/operations.md.
"""

from __future__ import annotations

import codecs
import hashlib
import ipaddress
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from cluster.links.options import MAX_MTU_BYTES, MIN_MTU_BYTES, LinkOptions
from cluster.settings.fields import Spec, bounded, choice, field_problems, render_table, show, specs, unknown
from cluster.trust.key_ring import FILE, KeyRing, read_key_ring
from cluster.trust.listener_tls import ListenerTls
from pixiu.discovery.login import Login
from pixiu.discovery.paths import NO_PARTITION, ROLES, check_root
from pixiu.discovery.target import parse_address
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.ids import PROBE_ROOM
from pixiu.placement.big_rooms import VROOMS
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, Filter, parse_filter
from pixiu.rpc.tls import Tls, own_file
from pixiu.wire.record import MAX_RECORD_BYTES
from pixiu.wire.uin_list import OVERHEAD as ADDRESSED_OVERHEAD

MAX_FILE_BYTES = 1 << 20
"""Maximum size of a configuration file."""
NODE: Final = "node"
"""Table of a process of several roles. A file may have it beside those of roles that are processes of their own."""
ROLES_OF_ROUTER_ROOT = ("router", "relay", "gateway")
"""Roles that a cluster with a `router_root` does not have."""
WIRE_DEFAULTS: Mapping[str, Any] = {
    "heartbeat_interval_ms": 1000,
    "dead_after": 4,
    "max_record_bytes": 1 << 20,
    "mtu_bytes": 1400,
    "loopback_mtu_bytes": 8192,
    "push_back_ms": 200,
    "fanout": "gateway",
    "login_policy": "all",
    "big_rooms": (0, 0),
    "router_root": "",
    "topic_rooms": "",
}
"""Cluster settings that must agree on the wire, each with the value that a process without the key uses. That is the key's
default when it was introduced, and never changes: `wire_hash` leaves out keys with this value."""
CLUSTER_CLOSED = (
    "a loopback address such as 127.0.0.1: callers do not prove their role at this port; give [cluster] tls_dir with "
    "certificates (`pixiu pki`), or set cluster_insecure = true to open it to everybody who reaches it"
)
DEFAULT_REGISTRY = "zk://127.0.0.1:2181/pubsub"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options. A subclass adds checks to `problems` that one field's type and bounds cannot express."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from field_problems(self)

    def validate(self) -> None:
        """Check the options. Raises ConfigurationError that names the first key at fault, its value and what is allowed."""
        for key, allowed in self.problems():
            raise ConfigurationError(f"{key} = {show(getattr(self, key))}: must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """The [cluster] table: settings of a whole cluster. Processes must agree on those in `WIRE_DEFAULTS`, and on having keys.

    Source: docs/protocol.md, "Record", docs/links.md, docs/registry.md, docs/routing.md, docs/operations.md, "Every setting".
    """

    heartbeat_interval_ms: int = bounded(1000, 20, 60_000)
    """Milliseconds between two heartbeats to one peer."""
    suspect_after: int = bounded(2, 1, 100)
    """Missed heartbeats after which a peer is suspected."""
    dead_after: int = bounded(4, 2, 1000)
    """Missed heartbeats after which a peer is dead: its share goes to others."""
    max_record_bytes: int = bounded(MAX_RECORD_BYTES, 1024, MAX_RECORD_BYTES)
    """Bytes of the largest message, header included; larger is refused where it enters."""
    mtu_bytes: int = bounded(1400, MIN_MTU_BYTES, MAX_MTU_BYTES)
    """Bytes of the largest datagram between machines."""
    loopback_mtu_bytes: int = bounded(8192, MIN_MTU_BYTES, MAX_MTU_BYTES)
    """Bytes of the largest datagram between processes of one machine."""
    push_back_ms: int = bounded(200, 1, 60_000)
    """Milliseconds for which a real-time message waits for its receiver before it is dropped."""
    fanout: str = choice("gateway", "gateway", "relay")
    """How rooms' messages leave brokers: to every gateway with members, or with the lists of their users through relays."""
    login_policy: str = choice("all", "all", "newest", "newest_of_class")
    """Which of a user's devices may be online together; the others are notified that they were replaced."""
    big_rooms: tuple[int, int] = (0, 0)
    """RoomIDs from the first number to below the second are rooms of 64 VRooms each; the numbers 64 times as high are
    reserved with them. Both 0: there are none."""
    topic_rooms: str = ""
    """How free topics are spread over rooms: PREFIX=DEPTH or PREFIX=DEPTH:ROOMS, with commas between. With devices=2 the first two
    levels of topics below devices/ choose one of 1,024 rooms. Empty: a topic's first level is its room."""
    important_topics: tuple[str, ...] = ()
    """Filters of free topics, such as "orders/#", whose messages are kept for MQTT sessions that are away as if they were published
    with QoS 1, and subscribed to with QoS 1 by clients whose sessions outlive their connections."""
    weighted_routing: bool = False
    """Whether a broker that answers heartbeats late or seldom gets fewer rooms than the others of its partition: a half or a
    quarter."""
    router_root: str = ""
    """Root in the registry of another cluster, whose routers and gateways this one shares: it has brokers and proxies only.
    Empty: the cluster has its own."""
    trace_fraction: float = bounded(0.0, 0.0, 1.0)
    """Fraction of real-time messages that collect the time of every hop; gateways with a trace_dir keep these traces."""
    tls_dir: str = ""
    """Folder of certificates: `ca.pem` and one file for each role, such as `xiu.pem` (`pixiu pki`). Every caller at the cluster's
    port must then have one. Empty: callers are not asked for one."""
    guests: bool = False
    """Whether links accept datagrams of senders that are not in the registry: for a cluster that is the router_root of another
    one."""
    key_dir: str = ""
    """Folder of the keys that sign every datagram, `1.key` and so on (`pixiu keys`), exchanged while everything runs. Empty:
    datagrams are not signed; all processes of a cluster have keys, or none."""
    ticket_key_dir: str = ""
    """Folder of the keys by which proxies sign login tickets, and relays and proxies check them (`pixiu keys --dir`). Gateways do
    not read it, and must not be able to. Empty: gateways' word about their users counts; all processes have it, or none."""
    registry_credentials_file: str = ""
    """File with the login of each role in the registry (`pixiu registry credentials`), which nobody else may read; looked at again
    while everything runs. Empty: the one of an embedded ZooKeeper of the same user on this machine, or none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        wrong = dict(super().problems())
        yield from wrong.items()
        if wrong.keys().isdisjoint(("suspect_after", "dead_after")) and self.dead_after <= self.suspect_after:
            yield "dead_after", f"above suspect_after, which is {self.suspect_after}"
        if wrong.keys().isdisjoint(("mtu_bytes", "loopback_mtu_bytes")) and self.loopback_mtu_bytes < self.mtu_bytes:
            yield "loopback_mtu_bytes", f"at least mtu_bytes, which is {self.mtu_bytes}"
        if "big_rooms" not in wrong and not are_big_rooms(*self.big_rooms):
            yield (
                "big_rooms",
                (
                    f"[0, 0] for none, or [low, high] with 0 < low < high <= {VROOMS} * low "
                    f"and {VROOMS} * high at most 2^62 - 2^20, because the VRooms are from {VROOMS} * low to {VROOMS} * high"
                ),
            )

        try:
            TopicRooms(self.topic_rooms)
        except InvalidArgument as error:
            yield "topic_rooms", f"empty, or rules such as devices=2: {error}"
        for name in self.important_topics:
            parsed = parse_filter(name)
            if not isinstance(parsed, Filter) or parsed.group or parsed.name.startswith(("$", ROOM_PREFIX)):
                yield "important_topics", "filters of free topics, such as orders/#"
                break
        if self.ticket_key_dir and (not self.key_dir or Path(self.key_dir) == Path(self.ticket_key_dir)):
            yield "ticket_key_dir", "given with a key_dir, which must be another folder, because gateways have its keys"
        if "router_root" not in wrong and self.router_root:
            try:
                check_root(self.router_root)
            except InvalidArgument as error:
                yield "router_root", f"empty, or where the other cluster is: {error}"

    def tls(self, role: str) -> Tls | None:
        """Return the certificates of a process of this role; None without a tls_dir. Raises ConfigurationError."""
        return Tls(Path(self.tls_dir), role) if self.tls_dir else None

    def login(self, *roles: str) -> Login | None:
        """Return the login of a process of these roles in the registry; None without a file."""
        return Login(Path(self.registry_credentials_file), *roles) if self.registry_credentials_file else None

    def key_ring(self) -> KeyRing | None:
        """Return the keys of datagrams; None without a key_dir. Raises ConfigurationError."""
        return read_key_ring(Path(self.key_dir)) if self.key_dir else None

    def ticket_ring(self) -> KeyRing | None:
        """Return the keys of login tickets, which gateways cannot read; None without a ticket_key_dir. Raises
        ConfigurationError."""
        return read_key_ring(Path(self.ticket_key_dir), "ticket_key_dir") if self.ticket_key_dir else None

    def files_with_keys(self, role: str) -> list[Path]:
        """Return the files that only the cluster's processes should be able to read."""
        folders = [folder for folder in (self.key_dir, self.ticket_key_dir) if folder]
        found = sorted(path for folder in folders for path in Path(folder).glob("*") if FILE.fullmatch(path.name))
        return [*found, own_file(Path(self.tls_dir), role)] if self.tls_dir else found

    def wire_settings(self) -> dict[str, Any]:
        """Return the settings that must agree with other processes and differ from those of a process without the key."""
        found = {key: value for key, known in WIRE_DEFAULTS.items() if (value := getattr(self, key)) != known}
        found |= {"signed": True} if self.key_dir else {}
        return found | {"tickets": True} if self.ticket_key_dir else found

    def wire_hash(self) -> str:
        """16 hex digits over `wire_settings`. Source: docs/registry.md, "Who may join"."""
        return _hash(self.wire_settings())


@dataclass(frozen=True, kw_only=True)
class SharedOptions(Options):
    """Options that the roles of one process may share.

    Source: docs/registry.md, docs/operations.md.
    """

    registry: str = DEFAULT_REGISTRY
    """Where the cluster is: zk://HOST:PORT[,HOST:PORT…]/ROOT."""
    host: str = "127.0.0.1"
    """Address to listen on, a name or a number. Others must reach the process there, or at advertised_host."""
    advertised_host: str = ""
    """Address announced to other processes. Empty: host."""
    advertised_udp_host: str = ""
    """Address announced for the datagrams of links, where it differs from the one for gRPC: behind an address translator or in a
    container. Empty: advertised_host."""
    cluster_insecure: bool = False
    """Whether callers from other machines may use the cluster's port without proving a role, where there is no tls_dir."""
    reflection: bool = False
    """Whether gRPC reflection at `port` lists the services there."""
    poll_interval_s: float = bounded(60.0, 0.1, 3600.0)
    """Seconds between two readings of the whole registry, beside the watches. Below session_timeout_ms it finds nothing earlier."""
    session_timeout_ms: int = bounded(10_000, 1000, 120_000)
    """Milliseconds after which ZooKeeper removes a silent process."""
    connect_timeout_s: float = bounded(15.0, 0.1, 600.0)
    """Seconds to wait for ZooKeeper at the start."""
    drain_timeout_s: float = bounded(30.0, 0.0, 3600.0)
    """Seconds that a process has after SIGTERM to hand over what it holds."""
    receive_buffer_bytes: int = bounded(8 << 20, 64 << 10, 1 << 30)
    """Bytes of socket buffer asked for received datagrams."""
    link_queue_bytes: int = bounded(16 << 20, MAX_RECORD_BYTES, 1 << 30)
    """Bytes that may wait for one peer; real-time messages above it are dropped, oldest first."""
    data_dir: str = ""
    """Folder of the process's data. Empty: the role's default, or none for a role that stores nothing."""
    log_format: str = choice("console", "console", "json")
    """Form of log lines: for people or for programs."""
    log_level: str = choice("info", "debug", "info", "warning", "error")
    """The least important lines that are logged."""


@dataclass(frozen=True, kw_only=True)
class RoleOptions(SharedOptions):
    """Options of every role; each role's own options are a subclass."""

    port: int = bounded(0, 0, 65_535)
    """Port of the cluster: gRPC calls (TCP) and datagrams of links (UDP). 0: any that is free for both."""
    advertised_udp_port: int = bounded(0, 0, 65_535)
    """Port announced for the datagrams of links. 0: port."""
    http_port: int = bounded(0, 0, 65_535)
    """Port of /metrics, /health and /live. 0: port + 1, or any when port is 0 and that one is taken."""
    stream_port: int = bounded(0, 0, 65_535)
    """Port of framed streams, by which processes send each other what is no datagram and no single call. 0: port + 3, or any
    where that one is taken."""
    audit_dir: str = ""
    """Folder of the process's audit log. Empty: `audit` in data_dir; without data_dir too, audit lines go to the process's log
    only."""

    @property
    def audit_folder(self) -> Path | None:
        """Folder of the audit log; None: there is none."""
        if self.audit_dir:
            return Path(self.audit_dir)
        return Path(self.data_dir) / "audit" if self.data_dir else None

    @property
    def address_host(self) -> str:
        """The host that the registry announces to others."""
        return self.advertised_host or self.host

    def listen_ports(self) -> list[tuple[str, str, int]]:
        """Return (key, host, port) of each TCP port that must be free."""
        http_port = self.http_port or (self.port + 1 if self.port else 0)
        found = [("port", self.host, self.port), ("http_port", self.host, http_port), ("stream_port", self.host, self.stream_port)]
        return [each for each in found if each[2]]

    def insecure_listeners(self) -> list[str]:
        """Return the reminders for an operator: a line for each listener that is not guarded."""
        return []

    def doubtful_settings(self) -> list[str]:
        """Return the allowed but useless settings, a line for each."""
        if self.poll_interval_s * 1000 >= self.session_timeout_ms:
            return []
        return [
            f"poll_interval_s = {self.poll_interval_s:g}: ZooKeeper itself takes session_timeout_ms = {self.session_timeout_ms} to "
            f"notice a silent process, so that polls more often find nothing earlier and load it; make it a minute or so"
        ]

    def files_with_keys(self) -> list[Path]:
        """Return the files that only this role should be able to read, besides those of the cluster's options."""
        return []

    def read_files(self) -> None:
        """Read the files without which the process cannot start, as it will. Raises ConfigurationError with a line for each error.

        An error is so found before any socket opens, and before the other roles of a node start.
        """
        self.listener_tls()

    def listener_tls(self) -> ListenerTls | None:
        """Return the TLS of this role's client listeners; None if it has none, or they do not use TLS. Raises
        `ConfigurationError`."""
        return None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        wrong = dict(super().problems())
        yield from wrong.items()
        if "registry" not in wrong:
            try:
                parse_address(self.registry)
            except InvalidArgument as error:
                yield "registry", f"where the registry is: {error}"
        if not self.host:
            yield "host", "an address, such as 127.0.0.1"
        elif wrong.keys().isdisjoint(("host", "advertised_host")) and is_wildcard(self.address_host):
            key = "advertised_host" if self.advertised_host else "host"
            yield key, "an address at which others reach the process; with a wildcard host set advertised_host"
        if is_wildcard(self.advertised_udp_host):
            yield "advertised_udp_host", "an address at which datagrams reach the process, or empty for advertised_host"
        if wrong.keys().isdisjoint(("port", "http_port")) and self.port and self.http_port == self.port:
            yield "http_port", "another port than port"
        if (
            wrong.keys().isdisjoint(("port", "http_port", "stream_port"))
            and self.stream_port
            and self.stream_port in (self.port, self.http_port or self.port + 1 if self.port else 0)
        ):
            yield "stream_port", "another port than port and http_port"
        if "port" not in wrong and self.port == 65_535 and self.http_port == 0:
            yield "http_port", "given, because port + 1 is not a port"


@dataclass(frozen=True, kw_only=True)
class ClientListenerOptions(RoleOptions):
    """Additional options of roles that serve clients by gRPC: a port of their own for them."""

    client_host: str = ""
    """Address on which clients' gRPC calls are taken. Empty: host."""
    client_port: int = bounded(0, 0, 65_535)
    """Port of clients' gRPC calls. 0: port + 2, or any when port is 0 and that one is taken."""
    advertised_client_host: str = ""
    """Address announced to clients. Empty: client_host, or advertised_host where that is empty too."""

    @property
    def client_listen_host(self) -> str:
        """The address that clients' calls arrive at."""
        return self.client_host or self.host

    @property
    def client_address_host(self) -> str:
        """The host that the registry announces to clients."""
        return self.advertised_client_host or self.client_host or self.address_host

    def listen_ports(self) -> list[tuple[str, str, int]]:
        """Return (key, host, port) of each TCP port that must be free."""
        port = self.client_port or (self.port + 2 if self.port else 0)
        return super().listen_ports() + ([("client_port", self.client_listen_host, port)] if port else [])

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        wrong = dict(super().problems())
        yield from wrong.items()
        if wrong.keys().isdisjoint(("host", "advertised_host", "client_host")) and is_wildcard(self.client_address_host):
            key = "advertised_client_host" if self.advertised_client_host else "client_host"
            yield key, "an address at which clients reach the process; with a wildcard client_host set advertised_client_host"
        if wrong.keys().isdisjoint(("client_port", "port", "http_port")):
            if self.client_port and self.client_port in (self.port, self.http_port or self.port + 1 if self.port else 0):
                yield "client_port", "another port than port and http_port"
            if self.port >= 65_534 and self.client_port == 0:
                yield "client_port", "given, because port + 2 is not a port"


@dataclass(frozen=True, kw_only=True)
class PacedOptions(RoleOptions):
    """Additional options of roles that carry real-time messages."""

    pace_ms: float = bounded(0.0, 0.0, 20.0)
    """Milliseconds between two wake-ups of the event loop, while messages that nobody waits for wake it more than 600 times a
    second, and the loop or the machine is more than half busy. Each wake-up then handles several messages, which costs less CPU
    and delays them by up to this time. 0: no pacing."""


@dataclass(frozen=True, kw_only=True)
class PartitionedOptions(RoleOptions):
    """Additional options of roles with partitions."""

    partition: int = bounded(0, 0, 127)
    """Partition that this process serves."""


def partition_of(options: RoleOptions) -> int:
    """Return the partition of a process; `NO_PARTITION` for a role without partitions."""
    return options.partition if isinstance(options, PartitionedOptions) else NO_PARTITION


def link_options(cluster: ClusterOptions, options: RoleOptions) -> LinkOptions:
    """Return the options of a process's links from the cluster's and its own."""
    return LinkOptions(
        mtu_bytes=cluster.mtu_bytes,
        loopback_mtu_bytes=cluster.loopback_mtu_bytes,
        receive_buffer_bytes=options.receive_buffer_bytes,
        push_back_ms=cluster.push_back_ms,
        heartbeat_interval_ms=cluster.heartbeat_interval_ms,
        suspect_after=cluster.suspect_after,
        dead_after=cluster.dead_after,
        max_queue_bytes=options.link_queue_bytes,
        max_record_bytes=cluster.max_record_bytes + ADDRESSED_OVERHEAD,
    )


OptionsT = TypeVar("OptionsT", bound=RoleOptions)
Table = TypeVar("Table", bound=Options)


def are_big_rooms(low: int, high: int) -> bool:
    """Return True if [low, high) can be big rooms: their VRooms are not RoomIDs of big rooms and stay below those of probes."""
    return low == high == 0 or (0 < low < high <= VROOMS * low and VROOMS * high <= PROBE_ROOM)


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine and cannot be reached from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return True if a host means «every address of this machine»."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class Sources(Generic[Table]):
    """Collects one table's values and their origins.

    Args:
        table: its name, for errors.
    """

    def __init__(self, table: str, options_type: type[Table]) -> None:
        self._type = options_type
        self.table = table
        self.specs: Mapping[str, Spec] = specs(options_type)
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.wrong: list[str] = []

    def put(self, key: str, raw: Any, origin: str, *, text: bool) -> None:
        """Set a value, of TOML or a text; it replaces an earlier one."""
        spec = self.specs.get(key)
        if spec is None:
            self.wrong.append(f"{origin}: [{self.table}]: {unknown('option', key, self.specs)}")
            return
        try:
            value = spec.convert_text(raw) if text else spec.convert(raw)
        except ValueError as error:
            self.wrong.append(f"{origin}: [{self.table}] {key} = {show(raw)}: must be {error}")
            return
        self.values[key] = value
        self.origins[key] = origin

    def build(self) -> Table | None:
        """Make the options, and check them. None if something is `wrong`; more may be wrong afterwards."""
        if self.wrong:
            return None
        options = self._type(**self.values)
        for key, allowed in options.problems():
            where = set(self.origins.values())
            origin = self.origins.get(key) or (f"{where.pop()}: default" if len(where) == 1 else "default")
            self.wrong.append(f"{origin}: [{self.table}] {key} = {show(getattr(options, key))}: must be {allowed}")
        if not self.wrong:
            try:
                options.validate()
            except ConfigurationError as error:
                self.wrong.append(f"[{self.table}] {error}")
        return options


def load_options(
    role: str,
    options_type: type[OptionsT],
    path: Path | str | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
    *,
    names_registry: bool = False,
) -> tuple[ClusterOptions, OptionsT]:
    """Read, check and join all sources of options.

    path: the TOML file, or None for none. environ: the process's environment. overrides: text values of --set, keys
    `KEY` or `ROLE.KEY` of the role's table, or `cluster.KEY`. names_registry: True if one of them must name the registry, so that
    no process joins a cluster that happens to be at the default address.

    Raises ConfigurationError with one line for each error: the file (or variable, or --set), the table and
    key, the value and what is allowed.

    Source: docs/operations.md.
    """
    cluster, own = Sources("cluster", ClusterOptions), Sources(role, options_type)
    tables: dict[str, Sources[Any]] = {"cluster": cluster, role: own}
    wrong: list[str] = []
    for name, content in read_tables(path).items():
        if name not in tables and name not in (*ROLES, NODE):
            wrong.append(f"{path}: {unknown('table', name, {*ROLES, *tables})}")
        elif not isinstance(content, dict):
            wrong.append(f"{path}: {name} = {show(content)}: must be a table, [{name}]")
        elif name in tables:
            for key, raw in content.items():
                tables[name].put(key, raw, str(path), text=False)
    for variable in sorted(environ):
        for name, table in tables.items():
            prefix = f"PIXIU_{name.upper()}_"
            if variable.startswith(prefix):
                origin = f"environment variable {variable}"
                table.put(variable.removeprefix(prefix).lower(), environ[variable], origin, text=True)
    for name, text in overrides.items():
        table_name, dot, key = name.partition(".")
        if dot and table_name not in tables:
            wrong.append(f"--set {name}: {unknown('table', table_name, tables)}")
        else:
            tables[table_name if dot else role].put(key if dot else name, text, f"--set {name}", text=True)
    if names_registry and "registry" not in own.origins:
        wrong.append(f"registry is not given: name the cluster to join, such as --set registry={DEFAULT_REGISTRY}")
    cluster_options, role_options = cluster.build(), own.build()
    wrong += cluster.wrong + own.wrong
    if not wrong and cluster_options is not None and role_options is not None:
        wrong += against_cluster(role, role, cluster_options, role_options)
        wrong += file_errors(role_options)
    if wrong or cluster_options is None or role_options is None:
        raise ConfigurationError("\n".join(wrong))
    cluster_options.tls(role)
    cluster_options.key_ring()  # an unusable file is found here, before any socket opens
    return cluster_options, role_options


def against_cluster(role: str, table: str, cluster: ClusterOptions, options: RoleOptions) -> Iterator[str]:
    """Yield an error for each option of a role that a cluster's options do not allow. table: the name of its table."""
    if root := cluster.router_root if role in ROLES_OF_ROUTER_ROOT else "":
        yield f"[cluster] router_root = {show(root)}: a {role} belongs to the cluster that has the routers: start it at {root}"
    elif not (cluster.tls_dir or options.cluster_insecure or is_loopback(options.host)):
        yield f"[{table}] host = {show(options.host)}: must be {CLUSTER_CLOSED}"


def file_errors(options: RoleOptions) -> list[str]:
    """Return an error for each line of the options' files that is wrong."""
    try:
        options.read_files()
    except ConfigurationError as error:
        return str(error).splitlines()
    return []


def example_toml(role: str, options_type: type[RoleOptions]) -> str:
    """Render a file with every option of the cluster and of a role at its default, each below its help text."""
    return f"{render_table('cluster', ClusterOptions)}\n{render_table(role, options_type)}"


def read_bounded(path: Path | str, max_bytes: int, what: str = "") -> bytes:
    """Read a whole file of an operator's. Raises `ConfigurationError` with its path if it cannot be read or is larger."""
    subject, verb = (f"{what} ", "is ") if what else ("", "")
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigurationError(f"{path}: {subject}cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ConfigurationError(f"{path}: {subject}{verb}larger than {max_bytes} bytes")
    return data.removeprefix(codecs.BOM_UTF8)  # Windows editors write it


def read_tables(path: Path | str | None, what: str = "the configuration file") -> dict[str, Any]:
    """Read a TOML file; None: there is none. Raises ConfigurationError. what: its name in errors."""
    if path is None:
        return {}
    data = read_bounded(path, MAX_FILE_BYTES, what)
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: {what} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {what} is not TOML: {error}") from None
