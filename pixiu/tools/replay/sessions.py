"""What the driver asks of connections, so that a test can hand it a cluster of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pixiu.ids import UIN, RoomID

Done = Callable[[str], None]
"""Tells once what became of a message: "" accepted, else the code of the error."""


class Session(Protocol):
    """One user's connection to one gateway."""

    @property
    def gateway(self) -> int:
        """The endpoint ID of the gateway; 0 when it is not known."""

    @property
    def publishes(self) -> bool:
        """Whether `publish` can be used."""

    async def join(self, room: RoomID) -> None:
        """Returns when the whole cluster knows. Raises `PixiuError`, also when the connection is broken."""

    async def leave(self, room: RoomID) -> None:
        """Returns when nothing more of the room will come. Raises `PixiuError`."""

    async def publish(self, room: RoomID, payload: bytes, done: Done) -> None:
        """Returns when the message is queued in its order; `done` is called once, later or before. Raises nothing."""

    async def close(self) -> None:
        """Ends the connection; `on_broken` is not called. Raises nothing."""


class Connector(Protocol):
    """Opens sessions, and publishes through the SDK."""

    async def open(
        self, uin: UIN, on_message: Callable[[UIN, RoomID, bytes], None], on_broken: Callable[[UIN, str], None]
    ) -> Session:
        """Connect a user to a gateway. `on_broken` is called once when the connection ends by itself. Raises `PixiuError`."""

    async def publish(self, uin: UIN, room: RoomID, payload: bytes, done: Done) -> None:
        """Publish as a back end does, with the user as the sender; as `Session.publish`."""
