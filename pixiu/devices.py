"""Relay data: on which gateways a user's devices are, as a map of last-writer-wins registers. Pure.

    (UIN, DeviceID, gateway instance) -> GatewayMsgID, connected or a tombstone, connect time, device class, takes chat

The registers are those of `pixiu.softstore.Membership`, with the UIN in the place of the room and the DeviceID in that
of the member; this module adds what a connected entry holds besides. Among the entries of one device that on the
gateway with the highest connect time is the *current* one, ties by instance.

Source: seed 004 §7.3; DESIGN section 10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID, gateway_instance
from pixiu.softstore import ENTRY, MAX_ENTRIES, TOMBSTONE_S, Change, Chunk, Key, Membership, Purged, StoreCounters
from pixiu.wire.v1 import control_pb2

ENTRY_FIELDS: Final = struct.Struct("<QHQQHB")
"""UIN, DeviceID, GatewayMsgID, connect time, device class, chat: one entry of a snapshot."""
SNAPSHOT_ENTRIES: Final = 9_000
"""Entries of one snapshot chunk: a quarter of a MiB."""
MESSAGES_A_CONTROL: Final = 24
"""Relay messages in one `Control`: about 45 bytes each, so that they fit one datagram."""
MAX_DEVICE: Final = 0xFFFF
MAX_DEVICE_CLASS: Final = 0xFFFF


class DeviceChange(NamedTuple):
    """One connect or disconnect of a device on a gateway: what the gateway says, and what the map took over."""

    id: int
    """GatewayMsgID; names the gateway instance too."""
    uin: int
    device: int
    """DeviceID."""
    online: bool
    reason: int = 0
    """A `Reason` of control.proto; passed on, not kept."""
    connect_time: int = 0
    """Of `pixiu.hybridclock`."""
    device_class: int = 0
    """0: none."""
    chat: bool = False
    """Whether a connection of the device takes the messages that are sent to the user."""

    @property
    def partition_key(self) -> int:
        """What chooses the partition."""
        return self.uin

    @property
    def pair(self) -> tuple[int, int]:
        """What it speaks of, on its gateway."""
        return self.uin, self.device

    def in_range(self) -> bool:
        """Whether all numbers are possible ones."""
        return (
            0 < self.id <= MAX_ID
            and self.uin <= MAX_ID
            and self.device <= MAX_DEVICE
            and self.connect_time <= MAX_ID
            and self.device_class <= MAX_DEVICE_CLASS
        )


class Entry(NamedTuple):
    """What a connected entry holds besides its GatewayMsgID."""

    connect_time: int
    device_class: int
    chat: bool


class Connection(NamedTuple):
    """A device's current connection."""

    device: int
    instance: int
    """Of the gateway."""
    entry: Entry


class AppliedDevices(NamedTuple):
    """What a batch changed."""

    changes: list[DeviceChange]
    """Those that applied, in order."""


class Devices:
    """Where the devices of users are. `now` is monotonic seconds and must not go back.

    Args:
        max_entries: most connected entries; beyond it a new one is refused and counted.
        tombstone_s: how long a disconnect is remembered, seconds.

    Source: DESIGN section 10.
    """

    def __init__(self, *, max_entries: int = MAX_ENTRIES, tombstone_s: float = TOMBSTONE_S) -> None:
        self._map = Membership(max_entries=max_entries, tombstone_s=tombstone_s)
        self._entries: dict[Key, Entry] = {}
        self._chat: dict[int, tuple[int, ...]] = {}
        self._reachable: frozenset[int] | None = None

    def __len__(self) -> int:
        """Connected entries."""
        return len(self._entries)

    @property
    def counters(self) -> StoreCounters:
        """What became of messages."""
        return self._map.counters

    @property
    def tombstones(self) -> int:
        """Disconnects that are remembered."""
        return self._map.tombstones

    @property
    def users(self) -> int:
        """Users with a connected device."""
        return self._map.rooms

    def instances(self) -> list[int]:
        """The gateway instances that have connected entries, ascending."""
        return self._map.instances()

    def floor(self, instance: int) -> int:
        """The GatewayMsgID below which nothing of an instance applies."""
        return self._map.floor(instance)

    def get(self, uin: int, device: int, instance: int) -> tuple[int, Entry | None] | None:
        """(GatewayMsgID, what it holds; None for a tombstone) of one register, or None."""
        found = self._map.get(uin, device, instance)
        return (found[0], self._entries.get(Key(uin, device, instance))) if found is not None else None

    def set_reachable(self, instances: frozenset[int] | None) -> None:
        """Only connections on these gateway instances count as online; None: all do.

        Entries of the others stay: a gateway that comes back finds what it said before.
        """
        if instances != self._reachable:
            self._reachable = instances
            self._chat.clear()

    def connections(self, uin: int) -> list[Connection]:
        """The current connection of every device of a user that is online."""
        newest: dict[int, Connection] = {}
        for key in self._map.live_keys(uin):
            if self._reachable is not None and key.instance not in self._reachable:
                continue
            entry, there = self._entries[key], newest.get(key.uin)
            if there is None or (entry.connect_time, key.instance) > (there.entry.connect_time, there.instance):
                newest[key.uin] = Connection(key.uin, key.instance, entry)
        return list(newest.values())

    def chat_gateways(self, uin: int) -> tuple[int, ...]:
        """The gateway instances, ascending, whose copy of a message to the user reaches a device."""
        found = self._chat.get(uin)
        if found is None:
            found = tuple(sorted({c.instance for c in self.connections(uin) if c.entry.chat}))
            if found:  # only users with entries: what anybody may invent cannot fill the cache
                self._chat[uin] = found
        return found

    def newer(self, change: DeviceChange) -> int:
        """The connect time of the device's connection on another gateway that is above that of a change; 0: none."""
        mine = (change.connect_time, gateway_instance(change.id))
        others = [
            (self._entries[key].connect_time, key.instance)
            for key in self._map.live_keys(change.uin)
            if key.uin == change.device and key.instance != mine[1]
        ]
        highest = max(others, default=mine)
        return highest[0] if highest > mine else 0

    def apply(self, batch: Iterable[DeviceChange], now: float) -> AppliedDevices:
        """Apply connects and disconnects. What is stale, out of range or refused is counted and left out of the result."""
        pairs: list[tuple[Change, DeviceChange]] = []
        for device in batch:
            if device.in_range():
                pairs.append((Change(device.id, device.uin, device.device, device.online, device.reason), device))
            else:
                self._map.counters.malformed += 1
        applied = self._map.apply([change for change, _ in pairs], now).changes
        changes: list[DeviceChange] = []
        rest = iter(pairs)
        for change in applied:
            # The map hands back the same objects, in order.
            device = next(device for candidate, device in rest if candidate is change)
            key = Key(device.uin, device.device, gateway_instance(device.id))
            if device.online:
                self._entries[key] = Entry(device.connect_time, device.device_class, device.chat)
            else:
                self._entries.pop(key, None)
            self._chat.pop(device.uin, None)
            changes.append(device)
        return AppliedDevices(changes)

    def merge(self, chunk: Chunk, now: float) -> AppliedDevices:
        """Apply a part of a snapshot. Raises `MalformedData` when a size is wrong; nothing is applied then."""
        if len(chunk.entries) % ENTRY_FIELDS.size or len(chunk.tombstones) % ENTRY_FIELDS.size:
            raise MalformedData(f"a snapshot chunk's parts are multiples of {ENTRY_FIELDS.size} bytes; take the snapshot again")
        return self.apply(changes_of(chunk), now)

    def snapshot(self, partition: int = 0, partitions: int = 1, chunk_entries: int = SNAPSHOT_ENTRIES) -> Iterator[Chunk]:
        """Everything that a partition serves; see `Membership.snapshot` for what happens to changes meanwhile."""
        return self._chunks(self._map.snapshot(partition, partitions, chunk_entries))

    def _chunks(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        pack = ENTRY_FIELDS.pack
        for chunk in chunks:
            live: list[bytes] = []
            for uin, device, id_ in ENTRY.iter_unpack(chunk.entries):
                # One that went since the map noted it needs no place: its disconnect is sent to the receiver live.
                entry = self._entries.get(Key(uin, device, gateway_instance(id_)))
                if entry is not None:
                    live.append(pack(uin, device, id_, *entry))
            dead = [pack(uin, device, id_, 0, 0, 0) for uin, device, id_ in ENTRY.iter_unpack(chunk.tombstones)]
            yield Chunk(b"".join(live), b"".join(dead))

    def expire(self, now: float) -> list[Key]:
        """Forget tombstones whose time is over; returns their keys."""
        return self._map.expire(now)

    def purge_partition(self, partition: int, partitions: int) -> Purged:
        """Drop every register whose user the partition does not serve (after a doubling)."""
        return self._forget(self._map.purge_partition(partition, partitions))

    def raise_floor(self, instance: int, generation: int) -> Purged:
        """A gateway of this generation holds the instance: drop what lower generations wrote, and never take it again."""
        return self._forget(self._map.raise_floor(instance, generation))

    def purge_instance(self, instance: int) -> Purged:
        """Drop all connected entries of an instance whose gateway is gone for good, without a floor."""
        return self._forget(self._map.purge_instance(instance))

    def _forget(self, purged: Purged) -> Purged:
        for key in purged.keys:
            self._entries.pop(key, None)
            self._chat.pop(key.room, None)
        return purged


def changes_of(chunk: Chunk) -> list[DeviceChange]:
    """The changes that a snapshot's chunk stands for: connects, then disconnects."""
    live = [
        DeviceChange(id_, uin, device, True, 0, time, class_, bool(chat))
        for uin, device, id_, time, class_, chat in ENTRY_FIELDS.iter_unpack(chunk.entries)
    ]
    return live + [DeviceChange(id_, uin, device, False) for uin, device, id_, *_ in ENTRY_FIELDS.iter_unpack(chunk.tombstones)]


def encode_devices(changes: Sequence[DeviceChange]) -> list[bytes]:
    """Serialized `Control` messages that carry these changes, `MESSAGES_A_CONTROL` in each."""
    found: list[bytes] = []
    for start in range(0, len(changes), MESSAGES_A_CONTROL):
        control = control_pb2.Control()
        add = control.relay_messages.messages.add
        for id_, uin, device, online, reason, connect_time, device_class, chat in changes[start : start + MESSAGES_A_CONTROL]:
            add(
                id=id_,
                uin=uin,
                device=device,
                action=control_pb2.ACTION_LOGIN if online else control_pb2.ACTION_LOGOUT,
                reason=cast("control_pb2.Reason", reason),
                connect_time=connect_time,
                device_class=device_class,
                chat=chat,
            )
        found.append(control.SerializeToString())
    return found


def decode_devices(messages: control_pb2.RelayMessages) -> list[DeviceChange]:
    """The changes in a message from the network; what has no known action gets ID 0, which is out of range."""
    login, logout = control_pb2.ACTION_LOGIN, control_pb2.ACTION_LOGOUT
    return [
        DeviceChange(
            m.id if m.action in (login, logout) else 0,
            m.uin,
            m.device,
            m.action == login,
            m.reason,
            m.connect_time,
            m.device_class,
            m.chat,
        )
        for m in messages.messages
    ]
