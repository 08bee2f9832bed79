"""Records of a source that are not stored yet, or not confirmed to it. Pure.

    read ──add──▶ [ stored, stored, not yet, stored … ] ──take──▶ confirmed to the source, in the order in which they were read

Source: docs/bridges.md, "How a bridge works".
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from bridge.connector import Record
from pixiu.errors import PixiuError


class Ticket(Protocol):
    """The receipt of a record that is being stored."""

    @property
    def done(self) -> bool:
        """True if the outcome is known."""

    @property
    def error(self) -> PixiuError | None:
        """The failure; None if there is none."""

    async def outcome(self) -> PixiuError | None:
        """Wait for the outcome."""


class Kept:
    """The ticket of a record that is in the dead topic."""

    done = True
    error = None

    async def outcome(self) -> PixiuError | None:
        """Nothing to wait for."""


class Unconfirmed:
    """Records in the order in which they were read. A record is confirmed only when all before it are stored: a source that
    confirms by position would forget those as well."""

    def __init__(self) -> None:
        self._records: deque[tuple[Record, Ticket]] = deque()
        self.bytes = 0
        """Of their bodies and keys."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> Ticket | None:
        """The ticket of the record that was read first; None: there is none."""
        return self._records[0][1] if self._records else None

    def add(self, record: Record, ticket: Ticket) -> None:
        """Note a record that was read, and is being stored."""
        self._records.append((record, ticket))
        self.bytes += size_of(record)

    def take(self, most: int) -> list[Record]:
        """Take the records that may be confirmed now, `most` at most, without gaps. Raises the failure of the first one that has
        one, when nothing is left before it."""
        found = list[Record]()
        while self._records and len(found) < most:
            record, ticket = self._records[0]
            if not ticket.done or (ticket.error is not None and found):
                break
            if ticket.error is not None:
                raise ticket.error
            self._records.popleft()
            self.bytes -= size_of(record)
            found.append(record)
        return found


def size_of(record: Record) -> int:
    """Bytes of body and key."""
    return len(record.body) + len(record.key or b"")
