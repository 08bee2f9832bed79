"""An admin's own options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.settings.fields import bounded
from cluster.settings.options import RoleOptions


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [admin] table: what every role has, the pace of moves, and what runs beside the leader. An admin stores no topics; those
    are in the registry."""

    moves_per_hour: int = bounded(0, 0, 60)
    """Parts of topics that the leading admin moves from loaded groups to others in an hour, without being asked; 0: none."""
    console_port: int = bounded(0, 0, 65_535)
    """Port of the console (`pixiu console`) that runs beside the leading admin, at 127.0.0.1; 0: none runs."""
    console_access_file: str = ""
    """Access file by which users of the console log in; those of its group `operators` may change something. Empty: everybody
    who reaches the port may look, and change nothing."""
    probe_interval_ms: int = bounded(0, 0, 3_600_000)
    """Interval at which the leading admin has every path probed (`pixiu probe`), milliseconds; 0: never."""
    probe_file: str = ""
    """File in which it keeps the share of probes that arrived, for 30 days; it is in a folder of this process alone. Must be set
    with probe_interval_ms."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        if self.probe_interval_ms and not self.probe_file:
            yield "probe_file", "a file for the availability, because probe_interval_ms is set"
        if self.console_access_file and not self.console_port:
            yield "console_access_file", "empty, or with a console_port"
