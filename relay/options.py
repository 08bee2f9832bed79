"""A relay's own options."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings.fields import bounded
from cluster.settings.options import PartitionedOptions


@dataclass(frozen=True, kw_only=True)
class Options(PartitionedOptions):
    """The [relay] table. `data_dir` holds the Relay DB; without one users' devices are kept in memory only, and lost when
    all replicas of the partition stop together."""

    store_mb: int = bounded(1024, 1, 1 << 20)
    """MiB that the Relay DB may grow to: about 100 bytes for each connected device."""
    max_entries: int = bounded(4_000_000, 1, 1_000_000_000)
    """Limit of connected devices; further ones are refused and counted."""
    gone_gateway_s: float = bounded(10.0, 0.1, 1_000_000.0)
    """Seconds after which the devices on a gateway are dropped when its lease is gone and its heartbeats have stopped."""
    mail_opening: int = bounded(128, 1, 10_000)
    """Limit of devices whose inboxes are opened at a time; when thousands log in at once, the others wait in order."""
    mail_fetching: int = bounded(256, 1, 10_000)
    """Limit of devices for which Pi and Xiu are read at a time; the others wait in order."""
    mail_waiting_mb: int = bounded(64, 1, 4096)
    """MiB of deliveries that may wait for one gateway; beyond that its stream is opened again, and what was not acknowledged is
    sent again."""
