"""Effects of a session, and its limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nsqdoor.protocol.extended import NO_HEADERS, Headers

MIN_HEARTBEAT_MS: Final = 1_000
MIN_MSG_TIMEOUT_MS: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a session, and what it offers."""

    version: str = ""
    """Said in answers to IDENTIFY."""
    max_message: int = 1 << 20
    """Largest message, bytes."""
    max_body: int = 5 << 20
    """Largest body of MPUB and of IDENTIFY, bytes."""
    max_rdy: int = 2_500
    max_publishes: int = 1_000
    """Publishes that are not answered. Policy: nothing is read meanwhile."""
    max_publish_bytes: int = 8 << 20
    """Their bytes, likewise."""
    heartbeat_ms: int = 30_000
    max_heartbeat_ms: int = 60_000
    msg_timeout_ms: int = 60_000
    max_msg_timeout_ms: int = 900_000
    max_delay_ms: int = 3_600_000
    """Longest delay of DPUB (more is refused) and of REQ (more is cut)."""
    tls: bool = False
    """TLS is offered."""
    tls_required: bool = False
    deflate: bool = True
    max_deflate_level: int = 6
    auth: bool = False
    """AUTH is known."""
    auth_required: bool = False
    login_ms: int = 30_000
    """Time that a client has for AUTH if it is required, milliseconds. Policy: the connection ends then."""
    headers_required: bool = False
    """Consumers that do not know extended messages are refused."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes for the client."""

    data: bytes


@dataclass(frozen=True, slots=True)
class StartTls:
    """Begin TLS once everything is written; then call `secured`."""


@dataclass(frozen=True, slots=True)
class StartDeflate:
    """Compress both ways from here on."""

    level: int


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Check a login; then call `authenticated`."""

    secret: str


@dataclass(slots=True)
class Publish:
    """Store messages; then call `published` with this."""

    command: str
    topic: str
    bodies: Sequence[bytes]
    delay_ms: int = 0
    headers: Sequence[Headers] = (NO_HEADERS,)
    """One for each message, or one for all."""
    size: int = 0
    """Bytes of all messages."""
    answer: bytes | None = field(default=None, repr=False)
    """Frame, once it is known."""
    fatal: bool = False
    answers: int = 1
    """Answers that it gets; several, if each message came by a command of its own."""
    stored: int = 0
    """Messages that were stored before the one that failed, if it gets several answers."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Join a channel; then call `subscribed`."""

    topic: str
    channel: str
    tag: str
    filter: list[dict[str, Any]]
    extended: bool
    """Messages have their headers."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Take this number of messages at a time."""

    count: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Acknowledge messages."""

    ids: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give a message back."""

    id: bytes
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Ask for more time for a message."""

    id: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection, after what was written."""

    why: str


Effect = (
    Write | StartTls | StartDeflate | Authenticate | Publish | Subscribe | Credit | Finish | Requeue | Touch | Close
)  # fmt: skip
