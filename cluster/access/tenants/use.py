"""Use of a process by one tenant, and its limits there. Pure.

    rate in    everybody who publishes is read more slowly until the debt is paid; while there is debt, the tenant is `over`
    rate out   messages of QoS 0 are dropped while there is debt; others only make debt
    stage      what an overloaded gateway takes from the tenant: see `gateway.tenants.shedding`

Source: docs/tenants.md, "Limits".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from cluster.access.tenants.names import TenantNames
from cluster.access.tenants.settings import TenantSettings
from cluster.core.token_bucket import Meter
from pixiu.errors import Overloaded

BURST_S: Final = 1.0
"""Burst after a silence, in seconds of a rate."""
FULL_RETRY_MS: Final = 5_000
"""Retry-after of a session that finds no place, ms."""


class QuotaReached(Overloaded):
    """A tenant has as much as it may; MQTT clients are told 0x97, quota exceeded."""


class Stage(IntEnum):
    """Loss of a tenant while its gateway is overloaded. Each stage has that of the one before, too."""

    NONE = 0
    NO_QOS_0 = 1
    """Its messages of QoS 0 are dropped, in both directions."""
    REFUSED = 2
    """New connections and published messages are refused."""


@dataclass(slots=True)
class TenantCounters:
    """Counts since the start of the process."""

    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    dropped_in: int = 0
    """Published messages of QoS 0 that were dropped."""
    dropped_out: int = 0
    """Messages of QoS 0 to its clients that were dropped."""
    refused_messages: int = 0
    """Published messages of QoS 1 and 2, and retained ones, that were refused."""
    refused_sessions: int = 0
    refused_subscriptions: int = 0
    refused_kept: int = 0
    """Sessions that would outlive their connections."""


@dataclass(slots=True)
class Retained:
    """Retained messages of a tenant: as routers counted them, and what clients here put since."""

    messages: int = 0
    bytes: int = 0
    asked: bool = False
    """True if clients here have put some since the last count."""


@dataclass(slots=True, eq=False)
class TenantUse:
    """One tenant at this process."""

    settings: TenantSettings
    names: TenantNames
    label: str
    """Its name in metrics."""
    now: float
    """Monotonic seconds, at the start."""
    sessions: int = 0
    subscriptions: int = 0
    stage: Stage = Stage.NONE
    counters: TenantCounters = field(default_factory=TenantCounters)
    retained: Retained = field(default_factory=Retained)
    kept: int = 0
    """Sessions in the cluster that outlive their connections, as routers counted them last."""
    _in: Meter = field(init=False)
    _out: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.set(self.settings, self.label, self.now)

    def set(self, settings: TenantSettings, label: str, now: float) -> None:
        """Use these settings from now on, with full bursts."""
        self.settings, self.label = settings, label
        self._in = Meter(settings.messages_in_per_s, settings.bytes_in_per_s, BURST_S, now)
        self._out = Meter(settings.messages_out_per_s, settings.bytes_out_per_s, BURST_S, now)

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.names.name

    def require_session(self) -> None:
        """Raise `QuotaReached` if it may have no further session."""
        most = self.settings.connections
        if self.stage is Stage.REFUSED:
            text = f"this gateway is overloaded, and the tenant {self.name} uses more than its share"
        elif most and self.sessions >= most:
            text = f"the tenant {self.name} has {most} sessions here already"
        else:
            return
        self.counters.refused_sessions += 1
        raise QuotaReached(text, FULL_RETRY_MS)

    def kept_refused(self, text: str) -> QuotaReached:
        """The error for a session that the routers have no place for. `text`: theirs."""
        self.counters.refused_kept += 1
        return QuotaReached(text, FULL_RETRY_MS)

    def take_subscriptions(self, number: int) -> bool:
        """Take places for filters. False: there are not enough."""
        most = self.settings.subscriptions
        if most and self.subscriptions + number > most:
            self.counters.refused_subscriptions += number
            return False
        self.subscriptions += number
        return True

    def spend_in(self, messages: int, size: int, now: float) -> float:
        """Charge published messages. Returns the seconds for which their client must not be read from."""
        self.counters.messages_in += messages
        self.counters.bytes_in += size
        return self._in.spend(messages, size, now)

    def why_over(self, now: float) -> str:
        """Reason why messages that come now are above what it may publish; empty: they are not."""
        if self.stage is Stage.REFUSED:
            return f"the gateway is overloaded, and the tenant {self.name} uses more than its share"
        return f"the tenant {self.name} publishes more than it may" if self._in.wait_s(now) else ""

    def take_out(self, qos: int, size: int, now: float) -> bool:
        """Charge a message to one of its clients. False: it has QoS 0 and is dropped."""
        if not qos and (self.stage or self._out.wait_s(now)):
            self.counters.dropped_out += 1
            return False
        self.spend_out(1, size, now)
        return True

    def take_shared(self, messages: int, size: int, now: float) -> bool:
        """Charge messages of QoS 0 whose bytes several of its clients share. False: all are dropped."""
        if self.stage or self._out.wait_s(now):
            self.counters.dropped_out += messages
            return False
        self.spend_out(messages, size, now)
        return True

    def spend_out(self, messages: int, size: int, now: float) -> None:
        """Charge messages to one of its clients that are not dropped, whatever their QoS."""
        self.counters.messages_out += messages
        self.counters.bytes_out += size
        self._out.spend(messages, size, now)

    def take_retained(self, size: int) -> bool:
        """Take space for a retained message, which is refused without it. `size` 0: it clears one."""
        retained, settings = self.retained, self.settings
        if not (settings.retained_messages or settings.retained_bytes):
            return True
        retained.asked = True
        if not size:
            return True
        over = bool(settings.retained_messages) and retained.messages >= settings.retained_messages
        if over or (settings.retained_bytes and retained.bytes + size > settings.retained_bytes):
            self.counters.refused_messages += 1
            return False
        retained.messages += 1
        retained.bytes += size
        return True

    @property
    def offered(self) -> int:
        """Work that was asked of this process for the tenant since its start: messages, with those dropped, and KiB."""
        counts = self.counters
        messages = counts.messages_in + counts.messages_out + counts.dropped_in + counts.dropped_out + counts.refused_messages
        return messages + (counts.bytes_in + counts.bytes_out >> 10)
