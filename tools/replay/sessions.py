"""Interface of connections for the driver, so that a test can provide a cluster of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pixiu.ids import UIN, RoomID

Done = Callable[[str], None]
"""Reports the outcome of a message once: "" for accepted, else the code of the error."""


class Session(Protocol):
    """One user's connection to one gateway."""

    @property
    def gateway(self) -> int:
        """The endpoint ID of the gateway; 0 when it is not known."""

    @property
    def publishes(self) -> bool:
        """True if `publish` can be used."""

    async def join(self, room: RoomID) -> None:
        """Join a room; returns when the whole cluster knows. Raises `PixiuError`, also when the connection is broken."""

    async def leave(self, room: RoomID) -> None:
        """Leave a room; returns when nothing more of it will arrive. Raises `PixiuError`."""

    async def publish(self, room: RoomID, payload: bytes, done: Done) -> None:
        """Queue a message in order; `done` is called once, before or after the return. Raises nothing."""

    async def close(self) -> None:
        """End the connection; `on_broken` is not called. Raises nothing."""


class Connector(Protocol):
    """Opens sessions, and publishes through the SDK."""

    async def open(
        self, uin: UIN, on_message: Callable[[UIN, RoomID, bytes], None], on_broken: Callable[[UIN, str], None]
    ) -> Session:
        """Connect a user to a gateway. `on_broken` is called once when the connection ends by itself. Raises `PixiuError`."""

    async def publish(self, uin: UIN, room: RoomID, payload: bytes, done: Done) -> None:
        """Publish a user's message like a back end; otherwise like `Session.publish`."""
