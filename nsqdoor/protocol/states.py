"""The states of a client's connection, and which commands each takes. Pure.

    Opened ──SUB──▶ Subscribed ──CLS──▶ Closing        each ──an error that is fatal──▶ Ended

Source: docs/nsq.md, "Protocol".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class State(Enum):
    """State of a connection."""

    OPENED = "Opened"
    SUBSCRIBED = "Subscribed"
    CLOSING = "Closing"
    ENDED = "Ended"


_PUBLISHES: Final = {
    b"PUB": "publish", b"DPUB": "publish", b"MPUB": "publish_many", b"PUB_EXT": "publish", b"MPUB_EXT": "publish_many",
    b"NOP": "nothing",
}  # fmt: skip
_HAS_MESSAGES: Final = {b"FIN": "finish", b"REQ": "requeue", b"TOUCH": "touch"}

ACTIONS: Final[Mapping[State, Mapping[bytes, str]]] = {
    State.OPENED: {b"IDENTIFY": "identify", b"AUTH": "auth", b"SUB": "subscribe", **_PUBLISHES},
    State.SUBSCRIBED: {b"RDY": "ready", b"CLS": "stop", **_HAS_MESSAGES, **_PUBLISHES},
    State.CLOSING: {b"RDY": "nothing", **_HAS_MESSAGES, **_PUBLISHES},
    State.ENDED: {},
}
"""State → command → action. Any other command is refused with E_INVALID, which ends the connection."""
BEFORE_TLS: Final = frozenset((b"IDENTIFY",))
"""Commands that need no TLS where TLS is required."""
