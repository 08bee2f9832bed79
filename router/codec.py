"""How logins and logouts are written: on the wire, in snapshots and in the Router DB.

    Router DB   key    RoomID u64 | UIN u64 | gateway instance u16     big-endian
                value  GatewayMsgID u64 little-endian | 1 login, 0 tombstone

Source: seed 004 §2.4 step 10, §5.2 step 7; DESIGN section 10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pixiu.softstore import ENTRY, INSTANCE_SHIFT, Change, Chunk, Key, decode_messages, encode_messages
from pixiu.wire.v1 import control_pb2

VALUE: Final = struct.Struct("<QB")


class MembershipCodec:
    """`pixiu.replicas.registers.Codec` of `pixiu.softstore.Change`."""

    def encode(self, changes: Sequence[Change]) -> list[bytes]:
        """Serialized `Control` messages."""
        return encode_messages(changes)

    def decode(self, control: control_pb2.Control) -> list[Change]:
        """The logins and logouts in a `Control`."""
        return decode_messages(control.gateway_messages) if control.HasField("gateway_messages") else []

    def rows(self, changes: Iterable[Change]) -> Iterator[tuple[Key, bytes]]:
        """Database keys and values."""
        pack = VALUE.pack
        for id_, room, uin, login, _ in changes:
            yield Key(room, uin, id_ >> INSTANCE_SHIFT), pack(id_, login)

    def entry(self, key: Key, value: bytes) -> tuple[bool, bytes] | None:
        """A row as a snapshot has it."""
        if len(value) != VALUE.size:
            return None
        id_, login = VALUE.unpack(value)
        return bool(login), ENTRY.pack(key.room, key.uin, id_)

    def changes(self, chunk: Chunk) -> list[Change]:
        """A chunk's logins, then its logouts."""
        found = [Change(id_, room, uin, True) for room, uin, id_ in ENTRY.iter_unpack(chunk.entries)]
        return found + [Change(id_, room, uin, False) for room, uin, id_ in ENTRY.iter_unpack(chunk.tombstones)]


CODEC: Final = MembershipCodec()
