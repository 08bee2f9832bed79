"""Mail that waits for one connection to take it. Pure.

Nothing of it is dropped: a slow connection stops at its windows, which are all that may wait here. A new session begins anew, and
what an older one has left here goes, because it comes again.
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
"""Entries. The core lets no more be written that are not acknowledged; a client that acknowledges what it did not read yet ends."""
OVERRUN: Final = f"more than {MAX_WAITING} mails wait for this client: it acknowledges what it has not read"

MAX_RANGES: Final = 10_000
"""Of acknowledgements in one request."""


class MailQueue:
    """Mail that waits for one connection."""

    __slots__ = ("_chunks", "_count")

    def __init__(self) -> None:
        self._chunks: deque[tuple[bytes, int]] | None = None
        """Bytes, and how many entries they are. Made at the first mail: an empty one has 600 bytes, and most connections never
        need it."""
        self._count = 0

    def __len__(self) -> int:
        """Entries that wait."""
        return self._count

    def put(self, chunks: Iterable[tuple[bytes, int]], *, anew: bool) -> bool:
        """Add bytes of so many entries each. False when there are too many, and the connection is to end."""
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
        """Bytes of up to so many together, but at least one chunk, and of how many entries; nothing where none waits."""
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
    """What a client says that it has got: (lane, first, last). Raises `InvalidArgument`: then nothing of it is believed."""
    if len(said) > MAX_RANGES:
        raise InvalidArgument(f"a request may acknowledge {MAX_RANGES} ranges; send several")
    for one in said:
        if one.lane >= INBOX_LANES or not 0 < one.first <= one.last:
            raise InvalidArgument(
                f"an acknowledgement names a lane from 0 to {INBOX_LANES - 1} and InboxSeqs from 1 that rise, not lane {one.lane}, "
                f"{one.first} to {one.last}"
            )
    return [(one.lane, one.first, one.last) for one in said]
