"""What happens to a relay's core beyond what every soft role has, and what it asks its shell to do.

Source: DESIGN sections 9 ("Chat") and 10.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.membership.replica_events import RecordsReceived, SendControl
from pixiu.ids import EndpointID

__all__ = ["RecordsReceived", "Relayed", "SendRecords"]


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
    taken: bool = True
    """Whether all of it could be handled: not what is for a partition that this relay can reach no replica of."""
