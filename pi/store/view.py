"""A Pi's state right after one entry of the log, kept while it is read: the store as of then, and changes not yet in it.

    apply … mark ─┬─ apply …            event loop
                  └─ view ── part ── part ── part ── end         a thread, a bounded part at a time

Source: docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from pi.inboxes.unwritten import Changes
from pi.store.store import StateReader
from pixiu.errors import Overloaded, StorageError

MARK_KIND: Final = 17
"""Kind of log entries that hold a mark (u64): they change nothing, and name the position at which replicas are compared."""
MARK_BYTES: Final = 8
PART_ROWS: Final = 2000
"""Rows read at a time."""
MAX_VIEWS: Final = 2
"""Limit of marks that are waited for. Policy: further ones are refused with OVERLOADED. While a view is open, the store cannot
reuse pages that it frees."""


class View:
    """A consistent view of the state at one entry of the log. `close` ends it.

    Args:
        reader: of the store.
        overlay: changes that had not been written into the store, or were being written.
        position: counter of the last entry in it.
    """

    def __init__(self, reader: StateReader, overlay: Changes, position: int) -> None:
        self.reader, self.position = reader, position
        self._overlay = overlay
        self._rest = iter(overlay.items())
        self._after: bytes | None = b""

    def part(self) -> list[tuple[bytes, bytes]] | None:
        """Return the next rows; None: there are no more. Blocking; one thread at a time. Raises StorageError."""
        if self._after is not None:
            rows, self._after = self.reader.rows(self._after, PART_ROWS)
            overlay = self._overlay
            return [(key, value) for key, value in rows if key not in overlay]
        part = list(itertools.islice(self._rest, PART_ROWS))
        return [(key, value) for key, value in part if value is not None] if part else None

    def close(self) -> None:
        """Release the store's pages."""
        self.reader.close()


class Views:
    """Requested views, by their marks."""

    def __init__(self) -> None:
        self._wanted: dict[bytes, asyncio.Future[View]] = {}

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def expect(self, mark: int) -> asyncio.Future[View]:
        """Return a future of the view right after the entry that holds a mark; `forget` must follow. Raises Overloaded."""
        payload = mark.to_bytes(MARK_BYTES, "little")
        if len(self._wanted) >= MAX_VIEWS or payload in self._wanted:
            raise Overloaded("this replica is being compared already; wait for it to end", 1000)
        self._wanted[payload] = found = asyncio.get_running_loop().create_future()
        return found

    def wants(self, payload: bytes) -> bool:
        """True if a caller waits for this mark."""
        future = self._wanted.get(payload)
        return future is not None and not future.done()

    def answer(self, payload: bytes, view: View | StorageError) -> None:
        """Deliver the view: the mark was applied."""
        future = self._wanted[payload]
        if isinstance(view, View):
            future.set_result(view)
        else:
            future.set_exception(view)

    def forget(self, mark: int) -> None:
        """Close the view, or cancel the wait for it."""
        future = self._wanted.pop(mark.to_bytes(MARK_BYTES, "little"))
        if future.cancel() or future.cancelled() or future.exception() is not None:
            return
        future.result().close()
