"""Topics that a gateway publishes about itself, to its own subscribers: `$SYS/broker/…`. Pure.

They are published while somebody listens: soon after a client subscribes, and then at an interval.

Source: docs/subscriptions.md, "$SYS".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cluster.core.contract import NEVER
from cluster.mqtt.properties_in_records import origin_of
from gateway.delivery.fan_out import FanOut
from gateway.membership.rooms import RoomIndex
from pixiu.ids import SNOWFLAKE_EPOCH_MS, snowflake
from pixiu.placement.topics import SYSTEM_PREFIX
from pixiu.wire.record import ORIGIN_AT, Flag, Kind, encode, with_topic

INTERVAL_S: Final = 10.0
FIRST_S: Final = 1.0
"""Shortest time between two publications, seconds: clients that subscribe together share one."""


class SystemTopics:
    """Publishes what the gateway says about itself.

    Args:
        index, fan_out: of the gateway.
        values: topic below `$SYS/broker/` → gives its value.
        unix_ms: Unix milliseconds.
    """

    def __init__(
        self, index: RoomIndex, fan_out: FanOut, values: dict[str, Callable[[], object]], unix_ms: Callable[[], int]
    ) -> None:
        self._index, self._fan_out, self._values, self._unix_ms = index, fan_out, values, unix_ms
        self.more: Callable[[], Mapping[str, object]] = dict
        """Gives values of further topics, by their names below `$SYS/`."""
        self.received = 0
        """Messages that clients published."""
        self._began_at = NEVER
        self._listeners = 0
        self._published_at = -INTERVAL_S
        self._due = NEVER

    def begin(self, now: float) -> None:
        """Note the start, monotonic seconds: the first call counts."""
        self._began_at = min(self._began_at, now)

    def next_deadline(self) -> float:
        """Time of the next publication; `NEVER` while nobody listens."""
        return self._due if self._index.system else NEVER

    def note(self, now: float) -> None:
        """Note that clients may have subscribed."""
        if self._index.system > self._listeners:
            self._due = min(self._due, max(now, self._published_at + FIRST_S))
        self._listeners = self._index.system

    def flush(self, now: float) -> None:
        """Publish if it is time."""
        if not self._index.system or now < self._due:
            return
        self._published_at, self._due = now, now + INTERVAL_S
        identity = snowflake(max(self._unix_ms(), SNOWFLAKE_EPOCH_MS), 0, 0)
        said = {f"broker/{name}": value() for name, value in self._values.items()}
        uptime = f"{int(now - min(self._began_at, now))} seconds"
        said |= {"broker/uptime": uptime, "broker/messages/received": self.received, **self.more()}
        for name, value in said.items():
            topic = f"{SYSTEM_PREFIX}{name}"
            channel = self._index.system_channel(topic.encode())
            if channel is not None:
                body = with_topic(topic, str(value).encode())
                record = encode(Kind.ROOM, 0, body, identity, flags=Flag.TO_ROOM | Flag.TOPIC)
                head, rest = record[:ORIGIN_AT], record[ORIGIN_AT + 1 :]
                self._fan_out.queue(channel, head + bytes((origin_of(0, retain=False),)) + rest, body)
