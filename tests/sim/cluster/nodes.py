"""Processes of several roles: which places share one, by the seed. Links inside one are calls; it stops, and dies, as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.links.local import LocalSwitch

if TYPE_CHECKING:
    from tests.sim.cluster.process import Place

LAYOUTS = ("", "whole", "", "uneven", "front")
"""By the seed: every role a process of its own; two nodes of one of each; one such node, and one of a broker and a router, beside
separate processes; two nodes of a gateway and a proxy."""


def node_of(layout: str, role: str, partition: int, number: int) -> int | None:
    """Which node a place belongs to; None: a process of its own."""
    if partition or number > 1:
        return None
    if layout == "whole" or (layout == "front" and role in ("gateway", "proxy")):
        return number
    if layout == "uneven" and (number == 0 or role in ("broker", "router")):
        return number
    return None


@dataclass(eq=False)
class Node:
    """One process of several roles, or of one."""

    host: str
    kind: type[LocalSwitch]
    places: list[Place] = field(default_factory=list)
    runs: int = 0
    """How often it was killed."""

    def __post_init__(self) -> None:
        self.switch = self.kind()
        """Of this run of it."""

    def work(self, now: Callable[[], float], after: Callable[[float, Callable[[], None]], object]) -> None:
        """Give the roles their turns, as `cluster.links.endpoint.work` does."""
        switch = self.switch

        def go_on() -> None:
            switch.continues = False
            if switch is self.switch and not self.is_paused:
                self.work(now, after)

        switch.work(now())
        if switch.waits() and not switch.continues:
            switch.continues = True
            after(0.0, go_on)

    @property
    def is_paused(self) -> bool:
        """Whether it is stopped."""
        return any(place.process is not None and place.process.paused for place in self.places)

    def killed(self) -> None:
        """What comes up next knows nothing of what was here."""
        self.runs += 1
        self.switch = self.kind()
