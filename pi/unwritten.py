"""The state's keys and values: what changed since the last transaction in memory, over a store. Pure.

    changes now ─▶ changes being written ─▶ store         a look-up goes from left to right

The shell writes what `freeze` returned, in a thread of its own, in one transaction; meanwhile the next changes come in.

Source: docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from pi.keys import seal, unseal

Changes = dict[bytes, bytes | None]
"""Keys and their new values; None: deleted."""


class Store(Protocol):
    """Where committed state is. Calls are short."""

    def get(self, key: bytes) -> bytes | None:
        """A value of the last transaction."""

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys from `low` to below `high`, in order, of the last transaction."""

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """All of it or nothing, in one transaction."""


class Table:
    """See the module."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.changes: Changes = {}
        self.frozen: Changes = {}

    def get_raw(self, key: bytes) -> bytes | None:
        """A value with its CRC."""
        for changes in (self.changes, self.frozen):
            if key in changes:
                return changes[key]
        return self._store.get(key)

    def get(self, key: bytes) -> bytes | None:
        """A value's body. Raises StateDamaged."""
        value = self.get_raw(key)
        return None if value is None else unseal(key, value)

    def put(self, key: bytes, body: bytes) -> None:
        """Set a value."""
        self.changes[key] = seal(key, body)

    def delete(self, key: bytes) -> None:
        """Remove a value."""
        self.changes[key] = None

    def keys(self, low: bytes, high: bytes, limit: int) -> list[bytes]:
        """The first keys from `low` to below `high`."""
        changed = {key: value for part in (self.frozen, self.changes) for key, value in part.items() if low <= key < high}
        found = {key for key, value in changed.items() if value is not None}
        stored = 0
        for key, _ in self._store.scan(low, high):
            if key not in changed:
                found.add(key)
                stored += 1
                if stored == limit:
                    break
        return sorted(found)[:limit]

    def freeze(self) -> Changes:
        """What is to be written now. `thawed` ends it; until then no other call of this."""
        assert not self.frozen
        self.frozen, self.changes = self.changes, {}
        return self.frozen

    def thawed(self) -> None:
        """It was written."""
        self.frozen = {}

    def refused(self) -> None:
        """It was not written: it goes with the next."""
        self.changes = {**self.frozen, **self.changes}
        self.frozen = {}
