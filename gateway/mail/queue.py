"""Queue of mail for one connection. Pure.

Nothing is dropped: a slow connection stops at its windows, which bound the queue. A new session starts over and discards what an
older one has left here, because it comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from pixiu.errors import InvalidArgument
from pixiu.wire.cursor import MAP_BITS
from pixiu.wire.record import INBOX_LANES
from pixiu.wire.v1 import wire_pb2

MAX_WAITING: Final = INBOX_LANES * MAP_BITS
"""Entries. The core writes no more unacknowledged ones; a client that acknowledges what it has not read is disconnected."""
OVERRUN: Final = f"more than {MAX_WAITING} mails wait for this client: it acknowledges what it has not read"

MAX_RANGES: Final = 10_000
"""Acknowledged ranges in one request."""


class MailQueue:
    """Mail that waits for one connection."""

    __slots__ = ("_chunks", "_count")

    def __init__(self) -> None:
        self._chunks: deque[tuple[bytes, int]] | None = None
        """(bytes, entries). Created at the first mail: an empty one takes 600 bytes, and most connections never need it."""
        self._count = 0

    def __len__(self) -> int:
        """Number of entries that wait."""
        return self._count

    def put(self, chunks: Iterable[tuple[bytes, int]], *, anew: bool) -> bool:
        """Add chunks of (bytes, entries). Returns False if there are too many: the connection must end."""
        if self._chunks is None:
            self._chunks = deque()
        if anew:
            self._chunks.clear()
            self._count = 0
        for chunk in chunks:
            self._chunks.append(chunk)
            self._count += chunk[1]
        return self._count <= MAX_WAITING

    def take(self, max_bytes: int) -> tuple[bytes, int]:
        """Take up to `max_bytes`, but at least one chunk. Returns the bytes and their number of entries; empty if none waits."""
        taken: list[bytes] = []
        size = count = 0
        while self._chunks and (not taken or size + len(self._chunks[0][0]) <= max_bytes):
            data, entries = self._chunks.popleft()
            size += len(data)
            count += entries
            taken.append(data)
        self._count -= count
        return b"".join(taken), count


def acknowledged_ranges(said: Sequence[wire_pb2.MailAcknowledgement]) -> list[tuple[int, int, int]]:
    """Ranges that a client acknowledges: (lane, first, last). Raises `InvalidArgument`: then none of them may be used."""
    if len(said) > MAX_RANGES:
        raise InvalidArgument(f"a request may acknowledge {MAX_RANGES} ranges; send several")
    for one in said:
        if one.lane >= INBOX_LANES or not 0 < one.first <= one.last:
            raise InvalidArgument(
                f"an acknowledgement names a lane from 0 to {INBOX_LANES - 1} and InboxSeqs from 1 that rise, not lane {one.lane}, "
                f"{one.first} to {one.last}"
            )
    return [(one.lane, one.first, one.last) for one in said]
