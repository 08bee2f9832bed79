"""Events and effects of the core of a gateway's wills."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.contract import EndOfTurn, SendControl, Settled, Tick
from cluster.wills.will import Will
from gateway.events import EndWill, RelaysChanged, SetWill
from pixiu.ids import EndpointID


@dataclass(frozen=True, slots=True)
class DeviceOpened:
    """A device connected to this gateway: its delayed wills are not published any more."""

    connection: int
    uin: int
    device: int


@dataclass(frozen=True, slots=True)
class WillAsked:
    """A relay asks this gateway to publish a will that is due."""

    relay: EndpointID
    will: Will
    message_id: int


@dataclass(frozen=True, slots=True)
class WillDone:
    """A try to publish a will ended. `again`: it failed, and another try may succeed."""

    id: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class WillOver:
    """A relay had a will of this gateway published, or its device is back."""

    id: int


@dataclass(frozen=True, slots=True)
class PublishWill:
    """Effect: publish a will; `WillDone` follows."""

    will: Will
    message_id: int


Event = SetWill | EndWill | DeviceOpened | WillAsked | WillDone | WillOver | RelaysChanged | Settled | Tick | EndOfTurn
Effect = PublishWill | SendControl
