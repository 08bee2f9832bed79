"""Big rooms: rooms that are carried as 64 VRooms, so that one message to everybody is many small ones. Pure functions.

    RoomID 1000 ── VRooms 64000 … 64063; user 7 is in VRoom 64000 + 7 % 64 = 64007

Publishers and clients only know the RoomID. A proxy makes a copy of a message for each VRoom; a gateway joins the VRoom of each of
its users and shows the RoomID; routers and brokers see 64 ordinary rooms.

Source: PiXiu §2.2.2; docs/routing.md. Departs from the seed's `VRoomID = UserID % 64` because there may be more than
one big room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

VROOMS: Final = 64
"""VRooms of a big room. Source: docs/routing.md."""


@dataclass(frozen=True, slots=True)
class VRooms:
    """A cluster's big rooms: the RoomIDs in [low, high). Both 0: there are none.

    The numbers in [64 * low, 64 * high) are their VRooms, which only proxies and gateways may use.
    """

    low: int = 0
    high: int = 0

    def is_big(self, room: int) -> bool:
        """True if a room is carried as VRooms."""
        return self.low <= room < self.high

    def is_vroom(self, number: int) -> bool:
        """True if a number is that of a VRoom, and so not a valid RoomID."""
        return VROOMS * self.low <= number < VROOMS * self.high

    def room_of_user(self, room: int, uin: int) -> int:
        """The room that a user joins to be in `room`: the VRoom of a big one, else the room itself."""
        return room * VROOMS + uin % VROOMS if self.low <= room < self.high else room

    def shown(self, number: int) -> int:
        """The RoomID as users know it: that of a VRoom's big room, else the number itself."""
        return number // VROOMS if self.is_vroom(number) else number


NO_BIG_ROOMS: Final = VRooms()


def vrooms_of(room: int) -> range:
    """The VRooms of a big room."""
    return range(room * VROOMS, (room + 1) * VROOMS)
