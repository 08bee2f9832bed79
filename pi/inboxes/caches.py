"""A cache for values of the store, in two generations. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Cache(Generic[Value]):
    """A cache of at most `size` values. When the young generation is full, it replaces the old one.

    `young` may be read as a dict on a hot path; every `put` may replace it.
    """

    def __init__(self, size: int) -> None:
        self._half = max(size // 2, 1)
        self.young: dict[int, Value] = {}
        self._old: dict[int, Value] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def get(self, key: int) -> Value | None:
        """Return a value, or None if it is not cached."""
        found = self.young.get(key)
        return found if found is not None else self._old.get(key)

    def put(self, key: int, value: Value) -> None:
        """Store a value under a key."""
        if key not in self.young and len(self.young) >= self._half:
            self._old, self.young = self.young, {}
        self.young[key] = value
        self._old.pop(key, None)

    def drop(self, key: int) -> None:
        """Remove a value."""
        self.young.pop(key, None)
        self._old.pop(key, None)
