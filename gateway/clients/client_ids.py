"""The MQTT client IDs of a gateway: each has one connection, and is remembered for a while after it. Pure.

Source: OASIS MQTT 3.1.1 [MQTT-3.1.4-2], section 4.4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from cluster.mqtt.events import CloseReason
from pixiu.ids import SnowflakeID

REMEMBERED_S: Final = 60.0
"""Time for which the IDs of a departed client's messages are kept, seconds, in case it sends these again with DUP. Longer than
gateways drop repeats; after that an old ID is worth no more than a new one."""
MAX_REMEMBERED_CLIENTS: Final = 10_000
"""Clients whose unacknowledged message IDs are kept after their connection ended. Policy: the oldest go first."""


class Connection(Protocol):
    """A connection of a client."""

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection to the client."""


class ClientIDs:
    """Connections by client ID, and unacknowledged messages of those that ended.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._connections: dict[str, Connection] = {}
        self._remembered: OrderedDict[str, tuple[float, dict[int, SnowflakeID]]] = OrderedDict()

    def take_over(self, client_id: str, connection: Connection) -> dict[int, SnowflakeID]:
        """Register the connection of a client ID and end an older one. Returns its unacknowledged messages: packet ID → ID."""
        older = self._connections.pop(client_id, None)
        if older is not None:
            older.end(CloseReason.TAKEN_OVER, "the same client connected again")
        self._connections[client_id] = connection
        self._forget_old()
        return self._remembered.pop(client_id, (0.0, {}))[1]

    def end(self, client_id: str, text: str) -> None:
        """End the connection of a client ID, if there is one."""
        if (connection := self._connections.get(client_id)) is not None:
            connection.end(CloseReason.LOGIN_OVER, text)

    def _forget_old(self) -> None:
        now = self._now()
        while self._remembered and next(iter(self._remembered.values()))[0] <= now:
            self._remembered.popitem(last=False)

    def gone(self, client_id: str, connection: Connection, unacknowledged: dict[int, SnowflakeID]) -> None:
        """Remove the connection of a client ID, and keep the IDs of its unacknowledged messages for a while."""
        if self._connections.get(client_id) is connection:
            del self._connections[client_id]
        if unacknowledged:
            self._forget_old()
            self._remembered.pop(client_id, None)  # the order is that of the times
            self._remembered[client_id] = self._now() + REMEMBERED_S, dict(unacknowledged)
            while len(self._remembered) > MAX_REMEMBERED_CLIENTS:
                self._remembered.popitem(last=False)
