"""What happens to a broker's core, and what it asks its shell to do.

Much is as routers have it: `cluster.membership.replica_events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.membership.replica_events import (
    AbsenceReceived,
    AntiEntropyReceived,
    BecomeInit,
    BecomeRunning,
    Gateway,
    MessagesReceived,
    PeerAlive,
    PeerDead,
    RecordsReceived,
    SendControl,
    SetAttachment,
    SnapshotChunk,
    SnapshotFinished,
    SubscriptionReply,
    TakeSnapshot,
    Tick,
)
from pixiu.ids import EndpointID

__all__ = [
    "AbsenceReceived",
    "AntiEntropyReceived",
    "BecomeInit",
    "BecomeRunning",
    "ClusterChanged",
    "Effect",
    "Event",
    "Gateway",
    "MalformedBatch",
    "MessagesReceived",
    "NotTaken",
    "PeerAlive",
    "PeerDead",
    "RecordsReceived",
    "Replica",
    "SendControl",
    "SendRecords",
    "SetAttachment",
    "SnapshotChunk",
    "SnapshotFinished",
    "SubscriptionReply",
    "TakeSnapshot",
    "Tick",
    "WaitingForRouters",
]


@dataclass(frozen=True, slots=True)
class Replica:
    """A Running replica in the registry: a router, or another broker."""

    endpoint: EndpointID
    partition: int


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


Event = (
    ClusterChanged
    | PeerDead
    | PeerAlive
    | RecordsReceived
    | MessagesReceived
    | SubscriptionReply
    | AntiEntropyReceived
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
class MalformedBatch:
    """A batch was dropped whole."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Records of a batch are for rooms of another partition and cannot be passed on: the sender must not take it as accepted."""

    peer: EndpointID


@dataclass(frozen=True, slots=True)
class WaitingForRouters:
    """The broker cannot run yet: no router of these partitions can be used. Said every 10 seconds."""

    partitions: tuple[int, ...]
    waited_s: float


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
