"""What happens to a broker's core, and what it asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from pixiu.ids import EndpointID
from pixiu.softstore import Change, Chunk
from pixiu.wire.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Replica:
    """A Running replica in the registry: a router, or another broker."""

    endpoint: EndpointID
    partition: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway in the registry, with the instance that it leases."""

    endpoint: EndpointID
    instance: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """The registry's view is another one."""

    version: int
    """Of the layout."""
    partitions: int
    """Broker partitions."""
    router_partitions: int
    router_next: int
    """Router partitions once the doubling that is under way is over; the present number without one."""
    routers: tuple[Replica, ...]
    brokers: tuple[Replica, ...]
    """Without this process."""
    gateways: tuple[Gateway, ...]
    relay_partitions: int = 0
    relays: tuple[Replica, ...] = ()
    """Used only where records go through relays."""


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Heartbeats say that a peer is dead."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """Heartbeats say that a peer is there (again)."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class RecordsReceived:
    """`count` records lie in data[start:end], from a proxy, or from a broker that passes them on."""

    peer: EndpointID
    data: bytes
    start: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class MessagesReceived:
    """Gateway messages from a router."""

    peer: EndpointID
    messages: list[Change]


@dataclass(frozen=True, slots=True)
class SubscriptionReply:
    """A router's answer to our heartbeat: whether it sends us everything since our last snapshot, and what it has of our
    rooms."""

    peer: EndpointID
    subscribed: bool
    digest: control_pb2.Digest | None = None


@dataclass(frozen=True, slots=True)
class HealingReceived:
    """One of the messages of `pixiu.healing`, from a router."""

    peer: EndpointID
    control: control_pb2.Control


@dataclass(frozen=True, slots=True)
class AbsenceReceived:
    """Negative feedback, by a router: as of this GatewayMsgID the gateway that made it had no members of these rooms."""

    peer: EndpointID
    as_of: int
    rooms: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of a snapshot that is being taken."""

    source: EndpointID
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class SnapshotFinished:
    """The snapshot from `source` is complete, or failed (`error` says why)."""

    source: EndpointID
    error: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline()` has come."""


Event = (
    ClusterChanged
    | PeerDead
    | PeerAlive
    | RecordsReceived
    | MessagesReceived
    | SubscriptionReply
    | HealingReceived
    | AbsenceReceived
    | SnapshotChunk
    | SnapshotFinished
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendRecords:
    """Send a parcel to a gateway or relay, or to the broker that serves the rooms."""

    peer: EndpointID
    records: list[bytes]
    lane: int


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send serialized `Control` messages."""

    peer: EndpointID
    messages: list[bytes]


@dataclass(frozen=True, slots=True)
class MalformedBatch:
    """A batch was dropped whole."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Records of a batch are for rooms of another partition and cannot be passed on: the sender must not take it as accepted."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class SetAttachment:
    """What heartbeats to a peer carry from now on."""

    peer: EndpointID
    attachment: bytes


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask a router for a snapshot: `SnapshotChunk` for each part, then `SnapshotFinished`."""

    source: EndpointID
    partition: int
    partitions: int


@dataclass(frozen=True, slots=True)
class WaitingForRouters:
    """The broker cannot run yet: no router of these partitions can be used. Said every 10 seconds."""

    partitions: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class BecomeInit:
    """The membership may lack what nobody remembers: register as Init until `BecomeRunning`."""


@dataclass(frozen=True, slots=True)
class BecomeRunning:
    """The membership is complete: register as Running."""


Effect = (
    SendRecords
    | SendControl
    | MalformedBatch
    | NotTaken
    | SetAttachment
    | TakeSnapshot
    | WaitingForRouters
    | BecomeInit
    | BecomeRunning
)
