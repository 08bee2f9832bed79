"""The replicas of one role that records go to: partition by key, then the replica that rendezvous hashing names. Pure.

Source: DESIGN section 8.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pixiu.ids import EndpointID
from pixiu.partition import rendezvous
from pixiu.routing import Routes
from proxy.events import Replica


@dataclass(slots=True, eq=False)
class Target:
    """One replica, with the parcel that is being made up for it."""

    endpoint: EndpointID
    normal: list[bytes] = field(default_factory=list)
    first: list[bytes] = field(default_factory=list)
    chat: bool = False
    """It is a relay."""


class Destinations:
    """Brokers, or relays.

    Args:
        barrier_ms: see `pixiu.routing.Routes`.
        chat: they are relays.
    """

    def __init__(self, barrier_ms: int, *, chat: bool = False) -> None:
        self.partitions = 1
        self.routes: Routes[Target] = Routes(self._choose, barrier_ms)
        self._chat = chat
        self._by_partition: dict[int, list[Replica]] = {}
        self._targets: dict[EndpointID, Target] = {}

    def change(self, partitions: int, replicas: tuple[Replica, ...], now: float) -> None:
        """Use these replicas, of so many partitions."""
        self.partitions = partitions
        self._by_partition = {}
        for replica in replicas:
            self._by_partition.setdefault(replica.partition, []).append(replica)
        known = {replica.endpoint for replica in replicas}
        gone = [target for endpoint, target in self._targets.items() if endpoint not in known]
        self._targets = {e: self._targets.get(e) or Target(e, chat=self._chat) for e in sorted(known)}
        self.routes.change(now, gone)

    def _choose(self, key: int) -> Target | None:
        replicas = self._by_partition.get(key % self.partitions)
        if not replicas:
            return None
        usable = [replica.endpoint for replica in replicas if replica.usable]
        return self._targets[EndpointID(rendezvous(key, usable or [replica.endpoint for replica in replicas]))]
