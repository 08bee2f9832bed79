"""Traced records in a gateway: stamped where they leave, and finished there. Pure.

A traced record is recognised when it arrives, and leaves at the end of the turn: until then it is both in its channel's queue and
here.

Source: docs/architecture.md, "Probes and traces"; PiXiu §3.1.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.membership.rooms import Channel
from pixiu.wire.record import SENDER_AT, SNOWFLAKE_AT
from pixiu.wire.trace import Tracer

MAX_TRACES_A_TURN: Final = 1_000
"""Traced records stamped in one turn; further ones are delivered without this gateway's stamp, and counted."""


class _Waiting(NamedTuple):
    channel: Channel
    place: int
    """Index in `channel.pending_records`; -1 if no connection of the channel gets records."""
    record: bytes
    in_us: int


class Traces:
    """Traced records of a turn."""

    def __init__(self, tracer: Tracer) -> None:
        self.left_out = 0
        self._tracer = tracer
        self.waiting: list[_Waiting] = []
        """Traced records that are queued for channels in this turn."""
        self._arrived: dict[bytes, int] = {}

    def arrived(self, record: bytes) -> None:
        """Note the arrival of a traced signal's copy, which is processed at the end of the turn."""
        if len(self._arrived) < MAX_TRACES_A_TURN:
            self._arrived.setdefault(record[SNOWFLAKE_AT:SENDER_AT], self._tracer.now_us())

    def take(self, channel: Channel, record: bytes) -> None:
        """Note a traced record that is about to be queued for a channel."""
        if len(self.waiting) >= MAX_TRACES_A_TURN:
            self.left_out += 1
            return
        place = len(channel.pending_records) if channel.records else -1
        in_us = self._arrived.get(record[SNOWFLAKE_AT:SENDER_AT]) or self._tracer.now_us()
        self.waiting.append(_Waiting(channel, place, record, in_us))

    def finish(self) -> list[bytes]:
        """Stamp the turn's records in their queues. Returns the finished records."""
        out_us = self._tracer.now_us()
        finished: list[bytes] = []
        for channel, place, record, in_us in self.waiting:
            stamped = self._tracer.stamp(record, in_us, out_us)
            if place >= 0:
                channel.pending_records[place] = stamped
            finished.append(stamped)
        self.waiting.clear()
        self._arrived.clear()
        return finished
