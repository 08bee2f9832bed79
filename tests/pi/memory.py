"""The state's store in memory, and entries to apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.replication.model import Entry
from pi.inboxes.chunk import Chunk
from pi.inboxes.unwritten import Store
from pi.keys import CHUNK_ENTRIES, CHUNK_KEY
from pi.state import Results, State
from pixiu.wire.inbox_operations import ENTRY_KIND, Operation, encode

HOUR = 3600
START_S = 100 * 24 * HOUR
"""The log's time at the beginning of a test, seconds since 2020."""


def entries_in(values: Mapping[bytes, bytes]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(UIN, lane, InboxSeq) → (MsgID, when) of everything that is stored. Raises StateDamaged."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for key, value in values.items():
        if key[:1] == b"K":
            _, uin, lane, begin = CHUNK_KEY.unpack(key)
            chunk = Chunk.decode(begin, key, value)
            found |= {(uin, lane, seq): entry for seq, entry in enumerate(chunk, chunk.first)}
            assert begin <= chunk.first <= chunk.last < begin + CHUNK_ENTRIES, "no chunk is empty, or too long"
    return found


class MemoryStore:
    """A dict."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted((key, value) for key, value in self.values.items() if low <= key < high))

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value


def at_us(seconds: float) -> int:
    """A time of the log as entries have it."""
    return int((seconds + 1_577_836_800) * 1_000_000)


class Replica:
    """A state that is fed with operations."""

    def __init__(self, store: Store | None = None) -> None:
        self.store: Store = store if store is not None else MemoryStore()
        self.state = State(self.store, max_heads=8, max_users=4)
        self.now_s: float = START_S
        self.epoch = 1

    def apply(self, *operations: Operation) -> list[Results]:
        """One entry."""
        entry = Entry(self.epoch, self.state.applied.counter + 1, ENTRY_KIND, at_us(self.now_s), encode(operations))
        return self.state.apply([entry])[0]

    def flush(self) -> None:
        """One transaction."""
        self.store.write(self.state.freeze())
        self.state.table.thawed()

    def restart(self) -> None:
        """What was not flushed is lost."""
        self.state = State(self.store, max_heads=8, max_users=4)
