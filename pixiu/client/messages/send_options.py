"""Options of a message to a room, a topic or a user's devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class SendOptions(TypedDict, total=False):
    """Options of a message beside its payload: `await room.send(b"…", type=3, lifetime_min=5)`."""

    type: int
    """A number for the application, 0 to 63; 0 by default."""
    lifetime_min: int
    """Lifetime in minutes; 0, the default: no limit."""
    extension: bytes
    """Bytes beside the payload, instead of headers: at most 65 535; none by default."""
    headers: Mapping[str, str] | None
    """Named texts, which receivers read as `message.headers`: at most 64, of 65 535 bytes; None, the default: none."""
    first_lane: bool
    """Overtake messages of the normal lane; False by default."""
    load_test: bool
    """True: it belongs to a load test, and receivers do not get it unless they ask for such. Default: as the message that is being
    handled by a handler of `run`; else False."""
    derived_id: int | None
    """ID derived from the content's origin, so that a repeat is the same message; None, the default: a new ID."""
