"""Events of a gateway's core, and the effects that it requests, besides those that all cores share (`cluster.core.contract`).

A connection is a number assigned by the shell. Clients subscribe by filters, as `pixiu.placement.topics.parse_filter` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from cluster.core.contract import NEVER, EndOfTurn, RecordsReceived, SendControl, SendRecords, Settle, Settled, Tick
from cluster.membership.events import DigestKeysChanged
from cluster.membership.map.updates import Update
from cluster.mqtt.events import Wanted as Wanted
from cluster.mqtt.outbound import Delivery as Delivery
from cluster.wills.will import WillMessage
from cluster.wire.v1 import control_pb2
from gateway.mail.run import MailRun
from pixiu.errors import PixiuError
from pixiu.ids import EndpointID, SnowflakeID


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that a gateway may send to: of a router or relay partition, or a proxy (partition 0)."""

    endpoint: EndpointID
    partition: int
    usable: bool = True
    """False while its heartbeats are in doubt: chosen only if there is no other."""


@dataclass(frozen=True, slots=True)
class RoutersChanged:
    """Router replicas that have started and are not dead, and the number of partitions."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class RelaysChanged:
    """The same for relays. `partitions` is 0 where the cluster's layout has no relays."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class ProxiesChanged:
    """Proxies that have started and are not dead, in the order of their registration."""

    proxies: tuple[Replica, ...]


class Inside(Protocol):
    """The tenant of a client: its topics have other names inside than outside, and it may be above its rate."""

    def inward(self, name: bytes) -> bytes:
        """The name that its clients know; empty: the topic is not the tenant's."""

    def take(self, messages: int, size: int) -> bool:
        """Charge messages of QoS 0 to its clients. False: they are dropped."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A client connected."""

    connection: int
    uin: int
    dialect: int
    """0: it gets records; otherwise PUBLISH packets of MQTT, 3: of 3.1 and 3.1.1, 5: of 5."""
    device: int = 0
    """DeviceID; 0: the connection is not reported."""
    device_class: int = 0
    wall_ms: int = 0
    """Unix milliseconds."""
    login: bool = True
    """True if it counts as a login of the user; see `cluster.membership.map.devices`."""
    name: str = ""
    """Name of the device, given by its user."""
    exact: bool = False
    """True if it gets no shared bytes, only `DeliverEach`: it limits the size of packets, or wants topic aliases."""
    credit: int = 65_535
    """Messages of shared subscriptions with QoS 1 or 2 that it may have unacknowledged."""
    session: int = 0
    """The pseudo-user whose inbox its session has, if that outlives the connection; 0: none. What concerns this inbox names the
    connection by its number below 0."""
    inside: Inside | None = None
    """Its tenant, if it gets packets; what `DeliverEach` delivers has the cluster's names."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A client disconnected; it leaves everything. `reason` is a `Reason` of control.proto."""

    connection: int
    reason: int


@dataclass(frozen=True, slots=True)
class SetWill:
    """A connection has a will; it replaces the one that the connection had."""

    connection: int
    uin: int
    device: int
    message: WillMessage
    delay_ms: int


@dataclass(frozen=True, slots=True)
class EndWill:
    """A connection has ended. `publish`: not by a DISCONNECT that takes the will back."""

    connection: int
    publish: bool


@dataclass(frozen=True, slots=True)
class Join:
    """A client subscribes; `Answer(connection, request)` follows when the cluster knows it.

    A filter that it has already gets the new options."""

    connection: int
    request: int
    channels: list[Wanted]
    chat: bool = False
    """True if it also takes the messages to its user."""
    mail: bool = False
    """True if it takes the user's mail."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A client unsubscribes. Takes effect at once."""

    connection: int
    filters: list[str]
    chat: bool = False
    mail: bool = False


@dataclass(frozen=True, slots=True)
class SharedAcknowledged:
    """A client acknowledged messages of shared subscriptions, by `Delivery.shared`. What it has not acknowledged at its end goes to
    another member of the group."""

    connection: int
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class RetainedFound:
    """Retained messages for filters of one connection, a slice: whole records of free topics and rooms."""

    connection: int
    fetch: int
    records: list[bytes]


@dataclass(frozen=True, slots=True)
class RetainedFetched:
    """Everything retained for a fetch was found."""

    connection: int
    fetch: int


@dataclass(frozen=True, slots=True)
class Publish:
    """A local client published: (key, record) of each, in order. `Passed` follows when they are no longer in flight."""

    records: list[tuple[int, bytes]]
    connection: int = 0


class Sender:
    """The connection that messages came by. `until`: the time, monotonic seconds, from which none of them leaves any more."""

    __slots__ = ("connection", "until")

    def __init__(self, connection: int = 0) -> None:
        self.connection, self.until = connection, NEVER


NO_SENDER: Final = Sender()
"""Of messages that nobody's connection bounds."""


class Confirmable:
    """A message of QoS 1 on its way to the brokers.

    Args:
        resolved: called once each time that it was published: the brokers have it, or the error is the reason.
    """

    __slots__ = ("_resolved", "attempts", "key", "number", "packet_id", "record", "refused", "sender", "snowflake")

    def __init__(
        self,
        resolved: Callable[[Confirmable, PixiuError | None], None],
        packet_id: int,
        key: int,
        record: bytes,
        snowflake: SnowflakeID,
        sender: Sender = NO_SENDER,
    ) -> None:
        self._resolved = resolved
        self.sender = sender
        self.packet_id = packet_id
        self.key = key
        self.record = record
        self.snowflake = snowflake
        self.refused = False
        """True if it was refused for now, and so may be stored nowhere."""
        self.number = 0
        """Place of the message among those of its client."""
        self.attempts = 0
        """Times that it was sent again after a refusal or loss."""

    def resolved(self, error: PixiuError | None) -> None:
        """Report that the brokers have it, or the reason why not."""
        self._resolved(self, error)


@dataclass(init=False, slots=True)
class PublishConfirmed:
    """Local clients published messages of QoS 1, in order. `Resolved` follows for each."""

    messages: list[Confirmable]

    def __init__(self, messages: list[Confirmable]) -> None:
        self.messages = messages


class RecordFailure(NamedTuple):
    """Messages of a batch that were not passed on, by their positions, with an error of `pixiu.errors`."""

    first: int
    last: int
    code: str
    text: str
    retry_after_ms: int


@dataclass(init=False, slots=True)
class BatchResolved:
    """A proxy answered a batch of messages of QoS 1: all are accepted but those with a failure."""

    proxy: EndpointID
    number: int
    failures: list[RecordFailure]

    def __init__(self, proxy: EndpointID, number: int, failures: list[RecordFailure]) -> None:
        self.proxy, self.number, self.failures = proxy, number, failures


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A router or relay confirms that its partition, and a router's brokers, know these gateway messages.

    `newer`: (ID, connect time) of those whose device has a newer connection on another gateway.
    """

    peer: EndpointID
    ids: list[int]
    newer: list[tuple[int, int]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    """Logins for which it has no capacity."""
    stale: list[int] = field(default_factory=list)
    """Messages hidden there by something newer in this gateway's name."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A relay reports that the connections of a device up to a connect time were replaced. `reason`: of control.proto."""

    uin: int
    key: int
    """As in `cluster.membership.map.devices.device_key`."""
    connect_time: int
    reason: int


@dataclass(frozen=True, slots=True)
class HealingReceived:
    """A router or relay asks for the state of this gateway, with one of the messages of `cluster.membership.map.anti_entropy`."""

    peer: EndpointID
    control: control_pb2.Control
    relay: bool | None = False
    """None: this gateway's view of the registry does not have the peer yet, so it may be either."""


@dataclass(frozen=True, slots=True)
class FenceReceived:
    """A router or relay refuses lower GatewayMsgIDs: it takes this gateway's generation for dead."""

    peer: EndpointID
    floor: int


class MailDevice(NamedTuple):
    """The connection that Pi's number for a device stands for."""

    uin: int
    key: int
    """As in `cluster.membership.map.devices.device_key`."""
    connect_time: int
    device: int


@dataclass(frozen=True, slots=True)
class MailStreamOpened:
    """A relay opened a stream to deliver mail. `stream`: a number assigned by the shell."""

    stream: int
    relay: EndpointID


@dataclass(frozen=True, slots=True)
class MailStreamClosed:
    """A relay's stream ended."""

    stream: int


class DeviceLane(Protocol):
    """A lane of a device under a session, as in `DeliveryBatch` from a relay."""

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
        """The lane as received; it may be invalid."""


@dataclass(frozen=True, slots=True)
class MailArrived:
    """A relay's batch, read by `gateway.delivery.mail.read_batch`."""

    stream: int
    devices: Sequence[MailDevice]
    runs: Sequence[MailRun]
    asked: Sequence[DeviceLane] = ()
    """Lanes whose state the relay asks for."""


@dataclass(frozen=True, slots=True)
class MailAcknowledged:
    """A client acknowledged mail: (lane, first, last) InboxSeq, both included."""

    connection: int
    ranges: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class PacketsAcknowledged:
    """An MQTT client sent PUBACKs of these packet identifiers."""

    connection: int
    """Below 0: of its session's inbox, whose identifiers are those of mail."""
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
    | SharedAcknowledged
    | RetainedFound
    | RetainedFetched
    | RecordsReceived
    | EndOfTurn
    | Publish
    | PublishConfirmed
    | BatchResolved
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
    """Send gateway messages to a router or a relay. A token of 0: nobody waits for the outcome."""

    peer: EndpointID
    messages: list[Update]
    token: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a connection: a newer login took its place. `reason`: of control.proto, reported with its departure."""

    connection: int
    reason: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """This generation is over: the process must end, and start again with a new one."""


@dataclass(init=False, slots=True)
class Deliver:
    """Write `data` to every connection: `count` PUBLISH packets of its dialect, or records end to end.

    `paced`: for a big room; other deliveries go first.
    """

    connections: tuple[int, ...]
    data: bytes
    count: int
    paced: bool

    def __init__(self, connections: tuple[int, ...], data: bytes, count: int, paced: bool = False) -> None:
        self.connections, self.data, self.count, self.paced = connections, data, count, paced


@dataclass(frozen=True, slots=True)
class DeliverEach:
    """Write messages to one MQTT connection, in order."""

    connection: int
    messages: list[Delivery]


@dataclass(frozen=True, slots=True)
class FetchRetained:
    """Fetch the retained messages of filters for a connection: `RetainedFound` in slices, then `RetainedFetched`."""

    connection: int
    fetch: int
    filters: list[str]


@dataclass(frozen=True, slots=True)
class SendDelivered:
    """Notify proxies of delivered signals, by SnowflakeID; a proxy whose publisher waits for one passes it on."""

    peers: tuple[EndpointID, ...]
    signals: list[int]


@dataclass(frozen=True, slots=True)
class KeepTraces:
    """Finish the traces of these records, which have left with this gateway's stamp."""

    records: list[bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's request has taken effect. `known`: all routers and relays confirmed it; False: it took too long and continues.

    `refused`: filters of the request that it did not get, because a router or relay has no capacity, they span too many rooms, or
    no room carries them.
    `user_refused`: it does not get the messages to its user either.
    """

    connection: int
    request: int
    known: bool
    refused: frozenset[str] = frozenset()
    user_refused: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """`size` bytes that a client published by `Publish` are with the proxies, or lost."""

    connection: int
    size: int


@dataclass(init=False, slots=True)
class Resolved:
    """Outcomes of messages of QoS 1: accepted (None), or the reason why not."""

    outcomes: list[tuple[Confirmable, PixiuError | None]]

    def __init__(self, outcomes: list[tuple[Confirmable, PixiuError | None]]) -> None:
        self.outcomes = outcomes


@dataclass(frozen=True, slots=True)
class WriteMail:
    """Write mail to a connection. `anew`: of a new session; what has not left of an older one must not leave."""

    connection: int
    """Below 0: it is of its session's inbox, with the markers of gaps, which are acknowledged."""
    runs: list[MailRun]
    anew: bool


@dataclass(frozen=True, slots=True)
class AcknowledgementsDue:
    """A relay's stream has acknowledgements to take (`MailBook.take_acknowledgements`) when its last reply is written."""

    stream: int


@dataclass(frozen=True, slots=True)
class EndMailStream:
    """End a relay's stream, which this core has dropped already. `text`: the reason."""

    stream: int
    text: str
    at_fault: bool = False
    """True if the relay broke the protocol."""


Effect = (
    Settle
    | SendMembership
    | SendControl
    | SendRecords
    | SendDelivered
    | Deliver
    | DeliverEach
    | FetchRetained
    | KeepTraces
    | Answer
    | Disconnect
    | Fenced
    | WriteMail
    | AcknowledgementsDue
    | EndMailStream
    | Passed
    | Resolved
)
