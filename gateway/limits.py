"""The limits that clients met, for one line of the log a minute. Pure.

Counts of a tenant are not here: see `gateway.tenants.watch`.

Source: docs/mqtt.md, "Limits".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Reason

LIMITS_MET: Final = "limits_met"
REPORT_S: Final = 60.0
"""Interval of the reports, seconds."""
_TOO_MUCH: Final = (
    Reason.FIRST_PACKET_TOO_LARGE, Reason.PACKET_TOO_LARGE, Reason.TOO_MANY_FILTERS, Reason.TOO_MANY_PROPERTIES,
)  # fmt: skip
LIMITS: Final[Mapping[str, str]] = {
    "connections_evicted_total": "gateway.max_pending_connections",
    "connections_refused_total": "gateway.max_connections, address_connections_percent, connect_rate_per_s",
    "filters_over_limit_total": "gateway.max_subscriptions, max_all_subscriptions, or of a session or tenant",
    "joins_over_share_total": "gateway.joins_per_s, max_all_subscriptions",
    "memory_evicted_total": "gateway.memory_bytes",
    "outbound_dropped_total": "gateway.connection_buffer_bytes",
    "outbound_too_large_total": "maximum packet size of a client",
    "publish_over_rate_dropped_total": "gateway.client_messages_per_s, client_bytes_per_s, room_messages_per_s, room_bytes_per_s",
    "publish_over_rate_held_total": "gateway.client_messages_per_s, client_bytes_per_s, room_messages_per_s, room_bytes_per_s",
    "retained_refused_total": "router.retained_messages, retained_mb",
    "session_ends_left_out_total": "ends of sessions that are stored at a time",
    "slow_consumer_dropped_total": "gateway.connection_buffer_bytes",
    "subscriptions_refused_total": "router.max_entries",
}
"""Count of the gateway → the limit that it tells of."""
LIMITS_BY_LABEL: Final[Mapping[str, Mapping[str, str]]] = {
    "connections_closed_total{reason}": {
        CloseReason.LARGE_ANSWER.value: "maximum packet size of a client",
        CloseReason.MAIL_OVERRUN.value: "unacknowledged mail",
        CloseReason.MAIL_UNACKNOWLEDGED.value: "gateway.puback_timeout_s",
        CloseReason.MEMORY.value: "gateway.memory_bytes",
        CloseReason.QUEUE_FULL.value: "gateway.connection_buffer_bytes",
        CloseReason.RECEIVE_MAXIMUM.value: "gateway.receive_maximum",
        CloseReason.SLOW_CONSUMER.value: "gateway.connection_buffer_bytes, slow_consumer_timeout_s",
        CloseReason.TOPIC_ALIAS.value: "gateway.topic_aliases",
        CloseReason.UNACKNOWLEDGED.value: "gateway.puback_timeout_s",
        CloseReason.UNRELEASED.value: "unreleased messages of QoS 2",
    },
    "packets_malformed_total{error}": {
        reason.name.lower(): "size of packets, their filters or user properties" for reason in _TOO_MUCH
    },
}
"""The same for counts by label."""


class LimitReport:
    """Limits that were met since the last report."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def met(self, samples: Mapping[str, object]) -> dict[str, int]:
        """Limit → how often it was met since the last call."""
        counts: dict[str, int] = {}
        for name, limit in LIMITS.items():
            count = samples.get(name)
            counts[limit] = counts.get(limit, 0) + (count if isinstance(count, int) else 0)
        for name, limits in LIMITS_BY_LABEL.items():
            by_label = samples.get(name)
            if isinstance(by_label, Mapping):
                for label, limit in limits.items():
                    counts[limit] = counts.get(limit, 0) + int(by_label.get(label, 0))
        before, self._before = self._before, counts
        return {limit: more for limit, count in counts.items() if (more := count - before.get(limit, 0)) > 0}
