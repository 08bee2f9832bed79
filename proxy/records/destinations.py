"""Destinations of a proxy's records: the replicas of brokers, or of relays. Pure.

Source: PiXiu §2.2 steps 6 to 8; docs/routing.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from pixiu.ids import EndpointID
from pixiu.placement.ordered_routes import Routes
from pixiu.placement.partition import rendezvous, weighted_rendezvous
from proxy import events as ev
from proxy.records.signals import replica_of_copy

Owner = TypeVar("Owner")
NOBODY: Final = EndpointID(0)


class Target(Generic[Owner]):
    """One replica, with the parcel that is being built for it."""

    __slots__ = ("divert", "endpoint", "first", "normal", "routes")

    def __init__(
        self,
        endpoint: EndpointID,
        routes: Routes[Target[Owner]] | None = None,
        divert: Callable[[list[bytes], Owner | None], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.routes = routes
        """Routes whose change waits for the target's parcels. None: its records are signals; no change of routes waits for them."""
        self.normal: list[bytes] = []
        self.first: list[bytes] = []
        self.divert = divert
        """Takes the records instead of a replica, so that special routing costs the loop over a batch nothing."""


class Destinations(Generic[Owner]):
    """The replicas of one role.

    Args:
        barrier_ms: see `pixiu.placement.ordered_routes.Routes`.
        wait: takes records that must wait until `routes` holds nothing, and must then be routed again.
        choose: gives a key's target instead of `replica`; None: `replica` does.
    """

    def __init__(
        self,
        barrier_ms: int,
        wait: Callable[[list[bytes], Owner | None], None],
        choose: Callable[[int], Target[Owner] | None] | None = None,
    ) -> None:
        self.partitions = 0
        """0: the cluster has no such role."""
        self._choose = choose if choose is not None else self.replica
        waiting: Target[Owner] = Target(NOBODY, divert=wait)
        self.routes: Routes[Target[Owner]] = Routes(self._choose, waiting, barrier_ms)
        self.targets: dict[EndpointID, Target[Owner]] = {}
        self._replicas: tuple[ev.Replica, ...] = ()
        self._by_partition: dict[int, list[ev.Replica]] = {}
        self._signal_targets: dict[EndpointID, Target[Owner]] = {}

    def change(self, partitions: int, replicas: tuple[ev.Replica, ...], now: float) -> None:
        """Use these replicas of `partitions` partitions. Nothing waits if they are the same, or for those that are doubted."""
        if (partitions, replicas) == (self.partitions, self._replicas):
            return
        old_partitions, old_groups, old_targets = self.partitions, self._by_partition, self.targets
        self.partitions, self._replicas = partitions, replicas
        self._by_partition = {}
        for replica in replicas:
            self._by_partition.setdefault(replica.partition, []).append(replica)
        self.targets = {
            replica.endpoint: old_targets.get(replica.endpoint) or Target(replica.endpoint, self.routes)
            for replica in sorted(replicas, key=lambda replica: replica.endpoint)
        }
        self._signal_targets = {endpoint: Target(endpoint) for endpoint in self.targets}
        usable = {replica.endpoint for replica in replicas if replica.usable}
        changed = [group for partition, group in old_groups.items() if group != self._by_partition.get(partition)]

        def old(key: int) -> Target[Owner] | None:
            new = self._choose(key)
            if new is None or new.divert is not None or not old_partitions:
                return None
            return _replica(key, old_groups.get(key % old_partitions, []), old_targets)

        gone = [target for endpoint, target in old_targets.items() if endpoint not in usable]
        losing = {old_targets[replica.endpoint] for group in changed for replica in group}
        self.routes.change(now, old, gone=gone, among=losing if partitions == old_partitions else None)

    def replica(self, key: int) -> Target[Owner] | None:
        """Replica of a key, by rendezvous hashing; None if its partition has none."""
        return _replica(key, self._of(key), self.targets)

    def of_copy(self, key: int, signal: int, copy: int) -> Target[Owner] | None:
        """Replica for a copy of a signal; see `proxy.records.signals`."""
        replicas = self._of(key)
        return self._signal_targets[EndpointID(replica_of_copy(replicas, signal, copy))] if replicas else None

    def _of(self, key: int) -> list[ev.Replica]:
        return self._by_partition.get(key % self.partitions, []) if self.partitions else []


def _replica(key: int, replicas: list[ev.Replica], targets: dict[EndpointID, Target[Owner]]) -> Target[Owner] | None:
    if not replicas:
        return None
    weights = {replica.endpoint: replica.weight for replica in replicas if replica.usable}
    if not weights:
        weights = {replica.endpoint: replica.weight for replica in replicas}
    # Most clusters have no weights, and this is cheaper.
    equal = len(set(weights.values())) == 1
    return targets[EndpointID(rendezvous(key, weights) if equal else weighted_rendezvous(key, weights.items()))]
