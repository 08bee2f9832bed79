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


def _headers(record: bytes) -> dict[str, str]:
    size = record[EXTENSION_AT] | record[EXTENSION_AT + 1] << 8
    extension = record[HEADER_SIZE : HEADER_SIZE + size]
    if not size or b'"mqtt-' not in extension:
        return {}
    try:
        found = json.loads(extension)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
