"""Logins and logouts as values and as bytes: in `Control` messages, in a snapshot's chunks and in listings. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Final, NamedTuple, cast

from cluster.membership.map import digest as digests
from cluster.membership.map.digest import DigestRule
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData

ENTRY: Final = digests.ENTRY
"""Group, member, GatewayMsgID: one entry of a snapshot."""
ENTRY_BYTES: Final = 24
VALUE: Final = struct.Struct("<Q")
"""The value of one entry, in maps with values."""
VALUE_BYTES: Final = 8
MESSAGES_A_CONTROL: Final = 32
"""Gateway messages in one `Control`: about 33 bytes each, so that they fit one datagram."""
VALUED_MESSAGES_A_CONTROL: Final = 24
"""Gateway messages with values, which take 9 bytes more, in one `Control`."""
NAMED_MESSAGES_A_CONTROL: Final = 6
"""Gateway messages with names, which take at most 124 bytes more, in one `Control`."""
PROVEN_MESSAGES_A_CONTROL: Final = 16
NAMED_AND_PROVEN_A_CONTROL: Final = 5
"""The same with a login ticket in each, which takes 22 bytes more."""

assert ENTRY.size == ENTRY_BYTES


class Update(NamedTuple):
    """One login or logout, as reported by a gateway and as applied to the map."""

    id: int
    """GatewayMsgID; identifies the gateway instance too."""
    group: int
    """RoomID; where a relay keeps devices, the UIN."""
    member: int
    """UIN; where a relay keeps devices, the device."""
    login: bool
    reason: int = 0
    """A `Reason` of control.proto; passed on, not kept."""
    value: int = 0
    """Value of a login, 64 bits; 0 for members of rooms."""
    name: str = ""
    """Name of a device that takes mail; passed on, not kept."""
    ticket: bytes = b""
    """Login ticket of the user, from a gateway to a relay; neither passed on nor kept."""


class Listing(NamedTuple):
    """All live entries of one bucket of an instance from `first` up to but not including `end`; both are (group, member)."""

    rule: DigestRule
    instance: int
    bucket: int
    as_of: int
    """The GatewayMsgID as of which the listing is complete; 0 if unknown: then it only adds."""
    first: tuple[int, int]
    end: tuple[int, int] | None
    """None: up to the end of the bucket."""
    entries: bytes
    """Entries as in `Chunk`, ascending."""
    values: bytes = b""
    """Values as in `Chunk`."""


class Chunk(NamedTuple):
    """A part of a snapshot: entries of 24 bytes laid end to end."""

    entries: bytes
    tombstones: bytes
    values: bytes = b""
    """8 bytes for each entry, in the same order; empty if none has a value."""


def logins(entries: bytes, values: bytes) -> list[Update]:
    """The logins in a snapshot's chunk or a listing. Raises `MalformedData`."""
    if values and len(values) * ENTRY_BYTES != len(entries) * VALUE_BYTES:
        raise MalformedData(f"every entry has a value of {VALUE_BYTES} bytes, or none has")
    held = (value for (value,) in VALUE.iter_unpack(values)) if values else repeat(0)
    found = zip(ENTRY.iter_unpack(entries), held, strict=False)
    return [Update(id_, group, member, True, 0, value) for (group, member, id_), value in found]


def encode_messages(changes: Sequence[Update]) -> list[bytes]:
    """Encode logins and logouts as serialized `Control` messages, each small enough for one datagram."""
    found: list[bytes] = []
    limit = VALUED_MESSAGES_A_CONTROL if any(change.value for change in changes) else MESSAGES_A_CONTROL
    proven = any(change.ticket for change in changes)
    if proven:
        limit = PROVEN_MESSAGES_A_CONTROL
    if any(change.name for change in changes):
        limit = NAMED_AND_PROVEN_A_CONTROL if proven else NAMED_MESSAGES_A_CONTROL
    for start in range(0, len(changes), limit):
        control = control_pb2.Control()
        add = control.gateway_messages.messages.add
        for id_, group, member, login, reason, value, name, ticket in changes[start : start + limit]:
            action = control_pb2.ACTION_LOGIN if login else control_pb2.ACTION_LOGOUT
            added = add(
                id=id_, room=group, uin=member, action=action, reason=cast("control_pb2.Reason", reason), value=value, name=name
            )
            if ticket:
                added.ticket = ticket
        found.append(control.SerializeToString())
    return found


def decode_messages(messages: control_pb2.GatewayMessages) -> list[Update]:
    """Decode the logins and logouts of a message from the network. One without a known action becomes an invalid `Update` (ID 0),
    which `LwwMap.apply` counts as malformed."""
    login, logout = control_pb2.ACTION_LOGIN, control_pb2.ACTION_LOGOUT
    return [
        Update(m.id if m.action in (login, logout) else 0, m.room, m.uin, m.action == login, m.reason, m.value, m.name, m.ticket)
        for m in messages.messages
    ]
