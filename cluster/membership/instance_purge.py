"""Gateways that are gone: their members are dropped, and what they said is never taken again. Pure.

A gateway has vanished when the registry's view has nobody with its instance: its lease is gone and heartbeats are
silent (docs/registry.md, "Static stability"). A short while later the instance's floor rises above the generation
that was there when it vanished. A gateway of a later generation that the view does not show yet is not touched.

Source: docs/memberships.md, "Tombstones and purges".
"""

from __future__ import annotations

from collections.abc import Collection

from cluster.membership.lww_map import LwwMap
from pixiu.ids import gateway_generation


class InstancePurge:
    """Purges the instances whose gateways are gone.

    Args:
        membership: what is purged.
        gone_s: how long an instance must be out of the view, seconds.
    """

    def __init__(self, membership: LwwMap, gone_s: float) -> None:
        self._membership = membership
        self._gone_s = gone_s
        self._absent: dict[int, tuple[float, int]] = {}
        """Instance → since when, and the highest generation that it had then."""
        self.purged_gateways = 0

    def purge(self, known: Collection[int], now: float) -> None:
        """Raise the floors of those that are gone. `known`: the instances in the view."""
        before, self._absent = self._absent, {}
        for instance in self._membership.instances():
            if instance in known:
                continue
            since, generation = before.get(instance) or (now, self._membership.generation(instance))
            if now - since < self._gone_s:
                self._absent[instance] = (since, generation)
                continue
            if gateway_generation(self._membership.floor(instance)) <= generation:  # else it is being purged
                self._membership.raise_floor(instance, generation + 1)
                self.purged_gateways += 1
