"""A Pi replica's own options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.replication.role_options import ReplicatedOptions
from cluster.settings.fields import bounded, choice
from pixiu.wire.inbox_operations import Limits

DAY_S = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Options(ReplicatedOptions):
    """The [pi] table. `data_dir` holds the log and the inboxes; it must be given, and belongs to one process."""

    store_mb: int = bounded(65_536, 16, 1 << 24)
    """MiB that the inboxes may hold: about 250 bytes an entry. At this size mail is refused, while what frees space is still
    accepted; for this the file may grow by up to 1 GiB more. It grows as it is needed."""
    inbox_cap: int = bounded(100_000, 1, 1_000_000_000)
    """Limit of readable entries of an inbox (a user's lane)."""
    inbox_full: str = choice("drop_oldest", "drop_oldest", "refuse")
    """What happens at that limit: the oldest entry is dropped, with a gap marker, or the new one is refused with INBOX_FULL."""
    dedupe_s: int = bounded(DAY_S, 60, 365 * DAY_S)
    """Seconds for which a sender may repeat a message: an entry stays stored for this time, acknowledged or not."""
    history_s: int = bounded(0, 0, 365 * DAY_S)
    """Seconds after its arrival in which an entry can be read even if every device acknowledged it."""
    age_s: int = bounded(30 * DAY_S, 3600, 3650 * DAY_S)
    """Seconds after which an entry is deleted, acknowledged or not; an unacknowledged one leaves a gap marker."""
    new_device_history: bool = True
    """Whether a user's further devices begin with all readable entries, or with those that arrive from then on. The first device
    always gets the entries that are there."""
    device_age_s: int = bounded(30 * DAY_S, 3600, 3650 * DAY_S)
    """Seconds without a connection after which a device no longer counts."""
    clock_interval_s: float = bounded(10.0, 0.05, 3600.0)
    """Seconds between two entries of the log that delete what has expired."""
    flush_interval_s: float = bounded(1.0, 0.01, 60.0)
    """Seconds between two transactions of the inboxes; the log holds what is not in one yet."""
    heads_cached: int = bounded(200_000, 2, 100_000_000)
    """Inboxes whose head and newest chunk are kept in memory: about 1 KB each."""
    scrub_keys_per_s: int = bounded(2000, 0, 1_000_000)
    """Stored values whose CRC is checked in the background, a second; 0: none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key, what it must be) of every option that is wrong."""
        wrong = dict(super().problems())
        yield from wrong.items()
        if wrong.keys().isdisjoint(("age_s", "dedupe_s", "history_s")) and self.age_s < max(self.dedupe_s, self.history_s):
            yield "age_s", "at least dedupe_s and history_s"

    def limits(self) -> Limits:
        """The limits in the form of the log."""
        return Limits(
            cap=self.inbox_cap,
            refuse_full=int(self.inbox_full == "refuse"),
            dedupe_s=self.dedupe_s,
            history_s=self.history_s,
            age_s=self.age_s,
            device_age_s=self.device_age_s,
            from_now=int(not self.new_device_history),
        )
