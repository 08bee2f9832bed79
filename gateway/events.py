"""What happens to a gateway's core, and what it asks its shell to do, beside what all cores share
(`cluster.runtime.contract`).

A connection is a number that the shell gives. A channel is what can be subscribed: a room (`topic` is None) or a
free topic inside its room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.membership.events import DigestKeysChanged
from cluster.membership.lww_map import Update
from cluster.runtime.contract import EndOfTurn, RecordsReceived, SendControl, SendRecords, Settle, Settled, Tick
from gateway.mail_run import MailRun
from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that a gateway may send to: of a router or relay partition, or a proxy (partition 0)."""

    endpoint: EndpointID
    partition: int
    usable: bool = True
    """False while heartbeats doubt it: chosen only when there is no other."""


@dataclass(frozen=True, slots=True)
class RoutersChanged:
    """The Running router replicas that are not dead, the number of partitions and the next one while it doubles."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class RelaysChanged:
    """The same for relays. `partitions` is 0 where the cluster's layout has no relays."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class ProxiesChanged:
    """The Running proxies that are not dead, in the order of their registration."""

    proxies: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """A client is there. `packets`: it speaks MQTT and gets PUBLISH packets, else records."""

    connection: int
    uin: int
    packets: bool
    device: int = 0
    """DeviceID; 0: nobody is told of the connection."""
    device_class: int = 0
    wall_ms: int = 0
    """Unix milliseconds."""
    login: bool = True
    """Whether it counts as a login of the user; see `cluster.membership.devices`."""
    name: str = ""
    """Of the device, as its user calls it."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A client is gone; it leaves everything. `reason` is a `Reason` of control.proto."""

    connection: int
    reason: int


@dataclass(frozen=True, slots=True)
class Join:
    """A client subscribes; `Answer(connection, request)` follows when the cluster knows it. A channel is (room, topic)."""

    connection: int
    request: int
    channels: list[tuple[int, bytes | None]]
    chat: bool = False
    """It wants the messages to its user as well."""
    mail: bool = False
    """It wants the user's mail."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A client unsubscribes. Takes effect at once."""

    connection: int
    channels: list[tuple[int, bytes | None]]
    chat: bool = False
    mail: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """A local client published: (key, record) of each, in order. `Passed` follows when they are no longer under way."""

    records: list[tuple[int, bytes]]
    connection: int = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A router or relay says that these gateway messages are known to its partition, and a router's to its brokers.

    `newer`: (ID, connect time) of those whose device has a newer connection on another gateway.
    """

    peer: EndpointID
    ids: list[int]
    newer: list[tuple[int, int]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    """Logins for which it has no room."""
    stale: list[int] = field(default_factory=list)
    """What something newer in this gateway's name hides there."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A relay says that the connections of a device up to a connect time were replaced. `reason`: of control.proto."""

    uin: int
    key: int
    """As `cluster.membership.devices.device_key` has it."""
    connect_time: int
    reason: int


@dataclass(frozen=True, slots=True)
class HealingReceived:
    """A router, or a relay, asks what is on this gateway: one of the messages of `cluster.membership.anti_entropy`."""

    peer: EndpointID
    control: control_pb2.Control
    relay: bool | None = False
    """None: this gateway's view of the registry does not have it yet, so that it may be either."""


@dataclass(frozen=True, slots=True)
class FenceReceived:
    """A router or relay refuses what has a lower GatewayMsgID: it takes this gateway's generation for dead."""

    peer: EndpointID
    floor: int


class MailDevice(NamedTuple):
    """Which connection Pi's number for a device means."""

    uin: int
    key: int
    """As `cluster.membership.devices.device_key` has it."""
    connect_time: int
    device: int


@dataclass(frozen=True, slots=True)
class MailStreamOpened:
    """A relay began to deliver mail. `stream`: a number that the shell gives."""

    stream: int
    relay: EndpointID


@dataclass(frozen=True, slots=True)
class MailStreamClosed:
    """A relay's stream is gone."""

    stream: int


class DeviceLane(Protocol):
    """A lane of what a relay sends to a device under a session, as `DeliveryBatch` has it."""

    @property
    def uin(self) -> int:
        """The user."""

    @property
    def device(self) -> int:
        """Pi's number."""

    @property
    def session(self) -> int:
        """The session's number."""

    @property
    def lane(self) -> int:
        """The lane, as it came: it may be none."""


@dataclass(frozen=True, slots=True)
class MailArrived:
    """A relay's batch, read by `gateway.mail.read_batch`."""

    stream: int
    devices: Sequence[MailDevice]
    runs: Sequence[MailRun]
    asked: Sequence[DeviceLane] = ()
    """Which lanes the relay wants to be told of."""


@dataclass(frozen=True, slots=True)
class MailAcknowledged:
    """A client has got mail: (lane, first, last) InboxSeq, both included."""

    connection: int
    ranges: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class PacketsAcknowledged:
    """An MQTT client sent PUBACKs of these packet identifiers."""

    connection: int
    packet_ids: Sequence[int]


Event = (
    RoutersChanged
    | DigestKeysChanged
    | RelaysChanged
    | ProxiesChanged
    | Opened
    | Closed
    | Join
    | Leave
    | RecordsReceived
    | EndOfTurn
    | Publish
    | Confirmed
    | Replaced
    | HealingReceived
    | FenceReceived
    | Settled
    | MailStreamOpened
    | MailStreamClosed
    | MailArrived
    | MailAcknowledged
    | PacketsAcknowledged
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendMembership:
    """Send gateway messages to a router or a relay. A token of 0: nobody waits for what becomes of them."""

    peer: EndpointID
    messages: list[Update]
    token: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a connection: a newer login took its place. `reason`: of control.proto, what its departure is reported as."""

    connection: int
    reason: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """This generation is over: the process must end, and start again with another."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Write `data` to every connection: `count` PUBLISH packets, or records end to end.

    `paced`: of a big room; others' deliveries go first.
    """

    connections: tuple[int, ...]
    data: bytes
    count: int
    paced: bool = False


@dataclass(frozen=True, slots=True)
class SendDelivered:
    """Tell proxies that these signals were delivered, by SnowflakeID: whoever of them has a publisher that waits passes it on."""

    peers: tuple[EndpointID, ...]
    signals: list[int]


@dataclass(frozen=True, slots=True)
class KeepTraces:
    """These traced records have left, with this gateway's stamp: their traces are finished."""

    records: list[bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's request has taken effect. `known`: all routers and relays confirmed it; False: it took too long, and goes on.

    `refused`: the channels of the request that a router or relay has no room for, as the client calls them; it is not in them.
    `user_refused`: nor does it get the messages to its user that it asked for.
    """

    connection: int
    request: int
    known: bool
    refused: frozenset[tuple[int, bytes | None]] = frozenset()
    user_refused: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """So many bytes of what a client published by `Publish` are with the proxies, or lost."""

    connection: int
    size: int


@dataclass(frozen=True, slots=True)
class WriteMail:
    """Write mail to a connection. `anew`: of a new session; what of an older one has not left yet is not to leave any more."""

    connection: int
    runs: list[MailRun]
    anew: bool


@dataclass(frozen=True, slots=True)
class AcknowledgementsDue:
    """A relay's stream has acknowledgements to take (`MailBook.take_acknowledgements`) when its last reply is written."""

    stream: int


@dataclass(frozen=True, slots=True)
class EndMailStream:
    """End a relay's stream; of this core it is gone already. `text` says why."""

    stream: int
    text: str
    at_fault: bool = False
    """The relay sent what it may not."""


Effect = (
    Settle
    | SendMembership
    | SendControl
    | SendRecords
    | SendDelivered
    | Deliver
    | KeepTraces
    | Answer
    | Disconnect
    | Fenced
    | WriteMail
    | AcknowledgementsDue
    | EndMailStream
    | Passed
)
