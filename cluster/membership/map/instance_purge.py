"""Purges gateways that are gone: drops their members and never takes their messages again. Pure.

A gateway is gone when no node in the registry's view has its instance: its lease is gone and heartbeats are silent
(docs/registry.md, "Static stability"). A short while later the instance's floor rises above the generation that it had when it
vanished. A gateway of a later generation that the view does not show yet is not affected, nor is the instance of routers' marks.

Source: docs/memberships.md, "Tombstones and purges".
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.membership.map.lww_map import LwwMap
from pixiu.ids import KEPT_INSTANCE, gateway_generation


class InstancePurge:
    """Purges the instances whose gateways are gone.

    Args:
        membership: the map to purge.
        gone_s: time that an instance must be out of the view, seconds.
    """

    def __init__(self, membership: LwwMap, gone_s: float) -> None:
        self._membership = membership
        self._gone_s = gone_s
        self._absent: dict[int, tuple[float, int]] = {}
        """Instance → time since when it is absent, and its highest generation then."""
        self.purged_gateways = 0

    def purge(self, known: Collection[int], now: float) -> None:
        """Raise the floors of instances that are gone. `known`: the instances in the view."""
        before, self._absent = self._absent, {}
        for instance in self._membership.instances():
            if instance in known or instance == KEPT_INSTANCE:
                continue
            since, generation = before.get(instance) or (now, self._membership.generation(instance))
            if now - since < self._gone_s:
                self._absent[instance] = (since, generation)
                continue
            if gateway_generation(self._membership.floor(instance)) <= generation:  # otherwise it is being purged
                self._membership.raise_floor(instance, generation + 1)
                self.purged_gateways += 1
