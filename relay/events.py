"""What happens to a relay's core beyond what every soft role has, and what it asks its shell to do.

Source: DESIGN sections 9 ("Chat") and 10.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pixiu.ids import EndpointID
from pixiu.replicas.events import SendControl


@dataclass(frozen=True, slots=True)
class RecordsReceived:
    """`count` records lie in data[start:end], from a proxy, or from a relay that passes them on."""

    peer: EndpointID
    data: bytes
    start: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class SendRecords:
    """Send a parcel to a gateway, or to the relay that serves the users."""

    peer: EndpointID
    records: list[bytes]
    lane: int


@dataclass(slots=True)
class Relayed:
    """What to do for a batch, in this order: records out, then controls to its sender, so that a notice of who is
    offline leaves before the acknowledgement of the batch."""

    parcels: list[SendRecords] = field(default_factory=list)
    controls: list[SendControl] = field(default_factory=list)
