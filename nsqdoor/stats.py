"""`/stats` as nsqd has it, of a whole topic: each listener says the same, so do not add several up.

Source: docs/nsq.md, "HTTP".
"""

from __future__ import annotations

from typing import Any, Final

from nsqdoor.logins import Login
from pixiu.client.topics.topic_admin import ChannelPartInfo
from pixiu.errors import UnknownTopic

MAX_TOPICS: Final = 100
"""Topics of one answer that names none. Policy: the first by name."""


async def stats_of(login: Login, topic: str, channel: str) -> dict[str, Any]:
    """Describe a topic, or all. Raises `PixiuError`."""
    names = [topic] if topic else [each.name for each in (await login.px.topics.list())[:MAX_TOPICS]]
    topics: list[dict[str, Any]] = []
    for name in names:
        try:
            parts = await login.px.topics.channel_state(name, channel)
        except UnknownTopic:
            continue
        by_channel: dict[str, list[ChannelPartInfo]] = {}
        for each in parts:
            by_channel.setdefault(each.channel, []).append(each)
        channels = [_channel(name, found) for name, found in sorted(by_channel.items())]
        count = max((each["message_count"] for each in channels), default=0)
        topics.append(
            {
                "topic_name": name, "channels": channels, "depth": 0, "backend_depth": 0, "message_count": count,
                "message_bytes": 0, "paused": False, "e2e_processing_latency": {"count": 0, "percentiles": None},
            }
        )  # fmt: skip
    return {"topics": topics, "producers": []}


def _channel(name: str, parts: list[ChannelPartInfo]) -> dict[str, Any]:
    in_flight, deferred = sum(each.with_members for each in parts), sum(each.waiting for each in parts)
    members = {member.name for each in parts for member in each.members}
    left = max(0, sum(each.unacknowledged for each in parts) - in_flight - deferred)
    return {
        "channel_name": name, "depth": left, "backend_depth": left, "in_flight_count": in_flight, "deferred_count": deferred,
        "message_count": sum(each.end for each in parts), "requeue_count": 0, "timeout_count": 0, "client_count": len(members),
        "clients": [], "paused": False, "e2e_processing_latency": {"count": 0, "percentiles": None},
    }  # fmt: skip
