"""Events of the core of a relay's wills; its only effect is `SendControl`."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.contract import Settled, Tick
from cluster.wills.will import State
from pixiu.ids import EndpointID


@dataclass(frozen=True, slots=True)
class WillsReceived:
    """States of wills, from a gateway (`run` is its own) or from a relay (None)."""

    peer: EndpointID
    run: int | None
    states: list[State]


@dataclass(frozen=True, slots=True)
class WillPublished:
    """A gateway has published a will."""

    id: int


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """The cluster as it is now.

    Args:
        owners: relays among which the owner of each user is chosen, this one included; () while it is not among them.
        gateways: run → gateway in the registry.
        reachable: gateways of these that are not silent.
    """

    partition: int = 0
    partitions: int = 1
    owners: tuple[int, ...] = ()
    gateways: dict[int, EndpointID] = field(default_factory=dict)
    reachable: frozenset[EndpointID] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceCame:
    """A gateway reported a device. `newest`: no connection of the device is known that is newer."""

    uin: int
    device: int
    run: int
    newest: bool


Event = WillsReceived | WillPublished | ClusterSeen | DeviceCame | Settled | Tick
