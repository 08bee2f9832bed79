"""QoS, RETAIN and properties of an MQTT publisher in the record of its message: in the header, and as headers. Pure.

    user properties     the headers of their names; all of them in `mqtt-user-properties` if they do not fit: names that repeat, or
                        that are not those of headers
    other properties    headers that begin with `mqtt-`
    message expiry      the time at which it is over, Unix milliseconds; the record's lifetime is rounded up to minutes

A message without properties has no extension. The record of an application that uses the SDK has QoS 1, and its headers are user
properties.

Source: docs/mqtt.md, "Properties"; docs/protocol.md, "Headers".
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import lru_cache
from typing import Final, NamedTuple

from cluster.mqtt.packets import PacketType, Properties
from cluster.mqtt.properties import Property, encode_properties, number
from pixiu.errors import InvalidArgument
from pixiu.wire.headers import MAX_HEADER_NAME_BYTES, MAX_HEADERS, decode_headers, encode_headers
from pixiu.wire.record import EXTENSION_AT, HEADER_SIZE, ORIGIN_AT, QOS_SHIFT, RETAIN

PREFIX: Final = "mqtt-"
"""Of header names that are not user properties."""
CONTENT_TYPE: Final = "mqtt-content-type"
RESPONSE_TOPIC: Final = "mqtt-response-topic"
CORRELATION_DATA: Final = "mqtt-correlation-data"
"""Base64."""
PAYLOAD_UTF8: Final = "mqtt-payload-utf8"
EXPIRES_MS: Final = "mqtt-expires-ms"
USER_PROPERTIES: Final = "mqtt-user-properties"
"""JSON: a list of pairs."""
RESERVED: Final = 6
"""Number of these headers."""
SDK_QOS: Final = 1
"""QoS of a record whose publisher did not use MQTT."""
MAX_LIFETIME_MIN: Final = 0xFFFF
CACHED_EXTENSIONS: Final = 1024
CACHED_EXTENSION_BYTES: Final = 512
"""Longest extension whose properties are cached."""
_NO_PROPERTIES: Final = b"\0"


class Carried(NamedTuple):
    """The properties of a message in its record."""

    properties: Properties | None
    """Those that a receiver gets, without message expiry."""
    expires_at_ms: int
    """Unix milliseconds; 0: never."""


NOTHING: Final = Carried(None, 0)


def origin_of(qos: int, *, retain: bool) -> int:
    """Bits of a record's origin for a message that was published by MQTT."""
    return (qos + 1) << QOS_SHIFT | (RETAIN if retain else 0)


def qos_of(record: bytes) -> int:
    """QoS with which a record was published."""
    qos = record[ORIGIN_AT] >> QOS_SHIFT
    return qos - 1 if qos else SDK_QOS


def retain_of(record: bytes) -> bool:
    """True if a record was published with RETAIN."""
    return bool(record[ORIGIN_AT] & RETAIN)


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
    if not size:
        return NOTHING
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
        encode_properties(found, PacketType.PUBLISH)
    except InvalidArgument:  # headers of an application that MQTT cannot carry
        return Carried(None, expires_at_ms)
    return Carried(found or None, expires_at_ms)


_remembered = lru_cache(CACHED_EXTENSIONS)(_carried)
_TEXTS: Final = {CONTENT_TYPE: Property.CONTENT_TYPE, RESPONSE_TOPIC: Property.RESPONSE_TOPIC}


def _pairs(value: str) -> list[tuple[str, str]]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [
        (one[0], one[1])
        for one in found
        if isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], str)
    ]
