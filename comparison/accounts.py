"""Accounts for every message at every subscriber: lost, repeated, out of order. Pure.

All messages of one topic come from one publisher and have one size, so each subscriber must receive the same bytes. A chunk from a
socket is therefore compared with the sent bytes as a whole, however many messages it holds: that is how one process can follow a
million deliveries a second, and look at every byte. Only a subscriber with different bytes has its messages read one by one.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

NUMBER: Final = struct.Struct(">Q")
"""Beginning of every body: the message's number within its topic."""
TRIM_BYTES: Final = 1 << 20
"""Step in which bytes that every subscriber has are dropped."""


class Account:
    """The numbers that one subscriber received."""

    __slots__ = ("disordered", "missing", "next", "received", "repeated")

    def __init__(self, first: int = 0) -> None:
        self.next = first
        """One above the highest number received."""
        self.received = 0
        """Distinct numbers received."""
        self.missing: set[int] = set()
        """Numbers below `next` that did not arrive."""
        self.repeated = 0
        self.disordered = 0
        """Messages that arrived after one with a higher number."""

    def run(self, count: int) -> None:
        """Count the next numbers, which arrived without a gap."""
        self.next += count
        self.received += count

    def take(self, number: int) -> bool:
        """Count one number. Returns True if it arrived for the first time."""
        if number >= self.next:
            self.missing.update(range(self.next, number))
            self.next = number + 1
        elif number in self.missing:
            self.missing.discard(number)
            self.disordered += 1
        else:
            self.repeated += 1
            return False
        self.received += 1
        return True

    def lost(self, sent: int) -> int:
        """Return how many of the numbers below `sent` did not arrive."""
        return len(self.missing) + max(sent - self.next, 0)


class Stream:
    """The bytes that every subscriber of one topic must receive, and the progress of each."""

    def __init__(self, head: bytes, tail: bytes, body_bytes: int, members: int) -> None:
        self._head, self._rest = head, bytes(body_bytes - NUMBER.size) + tail
        self.frame_bytes = len(head) + body_bytes + len(tail)
        self.accounts = [Account() for _ in range(members)]
        self.sent = 0
        self._bytes = bytearray()
        self._first = 0
        """Number of the first frame in `_bytes`."""
        self._positions = [0] * members
        """Bytes that each subscriber received, as long as they are those that were sent."""
        self._strays: dict[int, bytearray] = {}
        """Subscribers with different bytes → their incomplete frame."""

    def send(self, count: int) -> list[bytes]:
        """Return the frames of the next messages, which are expected from now on."""
        frames = [self._head + NUMBER.pack(self.sent + n) + self._rest for n in range(count)]
        self.sent += count
        self._bytes += b"".join(frames)
        return frames

    @property
    def slowest(self) -> int:
        """Number that the slowest subscriber waits for."""
        return min(account.next for account in self.accounts) if self._strays else min(self._positions) // self.frame_bytes

    def take(self, member: int, chunk: bytes) -> Sequence[int]:
        """Take a chunk from a subscriber's socket. Returns the numbers that were completed for the first time.

        Raises ValueError for bytes that are not messages of the topic.
        """
        if member not in self._strays:
            position, size = self._positions[member], self.frame_bytes
            if self._bytes.startswith(chunk, position - self._first * size):
                self._positions[member] = position + len(chunk)
                came = range(position // size, (position + len(chunk)) // size)
                self.accounts[member].run(len(came))
                return came
            whole = position // size
            begun = (whole - self._first) * size
            self._strays[member] = self._bytes[begun : begun + position % size]
        return self._take_strays(member, chunk)

    def _take_strays(self, member: int, chunk: bytes) -> list[int]:
        rest, size, account, came = self._strays[member], self.frame_bytes, self.accounts[member], list[int]()
        rest += chunk
        at = 0
        while len(rest) - at >= size:
            if not rest.startswith(self._head, at):
                raise ValueError(f"a subscriber received what is no message of its topic: {bytes(rest[at : at + size])!r}")
            number: int = NUMBER.unpack_from(rest, at + len(self._head))[0]
            if number >= self.sent:
                raise ValueError(f"a subscriber received number {number}, which was not sent yet")
            if account.take(number):
                came.append(number)
            at += size
        del rest[:at]
        return came

    def trim(self) -> int:
        """Drop frames that every subscriber has. Returns the first number that is still known."""
        if len(self._bytes) > TRIM_BYTES:
            follow = [position for member, position in enumerate(self._positions) if member not in self._strays]
            keep = min(follow) // self.frame_bytes if follow else self.sent
            del self._bytes[: (keep - self._first) * self.frame_bytes]
            self._first = keep
        return self._first

    def begin(self) -> None:
        """Restart the counts: everything sent until now was only to warm up."""
        self.accounts = [Account(self.sent) for _ in self.accounts]
