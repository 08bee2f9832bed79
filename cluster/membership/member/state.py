"""State that the core of every member keeps in addition to the shared map: its counters, its view of the registry. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import xxhash

from cluster.membership.events import NO_OTHER, ClusterChanged, Gateway, OtherRole, Replica
from pixiu.ids import EndpointID, gateway_msg_id, gateway_run
from pixiu.rpc.backoff import Backoff

FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
"""Longest pause before a snapshot is tried again; the pause doubles from the first value to this one, seconds."""


@dataclass(slots=True)
class MemberCounters:
    """Counters of every member since its start."""

    messages_malformed: int = 0
    messages_queued: int = 0
    queue_overflows: int = 0
    snapshots_taken: int = 0
    snapshots_failed: int = 0
    snapshots_malformed: int = 0
    started_again: int = 0
    """Number of times that it was out of contact for too long and became Init again."""
    layout_notices: int = 0
    """Senders that were notified of a newer layout."""


class Speaker(Enum):
    """Sender of messages that a replica passes on."""

    GATEWAY = auto()
    """A gateway that waits for the confirmation."""
    PEER = auto()
    """A replica of the same partition, which forwards to the other peers itself."""
    OTHER_PARTITION = auto()
    """A replica of another partition, to which a gateway with an old layout had reported."""


@dataclass(slots=True)
class Brokers:
    """The brokers in the registry."""

    partitions: int = 1
    endpoints: frozenset[EndpointID] = frozenset()
    by_partition: dict[int, list[EndpointID]] = field(default_factory=dict)
    """Brokers by partition. Those of a partition that is being made belong to the partition that serves its rooms until then."""

    @classmethod
    def of(cls, role: OtherRole) -> Brokers:
        """The brokers in an event."""
        found = cls(max(role.partitions, 1), frozenset(broker.endpoint for broker in role.replicas))
        for broker in role.replicas:
            found.by_partition.setdefault(broker.partition % found.partitions, []).append(broker.endpoint)
        return found


@dataclass(slots=True)
class ClusterView:
    """The registry's view as a core needs it."""

    version: int = 0
    partitions: int = 1
    replicas: dict[EndpointID, Replica] = field(default_factory=dict)
    """Other replicas of this process's role."""
    brokers: Brokers = field(default_factory=Brokers)
    gateways: tuple[Gateway, ...] = ()
    routers: OtherRole = NO_OTHER
    relays: OtherRole = NO_OTHER
    introductions: dict[int, bytes] = field(default_factory=dict)
    """Instance → `Gateway.introduction`."""
    runs: dict[EndpointID, int] = field(default_factory=dict)
    """Gateway → the run of its GatewayMsgIDs: it may report for no other run."""

    @classmethod
    def of(cls, event: ClusterChanged, own: EndpointID) -> ClusterView:
        """The view in an event, without this process."""
        replicas = {replica.endpoint: replica for replica in event.replicas if replica.endpoint != own}
        introductions = {gateway.instance: gateway.introduction for gateway in sorted(event.gateways, key=lambda g: g.generation)}
        runs = {
            gateway.endpoint: gateway_run(gateway_msg_id(gateway.instance, gateway.generation, 0)) for gateway in event.gateways
        }
        return cls(
            event.version,
            event.partitions,
            replicas,
            Brokers.of(event.brokers),
            event.gateways,
            event.routers,
            event.relays,
            introductions,
            runs,
        )

    def running(self, partition: int, dead: Container[EndpointID]) -> list[EndpointID]:
        """Running replicas of a partition of the own role that are not dead."""
        return [r.endpoint for r in self.replicas.values() if r.partition == partition and r.running and r.endpoint not in dead]

    def endpoints(self) -> set[EndpointID]:
        """The endpoints of all processes in the view."""
        others = {replica.endpoint for replica in (*self.routers.replicas, *self.relays.replicas)}
        return {*self.replicas, *self.brokers.endpoints, *others, *(gateway.endpoint for gateway in self.gateways)}


def retry_pause_s(endpoint: EndpointID, attempt: int) -> float:
    """The pause after an attempt to take a snapshot; the first attempt is 1. The jitter depends on the process and the attempt, so
    that replicas that start together do not retry together."""
    spread = xxhash.xxh3_64_intdigest(endpoint.to_bytes(8, "little") + attempt.to_bytes(8, "little"))
    return Backoff(FIRST_RETRY_S, MAX_RETRY_S, lambda: spread % 1024 / 1024).after_s(attempt)
