"""A proxy as a sender sees it: what waits for it, and what is in flight on its stream. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pixiu.client.send.events import ProxyState, Ticket
from pixiu.wire.record import LANE_FIRST


@dataclass(slots=True, eq=False)
class Proxy:
    """One proxy, with or without a stream."""

    address: str
    state: ProxyState = ProxyState.IDLE
    listed: bool = True
    stream: int = 0
    first: deque[Ticket] = field(default_factory=deque)
    normal: deque[Ticket] = field(default_factory=deque)
    in_flight: dict[int, Ticket] = field(default_factory=dict)
    """Messages sent on the stream and not answered, by position, in order. Expired ones stay, because the proxy has them, but not
    those of a writer, which may be sent again."""
    sent: int = 0
    """Last position that was sent."""
    up_to: int = 0
    """All positions up to here are answered."""
    taken: int = 0
    """The proxy has all positions up to here."""
    refused: set[int] = field(default_factory=set)
    """Positions that the draining proxy refused without handling: they go to another one."""
    heard: bool = False
    """True if the proxy has taken or answered anything on the stream."""
    batches: int = 0
    """Batches sent on the stream."""
    window_bytes: int = 0
    batch_bytes: int = 0
    batch_records: int = 0
    """The largest batch that the proxy takes, further receivers counted as records; 0: not announced."""
    in_flight_bytes: int = 0
    progress_at: float = 0.0
    rest_until: float = 0.0
    deaths: int = 0
    earliest: float = 0.0
    """Lower bound of the deadlines of all tickets here."""

    def tickets(self) -> Iterator[Ticket]:
        """All unresolved tickets, in the order in which they are to be sent again."""
        yield from (ticket for ticket in self.in_flight.values() if not ticket.resolved)
        yield from self.first
        yield from self.normal

    def busy(self) -> bool:
        """Return True if anything is unresolved here."""
        return bool(self.in_flight or self.first or self.normal)

    def requeue(self) -> None:
        """Put what is in flight back into the queues, before the rest."""
        again = [ticket for ticket in self.in_flight.values() if not ticket.resolved]
        self.first.extendleft(reversed([ticket for ticket in again if ticket.lane == LANE_FIRST]))
        self.normal.extendleft(reversed([ticket for ticket in again if ticket.lane != LANE_FIRST]))
        self.in_flight.clear()
        self.refused.clear()
        self.in_flight_bytes = 0

    def take_back(self, answered: bool) -> None:
        """Put what was sent on a stream that is over back into the queues. `answered`: none of it was taken."""
        for position, ticket in self.in_flight.items():
            if not answered and position not in self.refused:
                ticket.in_doubt = True
            elif not ticket.in_doubt:
                ticket.attempts = 0
        self.requeue()

    def begin(self, stream: int, window_bytes: int, now: float) -> None:
        """Begin a stream, on which nothing was sent yet."""
        self.stream, self.progress_at = stream, now
        self.sent = self.up_to = self.taken = self.batches = self.in_flight_bytes = 0
        self.heard = False
        self.window_bytes, self.batch_bytes, self.batch_records = window_bytes, 0, 0
