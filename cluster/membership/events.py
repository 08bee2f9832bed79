"""Events and effects of the core of a router, relay or broker.

All of them are members of the shared map: routers and relays replicate it (`replica_core`), brokers read it (`member_core`). Events
and effects that every core has, such as records and parcels, are in `cluster.core.contract`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import RecordsReceived, SendControl, SendRecords, Settle, Settled, Tick
from cluster.membership.map.digest import DigestKey
from cluster.membership.map.lww_map import Key
from cluster.membership.map.updates import Chunk, Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of a role in the registry, of any partition."""

    endpoint: EndpointID
    partition: int
    running: bool = True
    """False: it is in Init; peers forward to it, but nobody takes a snapshot from it."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway in the registry, with the instance that it leases."""

    endpoint: EndpointID
    instance: int
    generation: int
    introduction: bytes = b""
    """A serialized `Control` with its address for brokers. It is appended to one with the gateway's messages, and both are parsed
    as one. Empty: brokers learn the address from the registry alone."""


@dataclass(frozen=True, slots=True)
class OtherRole:
    """Replicas of another role: only the Running ones unless stated otherwise."""

    partitions: int = 0
    """Number of partitions; 0: no messages go through this role."""
    next_partitions: int = 0
    """Number of partitions after the current doubling; without a doubling the present number."""
    replicas: tuple[Replica, ...] = ()


NO_OTHER: Final = OtherRole()


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """The registry's view has changed."""

    version: int
    """Version of the layout."""
    partitions: int
    """Number of partitions of this process's role."""
    replicas: tuple[Replica, ...]
    """Replicas of this process's role without itself; Draining ones are left out. For a broker only the Running ones."""
    brokers: OtherRole
    """For routers: brokers in any state, which may subscribe and are informed of gateways' reports."""
    gateways: tuple[Gateway, ...]
    routers: OtherRole = NO_OTHER
    """Routers, for brokers."""
    relays: OtherRole = NO_OTHER
    """Relays, for brokers, if records go through relays."""


@dataclass(frozen=True, slots=True)
class DigestKeysChanged:
    """Keys for hashing entries in digests; the first is for asking others."""

    keys: tuple[DigestKey, ...]


@dataclass(frozen=True, slots=True)
class PeerDead:
    """A peer is dead according to heartbeats."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """A peer is alive (again) according to heartbeats."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class MessagesReceived:
    """Gateway messages, from a gateway or from another replica."""

    peer: EndpointID
    messages: list[Update]


@dataclass(frozen=True, slots=True)
class SubscriptionReply:
    """An answer to our heartbeat. A replica reports whether it sends us everything since our last snapshot, and its digest of our
    rooms; a gateway reports its own digest."""

    peer: EndpointID
    subscribed: bool
    digest: control_pb2.Digest | None = None


@dataclass(frozen=True, slots=True)
class AntiEntropyReceived:
    """A message of `cluster.membership.map.anti_entropy`, from a gateway, a replica or a broker."""

    peer: EndpointID
    control: control_pb2.Control


@dataclass(frozen=True, slots=True)
class SharedOutcome:
    """A gateway reports on messages of shared subscriptions: 16 bytes each, SnowflakeID and number of the group. Brokers only."""

    peer: EndpointID
    taken: bytes
    returned: bytes


@dataclass(frozen=True, slots=True)
class AbsenceReceived:
    """Negative feedback: as of this GatewayMsgID, the gateway that made it had no members of these rooms."""

    peer: EndpointID
    as_of: int
    rooms: list[int]


@dataclass(frozen=True, slots=True)
class MarkRooms:
    """Report to brokers and peers that rooms have kept filters, or have none any more. Routers only."""

    request: int
    """The shell's number of the request."""
    rooms: tuple[int, ...]
    marked: bool
    now_ms: int
    """Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class SnapshotRequested:
    """A broker or a replica requests a snapshot; from the answer on it gets live messages."""

    request: int
    """The shell's number of the call."""
    endpoint: EndpointID
    role: str
    partition: int
    partitions: int


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The database is open. `age_s`: seconds since it was last up to date; None: it is empty or unreadable."""

    age_s: float | None


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """A part of the database, in answer to `LoadStore`."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class StoreLoaded:
    """The database was read completely."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The database could not be written; it is incomplete from now on."""

    text: str


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A part of the snapshot that is being taken."""

    source: EndpointID
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class SnapshotFinished:
    """The snapshot from `source` is complete, or failed (`error` gives the reason)."""

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
    | SharedOutcome
    | MarkRooms
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
    """Set the attachment of heartbeats to a peer."""

    peer: EndpointID
    attachment: bytes


@dataclass(frozen=True, slots=True)
class Persist:
    """Write to the database, later, in order with all other `Persist` and `RewriteStore` effects."""

    puts: list[Update] = field(default_factory=list)
    deletes: list[Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RewriteStore:
    """Replace the content of the database by these chunks, which are made on demand."""

    chunks: Iterator[Chunk]


@dataclass(frozen=True, slots=True)
class LoadStore:
    """Read the database: `StoreChunk` for each part, then `StoreLoaded`."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Request a snapshot from a replica: `SnapshotChunk` for each part, then `SnapshotFinished`."""

    source: EndpointID
    partition: int
    partitions: int


@dataclass(frozen=True, slots=True)
class ServeSnapshot:
    """Answer a request with these chunks, which are made on demand."""

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
    """A sender's report on memberships was refused."""

    peer: EndpointID
    known: bool
    """True: the sender is a gateway and reported for another one. False: the sender is not in the view (yet)."""


@dataclass(frozen=True, slots=True)
class UnprovenLogins:
    """A gateway reported connections of users to a relay without a valid login ticket."""

    gateway: EndpointID
    count: int


@dataclass(frozen=True, slots=True)
class RoomsMarked:
    """All live peers, and all brokers that serve the rooms, have the marks of a request. Routers only."""

    request: int
    refused: bool = False
    """True: none of it was done, because the map is full."""


@dataclass(frozen=True, slots=True)
class MarksLost:
    """Rooms whose marks another replica removed. Routers only."""

    rooms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BecomeInit:
    """The membership may lack entries that nobody remembers: register as Init until `BecomeRunning`."""


@dataclass(frozen=True, slots=True)
class BecomeRunning:
    """The membership is complete: register as Running."""


@dataclass(frozen=True, slots=True)
class WaitingForRouters:
    """A broker cannot run yet: no router of these partitions is usable. Repeated every 10 seconds."""

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
    | UnprovenLogins
    | RoomsMarked
    | MarksLost
    | BecomeInit
    | BecomeRunning
    | WaitingForRouters
)
