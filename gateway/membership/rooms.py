"""The gateway's index of its own clients: channels, their members, and each user's presence in rooms. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pixiu.placement.big_rooms import VRooms


@dataclass(slots=True, eq=False)
class Channel:
    """A target of subscriptions: a room, a free topic inside a room, or the messages to a user.

    `head` begins the variable part of a PUBLISH packet for a room or user: u16 length and topic name. A free topic's records carry
    it in their bodies.
    """

    room: int
    """RoomID; for a user's own messages the UIN."""
    topic: bytes | None
    head: bytes
    shown: int
    """The number that clients know: the RoomID, if `room` is a VRoom."""
    packets: dict[int, None] = field(default_factory=dict)
    """Connections that get PUBLISH packets."""
    records: dict[int, None] = field(default_factory=dict)
    """Connections that get records."""
    packet_targets: tuple[int, ...] | None = None
    record_targets: tuple[int, ...] | None = None
    pending_packets: list[bytes] = field(default_factory=list)
    pending_records: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Client:
    """A connection of this gateway."""

    uin: int
    packets: bool
    channels: dict[tuple[int, bytes | None], Channel] = field(default_factory=dict)
    chat: bool = False
    """True if it takes the messages to its user."""
    gone: bool = False
    """True if its connection has ended and it is leaving its rooms."""


class RoomIndex:
    """Clients, channels and presence.

    `join` and `leave` return the rooms that the user has just entered, or left for good, on this gateway: a user is in a room while
    any connection of theirs is subscribed to any channel of it.
    """

    def __init__(self, vrooms: VRooms) -> None:
        self._vrooms = vrooms
        self.clients: dict[int, Client] = {}
        self.rooms: dict[int, Channel] = {}
        """RoomID, of big rooms VRoomID → the room's own channel."""
        self.topics: dict[int, dict[bytes, Channel]] = {}
        """RoomID → topic name → channel."""
        self.users: dict[int, Channel] = {}
        """UIN → channel of the messages to the user."""
        self._presence: dict[tuple[int, int], int] = {}

    @property
    def presences(self) -> int:
        """Number of (room, user) pairs on this gateway."""
        return len(self._presence)

    def present(self, room: int, uin: int) -> bool:
        """True if a user is in a room on this gateway."""
        return (room, uin) in self._presence

    def channels(self, connection: int, wanted: list[tuple[int, bytes | None]]) -> list[tuple[int, bytes | None]]:
        """Channels that a connection subscribes to when its user names these: in a big room, the user's VRoom."""
        uin = self.clients[connection].uin
        return [(self._vrooms.room_of_user(room, uin), topic) for room, topic in wanted]

    def join(self, connection: int, channels: list[tuple[int, bytes | None]]) -> list[int]:
        """Subscribe a connection. Returns the rooms that its user was not in before."""
        client = self.clients[connection]
        entered: list[int] = []
        for name in channels:
            if name in client.channels:
                continue
            channel = self._channel(*name)
            client.channels[name] = channel
            if client.packets:
                channel.packets[connection] = None
                channel.packet_targets = None
            else:
                channel.records[connection] = None
                channel.record_targets = None
            pair = (channel.room, client.uin)
            count = self._presence.get(pair, 0)
            self._presence[pair] = count + 1
            if not count:
                entered.append(channel.room)
        return entered

    def leave(self, connection: int, channels: list[tuple[int, bytes | None]]) -> list[int]:
        """Unsubscribe a connection. Returns the rooms that its user is no longer in."""
        client = self.clients[connection]
        left: list[int] = []
        for name in channels:
            channel = client.channels.pop(name, None)
            if channel is None:
                continue
            if client.packets:
                channel.packets.pop(connection, None)
                channel.packet_targets = None
            else:
                channel.records.pop(connection, None)
                channel.record_targets = None
            if not channel.packets and not channel.records:
                self._drop(channel)
            pair = (channel.room, client.uin)
            self._presence[pair] -= 1
            if not self._presence[pair]:
                del self._presence[pair]
                left.append(channel.room)
        return left

    def join_user(self, connection: int) -> None:
        """Subscribe a connection to the messages to its user."""
        client = self.clients[connection]
        if client.chat:
            return
        client.chat = True
        channel = self.users.get(client.uin)
        if channel is None:
            name = b"user/%d" % client.uin
            channel = self.users[client.uin] = Channel(client.uin, None, len(name).to_bytes(2, "big") + name, client.uin)
        (channel.packets if client.packets else channel.records)[connection] = None
        channel.packet_targets = channel.record_targets = None

    def leave_user(self, connection: int) -> None:
        """Unsubscribe a connection from the messages to its user."""
        client = self.clients[connection]
        if not client.chat:
            return
        client.chat = False
        channel = self.users[client.uin]
        (channel.packets if client.packets else channel.records).pop(connection)
        channel.packet_targets = channel.record_targets = None
        if not channel.packets and not channel.records:
            del self.users[client.uin]

    def _channel(self, room: int, topic: bytes | None) -> Channel:
        if topic is None:
            found = self.rooms.get(room)
            if found is None:
                shown = self._vrooms.shown(room)
                name = b"room/%d" % shown
                found = self.rooms[room] = Channel(room, None, len(name).to_bytes(2, "big") + name, shown)
            return found
        topics = self.topics.setdefault(room, {})
        found = topics.get(topic)
        if found is None:
            found = topics[topic] = Channel(room, topic, b"", room)
        return found

    def _drop(self, channel: Channel) -> None:
        if channel.topic is None:
            del self.rooms[channel.room]
            return
        topics = self.topics[channel.room]
        del topics[channel.topic]
        if not topics:
            del self.topics[channel.room]
