"""The shell of a relay's wills: connects their core with links and with the relay's core.

Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.core.contract import TICK, SendControl, Settled
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.links.api import Links, Outcome
from cluster.membership.map.devices import DEVICE_MASK, Devices
from cluster.membership.map.updates import Update
from cluster.wills.will import decode
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID, gateway_run
from relay.wills import events as ev
from relay.wills.core import Core

INSTANCE_SHIFT: Final = 10
"""A run holds the instance above ten bits of generation."""


class Wills:
    """The wills of a relay's users.

    Args:
        endpoint: of this relay.
        gone_s: time after which a gateway that left the registry counts as lost, seconds.
        devices: relay data.
        now: monotonic seconds.
    """

    def __init__(self, endpoint: EndpointID, gone_s: float, devices: Devices, now: Callable[[], float]) -> None:
        self._devices = devices
        self._core = Core(
            endpoint=endpoint, gone_s=gone_s, unix_ms=lambda: time.time_ns() // 1_000_000, is_back=self._is_back
        )  # fmt: skip
        self.runner: Runner[ev.Event, SendControl] = Runner(self._core, now, tick=TICK)

    def __len__(self) -> int:
        return len(self._core)

    def start(self, links: Links) -> None:
        """Send by these links."""
        self.runner.send_by(links)

    def seen(self, cluster: ev.ClusterSeen) -> None:
        """Take the cluster as it is now."""
        self.runner.step(cluster)

    def reported(self, changes: list[Update]) -> None:
        """Note devices that gateways have reported: with delayed wills they are not lost."""
        awaited = self._core.awaited
        if awaited:
            for change in changes:
                device = change.member & DEVICE_MASK
                if change.login and (change.group, device) in awaited:
                    newest = not self._devices.newer(change)
                    self.runner.step(ev.DeviceCame(change.group, device, gateway_run(change.id), newest))

    def on_control(self, peer: EndpointID, run: int | None, control: control_pb2.Control) -> Outcome:
        """Take a message of a gateway with this run, or of a relay (None)."""
        if control.HasField("will_published"):
            self.runner.step(ev.WillPublished(control.will_published.id))
            return Outcome.TAKEN
        try:
            states = [decode(state) for state in control.will_states.wills]
        except MalformedData:
            return Outcome.MALFORMED
        self.runner.step(ev.WillsReceived(peer, run, states))
        return Outcome.TAKEN

    def settled(self, settled: list[tuple[int, bool]]) -> None:
        """Report settled parcels to the core."""
        self.runner.step(Settled(settled))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {"wills": len(self._core), "wills_bytes": self._core.bytes, **totals(self._core.counters)}

    def _is_back(self, uin: int, device: int, run: int, over: bool) -> bool:
        """True if a device is connected elsewhere. The gateway of a run that goes on watches its own connections."""
        return any(
            entry.device == device and (over or entry.instance != run >> INSTANCE_SHIFT) for entry in self._devices.entries(uin)
        )
