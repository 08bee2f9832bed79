"""What the core of a router or a relay keeps beside its map: its state, its counters, its view of the registry. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import xxhash

from cluster.membership.replica_events import Gateway, Replica
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff

FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
"""The pause before a snapshot is tried again doubles from the first value to this one."""


class State(Enum):
    """Of a replica; Draining is the shell's matter, the core works on."""

    STARTING = "Starting"
    """The registry's view or the own database is not known yet."""
    LOADING = "Loading"
    """Reading the own database."""
    SYNCING = "Syncing"
    """Taking the first snapshot from a peer, or waiting to try again."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters:
    """What the replica has done since its start."""

    messages_from_gateways: int = 0
    messages_from_replicas: int = 0
    messages_malformed: int = 0
    messages_stale_sender: int = 0
    """For keys of another partition; passed on to it."""
    messages_unroutable: int = 0
    """For keys of a partition that has no replica now; not confirmed, so the gateway sends them again."""
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
    """Changes that were not written because the database had failed; it is written anew later."""


@dataclass(slots=True)
class ClusterView:
    """The registry's view as the core needs it."""

    version: int = 0
    partitions: int = 1
    replicas: dict[EndpointID, Replica] = field(default_factory=dict)
    brokers: frozenset[EndpointID] = frozenset()
    gateways: tuple[Gateway, ...] = ()

    def running(self, partition: int, dead: Container[EndpointID]) -> list[EndpointID]:
        """Running replicas of a partition that are not dead."""
        return [r.endpoint for r in self.replicas.values() if r.partition == partition and r.running and r.endpoint not in dead]

    def instance_of(self, endpoint: EndpointID) -> int | None:
        """The instance of a gateway in the registry."""
        return next((gateway.instance for gateway in self.gateways if gateway.endpoint == endpoint), None)


def retry_pause_s(endpoint: EndpointID, attempt: int) -> float:
    """The pause after an attempt to take a snapshot, the first is 1. The jitter comes from the process and the attempt:
    replicas that start together do not try together."""
    spread = xxhash.xxh3_64_intdigest(endpoint.to_bytes(8, "little") + attempt.to_bytes(8, "little"))
    return Backoff(FIRST_RETRY_S, MAX_RETRY_S, lambda: spread % 1024 / 1024).after_s(attempt)
