"""What happens to the core of a router, relay or broker, and what it asks its shell to do.

All are members of the shared map: routers and relays replicate it (`replica_core`), brokers read it (`member_core`). What
every core has, records and parcels among it, is in `cluster.runtime.contract`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cluster.membership.digest import DigestKey
from cluster.membership.lww_map import Chunk, Key, Update
from cluster.runtime.contract import RecordsReceived, SendControl, SendRecords, Settle, Settled, Tick
from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of a role in the registry, of any partition."""

    endpoint: EndpointID
    partition: int
    running: bool = True
    """False: it is in Init; peers forward to it, nobody takes a snapshot from it."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway in the registry, with the instance that it leases."""

    endpoint: EndpointID
    instance: int
    generation: int
    introduction: bytes = b""
    """A serialized `Control` that tells brokers where it is; to be written behind one with its messages, as both are then read as
    one. Empty: they learn it from the registry alone."""


@dataclass(frozen=True, slots=True)
class OtherRole:
    """Replicas of another role: the Running ones, unless said otherwise."""

    partitions: int = 0
    """0: nothing goes by way of this role."""
    next_partitions: int = 0
    """Once the doubling that is under way is over; the present number without one."""
    replicas: tuple[Replica, ...] = ()


NO_OTHER: Final = OtherRole()


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """The registry's view is another one."""

    version: int
    """Of the layout."""
    partitions: int
    """Of the own role."""
    replicas: tuple[Replica, ...]
    """Of the own role without this process; Draining ones left out. To a broker the Running ones."""
    brokers: OtherRole
    """For routers: who may subscribe, whatever its state, and is told what gateways say."""
    gateways: tuple[Gateway, ...]
    routers: OtherRole = NO_OTHER
    """For brokers."""
    relays: OtherRole = NO_OTHER
    """For brokers, where records go through relays."""


@dataclass(frozen=True, slots=True)
class DigestKeysChanged:
    """What entries are hashed with for digests, the key to ask others by first."""

    keys: tuple[DigestKey, ...]


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Heartbeats say that a peer is dead."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """Heartbeats say that a peer is there (again)."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class MessagesReceived:
    """Gateway messages, from a gateway or from another replica."""

    peer: EndpointID
    messages: list[Update]


@dataclass(frozen=True, slots=True)
class SubscriptionReply:
    """An answer to our heartbeat. A replica's: whether it sends us everything since our last snapshot, and what it has
    of our rooms; a gateway's: what is on it."""

    peer: EndpointID
    subscribed: bool
    digest: control_pb2.Digest | None = None


@dataclass(frozen=True, slots=True)
class AntiEntropyReceived:
    """One of the messages of `cluster.membership.anti_entropy`, from a gateway, a replica or a broker."""

    peer: EndpointID
    control: control_pb2.Control


@dataclass(frozen=True, slots=True)
class AbsenceReceived:
    """Negative feedback: as of this GatewayMsgID the gateway that made it had no members of these rooms."""

    peer: EndpointID
    as_of: int
    rooms: list[int]


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """A broker or a replica asks for a snapshot; from the answer on it gets live messages."""

    request: int
    """The shell's number for the call."""
    endpoint: EndpointID
    role: str
    partition: int
    partitions: int


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The database is open. `age_s`: seconds since it was last kept up to date; None: it is empty or unreadable."""

    age_s: float | None


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """A part of the database, in answer to `LoadStore`."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class StoreLoaded:
    """The database was read to its end."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The database could not be written; it lacks something from now on."""

    text: str


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of the snapshot that is being taken."""

    source: EndpointID
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class SnapshotFinished:
    """The snapshot from `source` is complete, or failed (`error` says why)."""

    source: EndpointID
    error: str | None


Event = (
    ClusterChanged
    | PeerDead
    | DigestKeysChanged
    | PeerAlive
    | RecordsReceived
    | MessagesReceived
    | Settled
    | SubscriptionReply
    | AntiEntropyReceived
    | AbsenceReceived
    | SnapshotRequested
    | StoreOpened
    | StoreChunk
    | StoreLoaded
    | StoreFailed
    | SnapshotChunk
    | SnapshotFinished
    | Tick
)


@dataclass(frozen=True, slots=True)
class SetAttachment:
    """What heartbeats to a peer carry from now on."""

    peer: EndpointID
    attachment: bytes


@dataclass(frozen=True, slots=True)
class Persist:
    """Write to the database, later, in this order among all `Persist` and `RewriteStore`."""

    puts: list[Update] = field(default_factory=list)
    deletes: list[Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RewriteStore:
    """Replace all that the database holds by these chunks, which are made as they are asked for."""

    chunks: Iterator[Chunk]


@dataclass(frozen=True, slots=True)
class LoadStore:
    """Read the database: `StoreChunk` for each part, then `StoreLoaded`."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask a replica for a snapshot: `SnapshotChunk` for each part, then `SnapshotFinished`."""

    source: EndpointID
    partition: int
    partitions: int


@dataclass(frozen=True, slots=True)
class ServeSnapshot:
    """Answer a request with these chunks, which are made as they are asked for."""

    request: int
    chunks: Iterator[Chunk]


@dataclass(frozen=True, slots=True)
class RefuseSnapshot:
    """Answer a request with an error of `pixiu.errors`."""

    request: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class SenderRefused:
    """What somebody said of memberships was not taken."""

    peer: EndpointID
    known: bool
    """It is a gateway, and spoke for another one. False: the view does not have it (yet)."""


@dataclass(frozen=True, slots=True)
class BecomeInit:
    """The membership may lack what nobody remembers: register as Init until `BecomeRunning`."""


@dataclass(frozen=True, slots=True)
class BecomeRunning:
    """The membership is complete: register as Running."""


@dataclass(frozen=True, slots=True)
class WaitingForRouters:
    """A broker cannot run yet: no router of these partitions can be used. Said every 10 seconds."""

    partitions: tuple[int, ...]
    waited_s: float


Effect = (
    SendRecords
    | SendControl
    | Settle
    | SetAttachment
    | Persist
    | RewriteStore
    | LoadStore
    | TakeSnapshot
    | ServeSnapshot
    | RefuseSnapshot
    | SenderRefused
    | BecomeInit
    | BecomeRunning
    | WaitingForRouters
)
