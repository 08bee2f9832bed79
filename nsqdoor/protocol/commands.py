"""Commands of NSQ's clients, cut out of the stream of bytes. Pure.

    NAME words…\\n                          FIN, REQ, TOUCH, RDY, SUB, CLS, NOP
    NAME words…\\n[size: i32][body]         IDENTIFY, AUTH, PUB, DPUB, MPUB and those with headers
    body of MPUB: [count: i32] and for each [size: i32][message]

A size is checked before its bytes are waited for. What is wrong gets nsqd's own code and words.

Source: https://nsq.io/clients/tcp_protocol_spec.html.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from cluster.nsq.frames import ID_BYTES, MAGIC

MAX_LINE: Final = 1024
"""Longest line of a command, bytes. nsqd reads 16 KiB."""
MAX_EARLY_BODY: Final = 8_192
"""Longest body, bytes, of a client that has to log in and has not: nobody's megabytes are kept."""
SIZE_BYTES: Final = 4
MESSAGE_COMMANDS: Final = frozenset((b"PUB", b"DPUB", b"PUB_EXT"))
BODY_COMMANDS: Final = MESSAGE_COMMANDS | {b"IDENTIFY", b"AUTH", b"MPUB", b"MPUB_EXT"}
FINISHES: Final = re.compile(rb"(?:FIN [^ \r\n]{16}\n)+")
FINISH_BYTES: Final = 4 + ID_BYTES + 1
EARLY_COMMANDS: Final = frozenset((b"IDENTIFY", b"AUTH"))
LINE_COMMANDS: Final = frozenset((b"FIN", b"REQ", b"TOUCH", b"RDY", b"SUB", b"CLS", b"NOP"))


class Refused(Exception):
    """A command that is refused.

    Args:
        code: of NSQ.
        text: why.
        fatal: the connection ends with it.
    """

    def __init__(self, code: str, text: str, *, fatal: bool = True) -> None:
        super().__init__(f"{code} {text}")
        self.code, self.fatal = code, fatal


class Command(NamedTuple):
    """A command."""

    name: bytes
    words: Sequence[bytes]
    """After the name."""
    body: bytes = b""


class Parser:
    """Cuts commands out of what comes. It keeps one unfinished command at most, besides what came after it in one piece.

    Args:
        max_message: largest message, bytes.
        max_body: largest body of another command, bytes.
    """

    def __init__(self, max_message: int, max_body: int) -> None:
        self._max_message, self._max_body = max_message, max_body
        self.early = False
        """True until the client has logged in, if it has to: bodies are short until then."""
        self._buffer = bytearray()
        self._at = 0
        self._begun = False

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    @property
    def waiting(self) -> int:
        """Number of bytes that are not used yet."""
        return len(self._buffer) - self._at

    def next(self) -> Command | None:
        """The next command; None: it is not whole yet. Raises `Refused`."""
        if not self._begun and not self._begins():
            return None
        end = self._buffer.find(b"\n", self._at, self._at + MAX_LINE)
        if end < 0:
            if self.waiting >= MAX_LINE:
                raise Refused("E_INVALID", f"a command's line has at most {MAX_LINE} bytes")
            return None
        name, *words = bytes(self._buffer[self._at : end]).removesuffix(b"\r").split(b" ")
        at = end + 1
        if name not in BODY_COMMANDS:
            if name not in LINE_COMMANDS:
                raise Refused("E_INVALID", f"invalid command {printable(name)}")
            self._at = at
            return Command(name, words)
        if len(self._buffer) - at < SIZE_BYTES:
            return None
        size = int.from_bytes(self._buffer[at : at + SIZE_BYTES], "big", signed=True)
        self._check(name, size)
        at += SIZE_BYTES
        if len(self._buffer) - at < size:
            return None
        body = bytes(memoryview(self._buffer)[at : at + size])
        self._at = at + size
        return Command(name, words, body)

    def same(self, line: bytes, most: int, most_bytes: int) -> list[bytes]:
        """Bodies of the messages whose commands come next with this very line, are whole and not too large: cut out at once,
        because producers send many. Stops after `most`, or once they have `most_bytes`."""
        buffer, at, found = self._buffer, self._at, list[bytes]()
        with memoryview(buffer) as view:
            while len(found) < most and most_bytes > 0 and buffer.startswith(line, at):
                at += len(line) + SIZE_BYTES
                size = int.from_bytes(view[at - SIZE_BYTES : at], "big", signed=True) if at <= len(buffer) else 0
                if not 0 < size <= self._max_message or at + size > len(buffer):
                    break  # `next` says why, or waits
                found.append(bytes(view[at : at + size]))
                at = self._at = at + size
                most_bytes -= size
        return found

    def finishes(self) -> list[bytes]:
        """IDs of the FINs that come next, cut out at once, because consumers send many."""
        match = FINISHES.match(self._buffer, self._at)
        if match is None:
            return []
        text, self._at = match.group(), match.end()
        return [text[at : at + ID_BYTES] for at in range(4, len(text), FINISH_BYTES)]

    def _begins(self) -> bool:
        found = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(found):
            raise Refused("E_BAD_PROTOCOL", "a connection begins with two spaces and V2")
        self._begun = found == MAGIC
        self._at = len(MAGIC) if self._begun else 0
        return self._begun

    def _check(self, name: bytes, size: int) -> None:
        text = name.decode()
        if self.early and size > MAX_EARLY_BODY:
            if name in EARLY_COMMANDS:
                raise Refused("E_BAD_BODY", f"{text} body too big {size} > {MAX_EARLY_BODY} before AUTH")
            raise Refused("E_AUTH_FIRST", f"AUTH required before {text}")
        if name in MESSAGE_COMMANDS:
            if size <= 0:
                raise Refused("E_BAD_MESSAGE", f"{text} invalid message body size {size}")
            if size > self._max_message:
                raise Refused("E_BAD_MESSAGE", f"{text} message too big {size} > {self._max_message}")
        elif size > self._max_body:
            raise Refused("E_BAD_BODY", f"{text} body too big {size} > {self._max_body}")
        elif size <= 0:
            raise Refused("E_BAD_BODY", f"{text} invalid body size {size}")


def messages_of(body: bytes, max_message: int, max_messages: int) -> list[bytes]:
    """The messages of an MPUB. Raises `Refused`."""
    count = int.from_bytes(body[:SIZE_BYTES], "big", signed=True)
    if len(body) < SIZE_BYTES or not 0 < count <= max_messages:
        raise Refused("E_BAD_BODY", f"MPUB invalid message count {count}")
    found: list[bytes] = []
    at = SIZE_BYTES
    for number in range(count):
        if len(body) - at < SIZE_BYTES:
            raise Refused("E_BAD_MESSAGE", f"MPUB failed to read message({number}) body size")
        size = int.from_bytes(body[at : at + SIZE_BYTES], "big", signed=True)
        at += SIZE_BYTES
        if size <= 0:
            raise Refused("E_BAD_MESSAGE", f"MPUB invalid message({number}) body size {size}")
        if size > max_message:
            raise Refused("E_BAD_MESSAGE", f"MPUB message too big {size} > {max_message}")
        if len(body) - at < size:
            raise Refused("E_BAD_MESSAGE", "MPUB failed to read message body")
        found.append(body[at : at + size])
        at += size
    if at != len(body):
        raise Refused("E_BAD_BODY", f"MPUB has {len(body) - at} bytes after its messages")
    return found


def number_of(word: bytes) -> int | None:
    """A decimal number; None: it is none. At most 18 digits, so that it fits 64 bits."""
    return int(word) if 0 < len(word) <= 18 and word.isdigit() else None


def printable(word: bytes) -> str:
    """A word of a client for an error's text, 64 characters at most."""
    return repr(word[:64])[2:-1]
