"""QoS, RETAIN and properties of an MQTT publisher in the record of its message: in the header, and as headers. Pure.

Source: docs/protocol.md, "Record".
"""

from __future__ import annotations

import json
from typing import Final

from cluster.mqtt.packets import PacketType, Properties
from cluster.mqtt.properties import Property, encode_properties, number
from pixiu.errors import InvalidArgument
from pixiu.wire.headers import MAX_HEADER_NAME_BYTES, MAX_HEADERS, decode_headers, encode_headers
from pixiu.wire.record import EXTENSION_AT, HEADER_SIZE, ORIGIN_AT, QOS_SHIFT, RETAIN

QOS: Final = "mqtt-qos"
RETAIN: Final = "mqtt-retain"
SDK_QOS: Final = 1


def qos_of(record: bytes) -> int:
    """QoS with which a record was published; those of the SDK count as QoS 1."""
    found = _headers(record).get(QOS)
    return int(found) if isinstance(found, str) and found in ("0", "1", "2") else SDK_QOS


def retain_of(record: bytes) -> bool:
    """True if a record was published with RETAIN."""
    return RETAIN in _headers(record)


def lifetime_min_of(properties: Properties | None) -> int:
    """Lifetime of a message's record, minutes, 0 none: its message expiry, rounded up."""
    expiry_s = number(properties, Property.MESSAGE_EXPIRY, -1)
    return 0 if expiry_s < 0 else min(expiry_s // 60 + 1, MAX_LIFETIME_MIN)


def extension_for(properties: Properties | None, now_ms: int) -> bytes:
    """Make the extension of a message's record from its properties; empty for none.

    now_ms: Unix milliseconds of the publication. Raises `InvalidArgument` if they are too large.
    """
    if not properties:
        return b""
    headers: dict[str, str] = {}
    user: list[tuple[str, str]] = []
    for which, value in properties.items():
        if which == Property.USER and isinstance(value, tuple):
            user = list(value)
        elif which == Property.MESSAGE_EXPIRY and isinstance(value, int):
            headers[EXPIRES_MS] = str(now_ms + value * 1000)
        elif which == Property.PAYLOAD_FORMAT:
            headers[PAYLOAD_UTF8] = str(value)
        elif which == Property.CONTENT_TYPE and isinstance(value, str):
            headers[CONTENT_TYPE] = value
        elif which == Property.RESPONSE_TOPIC and isinstance(value, str):
            headers[RESPONSE_TOPIC] = value
        elif which == Property.CORRELATION_DATA and isinstance(value, bytes):
            headers[CORRELATION_DATA] = base64.b64encode(value).decode()
    if _are_headers(user):
        headers |= dict(user)
    elif user:
        headers[USER_PROPERTIES] = json.dumps(user, ensure_ascii=False, separators=(",", ":"))
    return encode_headers(headers)


def extension_for_will(properties: Properties | None) -> bytes:
    """Make the extension of a will's record. Its expiry begins when it is published: then there is nobody any more who knows it, so
    it has none. Raises `InvalidArgument` if the properties are too large."""
    return extension_for({which: value for which, value in (properties or {}).items() if which != Property.MESSAGE_EXPIRY}, 0)


def _are_headers(user: list[tuple[str, str]]) -> bool:
    """True if user properties are headers as they are."""
    names = {name for name, _ in user}
    return len(names) == len(user) <= MAX_HEADERS - RESERVED and all(
        name and not name.startswith(PREFIX) and len(name.encode()) <= MAX_HEADER_NAME_BYTES for name in names
    )


def carried_by(record: bytes) -> Carried:
    """Find the properties of a record's message. Never raises: what is not understood is left out."""
    size = record[EXTENSION_AT] | record[EXTENSION_AT + 1] << 8
    extension = record[HEADER_SIZE : HEADER_SIZE + size]
    return _remembered(extension) if size <= CACHED_EXTENSION_BYTES else _carried(extension)


def expires_at_ms_of(record: bytes) -> int:
    """Time at which a record's message is over, Unix milliseconds; 0: never."""
    return carried_by(record).expires_at_ms


def properties_of(record: bytes, now_ms: int) -> bytes:
    """The encoded properties of a record's message, as in a PUBLISH of MQTT 5: with their length. Never raises."""
    carried = carried_by(record)
    return _NO_PROPERTIES if carried is NOTHING else encoded(carried, now_ms)


def encoded(carried: Carried, now_ms: int, identifiers: tuple[int, ...] = (), alias: int = 0) -> bytes:
    """Encode properties for one receiver, with their length: also the rest of the message's expiry, subscription identifiers, and a
    topic alias. Never raises."""
    properties = dict(carried.properties or {})
    if carried.expires_at_ms:
        properties[Property.MESSAGE_EXPIRY] = max(carried.expires_at_ms - now_ms, 0) // 1000
    if identifiers:
        properties[Property.SUBSCRIPTION_IDENTIFIER] = identifiers
    if alias:
        properties[Property.TOPIC_ALIAS] = alias
    return encode_properties(properties, PacketType.PUBLISH)


def _carried(extension: bytes) -> Carried:
    headers = decode_headers(extension)
    found: dict[int, object] = {}
    user: list[tuple[str, str]] = []
    expires_at_ms = 0
    for name, value in headers.items():
        if not name.startswith(PREFIX):
            user.append((name, value))
        elif name == EXPIRES_MS:
            expires_at_ms = int(value) if value.isascii() and value.isdecimal() and len(value) < 16 else 0
        elif name == CORRELATION_DATA:
            try:
                found[Property.CORRELATION_DATA] = base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                continue
        elif name == PAYLOAD_UTF8:
            found[Property.PAYLOAD_FORMAT] = int(value == "1")
        elif name in _TEXTS:
            found[_TEXTS[name]] = value
        elif name == USER_PROPERTIES:
            user += _pairs(value)
    if user:
        found[Property.USER] = tuple(user)
    try:
        found = json.loads(extension)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
