"""The state's keys and values: changes since the last transaction in memory, over a store. Pure.

    changes now ─▶ changes being written ─▶ store         a look-up goes from left to right

The shell writes the result of `freeze` in a thread, in one transaction; meanwhile further changes come in.

Source: docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from pi.keys import seal, unseal

Changes = dict[bytes, bytes | None]
"""Keys and their new values; None: deleted."""


class Store(Protocol):
    """Interface to committed state. Calls are short."""

    def get(self, key: bytes) -> bytes | None:
        """Return a value of the last transaction."""

    def scan(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys from `low` to below `high`, in order, as of the last transaction."""

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Write all changes or none, in one transaction."""


class Table:
    """Keys and values: changes in memory over the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.changes: Changes = {}
        self.frozen: Changes = {}
        self.kib = 0
        """KiB of the large values in `changes`, an estimate: what waits is bounded by it, too."""
        self._frozen_kib = 0

    def get_raw(self, key: bytes) -> bytes | None:
        """Return a value with its CRC."""
        for changes in (self.changes, self.frozen):
            if key in changes:
                return changes[key]
        return self._store.get(key)

    def get(self, key: bytes) -> bytes | None:
        """Return a value's body. Raises StateDamaged."""
        value = self.get_raw(key)
        return None if value is None else unseal(key, value)

    def put(self, key: bytes, body: bytes) -> None:
        """Set a value."""
        self.changes[key] = seal(key, body)
        self.kib += len(body) >> 10

    def put_raw(self, key: bytes, value: bytes) -> None:
        """Set a value with its CRC."""
        self.changes[key] = value

    def delete(self, key: bytes) -> None:
        """Remove a value."""
        self.changes[key] = None

    def keys(self, low: bytes, high: bytes, limit: int) -> list[bytes]:
        """Return the first keys from `low` to below `high`."""
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
        """Return the changes to write now. `thawed` or `refused` must follow before the next call."""
        assert not self.frozen
        self.frozen, self.changes = self.changes, {}
        self._frozen_kib, self.kib = self.kib, 0
        return self.frozen

    def thawed(self) -> None:
        """Drop the frozen changes, which were written."""
        self.frozen, self._frozen_kib = {}, 0

    def refused(self) -> None:
        """Put the frozen changes back, which were not written: they go with the next."""
        self.changes = {**self.frozen, **self.changes}
        self.kib += self._frozen_kib
        self.frozen, self._frozen_kib = {}, 0
