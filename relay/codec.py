"""How connects and disconnects are written: on the wire, in snapshots and in the Relay DB.

    Relay DB   key    UIN u64 | DeviceID u64 | gateway instance u16                                    big-endian
               value  GatewayMsgID u64 | 1 connected, 0 tombstone | connect time u64 | class u16 | chat u8   little-endian

Source: seed 004 §7.3; DESIGN section 10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pixiu.devices import ENTRY_FIELDS, DeviceChange, changes_of, decode_devices, encode_devices
from pixiu.ids import gateway_instance
from pixiu.softstore import Chunk, Key
from pixiu.wire.v1 import control_pb2

VALUE: Final = struct.Struct("<QBQHB")


class DevicesCodec:
    """`pixiu.replicas.registers.Codec` of `pixiu.devices.DeviceChange`."""

    def encode(self, changes: Sequence[DeviceChange]) -> list[bytes]:
        """Serialized `Control` messages."""
        return encode_devices(changes)

    def decode(self, control: control_pb2.Control) -> list[DeviceChange]:
        """The connects and disconnects in a `Control`."""
        return decode_devices(control.relay_messages) if control.HasField("relay_messages") else []

    def rows(self, changes: Iterable[DeviceChange]) -> Iterator[tuple[Key, bytes]]:
        """Database keys and values."""
        pack = VALUE.pack
        for id_, uin, device, online, _, connect_time, device_class, chat in changes:
            yield Key(uin, device, gateway_instance(id_)), pack(id_, online, connect_time, device_class, chat)

    def entry(self, key: Key, value: bytes) -> tuple[bool, bytes] | None:
        """A row as a snapshot has it."""
        uin, device, _ = key
        if len(value) != VALUE.size or device >> 16:
            return None
        id_, online, connect_time, device_class, chat = VALUE.unpack(value)
        return bool(online), ENTRY_FIELDS.pack(uin, device, id_, connect_time, device_class, chat)

    def changes(self, chunk: Chunk) -> list[DeviceChange]:
        """A chunk's connects, then its disconnects."""
        return changes_of(chunk)


CODEC: Final = DevicesCodec()
