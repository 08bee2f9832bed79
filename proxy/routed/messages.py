"""The message of a durable topic that a route makes of a record. Pure.

Source: docs/routes.md, "What is stored".
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple

from cluster.routes.carried import EXTENSION, MESSAGE, MQTT_TOPIC, OWN_PREFIX, ROUTES, Carried, taken, with_taken
from cluster.routes.routes import Route
from pixiu.errors import MalformedData
from pixiu.ids import snowflake_time_ms
from pixiu.wire.headers import decode_headers
from pixiu.wire.record import VERSION_BITS, Flag, Record, decode
from proxy.kept.messages import topic_of
from proxy.routed_events import Storing


class Published(NamedTuple):
    """A record, as far as routes look at it."""

    name: str
    """Its topic, or room/N."""
    record: Record
    headers: Mapping[str, str]
    taken: tuple[str, ...]
    """Routes that it has taken, as a program says that may say so."""


def name_of(record: bytes) -> str | None:
    """The topic of a record, or room/N; None: it is malformed."""
    found = topic_of(record)
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError:
        return None


def published(record: bytes, name: str, trusted: bool) -> Published:
    """Read a record. `trusted`: a program sent it, and not a client of a gateway. It may say which routes the message has taken if
    that has a derived ID, which only services may use. Raises `MalformedData`."""
    found = decode(record)
    headers = decode_headers(found.extension)
    before = taken(headers.get(ROUTES, "")) if trusted and found.flags & Flag.DERIVED_ID else ()
    return Published(name, found, headers, before)


def storing(number: int, route: Route, message: Published) -> Storing:
    """The message that a route stores. Raises `MalformedData` and `InvalidArgument`."""
    record, options = message.record, route.options
    try:
        _, body = record.topic_and_payload()
    except UnicodeDecodeError:
        raise MalformedData("the record's topic is not UTF-8") from None
    headers = {name: value.encode() for name, value in message.headers.items() if not name.startswith(OWN_PREFIX)}
    if record.extension and not message.headers:
        headers[EXTENSION] = b64encode(record.extension)
    headers |= route.headers
    carried = Carried(record.snowflake_id, record.sender, record.type, record.origin & ~VERSION_BITS, record.lifetime_min)
    headers |= {
        MQTT_TOPIC: message.name.encode(),
        MESSAGE: carried.encode(),
        ROUTES: with_taken(message.taken, (route.name,)).encode(),
    }
    derived = bool(record.flags & Flag.DERIVED_ID)
    return Storing(
        number,
        route.name,
        options.topic,
        body,
        route.key_of(message.name, message.headers),
        headers,
        options.tag,
        None if derived else snowflake_time_ms(record.snowflake_id) * 1000,
        record.lifetime_min * 60 or None,
        bool(record.flags & Flag.LOAD_TEST),
    )
