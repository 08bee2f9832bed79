"""A proxy's own options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.listeners.clients import ClientRoleOptions
from cluster.routes.routes import read_routes
from cluster.settings.fields import bounded, choices
from cluster.settings.options import PacedOptions


@dataclass(frozen=True, kw_only=True)
class Options(ClientRoleOptions, PacedOptions):
    """The [proxy] table."""

    publisher_window_bytes: int = bounded(4 << 20, 64 << 10, 1 << 28)
    """Bytes that a publisher may have unresolved on one stream; beyond that the proxy stops reading it."""
    max_lent_workers: int = bounded(256, 0, 4096)
    """SnowflakeID worker numbers lent to publishers at one time; 4096 exist in a cluster."""
    login_lent_workers: int = bounded(32, 1, 4096)
    """Of these, how many one login may have. A login that asks for more gets one of those that it did not give back."""
    big_room_vrooms_per_s: int = bounded(100, 16, 1_000_000)
    """VRooms that this proxy serves in a second; a big room has 64, so a message to one takes 64 of these to reach all."""
    publisher_messages_per_s: int = bounded(0, 0, 100_000_000)
    """Messages that one publisher may send in a second; more is refused with OVERLOADED. 0: no limit."""
    publisher_bytes_per_s: int = bounded(0, 0, 1 << 40)
    """The same in bytes."""
    room_messages_per_s: int = bounded(0, 0, 100_000_000)
    """Messages that one room may get through this proxy in a second; more is refused with OVERLOADED. 0: no limit."""
    room_bytes_per_s: int = bounded(0, 0, 1 << 40)
    """The same in bytes."""
    limit_burst_s: float = bounded(1.0, 0.01, 60.0)
    """Burst that may come at once after a silence, in seconds of these rates."""
    mail_timeout_s: float = bounded(15.0, 0.1, 3600.0)
    """Seconds in which Xiu and Pi must have confirmed a mail; then its writer's stream is ended, and the writer sends again."""
    routes: str = ""
    """File of routes, which durable topics store which messages; read again when it changes. Empty: there are none."""
    routes_token_file: str = ""
    """File with the login with which routes write durable topics. Empty: the environment variable PIXIU_TOKEN, or none."""
    kinds: tuple[str, ...] = choices(("room", "chat", "mail"), "room", "chat", "mail")
    """Kinds that this proxy accepts: messages to rooms, messages to users in real time, mail to users. Others are refused. SDKs
    use all proxies, so proxies that differ are for back ends that name theirs."""

    def read_files(self) -> None:
        """See `RoleOptions`."""
        super().read_files()
        if self.access_file:
            from cluster.access.files import Files  # most processes do not need it

            Files(Path(self.access_file)).read()
        if self.routes:
            read_routes(self.routes)
