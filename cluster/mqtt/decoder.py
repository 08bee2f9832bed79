"""Bytes to packets of MQTT 3.1, 3.1.1 and 5. No I/O.

    0      type (upper 4 bits), flags (lower 4)
    1..4   remaining length: 7 bits a byte, least significant first, top bit: more follow
    …      for PUBLISH: u16 topic length, topic, u16 packet identifier (QoS 1 and 2 only), properties (MQTT 5 only), payload

The CONNECT names the dialect of what follows; it chooses among tables of first bytes and of parsers.

A decoder checks each packet as far as its bytes have arrived, in the order of the bytes: the packets it returns, and the error it
stops at, do not depend on how the stream was cut.

Source: OASIS MQTT 3.1.1 and 5.0, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from cluster.mqtt.fields import DIRECTIONS, LAYOUTS, Field, Layout
from cluster.mqtt.packets import (
    FIRST_PACKET_BYTES,
    FIXED_FLAGS,
    LEAST_PACKET_BYTES,
    MAX_FILTERS,
    MAX_PACKET_BYTES,
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
    PROTOCOL_NAMES,
    SUBACK_FAILURE,
    ConnackCode,
    Connect,
    Dialect,
    MalformedPacket,
    Packet,
    PacketType,
    Properties,
    Publish,
    Reason,
    Side,
    Subscribe,
    UnacceptableConnect,
    Unsubscribe,
    Will,
)
from cluster.mqtt.properties import WILL, Property, decode_properties, text
from cluster.mqtt.reason_codes import ALLOWED, DISCONNECTS
from pixiu.errors import InvalidArgument
from pixiu.placement.topics import CACHED_NAME_LENGTH, CACHED_NAMES, has_wildcard, is_filter

# Class of each first byte for the decoding loop: one look-up instead of a chain of comparisons.
_BAD: Final = 0
_PUBLISH_QOS_0: Final = 1
_PUBLISH_WITH_ID: Final = 2
_FILTERS: Final = 3
_OTHER: Final = 4
_PUBLISH_WITH_PROPERTIES: Final = 5

NO_LOCAL: Final = 4
SHARE: Final = "$share/"


def _first_byte_problem(first: int, side: Side, dialect: Dialect) -> Reason | None:
    kind, flags = first >> 4, first & 15
    if not kind or (kind == PacketType.AUTH and dialect is not MQTT_5):
        return Reason.UNKNOWN_TYPE
    if kind not in DIRECTIONS[dialect, side]:
        return Reason.WRONG_DIRECTION
    if kind == PacketType.PUBLISH:
        if flags & 6 == 6:
            return Reason.PUBLISH_QOS_3
        return Reason.DUP_WITH_QOS_0 if flags & 14 == 8 else None
    fixed = FIXED_FLAGS.get(PacketType(kind), 0)
    repeated = dialect is MQTT_3_1 and fixed and flags == fixed | 8  # MQTT 3.1 has DUP in packets of QoS 1 that are not PUBLISH
    return None if flags == fixed or repeated else Reason.RESERVED_FLAGS


def _kind_of_first_byte(first: int, side: Side, dialect: Dialect) -> int:
    if _first_byte_problem(first, side, dialect) is not None:
        return _BAD
    if first >> 4 in (PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE):
        return _FILTERS
    if first >> 4 != PacketType.PUBLISH:
        return _OTHER
    if dialect is MQTT_5:
        return _PUBLISH_WITH_PROPERTIES
    return _PUBLISH_WITH_ID if first & 6 else _PUBLISH_QOS_0


_LATER: Final = {
    (dialect, side): bytes(_kind_of_first_byte(first, side, dialect) for first in range(256))
    for dialect in Dialect
    for side in Side
}
_FIRST: Final = {
    Side.SERVER: bytes(_OTHER if first == PacketType.CONNECT << 4 else _BAD for first in range(256)),
    Side.CLIENT: bytes(_OTHER if first == PacketType.CONNACK << 4 else _BAD for first in range(256)),
}


class _Unfinished(NamedTuple):
    """A SUBSCRIBE or UNSUBSCRIBE of which parts are still to be returned."""

    subscribes: bool
    packet_id: int
    size: int
    """Bytes of the remaining filters."""
    filters: int
    """Limit of the remaining filters."""
    properties: Properties | None


class Decoder:
    """Bytes in, packets out, for one connection.

    `side` is the side that reads; a server takes the dialect from the CONNECT. At most one incomplete packet is kept, of at most
    `max_packet_bytes` (`FIRST_PACKET_BYTES` before the first packet is complete), and never more than has arrived. Raises
    `InvalidArgument` for a maximum below 4096.

    Source: OASIS MQTT 3.1.1 sections 2, 3 and 4.8; MQTT 5.0 section 4.13.
    """

    __slots__ = (
        "_kinds",
        "_limit",
        "_max_filters",
        "_max_packet_bytes",
        "_needed",
        "_parsers",
        "_rest",
        "_side",
        "_spent",
        "_unfinished",
        "buffered_bytes",
        "dialect",
        "error",
        "has_more",
        "translate",
    )

    def __init__(
        self,
        side: Side,
        max_packet_bytes: int = MAX_PACKET_BYTES,
        max_filters: int = MAX_FILTERS,
        dialect: Dialect = MQTT_3_1_1,
    ) -> None:
        if max_packet_bytes < LEAST_PACKET_BYTES:
            raise InvalidArgument(f"max_packet_bytes is at least {LEAST_PACKET_BYTES}, not {max_packet_bytes}")
        self.dialect = dialect
        self.error: MalformedPacket | None = None
        """The error at which decoding stopped for good; None while it goes on."""
        self._side = side
        self._kinds = _FIRST[side]
        self._parsers = _PARSERS[dialect, side]
        self._limit = FIRST_PACKET_BYTES
        self._max_packet_bytes = max_packet_bytes
        self._max_filters = max_filters
        self._rest = bytearray()
        self.buffered_bytes = 0
        """Bytes of packets not yet returned: an incomplete one, or packets left for the next call."""
        self._needed = 0
        self.has_more = False
        self.translate: Callable[[Packet], Packet] | None = None
        """Changes each packet before it is returned; None: none is changed."""
        self._spent = False
        """True if the last call stopped at its limit, so that complete packets may be left."""
        self._unfinished: _Unfinished | None = None
        """The packet whose remaining filters are at the start of the kept bytes."""

    def feed(self, data: bytes, most: int = 1 << 30) -> list[Packet]:
        """Decode the packets that `data` completes, at most `most`: see `has_more`. Never raises for data that arrived.

        A SUBSCRIBE or UNSUBSCRIBE counts as one per filter, because a filter costs as much as a packet. If that exceeds the limit,
        it is returned in parts, with `more` set if another part follows. Other packets except PUBLISH count one more for
        each 32 bytes.

        At the first malformed packet `error` is set, the packets before it are returned, and all later data is
        ignored.
        """
        packets: list[Packet] = []
        if self.error is not None:
            return packets
        if self._rest:
            self._rest += data
            self.buffered_bytes = len(self._rest)
            if self.buffered_bytes < self._needed:
                return packets
            data = bytes(self._rest)
            self._rest, self.buffered_bytes = bytearray(), 0
        try:
            used = self._decode(data, packets, most)
            self.has_more = self._spent and used < len(data)
            if used < len(data):
                self._needed = 0 if self.has_more else self._check_beginning(data, used)
                self._rest, self.buffered_bytes = bytearray(data[used:] if used else data), len(data) - used
        except MalformedPacket as error:
            self.error = error
        except UnicodeDecodeError:
            self.error = MalformedPacket(Reason.INVALID_UTF8)
        return packets if self.translate is None else list(map(self.translate, packets))

    def _decode(self, data: bytes, packets: list[Packet], left: int) -> int:
        """Append complete packets, at most `left`; returns the position of the first one that is incomplete or left over."""
        kinds, append, new, position, end = self._kinds, packets.append, tuple.__new__, 0, len(data)
        if self._unfinished is not None:
            position, left = self._give_filters(self._unfinished, data, 0, packets, left)
        while left and position + 2 <= end:
            left -= 1
            first = data[position]
            kind = kinds[first]
            if kind == _BAD:
                break
            size = data[position + 1]
            if size < 128:
                start = position + 2
            else:
                start, size = self._long_length(data, position)
                if not start:
                    break
            stop = start + size
            if stop > end:
                break
            if kind == _FILTERS:
                packet_id = _packet_id(data[start : min(stop, start + 2)])
                at, properties = start + 2, None
                if self.dialect is MQTT_5:
                    properties, at = decode_properties(data[:stop], at, first >> 4)
                whole = _Unfinished(first >> 4 == PacketType.SUBSCRIBE, packet_id, stop - at, self._max_filters, properties)
                stop, left = self._give_filters(whole, data, at, packets, left + 1)
            elif kind == _OTHER:
                append(self._parsers[first >> 4](data[start:stop]))
                left = max(left - (size >> 5), 0)
                if self._kinds is _FIRST[self._side]:
                    kinds = self._begin(packets[-1])
            elif kind == _PUBLISH_WITH_PROPERTIES:
                append(_publish(first, data, start, stop, self._side))
            else:
                if size < 2:
                    raise MalformedPacket(Reason.TRUNCATED)
                begin = start + 2
                after = begin + (data[start] << 8 | data[start + 1])
                if after > stop:
                    raise MalformedPacket(Reason.TRUNCATED)
                # Bodies are parsed inline because this runs once per message.
                raw = data[begin:after]
                topic = _short_topic(raw) if after - begin <= CACHED_NAME_LENGTH else _topic(raw)
                if kind == _PUBLISH_QOS_0:
                    append(new(Publish, (topic, data[after:stop], 0, first & 1 == 1, False, 0, None)))
                else:
                    if after + 2 > stop:
                        raise MalformedPacket(Reason.TRUNCATED)
                    packet_id = data[after] << 8 | data[after + 1]
                    if not packet_id:
                        raise MalformedPacket(Reason.PACKET_ID_ZERO)
                    append(
                        new(
                            Publish,
                            (topic, data[after + 2 : stop], first >> 1 & 3, first & 1 == 1, first & 8 == 8, packet_id, None),
                        )
                    )
            position = stop
        self._spent = not left
        return position

    def _begin(self, packet: Packet) -> bytes:
        """Choose the tables for what follows the first packet."""
        if isinstance(packet, Connect):
            self.dialect = packet.dialect
            self._parsers = _PARSERS[packet.dialect, self._side]
        self._kinds = _LATER[self.dialect, self._side]
        self._limit = self._max_packet_bytes
        return self._kinds

    def _give_filters(self, of: _Unfinished, data: bytes, at: int, packets: list[Packet], left: int) -> tuple[int, int]:
        """Append a part with at most `left` filters, from position `at`; returns its end and the limit that remains."""
        filters, used = _filters(data[at : at + of.size], min(left, of.filters), of.subscribes, self.dialect)
        more = used < of.size
        if more and len(filters) == of.filters:
            raise MalformedPacket(Reason.TOO_MANY_FILTERS)
        if of.subscribes:
            packets.append(Subscribe(of.packet_id, tuple(filters), more, of.properties))
        else:
            packets.append(Unsubscribe(of.packet_id, tuple([name for name, _ in filters]), more, of.properties))
        self._unfinished = of._replace(size=of.size - used, filters=of.filters - len(filters)) if more else None
        return at + used, left - len(filters)

    def _long_length(self, data: bytes, position: int) -> tuple[int, int]:
        """Find the start of the body and its size; (0, 0) when the length is incomplete."""
        size = 0
        end = len(data)
        for index in range(4):
            at = position + 1 + index
            if at >= end:
                return 0, 0
            byte = data[at]
            size |= (byte & 127) << 7 * index
            if byte < 128:
                if at + 1 - position + size > self._limit:
                    first = self._kinds is _FIRST[self._side]
                    raise MalformedPacket(Reason.FIRST_PACKET_TOO_LARGE if first else Reason.PACKET_TOO_LARGE)
                return at + 1, size
        raise MalformedPacket(Reason.REMAINING_LENGTH)

    def _check_beginning(self, data: bytes, position: int) -> int:
        """Compute the length to which `data[position:]` must grow before decoding can continue. Raises when its beginning is
        already bad."""
        first = data[position]
        if self._kinds[first] == _BAD:
            problem = _first_byte_problem(first, self._side, self.dialect)
            if self._kinds is _FIRST[self._side] and problem in (None, Reason.WRONG_DIRECTION):
                problem = Reason.FIRST_PACKET
            assert problem is not None
            raise MalformedPacket(problem)
        start, size = self._long_length(data, position)
        return start + size - position if start else len(data) - position + 1


def decode(data: bytes, side: Side, dialect: Dialect = MQTT_3_1_1) -> Packet:
    """Decode exactly one packet, at any point of a connection, without the size limit of the first packet.

    Raises `MalformedPacket`; `TRUNCATED` also when `data` is incomplete, `TRAILING_BYTES` when more follows.

    Source: OASIS MQTT 3.1.1 section 3.
    """
    decoder = Decoder(side, dialect=dialect)
    decoder._kinds, decoder._limit = _LATER[dialect, side], decoder._max_packet_bytes
    packets = decoder.feed(data)
    if decoder.error is not None and not packets:
        raise decoder.error
    if not packets:
        raise MalformedPacket(Reason.TRUNCATED)
    if len(packets) > 1 or decoder.buffered_bytes or decoder.error is not None:
        raise MalformedPacket(Reason.TRAILING_BYTES)
    return packets[0]


def _topic(raw: bytes) -> str:
    if not raw:
        raise MalformedPacket(Reason.EMPTY_TOPIC)
    topic = raw.decode()
    if "\0" in topic:
        raise MalformedPacket(Reason.NUL_IN_STRING)
    if has_wildcard(topic):
        raise MalformedPacket(Reason.WILDCARD_IN_TOPIC)
    return topic


_short_topic = lru_cache(CACHED_NAMES)(_topic)


def _u16(body: bytes, at: int) -> int:
    if at + 2 > len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    return body[at] << 8 | body[at + 1]


def _binary(body: bytes, at: int) -> tuple[bytes, int]:
    """Read a field with a u16 length; returns it and the position of the next one."""
    end = at + 2 + _u16(body, at)
    if end > len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    return body[at + 2 : end], end


def _string(body: bytes, at: int) -> tuple[str, int]:
    raw, end = _binary(body, at)
    text = raw.decode()
    if "\0" in text:
        raise MalformedPacket(Reason.NUL_IN_STRING)
    return text, end


def _packet_id(body: bytes) -> int:
    packet_id = _u16(body, 0)
    if not packet_id:
        raise MalformedPacket(Reason.PACKET_ID_ZERO)
    return packet_id


def _end(body: bytes, at: int) -> None:
    if at < len(body):
        raise MalformedPacket(Reason.TRAILING_BYTES)


def _parse_connect(body: bytes) -> Packet:
    name, at = _string(body, 0)
    if name not in PROTOCOL_NAMES.values():
        raise MalformedPacket(Reason.PROTOCOL_NAME)
    if at >= len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    level = body[at]
    if PROTOCOL_NAMES.get(level) != name:  # type: ignore[call-overload]
        return UnacceptableConnect(name, level)
    dialect = Dialect(level)
    try:
        return _connect(body, at + 1, dialect)
    except (MalformedPacket, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, MalformedPacket) else Reason.INVALID_UTF8
        raise MalformedPacket(reason, dialect) from None


def _connect(body: bytes, at: int, dialect: Dialect) -> Connect:
    if at + 3 > len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    flags = body[at]
    if flags & 1 and dialect is not MQTT_3_1:
        raise MalformedPacket(Reason.CONNECT_RESERVED_FLAG)
    if flags & 0x18 == 0x18:
        raise MalformedPacket(Reason.WILL_QOS_3)
    if flags & 0x38 and not flags & 4:
        raise MalformedPacket(Reason.WILL_FLAGS_WITHOUT_WILL)
    if flags & 0x40 and not flags & 0x80 and dialect is not MQTT_5:
        raise MalformedPacket(Reason.PASSWORD_WITHOUT_USER_NAME)
    keep_alive, at = _u16(body, at + 1), at + 3
    properties = will = user_name = password = None
    if dialect is MQTT_5:
        properties, at = decode_properties(body, at, PacketType.CONNECT)
        if properties and Property.AUTHENTICATION_DATA in properties and Property.AUTHENTICATION_METHOD not in properties:
            raise MalformedPacket(Reason.AUTHENTICATION_DATA)
    client_id, at = _string(body, at)
    if flags & 4:
        will, at = _will(body, at, flags, dialect)
    # MQTT 3.1: "the Remaining Length takes precedence over the User Name flag"
    if flags & 0x80 and not (dialect is MQTT_3_1 and at == len(body)):
        user_name, at = _string(body, at)
    if flags & 0x40 and not (dialect is MQTT_3_1 and at == len(body)):
        password, at = _binary(body, at)
    _end(body, at)
    return Connect(client_id, bool(flags & 2), keep_alive, user_name, password, will, dialect, properties)


def _will(body: bytes, at: int, flags: int, dialect: Dialect) -> tuple[Will, int]:
    properties = None
    if dialect is MQTT_5:
        properties, at = decode_properties(body, at, WILL)
        _check_response_topic(properties)
    raw_topic, at = _binary(body, at)
    payload, at = _binary(body, at)
    return Will(_topic(raw_topic), payload, flags >> 3 & 3, bool(flags & 0x20), properties), at


def _check_response_topic(properties: Properties | None) -> None:
    topic = text(properties, Property.RESPONSE_TOPIC)
    if topic is not None and (not topic or has_wildcard(topic)):
        raise MalformedPacket(Reason.RESPONSE_TOPIC)


def _publish(first: int, data: bytes, start: int, stop: int, side: Side) -> Publish:
    """Parse a PUBLISH of MQTT 5."""
    if start + 2 > stop:
        raise MalformedPacket(Reason.TRUNCATED)
    at = start + 2 + (data[start] << 8 | data[start + 1])
    qos, packet_id = first >> 1 & 3, 0
    if at + (2 if qos else 0) >= stop:
        raise MalformedPacket(Reason.TRUNCATED)
    raw = data[start + 2 : at]
    if qos:
        packet_id = data[at] << 8 | data[at + 1]
        if not packet_id:
            raise MalformedPacket(Reason.PACKET_ID_ZERO)
        at += 2
    properties: Properties | None = None
    if data[at]:
        properties, at = decode_properties(data[:stop], at, PacketType.PUBLISH)
    else:
        at += 1
    if properties is not None:
        if side is Side.SERVER and Property.SUBSCRIPTION_IDENTIFIER in properties:
            raise MalformedPacket(Reason.IDENTIFIER_FROM_CLIENT)
        _check_response_topic(properties)
    if not raw and properties is not None and Property.TOPIC_ALIAS in properties:
        topic = ""
    else:
        topic = _short_topic(raw) if len(raw) <= CACHED_NAME_LENGTH else _topic(raw)
    return Publish(topic, data[at:stop], qos, first & 1 == 1, first & 8 == 8, packet_id, properties)


def _read_field(field: Field, body: bytes, at: int, kind: PacketType, side: Side, dialect: Dialect) -> tuple[object, int]:
    if field is Field.PACKET_ID:
        return _packet_id(body[at : at + 2]), at + 2
    if field is Field.PROPERTIES:
        return decode_properties(body, at, kind)
    if field is Field.CODES:
        codes = tuple(body[at:])
        if not codes:
            raise MalformedPacket(Reason.EMPTY_SUBACK)
        if dialect is MQTT_5:
            if not ALLOWED[kind].issuperset(codes):
                raise MalformedPacket(Reason.REASON_CODE)
        elif any(code > 2 and code != SUBACK_FAILURE for code in codes):
            raise MalformedPacket(Reason.SUBACK_CODE)
        return codes, len(body)
    if at >= len(body):
        raise MalformedPacket(Reason.TRUNCATED)
    value = body[at]
    if field is Field.SESSION_PRESENT:
        if value > 1 or (value and len(body) > at + 1 and body[at + 1]):
            raise MalformedPacket(Reason.CONNACK_FLAGS)
        return value == 1, at + 1
    if dialect is not MQTT_5:
        if value > ConnackCode.NOT_AUTHORISED:
            raise MalformedPacket(Reason.CONNACK_CODE)
    elif value not in (DISCONNECTS[side] if kind is PacketType.DISCONNECT else ALLOWED[kind]):
        raise MalformedPacket(Reason.REASON_CODE)
    return value, at + 1


def _parser(kind: PacketType, layout: Layout, side: Side, dialect: Dialect) -> Callable[[bytes], Packet]:
    make, fields, required = layout

    def parse(body: bytes) -> Packet:
        values: dict[str, object] = {}
        at = 0
        for index, field in enumerate(fields):
            if index >= required and at == len(body):
                break
            values[field.value], at = _read_field(field, body, at, kind, side, dialect)
        _end(body, at)
        return make(**values)

    def acknowledge(body: bytes) -> Packet:
        if len(body) == 2 and (packet_id := body[0] << 8 | body[1]):
            return make(packet_id)
        return parse(body)

    def authenticate(body: bytes) -> Packet:
        packet = parse(body)
        if not text(getattr(packet, "properties", None), Property.AUTHENTICATION_METHOD):
            raise MalformedPacket(Reason.AUTHENTICATION_METHOD)
        return packet

    if kind is PacketType.AUTH:
        return authenticate
    return acknowledge if PacketType.PUBACK <= kind <= PacketType.PUBCOMP else parse


def _filters(body: bytes, most: int, subscribes: bool, dialect: Dialect) -> tuple[list[tuple[str, int]], int]:
    """Read at most `most` filters, each with its options if it has some; returns them and the position of the next one."""
    # Parsed inline, like the body of PUBLISH: a client that sends endless filters keeps a gateway busy with this.
    filters, at, end = list[tuple[str, int]](), 0, len(body)
    if not end:
        raise MalformedPacket(Reason.EMPTY_FILTER_LIST)
    while at < end and most:
        begin = at + 2
        if begin > end:
            raise MalformedPacket(Reason.TRUNCATED)
        at = begin + (body[at] << 8 | body[at + 1])
        if at > end:
            raise MalformedPacket(Reason.TRUNCATED)
        name, options = body[begin:at].decode(), 0
        if "\0" in name:
            raise MalformedPacket(Reason.NUL_IN_STRING)
        if not name:
            raise MalformedPacket(Reason.EMPTY_FILTER)
        if not is_filter(name):
            raise MalformedPacket(Reason.INVALID_FILTER)
        if subscribes:
            if at == end:
                raise MalformedPacket(Reason.TRUNCATED)
            options = body[at]
            if options > 2:
                _check_options(options, name, dialect)
            at += 1
        filters.append((name, options))
        most -= 1
    return filters, at


def _check_options(options: int, name: str, dialect: Dialect) -> None:
    if options & 3 == 3 or dialect is not MQTT_5:
        raise MalformedPacket(Reason.SUBSCRIBE_QOS)
    if options & 0xC0 or options & 0x30 == 0x30:
        raise MalformedPacket(Reason.SUBSCRIBE_OPTIONS)
    if options & NO_LOCAL and name.startswith(SHARE):
        raise MalformedPacket(Reason.SHARED_NO_LOCAL)


_PARSERS: Final[dict[tuple[Dialect, Side], dict[int, Callable[[bytes], Packet]]]] = {
    (dialect, side): {
        PacketType.CONNECT: _parse_connect,
        **{kind: _parser(kind, layout, side, dialect) for kind, layout in LAYOUTS[dialect].items()},
    }
    for dialect in Dialect
    for side in Side
}
