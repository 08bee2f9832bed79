"""Data of a process's ephemeral node in the registry.

    {"role": "router", "partition": 0, "state": "Running", "host": "10.0.0.5", "port": 7010, "http_port": 7011,
     "endpoint": "3f…", "incarnation": "51…", "version": "0.1.0", "wire_hash": "9a…", "started_ms": 1751958000000,
     "protocol_min": 1, "protocol_max": 1, "pid": 4711, "instance": -1, "generation": -1,
     "mqtt_host": "", "mqtt_port": 0, "udp_host": "", "udp_port": 0,
     "client_host": "", "client_port": 0, "client_tls": false, "tls": false, "stream_port": 0,
     "member": "0000000000000000", "member_incarnation": 0, "member_end": 0, "files_digest": ""}

The replica ID is not in the data: it is the sequence in the node's name. IDs are 16 hex digits. Unknown keys are ignored, so that
processes of two versions can work in one cluster.

Source: docs/registry.md; PiXiu §2.1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pixiu.discovery import paths
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import KEPT_INSTANCE, LAST_GENERATION, MAX_ID, EndpointID, gateway_msg_id, gateway_run, hex_id
from pixiu.placement.partition import MAX_PARTITIONS

MAX_NODE_BYTES: Final = 16_384
"""Limit of a node's data, bytes; more is malformed."""
MAX_TEXT: Final = 256
"""Limit of a host, a version or a hash, characters."""
MAX_PORT: Final = 65_535
LAST_PROTOCOL: Final = 1_000_000


class NodeState(StrEnum):
    """State of a process. Only Running replicas get traffic."""

    INIT = "Init"
    RUNNING = "Running"
    DRAINING = "Draining"


def run_of(gateway: Node) -> int:
    """The run of a gateway: its instance and generation, as `pixiu.ids.gateway_run` has it of a GatewayMsgID."""
    return gateway_run(gateway_msg_id(max(gateway.instance, 0), max(gateway.generation, 0), 0))


def json_object(data: bytes, limit: int, what: str) -> dict[str, object]:
    """Parse a JSON object of at most `limit` bytes. Raises `MalformedData`, which names `what`.

    Source: docs/promises.md, "Failure rules" 2 (a bound on everything).
    """
    if len(data) > limit:
        raise MalformedData(f"{what} has {len(data)} bytes; at most {limit} are allowed")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedData(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedData(f"{what} is not a JSON object")
    return value


def integer(fields: dict[str, object], key: str, low: int, high: int, default: int | None = None) -> int:
    """Read a whole number of a JSON object, in [low, high]. Raises `MalformedData`, also if it is missing without a default."""
    value = fields.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise MalformedData(f"{key} must be a whole number from {low} to {high}, not {str(value)[:40]!r}")
    return value


def text(fields: dict[str, object], key: str, default: str | None = None) -> str:
    """Read a printable text of a JSON object, at most 256 characters. Raises `MalformedData`."""
    value = fields.get(key, default)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise MalformedData(f"{key} must be printable text of at most {MAX_TEXT} characters")
    return value


def _hex(fields: dict[str, object], key: str, default: str | None = None) -> int:
    value = text(fields, key, default)
    if len(value) != 16 or not set(value) <= set("0123456789abcdef") or int(value, 16) > MAX_ID:
        raise MalformedData(f"{key} must be 16 hex digits below 2^63, not {value[:40]!r}")
    return int(value, 16)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Node:
    """One process of the cluster, as the registry knows it. Source: docs/registry.md."""

    role: str
    partition: int
    """-1 if the role has no partitions."""
    replica: int
    """The sequence that ZooKeeper assigned to the node; -1 before registration."""
    state: NodeState
    host: str
    port: int
    """Port of the cluster's gRPC (TCP), and of links (UDP) if udp_port is 0."""
    http_port: int
    endpoint: EndpointID
    """The run of the process: survives the loss of a ZooKeeper session. Links and routing use it."""
    incarnation: int
    """63 random bits, new with every registration and so with every ZooKeeper session."""
    version: str
    wire_hash: str
    """Hash of the cluster settings that must agree on the wire."""
    started_ms: int
    """Start of the process, Unix milliseconds."""
    pid: int = 0
    instance: int = -1
    """A gateway's leased instance."""
    generation: int = -1
    """The generation of a gateway's instance."""
    mqtt_host: str = ""
    mqtt_port: int = 0
    udp_host: str = ""
    """Host for datagrams of links; empty: `host`."""
    udp_port: int = 0
    """Port for datagrams of links; 0: `port`."""
    client_host: str = ""
    """Host of the gRPC services for clients; empty: `host`."""
    client_port: int = 0
    """Port of the gRPC services for clients; 0: the role has no clients of its own."""
    client_tls: bool = False
    """True if the listeners for clients, including MQTT, use TLS."""
    tls: bool = False
    """True if the cluster's listener requires certificates."""
    member: int = 0
    """The MemberID of a replica's data directory, if it has one (`cluster.replication`); else 0."""
    member_incarnation: int = 0
    """Number of this registration among those of the member; kept with its log."""
    member_end: int = 0
    """The counter of the member's last entry when it registered; 0: it has no data."""
    protocol_min: int = 1
    """The oldest protocol version that the process speaks."""
    protocol_max: int = 1
    """The newest protocol version that the process speaks."""
    login: str = ""
    """The login at the registry; empty: none."""
    stream_port: int = 0
    """Port of framed streams, at `host`; 0: none."""
    files_digest: str = ""
    """Digest of the files of which all processes of the role need the same, such as that of bridges; empty: there are none."""

    @property
    def process(self) -> tuple[str, int, int]:
        """Identity of the process: the roles of one node have the same. Containers of one host may have the same pid, so its start
        tells them apart; a process of an unknown pid has one role."""
        return self.host, self.pid, self.started_ms if self.pid else self.endpoint

    @property
    def udp_address(self) -> tuple[str, int]:
        """Host and port for the datagrams of links."""
        return self.udp_host or self.host, self.udp_port or self.port

    @property
    def address(self) -> str:
        """host:port, as people read it."""
        return _address(self.host, self.port)

    @property
    def client_address(self) -> str:
        """host:port of the gRPC services for clients; empty: the role has no clients of its own."""
        return _address(self.client_host or self.host, self.client_port) if self.client_port else ""

    def to_json(self) -> bytes:
        """Encode the data of the node, without the replica. Raises `InvalidArgument` if it could not be read back."""
        fields: dict[str, object] = {
            "role": self.role,
            "partition": self.partition,
            "state": self.state.value,
            "host": self.host,
            "port": self.port,
            "http_port": self.http_port,
            "endpoint": hex_id(self.endpoint),
            "incarnation": hex_id(self.incarnation),
            "version": self.version,
            "wire_hash": self.wire_hash,
            "started_ms": self.started_ms,
            "pid": self.pid,
            "instance": self.instance,
            "generation": self.generation,
            "mqtt_host": self.mqtt_host,
            "mqtt_port": self.mqtt_port,
            "udp_host": self.udp_host,
            "udp_port": self.udp_port,
            "client_host": self.client_host,
            "client_port": self.client_port,
            "client_tls": self.client_tls,
            "tls": self.tls,
            "member": hex_id(self.member),
            "member_incarnation": self.member_incarnation,
            "member_end": self.member_end,
            "protocol_min": self.protocol_min,
            "protocol_max": self.protocol_max,
            "login": self.login,
            "stream_port": self.stream_port,
            "files_digest": self.files_digest,
        }
        data = json.dumps(fields, separators=(",", ":")).encode()
        try:
            Node.from_json(data)
        except MalformedData as error:
            raise InvalidArgument(f"the node of {self.role} cannot be registered: {error}") from None
        return data

    @classmethod
    def from_json(cls, data: bytes, *, replica: int = -1) -> Node:
        """Decode a node's data; the replica comes from the node's name. Raises `MalformedData`."""
        fields = json_object(data, MAX_NODE_BYTES, "a node's data")
        role = text(fields, "role")
        if role not in paths.ROLES:
            raise MalformedData(f"role {role!r} is unknown")
        partition = integer(fields, "partition", -1, MAX_PARTITIONS - 1)
        if (partition < 0) != (role in paths.UNPARTITIONED_ROLES):
            raise MalformedData(f"{role} cannot have partition {partition}")
        try:
            state = NodeState(text(fields, "state"))
        except ValueError:
            raise MalformedData("state must be Init, Running or Draining") from None
        host = text(fields, "host")
        if not host:
            raise MalformedData("host is empty")
        oldest = integer(fields, "protocol_min", 1, LAST_PROTOCOL)
        return cls(
            role=role,
            partition=partition,
            replica=replica,
            state=state,
            host=host,
            port=integer(fields, "port", 0, MAX_PORT),
            http_port=integer(fields, "http_port", 0, MAX_PORT, 0),
            endpoint=EndpointID(_hex(fields, "endpoint")),
            incarnation=_hex(fields, "incarnation"),
            version=text(fields, "version", ""),
            wire_hash=text(fields, "wire_hash"),
            started_ms=integer(fields, "started_ms", 0, MAX_ID, 0),
            pid=integer(fields, "pid", 0, MAX_ID, 0),
            instance=integer(fields, "instance", -1, KEPT_INSTANCE - 1, -1),
            generation=integer(fields, "generation", -1, LAST_GENERATION, -1),
            mqtt_host=text(fields, "mqtt_host", ""),
            mqtt_port=integer(fields, "mqtt_port", 0, MAX_PORT, 0),
            udp_host=text(fields, "udp_host", ""),
            udp_port=integer(fields, "udp_port", 0, MAX_PORT, 0),
            client_host=text(fields, "client_host", ""),
            client_port=integer(fields, "client_port", 0, MAX_PORT, 0),
            client_tls=fields.get("client_tls") is True,
            tls=fields.get("tls") is True,
            member=_hex(fields, "member", "0" * 16),
            member_incarnation=integer(fields, "member_incarnation", 0, MAX_ID, 0),
            member_end=integer(fields, "member_end", 0, MAX_ID, 0),
            protocol_min=oldest,
            protocol_max=integer(fields, "protocol_max", oldest, LAST_PROTOCOL),
            login=text(fields, "login", ""),
            stream_port=integer(fields, "stream_port", 0, MAX_PORT, 0),
            files_digest=text(fields, "files_digest", ""),
        )
