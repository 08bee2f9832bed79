"""Bodies of requests: JSON, or raw bytes with parameters beside them; every field is checked before anything is done. Pure.

Source: docs/http.md; gateway/http/openapi.json.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from gateway.http.answers import bad
from pixiu.ids import MAX_ID, MAX_ROOM
from pixiu.placement.topics import MAX_TOPIC_LENGTH, ROOM_PREFIX, TopicRefusal, destination, user_of_topic

MAX_BATCH: Final = 1000
"""Messages of one request."""
MAX_RECEIVERS: Final = 1000
MAX_HEADERS: Final = 64
MAX_TYPE: Final = 63
MAX_MINUTES: Final = 65_535
LEVELS: Final = ("replicated", "persisted", "accepted")
JSON: Final = "application/json"
_HEX: Final = re.compile(r"[0-9a-f]{1,16}")
_UNSET: Final = object()

Fields = Mapping[str, Any]


class Publication(NamedTuple):
    """A message to a room, a free topic or a user's devices. One of the three is given."""

    room: int
    topic: str
    user: int
    payload: bytes
    options: dict[str, Any]


class Mailing(NamedTuple):
    """A mail."""

    to: tuple[int, ...]
    payload: bytes
    options: dict[str, Any]


class Entry(NamedTuple):
    """A message to a durable topic."""

    payload: bytes
    options: dict[str, Any]


def decoded(body: bytes) -> dict[str, Any]:
    """The object in a JSON body. Raises `Refused`."""
    try:
        found = json.loads(body, parse_float=_number)
    except (ValueError, RecursionError):
        raise bad("the body is not JSON") from None
    if not isinstance(found, dict):
        raise bad("the body is not a JSON object")
    return found


def items_of(body: Fields) -> list[Fields] | None:
    """The messages of a batch; None: the body is one message. Raises `Refused`."""
    if "messages" not in body:
        return None
    check_names(body, ("messages",))
    found = body["messages"]
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_BATCH or not all(isinstance(item, dict) for item in found):
        raise bad(f"messages is not a list of 1 to {MAX_BATCH} objects")
    return found


def check_names(fields: Fields, allowed: Iterable[str]) -> None:
    """Refuse fields that do not exist: a misspelt one would be ignored."""
    wrong = next((name for name in fields if name not in allowed), None)
    if wrong is not None:
        raise bad(f"there is no field {wrong[:64]!r} here; there are {', '.join(allowed)}")


def payload_of(fields: Fields) -> bytes:
    """Bytes to send: `payload` as UTF-8, or `payload_base64`; none without both. Raises `Refused`."""
    text, encoded = fields.get("payload"), fields.get("payload_base64")
    if text is not None and encoded is not None:
        raise bad("give payload or payload_base64, not both")
    if encoded is None:
        return _utf8("" if text is None else text, "payload")
    try:
        return base64.b64decode(_text(encoded, "payload_base64"), validate=True)
    except (binascii.Error, ValueError):
        raise bad("payload_base64 is not base64") from None


def number_of(fields: Fields, name: str, default: int, low: int, high: int) -> int:
    """An integer. Raises `Refused`."""
    found = fields.get(name, _UNSET)
    if found is _UNSET:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        raise bad(f"{name} is not an integer from {low} to {high}")
    return found


def headers_of(fields: Fields) -> dict[str, str] | None:
    """Named texts. Raises `Refused`."""
    found = fields.get("headers")
    if found is None:
        return None
    if not isinstance(found, dict) or len(found) > MAX_HEADERS:
        raise bad(f"headers is not an object with at most {MAX_HEADERS} texts")
    for name, value in found.items():
        _utf8(name, "the name of a header")
        _utf8(value, "a header")
    return found


def publication_of(fields: Fields) -> Publication:
    """Read a message to publish. Raises `Refused`."""
    check_names(fields, ("topic", "payload", "payload_base64", "headers", "type", "lifetime_min"))
    room, topic, user = topic_of(fields.get("topic"))
    options: dict[str, Any] = {
        "type": number_of(fields, "type", 0, 0, MAX_TYPE),
        "lifetime_min": number_of(fields, "lifetime_min", 0, 0, MAX_MINUTES),
        "headers": headers_of(fields),
    }
    return Publication(room, topic, user, payload_of(fields), options)


def topic_of(name: object) -> tuple[int, str, int]:
    """Room, free topic or user that a topic's name stands for. Raises `Refused`."""
    text = _utf8(name, "topic").decode()
    found = destination(text[: MAX_TOPIC_LENGTH + 1])
    if isinstance(found, TopicRefusal):
        raise bad(f"the topic cannot be used: {found.value}")
    if "\0" in text:
        raise bad("the topic cannot be used: it contains NUL")
    if user_of_topic(text) is not None:
        return 0, "", found
    return (found, "", 0) if text.startswith(ROOM_PREFIX) and found <= MAX_ROOM else (0, text, 0)


def mailing_of(fields: Fields) -> Mailing:
    """Read a mail to send. Raises `Refused`."""
    check_names(fields, ("to", "payload", "payload_base64", "headers", "type", "level", "lane", "expire_min"))
    to = fields.get("to")
    receivers: list[Any] = to if isinstance(to, list) else [to]
    if not 1 <= len(receivers) <= MAX_RECEIVERS or any(
        isinstance(uin, bool) or not isinstance(uin, int) or not 0 < uin <= MAX_ID for uin in receivers
    ):
        raise bad(f"to is not a UIN from 1 to 2^63-1, or a list of 1 to {MAX_RECEIVERS} of them")
    options: dict[str, Any] = {
        "type": number_of(fields, "type", 0, 0, MAX_TYPE),
        "lane": number_of(fields, "lane", 1, 0, 1),
        "expire_min": number_of(fields, "expire_min", 0, 0, MAX_MINUTES),
        "level": level_of(fields),
        "headers": headers_of(fields),
    }
    return Mailing(tuple(receivers), payload_of(fields), options)


def level_of(fields: Fields) -> str:
    """Level of a confirmation. Raises `Refused`."""
    found = fields.get("level", LEVELS[0])
    if found not in LEVELS:
        raise bad(f"level is not one of {', '.join(LEVELS)}")
    return str(found)


def entry_of(fields: Fields) -> Entry:
    """Read a message to a durable topic. Raises `Refused`."""
    check_names(fields, ("payload", "payload_base64", "headers", "key", "tag", "level"))
    options: dict[str, Any] = {"level": level_of(fields), "headers": headers_of(fields)}
    for name in ("key", "tag"):
        if fields.get(name) is not None:
            options[name] = _utf8(fields[name], name).decode()
    return Entry(payload_of(fields), options)


def ids_of(fields: Fields, name: str) -> list[int]:
    """IDs in hex. Raises `Refused`."""
    found = fields.get(name)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_BATCH:
        raise bad(f"{name} is not a list of 1 to {MAX_BATCH} IDs")
    for text in found:
        if not isinstance(text, str) or not _HEX.fullmatch(text):
            raise bad(f"{name} has something that is not an ID, such as 0a1b2c3d4e5f6071")
    return [int(text, 16) for text in found]


def texts_of(fields: Fields, name: str) -> list[str]:
    """A list of texts, maybe empty. Raises `Refused`."""
    found = fields.get(name, [])
    if (
        not isinstance(found, list)
        or len(found) > MAX_BATCH
        or not all(isinstance(text, str) and len(text) <= 256 for text in found)
    ):
        raise bad(f"{name} is not a list of at most {MAX_BATCH} texts")
    return found


def text_of(fields: Fields, name: str, most: int) -> str:
    """A text that must be there. Raises `Refused`."""
    found = _text(fields.get(name), name)
    if not 1 <= len(_utf8(found, name)) <= most:
        raise bad(f"{name} is not a text of 1 to {most} bytes")
    return found


def from_query(query: Mapping[str, str], numbers: Iterable[str] = ()) -> dict[str, Any]:
    """Fields that are given beside a raw body. Raises `Refused`."""
    found: dict[str, Any] = dict(query)
    for name in numbers:
        if name in found:
            found[name] = integer(found[name], name)
    return found


def integer(text: str, name: str) -> int:
    """An integer in decimal. Raises `Refused`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise bad(f"{name} is not an integer")
    return int(text)


def shown(payload: bytes) -> dict[str, str]:
    """A payload in JSON: as text, or in base64 if it is none."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def _number(text: str) -> float | int:
    """A number that JSON does not write as an integer, but that may be one: 1.0 and 1e3."""
    found = float(text)
    return int(found) if found.is_integer() else found


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise bad(f"{name} is not a text, or missing")
    return value


def _utf8(value: object, name: str) -> bytes:
    try:
        return _text(value, name).encode()
    except UnicodeEncodeError:
        raise bad(f"{name} is not Unicode: it has lone surrogates") from None
