"""A gateway's own options."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pixiu.runtime.fields import bounded
from pixiu.runtime.options import RoleOptions

TABLE_NAME: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})?")


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [gateway] table."""

    mqtt_host: str = "127.0.0.1"
    """Address on which MQTT clients connect. Only a loopback address, as long as clients are not authenticated."""
    mqtt_port: int = bounded(0, 0, 65_535)
    """Port on which MQTT clients connect. 0: any."""
    max_connections: int = bounded(20_000, 1, 10_000_000)
    """Client connections of all protocols at one time; more are refused."""
    max_subscriptions: int = bounded(1000, 1, 1_000_000)
    """Rooms and topics of one connection."""
    connection_buffer_bytes: int = bounded(2 << 20, 16 << 10, 1 << 30)
    """Bytes that may wait for one connection; the oldest messages go first."""
    slow_consumer_timeout_s: float = bounded(10.0, 0.1, 3600.0)
    """Seconds for which a connection may stay over connection_buffer_bytes before it is closed."""
    signal_table_dir: str = "/dev/shm"  # noqa: S108 (private folders are made in it)
    """Folder on a tmpfs for the table of delivered signals, which a gateway that was killed finds again."""
    signal_table_name: str = ""
    """Name of the table's folder in it. Empty: made of the registry's root, mqtt_host and the MQTT port."""
    signal_table_mb: int = bounded(16, 1, 4096)
    """MiB of memory for the table, taken at the start: for each, the last 4 000 signals, up to twice as many, are remembered."""
    drain_jitter_s: float = bounded(2.0, 0.0, 600.0)
    """Seconds over which clients are moved when the gateway drains, so that they do not reconnect all at once."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """(key, what it must be) of every option that is wrong."""
        yield from super().problems()
        if not TABLE_NAME.fullmatch(self.signal_table_name):
            yield "signal_table_name", "at most 100 letters, digits and the signs . _ - with a letter or digit first, or empty"
        for key in ("host", "mqtt_host"):
            if not is_loopback(getattr(self, key)):
                yield key, "a loopback address such as 127.0.0.1: clients are not authenticated yet, so none may come from outside"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and cannot be reached from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
