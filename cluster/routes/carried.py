"""Headers that carry a message of a client through a durable topic and back to clients. Pure.

    mqtt_topic      the topic or room/N where it was published
    pixiu-message   SnowflakeID, sender, type, origin (QoS, RETAIN) and lifetime in minutes, in hex, joined by dots
    pixiu-extension bytes that its publisher sent as an extension and not as headers, in base64
    pixiu-routes    routes that it has taken, joined by commas: none takes it again

A program between two topics copies all of them.

Source: docs/routes.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pixiu.ids import MAX_ID

OWN_PREFIX: Final = "pixiu-"
MQTT_TOPIC: Final = "mqtt_topic"
MESSAGE: Final = "pixiu-message"
ROUTES: Final = "pixiu-routes"
EXTENSION: Final = "pixiu-extension"
MAX_ROUTES_TEXT: Final = 1_024
_WIDTHS: Final = (MAX_ID, MAX_ID, 255, 255, 65_535)


class Carried(NamedTuple):
    """Fields of a record that a durable topic has no field for."""

    message_id: int = 0
    """SnowflakeID; 0: a back end wrote the message."""
    sender: int = 0
    type: int = 0
    origin: int = 0
    lifetime_min: int = 0

    def encode(self) -> bytes:
        """Encode for the header `MESSAGE`."""
        return ".".join(f"{each:x}" for each in self).encode()


NOT_CARRIED: Final = Carried()


def carried(headers: Mapping[str, bytes]) -> Carried:
    """Fields of a message in a durable topic. A header that cannot be read counts as none."""
    text = headers.get(MESSAGE, b"")
    parts = text.split(b".") if 0 < len(text) <= 64 else []
    try:
        found = [int(each, 16) for each in parts]
    except ValueError:
        return NOT_CARRIED
    good = len(found) == len(_WIDTHS) and all(0 <= each <= most for each, most in zip(found, _WIDTHS, strict=True))
    return Carried(*found) if good else NOT_CARRIED


def taken(text: str) -> tuple[str, ...]:
    """Routes in the header `ROUTES`, each once; one that is too long counts as none."""
    return tuple(dict.fromkeys(each for each in text.split(",") if each)) if len(text) <= MAX_ROUTES_TEXT else ()


def with_taken(before: Sequence[str], more: Sequence[str]) -> str:
    """The header `ROUTES` after further routes."""
    return ",".join(dict.fromkeys((*before, *more)))
