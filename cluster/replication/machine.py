"""The interface of a role's state machine: the state that committed entries produce. Pure.

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cluster.replication.model import Entry


class StateMachine(Protocol):
    """The state produced by a log. Open it before the replica is prepared.

    `apply` is called in the event loop for every committed entry, in order, on every replica. Its result must depend only on the
    entries and the state.
    """

    @property
    def applied(self) -> int:
        """Counter of the last entry in the state; 0 if empty. Stored with the state, in the same batch."""

    @property
    def flushed(self) -> int:
        """Counter up to which the state is durable: after a power cut it holds at least this much. Read once a second."""

    @property
    def clock_us(self) -> int:
        """Time of the state, Unix µs: the highest time of its entries; 0 before the first."""

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """Apply the entries that follow `applied`; returns one answer for each. Entries of replication's own kinds are included
        (`EntryKind.NOOP`): they change nothing but `applied`, and their answers are ignored.

        Raises DiskFull if nothing was applied; it is called again later. Raises StateDamaged if an entry cannot be applied:
        `applied` may then go back to what is stored, the entries after that are given again, and reads continue. Any other
        exception ends the process.
        """

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """Look at committed entries that `apply` does not reach after a StateDamaged: one of them may resolve it."""

    async def snapshot(self, folder: Path) -> int:
        """Write the state at one applied counter into an empty folder on the data folder's file system; returns that counter. Files
        are at most 4 levels deep, hard links are allowed. `apply` continues meanwhile."""

    async def check(self, folder: Path) -> None:
        """Check that every value of a received snapshot is intact, before it replaces anything. Raises StorageError."""

    async def load(self, folder: Path) -> None:
        """Replace the state by a snapshot, durably; its files may be moved away. `applied` is then the snapshot's counter. Nothing
        is applied meanwhile. Called again after a crash during the call."""
