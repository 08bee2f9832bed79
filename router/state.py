"""What a router's core keeps beside the membership: its state, its counters, and its view of the registry. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pixiu.ids import EndpointID
from router.events import Gateway, Replica


class State(Enum):
    """Of a router replica; Draining is the shell's matter, the core works on."""

    STARTING = "Starting"
    """The registry's view or the Router DB is not known yet."""
    LOADING = "Loading"
    """Reading the own Router DB."""
    SYNCING = "Syncing"
    """Taking the first snapshot from a peer, or waiting to try again."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters:
    """What the router has done since its start."""

    messages_from_gateways: int = 0
    messages_from_routers: int = 0
    messages_malformed: int = 0
    messages_stale_sender: int = 0
    """For rooms of another partition; passed on to it."""
    messages_unroutable: int = 0
    """For rooms of a partition that has no replica now; not confirmed, so the gateway sends them again."""
    messages_queued: int = 0
    queue_overflows: int = 0
    confirmed: int = 0
    snapshots_served: int = 0
    snapshots_refused: int = 0
    snapshots_taken: int = 0
    snapshots_failed: int = 0
    subscriptions_ended: int = 0
    started_again: int = 0
    """Times it was out of contact with its partition's other replicas for too long and became Init again."""
    store_failures: int = 0
    store_skipped: int = 0
    """Changes that were not written because the Router DB had failed; it is written anew later."""


@dataclass(slots=True)
class ClusterView:
    """The registry's view as the core needs it."""

    version: int = 0
    partitions: int = 1
    replicas: dict[EndpointID, Replica] = field(default_factory=dict)
    brokers: frozenset[EndpointID] = frozenset()
    gateways: tuple[Gateway, ...] = ()

    def instance_of(self, endpoint: EndpointID) -> int | None:
        """The instance of a gateway in the registry."""
        return next((gateway.instance for gateway in self.gateways if gateway.endpoint == endpoint), None)
