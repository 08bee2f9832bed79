"""The head of a datagram (and of a stream's frame), and the tag at its end if the cluster has keys.

    offset  type  field                                        offset  type  field
    0       2s    "PX"                                         8       u64   sender's EndpointID
    2       u8    version                                      16      u64   sequence of the first item
    3       u8    type                                         24      u32   layout version
    4       u8    key id: 0 without keys                        28      u32   low half of the destination's EndpointID
    5       u8    flags                                        32            items or body
    6       u16   count of items                               end-16        tag (key id not 0)

Little-endian. The tag is an HMAC-SHA256, cut to 16 bytes, over everything before it and the destination's whole EndpointID, which
is not sent: a datagram recorded for one process is refused by every other, including its successor at the same port.
The key id's high half is the key's number in the ring (`cluster.trust.key_ring`), its low half the sender's role. The tag is
made with that role's key for the receiver's role, so it proves the role.
A successor must understand a heartbeat, to report that it is another process: a heartbeat carries the flag
`ANY_DESTINATION`, its tag covers no destination, and its body names the target.

Source: docs/protocol.md, "Record". Differs from it in the last word of the head, reserved there: without keys there is no tag,
and a new process at the same port would take the datagrams meant for its predecessor.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from hmac import compare_digest
from typing import Final

from cluster.trust.key_ring import ROLES, TAG_SIZE, KeyRing, TagKey, key_byte, tag_keys
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID, EndpointID

HEAD: Final = struct.Struct("<2sBBBBHQQII")
HEAD_SIZE: Final = 32
ENDPOINT: Final = struct.Struct("<Q")
NO_DESTINATION: Final = bytes(8)
MAGIC: Final = b"PX"
VERSION: Final = 1
KEY_NONE: Final = 0
MAX_PROVEN: Final = 8192
"""Senders whose proven role is remembered."""
LAST_SEQUENCE: Final = 1 << 62
"""Highest valid sequence; a link that sends ten million items a second reaches it after 14 000 years."""

FLAG_ANY_DESTINATION: Final = 1
FLAG_STREAM: Final = 2
"""A stream's frame: refused in a datagram, as a datagram is on a stream."""
FLAG_TRUNCATED: Final = 4
"""An acknowledgement that could not list all missing ranges."""
FLAG_URGENT: Final = 8
"""Somebody waits for the acknowledgement of these items: it leaves at the end of the turn instead of after up to ten
milliseconds."""
ALL_FLAGS: Final = 15

MIN_RECORD: Final = 40
MIN_CONTROL: Final = 4
MIN_FRAGMENT: Final = 3

assert HEAD.size == HEAD_SIZE


class Type(IntEnum):
    """Type of a datagram."""

    RECORDS = 1
    CONTROL = 2
    HEARTBEAT = 3
    ACKNOWLEDGEMENT = 4
    RECORD_FRAGMENT = 5
    """One fragment of a record; the head's count is the number of fragments (`cluster.links.datagrams.fragments`)."""
    CONTROL_FRAGMENT = 6


RECORDS: Final = int(Type.RECORDS)
CONTROL: Final = int(Type.CONTROL)
HEARTBEAT: Final = int(Type.HEARTBEAT)
ACKNOWLEDGEMENT: Final = int(Type.ACKNOWLEDGEMENT)
RECORD_FRAGMENT: Final = int(Type.RECORD_FRAGMENT)
CONTROL_FRAGMENT: Final = int(Type.CONTROL_FRAGMENT)


class DatagramRefusal:
    """Reasons why something was refused: the keys of `LinkStats.refused`."""

    SHORT: Final = "short"
    OVERSIZED: Final = "oversized"
    KEY: Final = "key"
    TAG: Final = "tag"
    MAGIC: Final = "magic"
    VERSION: Final = "version"
    TYPE: Final = "type"
    FLAGS: Final = "flags"
    COUNT: Final = "count"
    SENDER: Final = "sender"
    SEQUENCE: Final = "sequence"
    DESTINATION: Final = "destination"
    DUPLICATE: Final = "duplicate"
    OLD_COUNTER: Final = "old_counter"
    UNKNOWN_SENDER: Final = "unknown_sender"
    MALFORMED_RECORDS: Final = "malformed_records"
    MALFORMED_CONTROL: Final = "malformed_control"
    MALFORMED_FRAGMENT: Final = "malformed_fragment"
    LATE_FRAGMENT: Final = "late_fragment"
    """The item of a fragment was given up, because the other fragments did not arrive in time."""
    MALFORMED_HEARTBEAT: Final = "malformed_heartbeat"
    MALFORMED_ACKNOWLEDGEMENT: Final = "malformed_acknowledgement"
    HANDLER_RAISED: Final = "handler_raised"
    LINK_RAISED: Final = "link_raised"
    """Sending to this peer failed, which is a bug; the data queued for it was given up."""
    NOT_TAKEN: Final = "not_taken"
    """The role cannot handle these records, although they are well-formed."""


FieldsOfHead = tuple[bytes, int, int, int, int, int, int, int, int, int]
"""Fields of a head: magic, version, type, key id, flags, count, sender, sequence, layout version, destination's low half."""


class Codec:
    """Builds and checks the datagrams of one process."""

    def __init__(
        self,
        own: EndpointID,
        max_datagram_bytes: int,
        max_frame_bytes: int,
        ring: KeyRing | None = None,
        role: str = "",
    ) -> None:
        """Create the codec of a process.

        `own` is the process's EndpointID; sizes include head and tag. `ring`: keys to sign with, for a process of the role `role`;
        None: nothing is signed.

        Raises `InvalidArgument`.
        """
        if not 0 < own <= MAX_ID:
            raise InvalidArgument("an EndpointID is from 1 to 2^63-1")
        self.own = own
        self.tag_size = TAG_SIZE if ring is not None else 0
        self._limits = (max_datagram_bytes, max_frame_bytes)
        self._least = HEAD_SIZE + self.tag_size
        self._key_id = KEY_NONE
        self._own_word = own & 0xFFFFFFFF
        self._own_bytes = ENDPOINT.pack(own)
        self.peer_roles: dict[int, str] = {}
        """Roles of peers by endpoint."""
        self.proven_roles: dict[int, str] = {}
        """Roles that senders' tags have proved, by endpoint."""
        self._role = role
        self._ring: KeyRing | None = None
        self._signing: dict[str, TagKey] = {}
        self._checking: dict[int, TagKey] = {}
        if ring is not None:
            self.set_ring(ring)

    def set_ring(self, ring: KeyRing) -> None:
        """Replace the keys to sign and check with."""
        self._ring = ring
        self._key_id = key_byte(ring.signing, self._role)
        self._signing, self._checking = tag_keys(ring, self._role)

    def _proves(self, key_id: int, sender: int) -> bool:
        """Remember the role that a sender's tag has proved; False if the sender is a peer of another role."""
        role = ROLES[(key_id & 15) - 1]
        if self.peer_roles.get(sender, role) != role:
            return False
        if self.proven_roles.get(sender) != role:
            if len(self.proven_roles) >= MAX_PROVEN:
                self.proven_roles.clear()  # they prove it again with their next datagram
            self.proven_roles[sender] = role
        return True

    def pack(
        self, type_: int, flags: int, count: int, sequence: int, layout_version: int, destination: int, parts: list[bytes]
    ) -> bytes:
        """One datagram of items or a body laid end to end."""
        if flags & FLAG_ANY_DESTINATION:
            word, covered = 0, NO_DESTINATION
        else:
            word, covered = destination & 0xFFFFFFFF, ENDPOINT.pack(destination)
        head = HEAD.pack(MAGIC, VERSION, type_, self._key_id, flags, count, self.own, sequence, layout_version & 0xFFFFFFFF, word)
        data = head + parts[0] if len(parts) == 1 else b"".join([head, *parts])
        if not self.tag_size:
            return data
        key = self._signing[self.peer_roles.get(destination) or self.proven_roles.get(destination, self._role)]
        return data + key.tag(data, covered)

    def unpack(self, data: bytes, stream: bool) -> FieldsOfHead | str:
        """Check a datagram (or frame) and return the fields of its head, or the reason why it is refused. Never raises.

        Before the tag is checked only two fields are read: the key id, which selects the key, and the flag that shows if the tag
        covers a destination.
        """
        size = len(data)
        if size < self._least:
            return DatagramRefusal.SHORT
        if size > self._limits[stream]:
            return DatagramRefusal.OVERSIZED
        if self._ring is not None:
            key = self._checking.get(data[4])
            if key is None:
                return DatagramRefusal.KEY
            if not self._is_tagged(data, key):
                return DatagramRefusal.TAG
        elif data[4] != KEY_NONE:
            return DatagramRefusal.KEY
        head: FieldsOfHead = HEAD.unpack_from(data)
        magic, version, type_, _, flags, count, sender, sequence, _, word = head
        if magic != MAGIC:
            return DatagramRefusal.MAGIC
        if version != VERSION:
            return DatagramRefusal.VERSION
        if flags & ~ALL_FLAGS or (flags & FLAG_STREAM != 0) is not stream:
            return DatagramRefusal.FLAGS
        if type_ == RECORDS:
            if not 0 < count <= (size - self._least) // MIN_RECORD:
                return DatagramRefusal.COUNT
        elif HEARTBEAT <= type_ <= ACKNOWLEDGEMENT:
            pass
        elif type_ == CONTROL:
            if not 0 < count <= (size - self._least) // MIN_CONTROL:
                return DatagramRefusal.COUNT
        elif RECORD_FRAGMENT <= type_ <= CONTROL_FRAGMENT:
            if size < self._least + MIN_FRAGMENT or not count:
                return DatagramRefusal.COUNT
            if stream:
                return DatagramRefusal.TYPE
        else:
            return DatagramRefusal.TYPE
        if flags & FLAG_ANY_DESTINATION:
            if type_ != HEARTBEAT:
                return DatagramRefusal.FLAGS
        elif word != self._own_word:
            return DatagramRefusal.DESTINATION
        if not 0 < sequence <= LAST_SEQUENCE:
            return DatagramRefusal.SEQUENCE
        if not 0 < sender <= MAX_ID or sender == self.own or (self._ring is not None and not self._proves(data[4], sender)):
            return DatagramRefusal.SENDER
        return head

    def _is_tagged(self, data: bytes, key: TagKey) -> bool:
        covered = NO_DESTINATION if data[5] & FLAG_ANY_DESTINATION else self._own_bytes
        return compare_digest(key.tag(data[:-TAG_SIZE], covered), data[-TAG_SIZE:])


def split_control(data: bytes, start: int, end: int, count: int) -> list[bytes] | None:
    """The messages of a control datagram: `count` items, each a u32 size and its bytes; None if malformed."""
    messages = []
    position = start
    for _ in range(count):
        body = position + MIN_CONTROL
        if body > end:
            return None
        position = body + int.from_bytes(data[position:body], "little")
        if position > end:
            return None
        messages.append(data[body:position])
    return messages if position == end else None


def join_control(messages: list[bytes]) -> list[bytes]:
    """The items of serialized control messages: each with its u32 size in front."""
    return [len(message).to_bytes(MIN_CONTROL, "little") + message for message in messages]
