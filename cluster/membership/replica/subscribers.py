"""Processes that take the live messages of a router or relay: brokers, peers, and replicas of a partition that is being made. Pure.

A subscription is opened by a snapshot, never by a heartbeat, so that the subscriber misses nothing between the two; heartbeats keep
it alive. A process that heartbeats without a subscription is informed of that, and takes a snapshot again.

Source: PiXiu §5 (brokers register themselves by heartbeat) and §5.2 step 8; docs/architecture.md, docs/memberships.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pixiu.ids import EndpointID
from pixiu.placement.partition import is_partition_count

MAX_SUBSCRIBERS: Final = 4096
"""Subscribers of one replica. Policy: a further snapshot request is refused with `OVERLOADED`."""
MAX_PARTITION: Final = 1 << 20
"""Bound of a valid partition number in a request."""


@dataclass(slots=True)
class Subscriber:
    """One process that takes live messages."""

    endpoint: EndpointID
    role: str
    partition: int
    partitions: int
    heard: float
    """Time of its last sign of life, monotonic seconds."""

    def wants(self, room: int) -> bool:
        """True if a room belongs to its partition."""
        return room % self.partitions == self.partition % self.partitions


def valid_filter(partition: int, partitions: int) -> bool:
    """True if a partition rule from the network is valid."""
    return is_partition_count(partitions) and 0 <= partition < MAX_PARTITION


class Subscribers:
    """The subscriptions of one replica.

    Args:
        expire_s: time without a heartbeat after which a subscription ends, seconds.
    """

    def __init__(self, expire_s: float) -> None:
        self._expire_s = expire_s
        self._all: dict[EndpointID, Subscriber] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self._all

    def all(self) -> list[Subscriber]:
        """All open subscriptions."""
        return list(self._all.values())

    def open(self, endpoint: EndpointID, role: str, partition: int, partitions: int, now: float) -> bool:
        """Open or reopen a subscription. False at the limit of subscribers."""
        if endpoint not in self._all and len(self._all) >= MAX_SUBSCRIBERS:
            return False
        self._all[endpoint] = Subscriber(endpoint, role, partition, partitions, now)
        return True

    def heartbeat(self, endpoint: EndpointID, partition: int, partitions: int, now: float) -> bool:
        """Take a subscriber's sign of life with its present partition rule. False: it must take a snapshot.

        A rule with fewer rooms (its partitions doubled) is taken over; one with other rooms ends the subscription, because these
        were not in its snapshot.
        """
        found = self._all.get(endpoint)
        if found is None:
            return False
        narrower = partitions % found.partitions == 0 and partition % found.partitions == found.partition % found.partitions
        if not valid_filter(partition, partitions) or not narrower:
            del self._all[endpoint]
            return False
        found.partition, found.partitions, found.heard = partition, partitions, now
        return True

    def end(self, endpoint: EndpointID) -> bool:
        """End a subscription. Returns True if there was one."""
        return self._all.pop(endpoint, None) is not None

    def expire(self, now: float) -> list[EndpointID]:
        """End the subscriptions that were silent for too long; returns their endpoints."""
        silent = [endpoint for endpoint, found in self._all.items() if found.heard + self._expire_s <= now]
        for endpoint in silent:
            del self._all[endpoint]
        return silent
