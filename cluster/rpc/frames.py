"""Frames of the framed stream carrier: bytes of a TCP connection as messages, and the hello. Pure.

    length u32 (little endian, of what follows) │ kind u8 │ payload

    server ── CHALLENGE ──▶   magic, 16 random bytes
    client ── HELLO ──────▶   32 bytes of tag, JSON {"protocol", "method", "role", "endpoint", "about"}
    server ── WELCOME ────▶   or REFUSED
           ◀─ MESSAGE ───▶    protobuf
           ◀─ LAST ──────▶    this side sends nothing more
    server ── REFUSED ────▶   JSON {"code", "text", "retry_after_ms"}: the stream ends

Source: docs/links.md, "Framed streams".
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from pixiu.discovery.node import MAX_TEXT, integer, json_object, text
from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID

HEAD: Final = Struct("<IB")
MAGIC: Final = b"PXFS"
PROTOCOL: Final = 1
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 32
MAX_HELLO_BYTES: Final = 1024
"""Size of any frame before the hello is accepted, and of a refusal."""
MAX_REASON: Final = MAX_TEXT
"""Characters in the reason of a refusal."""
MAX_RETRY_MS: Final = 60_000


class FrameKind(IntEnum):
    """Kinds of frames."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    MESSAGE = 4
    LAST = 5
    REFUSED = 6


KINDS: Final = frozenset(map(int, FrameKind))


class Hello(NamedTuple):
    """Caller and method of a new stream; the tag is checked separately."""

    method: str
    role: str
    endpoint: int
    about: str = ""
    """Text for the method before the first message, in a form of its own."""


class StreamRefusal(NamedTuple):
    """Reason why a stream is not served, or no longer."""

    code: str
    text: str
    retry_after_ms: int


def frame(kind: FrameKind, payload: bytes) -> bytes:
    """Encode a frame."""
    return HEAD.pack(len(payload) + 1, kind) + payload


class Splitter:
    """Splits a connection's bytes into frames.

    Args:
        max_bytes: largest payload; may be changed between two calls. A longer one is refused when its head has arrived.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that are complete now: kind and payload. Raises MalformedData; nothing may be fed afterwards."""
        if self._held:
            self._held += data
            whole: bytes | bytearray = self._held
        else:
            whole = data
        found: list[tuple[int, bytes]] = []
        position, end = 0, len(whole)
        while end - position >= HEAD.size:
            length, kind = HEAD.unpack_from(whole, position)
            if not 1 <= length <= self.max_bytes + 1 or kind not in KINDS:
                raise MalformedData(f"a frame of kind {kind} with {length} bytes; at most {self.max_bytes + 1} are taken")
            after = position + HEAD.size + length - 1
            if after > end:
                break
            found.append((kind, bytes(whole[position + HEAD.size : after])))
            position = after
        if whole is self._held:
            del self._held[:position]
        else:
            self._held += whole[position:]
        return found


def nonce_of(payload: bytes) -> bytes:
    """The random bytes of a challenge. Raises MalformedData if it is not one."""
    if len(payload) != len(MAGIC) + NONCE_BYTES or not payload.startswith(MAGIC):
        raise MalformedData("what listens there serves no framed streams")
    return payload[len(MAGIC) :]


def hello_payload(hello: Hello, key: bytes | None, nonce: bytes) -> bytes:
    """Encode a hello, with a tag if there is a key."""
    fields: dict[str, object] = {"protocol": PROTOCOL, "method": hello.method, "role": hello.role, "endpoint": hello.endpoint}
    if hello.about:
        fields["about"] = hello.about
    said = json.dumps(fields, separators=(",", ":")).encode()
    return (_tag(key, nonce, said) if key is not None else bytes(TAG_BYTES)) + said


def read_hello(payload: bytes, keys_of: Callable[[str], tuple[bytes, ...] | None], nonce: bytes) -> tuple[Hello, bool]:
    """Decode a hello; True if a key of its role made its tag, or if there are no keys (None). Raises MalformedData."""
    tag, said = payload[:TAG_BYTES], payload[TAG_BYTES:]
    fields = json_object(said, MAX_HELLO_BYTES, "a hello")
    integer(fields, "protocol", PROTOCOL, PROTOCOL)
    hello = Hello(text(fields, "method"), text(fields, "role"), integer(fields, "endpoint", 0, MAX_ID), text(fields, "about", ""))
    keys = keys_of(hello.role)
    return hello, keys is None or any(hmac.compare_digest(tag, _tag(key, nonce, said)) for key in keys)


def _tag(key: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(key, MAGIC + nonce + said, "sha256")


def refusal_payload(refusal: StreamRefusal) -> bytes:
    """Encode a refusal; texts that are too long are cut."""
    reason = "".join(letter if letter.isprintable() else " " for letter in refusal.text)[:MAX_REASON]
    while True:
        fields = {"code": refusal.code, "text": reason, "retry_after_ms": min(max(refusal.retry_after_ms, 0), MAX_RETRY_MS)}
        said = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        if len(said) <= MAX_HELLO_BYTES:
            return said
        reason = reason[: len(reason) // 2]


def read_refusal(payload: bytes) -> StreamRefusal:
    """Decode a refusal. Raises MalformedData."""
    fields = json_object(payload, MAX_HELLO_BYTES, "a refusal")
    return StreamRefusal(text(fields, "code"), text(fields, "text"), integer(fields, "retry_after_ms", 0, MAX_RETRY_MS, 0))
