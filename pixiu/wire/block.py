"""The block: many messages of one writer for one part of a topic, the form in which they are sent, stored and read.

    offset  type  field                                offset  type  field
    0       u16   magic, "PB"                          16      u32   part
    2       u8    version, 1                           20      u32   count of messages
    3       u8    flags of its messages, joined        24      u64   writer
    4       u32   size of the whole block              32      u64   position of the first message
    8       u32   CRC-32 of everything from 12 on      40      u64   progress after the last message, 0 none
    12      u32   topic                                48            index, messages

The index has 8 bytes a message: u32 where it ends, counted from the end of the index; u16 slot; u8 flags; u8 0. A message is the
fields of its flags, in this order, and its body. All numbers are little-endian, times are Unix µs:

    64 event time u64 | 4 deliver_at u64 | 8 expires_in u32 s | 2 tag: u8, bytes | 16 key: u16, bytes
    32 headers: u8 count, for each u8 name size, u16 value size, name, value | 1 (load test) has no field

A block of version 2 has no messages: it stands for `count` offsets whose messages compaction has removed. Its flags are 128, its
writer is 0, its position 1, and instead of the index are eight bytes 0. No writer may send one.

The leader of a part checks a block and stores it as it came, behind a stamp that only leaders write.

    0  u32 size of the block | 4  u32 CRC-32 of what follows, and of the block's CRC | 8  u64 offset of the first message
    16 u64 when it was appended | 24 u64 sender's UIN, as logged in

Source: docs/topics.md, "Blocks".
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from pixiu.errors import InvalidArgument, MalformedData, RecordTooLarge

MAGIC: Final = 0x4250
VERSION: Final = 1
HOLE: Final = 2
"""Version of a block that stands for messages which compaction has removed."""
HEAD: Final = struct.Struct("<HBBIIIIIQQQ")
HEAD_BYTES: Final = 48
COVERED_FROM: Final = 12
"""Offset from which the CRC covers the block."""
INDEX: Final = struct.Struct("<IHBB")
INDEX_BYTES: Final = 8
FLAGS_AT: Final = HEAD_BYTES + 6
SPARE_AT: Final = HEAD_BYTES + 7
"""Places of these fields of the first message; those of the others follow every `INDEX_BYTES`."""
STAMP: Final = struct.Struct("<IIQQQ")
STAMP_BYTES: Final = 32
MAX_BLOCK_BYTES: Final = 1 << 20
"""Limit of a whole block, and so, with its head, of a message."""
MAX_HEADERS: Final = 64
MAX_KEY_BYTES: Final = 4096
MAX_TAG_BYTES: Final = 100
MAX_NEEDLE: Final = 32
"""Bytes of a needle that are searched for. Policy: a long one may take its length for each byte of a short block."""
MAX_OFFSET: Final = (1 << 48) - 1
MAX_POSITION: Final = (1 << 63) - 1
U64: Final = struct.Struct("<Q")
U32: Final = struct.Struct("<I")
U16: Final = struct.Struct("<H")
HEADER: Final = struct.Struct("<BH")
assert HEAD.size == HEAD_BYTES
assert INDEX.size == INDEX_BYTES
assert STAMP.size == STAMP_BYTES
assert sys.byteorder == "little", "columns of the index are read in place"


class Flag:
    """Bits of a message, and of a block with such a message."""

    LOAD_TEST: Final = 1
    TAG: Final = 2
    DELIVER_AT: Final = 4
    EXPIRES: Final = 8
    KEY: Final = 16
    HEADERS: Final = 32
    EVENT_TIME: Final = 64
    HOLE: Final = 128
    """Of blocks that have no messages: see `hole`. No message has it."""


ALL_FLAGS: Final = 127


class Message(NamedTuple):
    """A message of a topic."""

    body: bytes
    slot: int
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    event_at_us: int | None = None
    deliver_at_us: int | None = None
    expires_in_s: int | None = None
    tag: str | None = None
    load_test: bool = False


class Stamp(NamedTuple):
    """The fields that the leader adds to a block."""

    base: int
    """Offset of the first message."""
    at_us: int
    """Time of appending, Unix µs."""
    sender: int
    """UIN of the writer's login."""


class Encoded(NamedTuple):
    """A message as a block holds it."""

    slot: int
    flags: int
    data: bytes


def encode_message(message: Message) -> Encoded:
    """Encode one message. Raises InvalidArgument for a field out of range."""
    if not 0 <= message.slot <= 0xFFFF:
        raise InvalidArgument(f"a slot is from 0 to 65535, not {message.slot}")
    flags, parts = int(message.load_test), list[bytes]()
    try:
        if message.event_at_us is not None:
            flags |= Flag.EVENT_TIME
            parts.append(U64.pack(message.event_at_us))
        if message.deliver_at_us is not None:
            flags |= Flag.DELIVER_AT
            parts.append(U64.pack(message.deliver_at_us))
        if message.expires_in_s is not None:
            flags |= Flag.EXPIRES
            parts.append(U32.pack(message.expires_in_s))
    except struct.error as problem:
        raise InvalidArgument("times are Unix µs from 0 to 2^64-1, expires_in is at most 2^32-1 seconds") from problem
    if message.tag is not None:
        tag = message.tag.encode()
        if not 0 < len(tag) <= MAX_TAG_BYTES:
            raise InvalidArgument(f"a tag has 1 to {MAX_TAG_BYTES} bytes, this one {len(tag)}")
        flags |= Flag.TAG
        parts.append(bytes((len(tag),)) + tag)
    if message.key is not None:
        if len(message.key) > MAX_KEY_BYTES:
            raise InvalidArgument(f"a key has at most {MAX_KEY_BYTES} bytes, this one {len(message.key)}")
        flags |= Flag.KEY
        parts.append(U16.pack(len(message.key)) + message.key)
    if message.headers:
        if len(message.headers) > MAX_HEADERS:
            raise InvalidArgument(f"a message has at most {MAX_HEADERS} headers, this one {len(message.headers)}")
        flags |= Flag.HEADERS
        parts.append(bytes((len(message.headers),)))
        for name, value in message.headers:
            encoded = name.encode()
            if not 0 < len(encoded) < 256 or len(value) > 0xFFFF:
                raise InvalidArgument(f"the header {name!r}: a name has 1 to 255 bytes, a value at most 65535")
            parts.append(HEADER.pack(len(encoded), len(value)) + encoded + value)
    parts.append(message.body)
    return Encoded(message.slot, flags, b"".join(parts))


def encode(messages: Sequence[Message], *, topic: int, part: int, writer: int, first: int, progress: int = 0) -> bytes:
    """Encode a block. `first`: position of the first message in the writer's stream to this part; the others follow it.

    Raises RecordTooLarge above `MAX_BLOCK_BYTES`, and InvalidArgument for a field out of range.
    """
    return join(map(encode_message, messages), topic=topic, part=part, writer=writer, first=first, progress=progress)


def join(messages: Iterable[Encoded], *, topic: int, part: int, writer: int, first: int, progress: int = 0) -> bytes:
    """Make a block of encoded messages; arguments and errors as for `encode`."""
    index, found, end, joined = bytearray(), list[bytes](), 0, 0
    for slot, flags, data in messages:
        found.append(data)
        end += len(data)
        joined |= flags
        index += INDEX.pack(end & 0xFFFFFFFF, slot, flags, 0)
    size = HEAD_BYTES + len(index) + end
    if size > MAX_BLOCK_BYTES:
        raise RecordTooLarge(
            f"a block of {size} bytes is above the limit of {MAX_BLOCK_BYTES}; send a reference to the content instead"
        )
    if not found or not 1 <= first <= MAX_POSITION - len(found):
        raise InvalidArgument("a block has at least one message, and positions from 1 to 2^63-1")
    try:
        head = HEAD.pack(MAGIC, VERSION, joined, size, 0, topic, part, len(found), writer, first, progress)
    except struct.error as problem:
        raise InvalidArgument("topic and part have 32 bits, writer and progress 64") from problem
    return with_crc(head, index, *found)


def with_crc(head: bytes, *rest: bytes | bytearray) -> bytes:
    """A block of these pieces, with its CRC in the head."""
    covered = b"".join((head[COVERED_FROM:], *rest))
    return head[:8] + U32.pack(crc32(covered)) + covered


def hole(topic: int, part: int, count: int) -> bytes:
    """Encode a block that stands for offsets whose messages were removed."""
    head = HEAD.pack(MAGIC, HOLE, Flag.HOLE, HEAD_BYTES + INDEX_BYTES, 0, topic, part, count, 0, 1, 0)
    return with_crc(head, bytes(INDEX_BYTES))


class Block:
    """A checked block, read in place: nothing is made for a message that nobody asks for.

    `parse` makes one after checking it, `checked` of one that was.
    """

    __slots__ = ("_at", "count", "data", "first", "flags", "part", "progress", "topic", "writer")

    def __init__(self, data: bytes, head: tuple[int, ...]) -> None:
        self.data = data
        _, _, self.flags, _, _, self.topic, self.part, self.count, self.writer, self.first, self.progress = head
        self._at = HEAD_BYTES + INDEX_BYTES * self.count
        """Offset of the first message."""

    @classmethod
    def checked(cls, data: bytes) -> Block:
        """A block that was checked before: when its writer sent it, say, and that comes from a log with CRCs now."""
        return cls(data, HEAD.unpack_from(data))

    @property
    def last(self) -> int:
        """Position of the last message."""
        return self.first + self.count - 1

    def index(self) -> Iterator[tuple[int, int, int, int]]:
        """(end, slot, flags, 0) of each message."""
        return INDEX.iter_unpack(memoryview(self.data)[HEAD_BYTES : self._at])

    def ends(self) -> list[int]:
        """The end of each message, counted from the end of the index."""
        return memoryview(self.data)[HEAD_BYTES : self._at].cast("I")[::2].tolist()

    def slots(self) -> list[int]:
        """The slot of each message."""
        return memoryview(self.data)[HEAD_BYTES : self._at].cast("H")[2::4].tolist()

    def all_flags(self) -> bytes:
        """The flags of each message."""
        return self.data[FLAGS_AT : self._at : INDEX_BYTES]

    def bounds(self, number: int) -> tuple[int, int]:
        """Begin and end of a message in `data`."""
        at = HEAD_BYTES + INDEX_BYTES * number
        begin = int(U32.unpack_from(self.data, at - INDEX_BYTES)[0]) if number else 0
        return self._at + begin, self._at + int(U32.unpack_from(self.data, at)[0])

    def headers(self, number: int) -> list[tuple[bytes, bytes]]:
        """Names and values of a message's headers, nothing else decoded."""
        data, (at, _), flags = self.data, self.bounds(number), self.data[FLAGS_AT + INDEX_BYTES * number]
        found = list[tuple[bytes, bytes]]()
        if flags & Flag.HEADERS:
            at += (8 if flags & Flag.EVENT_TIME else 0) + (8 if flags & Flag.DELIVER_AT else 0) + (4 if flags & Flag.EXPIRES else 0)
            if flags & Flag.TAG:
                at += 1 + data[at]
            if flags & Flag.KEY:
                at += 2 + (data[at] | data[at + 1] << 8)
            left, at = data[at], at + 1
            for _ in range(left):
                name, value = HEADER.unpack_from(data, at)
                at += HEADER.size + name
                found.append((data[at - name : at], data[at : at + value]))
                at += value
        return found

    def keyed(self) -> Iterator[tuple[int, bytes, int]]:
        """(number, key, size of the body) of each message with a key."""
        data, end = self.data, self._at
        for number, (to, _, flags, _) in enumerate(self.index()):
            at, end = end, self._at + to
            if flags & Flag.KEY:
                at += (8 if flags & Flag.EVENT_TIME else 0) + (8 if flags & Flag.DELIVER_AT else 0)
                at += 4 if flags & Flag.EXPIRES else 0
                if flags & Flag.TAG:
                    at += 1 + data[at]
                begin, at = at + 2, at + 2 + (data[at] | data[at + 1] << 8)
                key = data[begin:at]
                if flags & Flag.HEADERS:
                    left, at = data[at], at + 1
                    for _ in range(left):
                        name, value = HEADER.unpack_from(data, at)
                        at += HEADER.size + name + value
                yield number, key, end - at

    def length(self, low: int, high: int) -> int:
        """Bytes of the messages [low, high)."""
        return self.bounds(high - 1)[1] - self.bounds(low)[0] if low < high else 0

    def having(self, needles: Sequence[bytes], low: int, high: int) -> list[int]:
        """The numbers of the messages [low, high) that have one of these bytes anywhere, also by chance."""
        ends, found = self.ends(), set[int]()
        start, stop = self.bounds(low)[0], self.bounds(high - 1)[1]
        first = start - (ends[low - 1] if low else 0)
        for needle in (each[:MAX_NEEDLE] for each in needles):
            at = self.data.find(needle, start, stop)
            while at >= 0:
                number = bisect_right(ends, at - first)
                found.add(number)
                at = self.data.find(needle, first + ends[number], stop)
        return sorted(found)

    def handling(self, number: int) -> tuple[int | None, int | None, str | None]:
        """Time from which a message may be delivered, Unix µs, seconds until it expires, and its tag; nothing else decoded."""
        data, (at, _), flags = self.data, self.bounds(number), self.data[FLAGS_AT + INDEX_BYTES * number]
        deliver_at = expires = tag = None
        if flags & Flag.EVENT_TIME:
            at += 8
        if flags & Flag.DELIVER_AT:
            deliver_at = int(U64.unpack_from(data, at)[0])
            at += 8
        if flags & Flag.EXPIRES:
            expires = int(U32.unpack_from(data, at)[0])
            at += 4
        if flags & Flag.TAG:
            tag = data[at + 1 : at + 1 + data[at]].decode()
        return deliver_at, expires, tag

    def deliver_times(self, low: int, high: int) -> list[int]:
        """Times from which the messages [low, high) may be delivered, Unix µs; 0: at once."""
        data, flags, ends, at, read = self.data, self.all_flags(), self.ends(), self._at, U64.unpack_from
        size, skip, count = ends[0], 8 if flags[0] & Flag.EVENT_TIME else 0, self.count
        if flags[0] & Flag.DELIVER_AT and flags.count(flags[0]) == count and ends == list(range(size, size * count + 1, size)):
            alike = memoryview(data)[at + low * size : at + high * size]
            return [time for (time,) in struct.iter_unpack(f"<{skip}xQ{size - skip - 8}x", alike)]
        begins = [0, *ends]
        return [
            read(data, at + begins[number] + (8 if flags[number] & Flag.EVENT_TIME else 0))[0]
            if flags[number] & Flag.DELIVER_AT
            else 0
            for number in range(low, high)
        ]

    def message(self, number: int) -> Message:
        """Decode one message."""
        _, slot, flags, _ = INDEX.unpack_from(self.data, HEAD_BYTES + INDEX_BYTES * number)
        return decode_message(self.data, *self.bounds(number), slot, flags)


def decode_message(data: bytes, at: int, end: int, slot: int, flags: int) -> Message:
    """Decode the message that lies in [at, end), and was checked."""
    event_at = deliver_at = expires = tag = key = None
    headers = list[tuple[str, bytes]]()
    if flags & Flag.EVENT_TIME:
        (event_at,) = U64.unpack_from(data, at)
        at += 8
    if flags & Flag.DELIVER_AT:
        (deliver_at,) = U64.unpack_from(data, at)
        at += 8
    if flags & Flag.EXPIRES:
        (expires,) = U32.unpack_from(data, at)
        at += 4
    if flags & Flag.TAG:
        tag = data[at + 1 : at + 1 + data[at]].decode()
        at += 1 + data[at]
    if flags & Flag.KEY:
        size = int(U16.unpack_from(data, at)[0])
        key = data[at + 2 : at + 2 + size]
        at += 2 + size
    if flags & Flag.HEADERS:
        at += 1
        for _ in range(data[at - 1]):
            name, value = HEADER.unpack_from(data, at)
            at += HEADER.size + name + value
            headers.append((data[at - name - value : at - value].decode(), data[at - value : at]))
    return Message(data[at:end], slot, key, headers, event_at, deliver_at, expires, tag, bool(flags & Flag.LOAD_TEST))


def parse(data: bytes, *, fields: bool = True) -> Block:
    """Check a whole block before anything is made of it: size, CRC, index, and that the fields of each message lie within it.

    Args:
        fields: False leaves out the fields of messages, which are most of the work: of a block that was checked before it was
            written here, the rest says that it is still the same.

    Raises MalformedData.
    """
    if not HEAD_BYTES + INDEX_BYTES <= len(data) <= MAX_BLOCK_BYTES:
        raise MalformedData(f"a block has {HEAD_BYTES + INDEX_BYTES} to {MAX_BLOCK_BYTES} bytes, this one {len(data)}")
    head = HEAD.unpack_from(data)
    magic, version, joined, size, crc, _, _, count, _, first, _ = head
    if magic != MAGIC or version != VERSION:
        raise MalformedData("it does not begin as a block of version 1 does")
    if size != len(data):
        raise MalformedData(f"the block says {size} bytes and has {len(data)}")
    if crc32(memoryview(data)[COVERED_FROM:]) != crc:
        raise MalformedData("the block's CRC is wrong: it was damaged on the way")
    if not count or HEAD_BYTES + INDEX_BYTES * count > size or not 1 <= first <= MAX_POSITION - count:
        raise MalformedData(f"the block has no {count} messages from position {first} on")
    start = HEAD_BYTES + INDEX_BYTES * count
    block = Block(data, head)
    ends, flags = block.ends(), block.all_flags()
    if ends[-1] != size - start or ends != sorted(ends) or data[SPARE_AT:start:INDEX_BYTES].count(0) != count:
        raise MalformedData("the block's index does not fit its messages")
    found = 0
    for each in set(flags):
        found |= each
    if found != joined or found & ~ALL_FLAGS:
        raise MalformedData("the block's index does not fit its head")
    if fields and found & ~Flag.LOAD_TEST:
        at = start
        for each, end in zip(flags, ends, strict=True):
            if each & ~Flag.LOAD_TEST and not fits(data, each, at, start + end):
                raise MalformedData("a message's fields do not fit in it")
            at = start + end
    return block


def fits(data: bytes, flags: int, at: int, end: int) -> bool:
    """True if the fields of a message lie between its bounds and are within their limits."""
    at += (8 if flags & Flag.EVENT_TIME else 0) + (8 if flags & Flag.DELIVER_AT else 0) + (4 if flags & Flag.EXPIRES else 0)
    if flags & Flag.TAG:
        tag_at = at
        if at >= end or not 0 < data[at] <= MAX_TAG_BYTES:
            return False
        at += 1 + data[at]
        if at > end or not _is_text(data[at - data[tag_at] : at]):
            return False
    if flags & Flag.KEY:
        if at + 2 > end or data[at] | data[at + 1] << 8 > MAX_KEY_BYTES:
            return False
        at += 2 + (data[at] | data[at + 1] << 8)
    if flags & Flag.HEADERS:
        if at >= end or not 0 < data[at] <= MAX_HEADERS:
            return False
        left, at = data[at], at + 1
        for _ in range(left):
            if at + HEADER.size > end or not data[at]:
                return False
            name, value = HEADER.unpack_from(data, at)
            at += HEADER.size + name + value
            if at > end or not _is_text(data[at - name - value : at - value]):
                return False
    return at <= end


def _is_text(data: bytes) -> bool:
    """True for UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def stamped(block: bytes, stamp: Stamp) -> bytes:
    """A block as it is stored and read: behind its stamp."""
    head = STAMP.pack(len(block), 0, *stamp)
    return head[:4] + U32.pack(_stamp_crc(head, block)) + head[8:] + block


def _stamp_crc(head: bytes, block: bytes) -> int:
    return crc32(block[8:COVERED_FROM], crc32(head[8:STAMP_BYTES]))


def stored_size(head: bytes) -> int:
    """Size of a stored block, stamp included, by its first bytes; 0 if they cannot be those of one."""
    size = int(U32.unpack_from(head)[0]) if len(head) >= STAMP_BYTES else 0
    return STAMP_BYTES + size if HEAD_BYTES + INDEX_BYTES <= size <= MAX_BLOCK_BYTES else 0


def parse_stored(data: bytes, *, fields: bool = True) -> tuple[Stamp, Block]:
    """Check a stored block, stamp included; `fields` as for `parse`. Raises MalformedData."""
    if stored_size(data) != len(data):
        raise MalformedData("a stored block does not have the size that its stamp says")
    block = data[STAMP_BYTES:]
    _, crc, *stamp = STAMP.unpack_from(data)
    if crc != _stamp_crc(data, block):
        raise MalformedData("the CRC of a stored block's stamp is wrong")
    return Stamp(*stamp), _parse_hole(block) if block[2] == HOLE else parse(block, fields=fields)


def _parse_hole(data: bytes) -> Block:
    found = Block(data, HEAD.unpack_from(data))
    if not found.count or data != hole(found.topic, found.part, found.count):
        raise MalformedData("a block without messages does not have their form")
    return found
