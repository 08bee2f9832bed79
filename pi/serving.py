"""The users whom a replica of Pi serves: by the layout, and by the doubling in its own log. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

from cluster.store.doubling.copied import Record
from cluster.store.doubling.phases import Phase, counted
from pi import events as ev
from pi.checks import NOBODY


class Serving:
    """Users with UIN % `partitions` == `own`."""

    __slots__ = ("_addresses", "_appended", "_layout", "_partition", "_record", "own", "partitions", "version")

    def __init__(self, partition: int) -> None:
        self._partition = self.own = partition
        """`own` is NOBODY for a child that has not opened."""
        self.partitions, self.version = 0, 0
        """Number of partitions, 0: unknown; and version of the layout."""
        self._layout, self._record, self._appended = 0, Record(), 0
        self._addresses: dict[int, str] = {}

    def layout_changed(self, event: ev.LayoutChanged) -> None:
        """Take a layout."""
        self.version, self._layout, self._addresses = event.version, event.partitions, event.addresses
        self._serve()

    def doubling_changed(self, event: ev.DoublingChanged) -> None:
        """Take the state of this partition's doubling."""
        self._record, self._appended = event.record, event.appended
        self._serve()

    def _serve(self) -> None:
        self.partitions = counted(self._record, self._layout, self._appended)
        self.own = NOBODY if 0 < self.partitions <= self._partition else self._partition

    @property
    def learns(self) -> bool:
        """True for a child that may soon open."""
        return self._record.phase is Phase.LEARNING

    def server_of(self, uin: int) -> tuple[int, int, str]:
        """Partition of a user, number of partitions, and address if known."""
        right = uin % (self.partitions or 1)
        return right, self.partitions, self._addresses.get(right, "")

    def led_by(self, address: str) -> tuple[int, int, str]:
        """The same for this partition and its leader."""
        return self._partition, self.partitions, address
