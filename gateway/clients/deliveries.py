"""Messages on their way to a gateway's connections: each connection writes once a turn what was delivered in it; those of big rooms
are paced.

Source: docs/routing.md; docs/architecture.md, "The gateway's edge".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway import events as ev
from gateway.clients.paced_fanout import PacedFanout
from pixiu.rpc.turn_loop import call_at_end


class Connection(Protocol):
    """A connection of a client."""

    id: int

    def deliver(self, data: bytes, count: int) -> None:
        """Take `count` messages to write at `flush`."""

    def deliver_each(self, messages: Sequence[ev.Delivery]) -> None:
        """Take messages of its own to write at `flush`."""

    def flush(self) -> None:
        """Write what was delivered."""


class Deliveries:
    """Writes to the identified connections of a gateway.

    Args:
        connections: by number.
        dropped: called with the number of messages that waited too long for their turn.
    """

    def __init__(self, connections: Mapping[int, Connection], dropped: Callable[[int], None]) -> None:
        self._connections = connections
        self._paced = PacedFanout(self._write, asyncio.get_running_loop().call_later, dropped)
        self._written: dict[int, Connection] = {}
        """Connections with deliveries that leave at `flush`."""
        self._flush: asyncio.Handle | None = None
        self.follows: Callable[[], bool] = lambda: False
        """Returns True while effects are performed, after which `flush` is called."""

    def deliver(self, effect: ev.Deliver) -> None:
        """Write messages to connections: at `flush`, or paced."""
        if effect.paced:
            self._paced.put(effect)
            return
        connections, written, data, count = self._connections, self._written, effect.data, effect.count
        for number in effect.connections:
            connection = connections.get(number)
            if connection is not None:
                connection.deliver(data, count)
                written[number] = connection

    def deliver_each(self, effect: ev.DeliverEach) -> None:
        """Write messages to one connection, at `flush`."""
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.deliver_each(effect.messages)
            self._written[effect.connection] = connection

    def flush(self) -> None:
        """Write what was delivered, once for each connection."""
        if self._written:
            written, self._written = self._written, {}
            for connection in written.values():
                connection.flush()

    def flush_soon(self, connection: Connection) -> None:
        """Have `connection.flush` called when this turn of the event loop ends."""
        self._written[connection.id] = connection
        if self._flush is None and not self.follows():
            self._flush = call_at_end(self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        self.flush()

    def _write(self, number: int, data: bytes, count: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.deliver(data, count)
            connection.flush()
