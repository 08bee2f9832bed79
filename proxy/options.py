"""A proxy's own options."""

from __future__ import annotations

from dataclasses import dataclass

from pixiu.runtime.fields import bounded, choices
from pixiu.runtime.options import RoleOptions


@dataclass(frozen=True, kw_only=True)
class Options(RoleOptions):
    """The [proxy] table."""

    publisher_window_bytes: int = bounded(4 << 20, 64 << 10, 1 << 28)
    """Bytes that a publisher may have unresolved on one stream; it is not read from beyond that."""
    max_publishers: int = bounded(10_000, 1, 1_000_000)
    """Publishers' streams at one time; more are refused."""
    max_lent_workers: int = bounded(256, 0, 4096)
    """SnowflakeID worker numbers lent to publishers at one time; 4096 exist in a cluster."""
    kinds: tuple[str, ...] = choices(("room", "chat"), "room", "chat")
    """What this proxy takes: messages to rooms, messages to users. Others are refused; SDKs go by all proxies, so
    proxies that differ are for back ends that name theirs."""
