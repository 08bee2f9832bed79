"""The gateway's index of its own clients: their filters, the channels that messages go to, and presence in rooms. Pure.

    room/5, a/b   exact: a channel, found by a dictionary         ─┐
    a/+, #        in a tree; what matches a topic is merged with   ├─▶ one channel for each topic, each connection in one class:
                  its channel, once for a topic, and remembered   ─┘   packets, packets5, records, exact
    $share/g/a/+  a group: brokers choose the gateway, the gateway chooses the member (`gateway.membership.shared`)

Source: docs/subscriptions.md, "Subscriptions"; docs/memberships.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.events import Inside, Wanted
from gateway.membership.shared import SharedGroup, share_number
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.filter_tree import FilterTree
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, Filter, resolve

MAX_MERGED: Final = 16_384
"""Topics whose matches are remembered. Policy: at the bound all are forgotten."""
MAX_MERGED_NAME: Final = 256
"""Longest name that is remembered, bytes."""
MAX_WIDE: Final = 1024
"""Filters whose rooms are remembered. Policy: at the bound all are forgotten."""
THE_GATEWAY: Final = 0
"""Member in place of users for filters that span several rooms: it costs the same, however many of them have such filters."""
RECORDS: Final = 0
MQTT_5: Final = 5


class Grant(NamedTuple):
    """Options by which one connection gets the messages of a channel: those of its filter, or of all that overlap."""

    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    identifiers: tuple[int, ...] = ()
    kept: bool = False
    """True if messages that are kept for sessions come by the inbox of the connection's session."""


PLAIN: Final = Grant()


@dataclass(slots=True, eq=False)
class Channel:
    """A target of messages: a room, a free topic, or the messages to a user.

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
    """Connections that get PUBLISH packets of MQTT 3.1 and 3.1.1, with shared bytes."""
    records: dict[int, None] = field(default_factory=dict)
    """Connections that get records."""
    packets5: dict[int, None] | None = None
    """Connections that get PUBLISH packets of MQTT 5, with shared bytes."""
    exact: dict[int, Grant] | None = None
    """Connections that get a packet of their own for each message."""
    inside: dict[int, int] | None = None
    """Connections of a tenant that get PUBLISH packets with shared bytes, in the tenant's names → their dialect."""
    tenant: Inside | None = None
    """That tenant: a name belongs to one."""
    others: bool = False
    """True if any is in `packets5`, `exact` or `inside`."""
    packet_targets: tuple[int, ...] | None = None
    record_targets: tuple[int, ...] | None = None
    pending_packets: list[bytes] = field(default_factory=list)
    pending_records: list[bytes] = field(default_factory=list)
    pending_others: list[tuple[bytes, bytes]] | None = None
    """Record and body of messages for `packets5` and `exact`."""

    def add(self, connection: int, dialect: int, grant: Grant, *, exact: bool = False, tenant: Inside | None = None) -> None:
        """Add a connection, in the class that its options ask for."""
        if dialect == RECORDS:
            self.records[connection] = None
            self.record_targets = None
        elif exact or grant != PLAIN:
            self.exact = self.exact or {}
            self.exact[connection] = grant
            self.others = True
        elif tenant is not None:
            self.inside = self.inside or {}
            self.inside[connection] = dialect
            self.tenant = tenant
            self.others = True
        elif dialect == MQTT_5:
            self.packets5 = self.packets5 or {}
            self.packets5[connection] = None
            self.others = True
        else:
            self.packets[connection] = None
            self.packet_targets = None

    def discard(self, connection: int) -> None:
        """Remove a connection."""
        if connection in self.packets:
            del self.packets[connection]
            self.packet_targets = None
        elif connection in self.records:
            del self.records[connection]
            self.record_targets = None
        else:
            if self.packets5 is not None:
                self.packets5.pop(connection, None)
            if self.exact is not None:
                self.exact.pop(connection, None)
            if self.inside is not None:
                self.inside.pop(connection, None)
            self.others = bool(self.packets5 or self.exact or self.inside)

    def without(self, connections: Collection[int]) -> Channel:
        """A channel for one message, without some connections."""
        found = Channel(self.room, self.topic, self.head, self.shown)
        found.packets = {each: None for each in self.packets if each not in connections}
        found.records = {each: None for each in self.records if each not in connections}
        found.packets5 = {each: None for each in self.packets5 or () if each not in connections}
        found.exact = {each: grant for each, grant in (self.exact or {}).items() if each not in connections}
        found.inside = {each: dialect for each, dialect in (self.inside or {}).items() if each not in connections}
        found.tenant = self.tenant
        found.others = bool(found.packets5 or found.exact or found.inside)
        return found

    def connections(self) -> Iterable[int]:
        """All connections."""
        return (*self.packets, *self.records, *(self.packets5 or ()), *(self.exact or ()), *(self.inside or ()))

    def __bool__(self) -> bool:
        """True if any connection is in it."""
        return bool(self.packets or self.records or self.others)


@dataclass(slots=True)
class Subscription:
    """A filter of one connection."""

    wanted: Wanted
    """Its options; without the filter if subscriptions share them."""
    filter: Filter
    rooms: tuple[int, ...]
    """The rooms that carry what it can match; none if the gateway itself publishes it."""


@dataclass(slots=True)
class Client:
    """A connection of this gateway."""

    uin: int
    dialect: int
    filters: dict[str, Subscription] = field(default_factory=dict)
    exact: bool = False
    """True if it gets no shared bytes."""
    credit: int = 65_535
    chat: bool = False
    """True if it takes the messages to its user."""
    gone: bool = False
    """True if its connection has ended and it is leaving its rooms."""
    wide_rooms: int = 0
    """Rooms of its filters beyond one each."""
    inside: Inside | None = None
    """Its tenant."""

    @property
    def packets(self) -> bool:
        """True if it speaks MQTT."""
        return self.dialect != RECORDS


class Present(NamedTuple):
    """Somebody in a room, as routers know it: a user, `THE_GATEWAY`, or a group of a shared subscription (with a value)."""

    room: int
    member: int
    value: int = 0


class RoomIndex:
    """Clients, channels and presence.

    `join` and `leave` return who has just entered rooms, or left them for good, on this gateway: a user is in a room while any
    connection of theirs has a filter that the room carries.

    Args:
        vrooms: the cluster's big rooms.
        topics: the rooms of free topics.
        users_everywhere: True if filters that span several rooms are reported for each user, as relays need it.
    """

    def __init__(self, vrooms: VRooms, topics: TopicRooms = BY_FIRST_LEVEL, *, users_everywhere: bool = False) -> None:
        self._vrooms, self._topics, self._users_everywhere = vrooms, topics, users_everywhere
        self.clients: dict[int, Client] = {}
        self.rooms: dict[int, Channel] = {}
        """RoomID, of big rooms VRoomID → the room's own channel."""
        self.topics: dict[int, dict[bytes, Channel]] = {}
        """RoomID → topic name → channel."""
        self.users: dict[int, Channel] = {}
        """UIN → channel of the messages to the user."""
        self.wild: FilterTree[dict[int, Subscription]] = FilterTree()
        """Filters with wildcards, and those of topics that the gateway publishes → connection → subscription."""
        self.groups: dict[int, SharedGroup] = {}
        """Number of a group with its filter → its members here."""
        self.without_own = 0
        """Subscriptions of clients that do not want their own messages."""
        self.system = 0
        """Subscriptions to topics that the gateway publishes about itself."""
        self._options: dict[tuple[int, ...], Wanted] = {}
        """Options without an identifier, of which there are few: subscriptions share them."""
        self._presence: dict[tuple[int, int], int] = {}
        self._merged: dict[bytes, Channel | None] = {}
        self._wide: dict[str, tuple[int, ...]] = {}

    @property
    def presences(self) -> int:
        """Number of (room, member) pairs on this gateway."""
        return len(self._presence)

    def present(self, room: int, member: int) -> bool:
        """True if a user is in a room on this gateway."""
        return (room, member) in self._presence

    def rooms_of(self, client: Client, wanted: Filter) -> tuple[int, ...] | None:
        """Rooms that carry what a client wants; in a big room, the user's VRoom. None: no room does."""
        if wanted.name[0] == "$":
            return ()
        if wanted.wild:
            found = self._wide.get(wanted.name)
            if found is None:
                if len(self._wide) >= MAX_WIDE:
                    self._wide.clear()
                found = self._wide[wanted.name] = tuple(self._topics.rooms(wanted.name))
            return found
        if not wanted.name.startswith(ROOM_PREFIX):
            return (self._topics.room(wanted.name),)
        room = resolve(wanted.name)
        if not isinstance(room, int) or self._vrooms.is_vroom(room):
            return None
        in_room = self._vrooms.room_of_user(room, client.uin)
        # Each VRoom has a copy of a message, so a group would get it several times.
        return None if wanted.group and in_room != room else (in_room,)

    def join(self, connection: int, client: Client, wanted: Wanted, parsed: Filter, rooms: tuple[int, ...]) -> list[Present]:
        """Subscribe a connection, or change the options of its filter. Returns who entered rooms."""
        text = wanted.filter
        if not wanted.identifier:
            options = wanted[1:]
            shared = self._options.get(options)
            if shared is None:
                shared = self._options[options] = wanted._replace(filter="")
            wanted = shared
        before = client.filters.get(text)
        self.without_own += wanted.no_local
        if before is not None:
            self.without_own -= before.wanted.no_local
            before.wanted = wanted
            return self._changed(connection, client, before)
        subscription = client.filters[text] = Subscription(wanted, parsed, rooms)
        if parsed.group:
            return self._join_group(connection, subscription)
        name = parsed.name.encode()
        if parsed.wild or not rooms:
            members = self.wild.get(name)
            if members is None:
                members = {}
                self.wild.put(name, members)
            members[connection] = subscription
            client.wide_rooms += max(len(rooms) - 1, 0)
            self.system += not rooms
            self._merged.clear()
        else:
            channel = self._channel(rooms[0], None if parsed.name.startswith(ROOM_PREFIX) else name)
            channel.add(connection, client.dialect, grant_of(wanted), exact=client.exact, tenant=client.inside)
            if self._merged:
                self._merged.pop(name, None)
        return self._enter(rooms, self.member(client, parsed, rooms))

    def leave(self, connection: int, filters: Iterable[str]) -> list[Present]:
        """Unsubscribe a connection. Returns who is no longer in rooms."""
        client = self.clients[connection]
        left: list[Present] = []
        for text in filters:
            subscription = client.filters.pop(text, None)
            if subscription is None:
                continue
            parsed, rooms = subscription.filter, subscription.rooms
            self.without_own -= subscription.wanted.no_local
            if parsed.group:
                left += self._leave_group(connection, subscription)
                continue
            name = parsed.name.encode()
            if parsed.wild or not rooms:
                members = self.wild.get(name)
                assert members is not None, "the subscription is in the tree"
                del members[connection]
                if not members:
                    self.wild.remove(name)
                client.wide_rooms -= max(len(rooms) - 1, 0)
                self.system -= not rooms
                self._merged.clear()
            else:
                channel = self._channel(rooms[0], None if parsed.name.startswith(ROOM_PREFIX) else name)
                channel.discard(connection)
                if not channel:
                    self._drop(channel)
                if self._merged:
                    self._merged.pop(name, None)
            left += self._exit(rooms, self.member(client, parsed, rooms))
        return left

    def route(self, room: int, name: bytes) -> Channel | None:
        """The channel of a free topic's messages: of its own subscriptions, and of the filters that match it."""
        if not self.wild:
            return self.topics.get(room, NO_TOPICS).get(name)
        if name in self._merged:
            return self._merged[name]
        channel = self.topics.get(room, NO_TOPICS).get(name)
        matched = self.wild.match(name)
        if matched:
            channel = self._merge(room, name, channel, matched)
        if len(name) <= MAX_MERGED_NAME:
            if len(self._merged) >= MAX_MERGED:
                self._merged.clear()
            self._merged[name] = channel
        return channel

    def system_channel(self, name: bytes) -> Channel | None:
        """The channel of a topic that the gateway publishes."""
        matched = self.wild.match(name)
        return self._merge(0, name, None, matched) if matched else None

    def _merge(self, room: int, name: bytes, base: Channel | None, matched: list[dict[int, Subscription]]) -> Channel:
        """Merge what matches a topic: each connection is in it once, with the options of all its filters."""
        found: dict[int, list[Wanted]] = {}
        for members in matched:
            for connection, subscription in members.items():
                found.setdefault(connection, []).append(subscription.wanted)
        channel = Channel(room, name, b"", room)
        if base is not None:
            text = name.decode()
            for connection in base.connections():
                own = self.clients[connection].filters[text].wanted
                found.setdefault(connection, []).append(own)
        for connection, options in found.items():
            client = self.clients[connection]
            channel.add(connection, client.dialect, merged(options), exact=client.exact, tenant=client.inside)
        return channel

    def member(self, client: Client, parsed: Filter, rooms: tuple[int, ...]) -> int:
        """The member of a filter's rooms, as routers know it: the user, `THE_GATEWAY`, or a group's number."""
        if parsed.group:
            return share_number(parsed.group, parsed.name)
        return client.uin if len(rooms) == 1 or self._users_everywhere else THE_GATEWAY

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
        channel.add(connection, client.dialect, PLAIN, exact=client.exact, tenant=client.inside)

    def leave_user(self, connection: int) -> None:
        """Unsubscribe a connection from the messages to its user."""
        client = self.clients[connection]
        if not client.chat:
            return
        client.chat = False
        channel = self.users[client.uin]
        channel.discard(connection)
        if not channel:
            del self.users[client.uin]

    # Inside.

    def _enter(self, rooms: Iterable[int], member: int, value: int = 0) -> list[Present]:
        entered: list[Present] = []
        for room in rooms:
            count = self._presence.get((room, member), 0)
            self._presence[room, member] = count + 1
            if not count:
                entered.append(Present(room, member, value))
        return entered

    def _exit(self, rooms: Iterable[int], member: int, value: int = 0) -> list[Present]:
        left: list[Present] = []
        for room in rooms:
            pair = (room, member)
            self._presence[pair] -= 1
            if not self._presence[pair]:
                del self._presence[pair]
                left.append(Present(room, member, value))
        return left

    def _changed(self, connection: int, client: Client, subscription: Subscription) -> list[Present]:
        """Use the new options of a filter."""
        parsed = subscription.filter
        if parsed.group:
            group = self.groups[share_number(parsed.group, parsed.name)]
            value = group.value
            group.put(connection, subscription.wanted, client.credit)
            # Routers learn whether members want to acknowledge.
            return [Present(room, group.number, group.value) for room in group.rooms] if group.value != value else []
        if parsed.wild or not subscription.rooms:
            self._merged.clear()
            return []
        name = parsed.name.encode()
        channel = self._channel(subscription.rooms[0], None if parsed.name.startswith(ROOM_PREFIX) else name)
        channel.discard(connection)
        channel.add(connection, client.dialect, grant_of(subscription.wanted), exact=client.exact, tenant=client.inside)
        self._merged.pop(name, None)
        return []

    def _join_group(self, connection: int, subscription: Subscription) -> list[Present]:
        parsed, client = subscription.filter, self.clients[connection]
        number = share_number(parsed.group, parsed.name)
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = SharedGroup(number, parsed.name.encode(), subscription.rooms)
        client.wide_rooms += max(len(subscription.rooms) - 1, 0)
        value = group.value
        group.put(connection, subscription.wanted, client.credit)
        entered = self._enter(group.rooms, number, group.value)
        if not entered and group.value != value:
            entered = [Present(room, number, group.value) for room in group.rooms]
        return entered

    def _leave_group(self, connection: int, subscription: Subscription) -> list[Present]:
        parsed = subscription.filter
        number = share_number(parsed.group, parsed.name)
        group = self.groups[number]
        group.remove(connection)
        if not group.members:
            del self.groups[number]
        self.clients[connection].wide_rooms -= max(len(subscription.rooms) - 1, 0)
        return self._exit(subscription.rooms, number, 1)

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


NO_TOPICS: Final[dict[bytes, Channel]] = {}


def grant_of(wanted: Wanted) -> Grant:
    """Options of one filter."""
    if not (wanted.qos or wanted.no_local or wanted.retain_as_published or wanted.identifier):
        return PLAIN
    identifiers = (wanted.identifier,) if wanted.identifier else ()
    return Grant(wanted.qos, wanted.no_local, wanted.retain_as_published, identifiers, wanted.kept)


def merged(options: list[Wanted]) -> Grant:
    """Options of filters that overlap: one copy, with the highest QoS and all identifiers. A message of its own reaches a client if
    any of them lets it."""
    if len(options) == 1:
        return grant_of(options[0])
    return Grant(
        max(wanted.qos for wanted in options),
        all(wanted.no_local for wanted in options),
        any(wanted.retain_as_published for wanted in options),
        tuple(dict.fromkeys(wanted.identifier for wanted in options if wanted.identifier)),
        any(wanted.kept for wanted in options),
    )
