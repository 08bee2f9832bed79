"""The interface of a keyed state machine, as the shells of its copying see it.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from cluster.replication.model import Position
from cluster.store.doubling.copying import Copying

T = TypeVar("T")
V = TypeVar("V", bound="View")
Rows = list[tuple[bytes, bytes]]
"""Keys and values, as they are stored."""


class View(Protocol):
    """Interface to the state as it was after one entry."""

    def close(self) -> None:
        """Release what keeps it."""


class Sum(Protocol):
    """Interface to a digest of rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def size(self) -> int:
        """Their bytes."""

    @property
    def total(self) -> int:
        """One number for all rows."""


class CopiedMachine(Protocol[V]):
    """Interface to a state machine whose doubling copies its keys."""

    advanced: asyncio.Event
    """Set when something was applied."""
    on_doubling: Callable[[], None]
    """Called when the record of the partition's doubling has changed."""
    cut: V | None
    """For a child: the state at the moment when it opened."""

    @property
    def copying(self) -> Copying:
        """The doubling of the state."""

    @property
    def applied(self) -> int:
        """Counter of the last entry in the state."""

    @property
    def position(self) -> Position:
        """Position of the last entry in the state."""

    @property
    def behind(self) -> bool:
        """True if too many changes wait to be written."""

    @property
    def unwritten(self) -> int:
        """Number of changes that wait to be written."""

    @property
    def stored(self) -> tuple[int, int]:
        """Keys and bytes of the whole state."""

    def view(self) -> V:
        """Create a view of the current state; the caller closes it. Raises StorageError."""

    def close_cut(self) -> None:
        """Close that view, if there is one."""

    async def read_view(self, view: V, take: Callable[[Rows], T]) -> T | None:
        """Process the next rows of a view with a function; None at the end. Raises Unavailable, StorageError."""

    async def digest(self, view: V, moves: Callable[[bytes], bool] | None = None) -> Sum:
        """Digest those rows of a view whose keys are wanted, to its end. Raises as `read_view`."""
