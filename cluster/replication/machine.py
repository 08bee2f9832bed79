"""What a role gives to its replica: the state that committed entries make. Pure.

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cluster.replication.model import Entry


class StateMachine(Protocol):
    """The state behind a log. Open it before the replica is prepared.

    `apply` is called in the event loop, for every committed entry in order, on every replica. What it makes must follow from
    the entries and the state alone.
    """

    @property
    def applied(self) -> int:
        """The counter of the last entry in the state; 0 for an empty one. Kept with the state, in the same batch."""

    @property
    def flushed(self) -> int:
        """The state is durable up to this counter: after a power cut it holds at least so much. Read once a second."""

    @property
    def clock_us(self) -> int:
        """The time of the state, Unix µs: the highest of its entries' times; 0 before the first."""

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """Apply the entries that follow `applied`; returns one answer for each. Also entries of replication's own kinds are
        given (`EntryKind.NOOP`): they change nothing but `applied`, and their answers are not looked at.

        Raises DiskFull when nothing of it was applied (it is called again later), or StateDamaged: an entry cannot be applied, and
        `applied` may have gone back, to what is stored; what follows it is given again, and reads go on. Anything else ends the
        process.
        """

    def look_ahead(self, entries: Sequence[Entry]) -> None:
        """Committed entries that `apply` does not get to, after a StateDamaged: one of them may say what to do about it."""

    async def snapshot(self, folder: Path) -> int:
        """Write the state as it is at one applied counter into an empty folder of the data folder's file system, as files of
        at most 4 levels, hard links allowed; returns that counter. `apply` goes on meanwhile."""

    async def check(self, folder: Path) -> None:
        """Look whether every value of a snapshot that was received is whole, before it takes the place of anything. Raises
        StorageError."""

    async def load(self, folder: Path) -> None:
        """Replace the state by a snapshot, durably; its files may be moved away. `applied` is the snapshot's counter then.
        Nothing is applied meanwhile. Called again after a crash within it."""
