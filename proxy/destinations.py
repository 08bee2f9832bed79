"""Where a proxy's records go: the replicas of brokers, or of relays. Pure.

Source: PiXiu §2.2 steps 6 to 8; docs/routing.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pixiu.ids import EndpointID
from pixiu.placement.ordered_routes import Routes
from pixiu.placement.partition import rendezvous, weighted_rendezvous
from proxy import events as ev
from proxy.signals import replica_of_copy

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class Target(Generic[Owner]):
    """One replica, with the parcel that is being made up for it."""

    endpoint: EndpointID
    routes: Routes[Target[Owner]] | None = None
    """Whose change waits for its parcels. None: its records are signals, for which no change of routes waits."""
    normal: list[bytes] = field(default_factory=list)
    first: list[bytes] = field(default_factory=list)
    divert: Callable[[list[bytes], Owner | None], None] | None = None
    """Takes the records instead of a replica: so what is not routed plainly costs the loop over a batch nothing."""


class Destinations(Generic[Owner]):
    """The replicas of one role.

    Args:
        barrier_ms: see `pixiu.placement.ordered_routes.Routes`.
        choose: gives a key's target in place of `replica`; None: `replica` does.
    """

    def __init__(self, barrier_ms: int, choose: Callable[[int], Target[Owner] | None] | None = None) -> None:
        self.partitions = 0
        """0: the cluster has no such role."""
        self.routes: Routes[Target[Owner]] = Routes(choose if choose is not None else self.replica, barrier_ms)
        self.targets: dict[EndpointID, Target[Owner]] = {}
        self._by_partition: dict[int, list[ev.Replica]] = {}
        self._signal_targets: dict[EndpointID, Target[Owner]] = {}

    def change(self, partitions: int, replicas: tuple[ev.Replica, ...], now: float) -> None:
        """Use these replicas, of so many partitions."""
        self.partitions = partitions
        self._by_partition = {}
        for replica in replicas:
            self._by_partition.setdefault(replica.partition, []).append(replica)
        known = {replica.endpoint for replica in replicas}
        gone = [target for endpoint, target in self.targets.items() if endpoint not in known]
        self.targets = {endpoint: self.targets.get(endpoint) or Target(endpoint, self.routes) for endpoint in sorted(known)}
        self._signal_targets = {endpoint: Target(endpoint) for endpoint in self.targets}
        self.routes.change(now, gone)

    def replica(self, key: int) -> Target[Owner] | None:
        """The replica of a key that rendezvous hashing names; None where its partition has none."""
        replicas = self._of(key)
        if not replicas:
            return None
        weights = {replica.endpoint: replica.weight for replica in replicas if replica.usable}
        if not weights:
            weights = {replica.endpoint: replica.weight for replica in replicas}
        # Most clusters have no weights, and this is cheaper.
        equal = len(set(weights.values())) == 1
        return self.targets[EndpointID(rendezvous(key, weights) if equal else weighted_rendezvous(key, weights.items()))]

    def of_copy(self, key: int, signal: int, copy: int) -> Target[Owner] | None:
        """The replica that gets a copy of a signal; see `proxy.signals`."""
        replicas = self._of(key)
        return self._signal_targets[EndpointID(replica_of_copy(replicas, signal, copy))] if replicas else None

    def _of(self, key: int) -> list[ev.Replica]:
        return self._by_partition.get(key % self.partitions, []) if self.partitions else []
