"""Mail as MQTT carries it: packet identifiers that are made of a mail's place, and what waits for its PUBACK. Pure.

    packet identifier   2 bits lane | 14 bits InboxSeq % 16383 + 1

So no map has to survive a gateway: at most 64 mails of a lane wait at a time, and no two of them share an identifier.

Source: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pixiu.mqtt.codec import encode_publishes, topic_prefix

SEQ_BITS: Final = 14
SEQS: Final = (1 << SEQ_BITS) - 1
"""Identifiers of a lane: 0 is none in MQTT, so no lane uses its first."""


class Mails(NamedTuple):
    """Mails for a client under consecutive InboxSeqs."""

    lane: int
    first: int
    """InboxSeq of the first one."""
    payloads: Sequence[bytes]
    redelivered: bool
    """They may have arrived before: DUP."""


def packet_id_of(lane: int, seq: int) -> int:
    """The packet identifier of a mail."""
    return lane << SEQ_BITS | (seq % SEQS + 1)


def lane_of(packet_id: int) -> int:
    """The lane that a packet identifier names."""
    return packet_id >> SEQ_BITS


def seq_from(packet_id: int, least: int) -> int:
    """The lowest InboxSeq, `least` or above, of a packet identifier's lane; 0 where it names none."""
    number = packet_id & SEQS
    return least + (number - 1 - least) % SEQS if number else 0


class Unacknowledged:
    """The packet identifiers of one connection that wait for their PUBACK, and since when each lane waits for any.

    Source: docs/operations.md.
    """

    __slots__ = ("_since", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, set[int]] = {}
        self._since: dict[int, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def send(self, topic: str, mails: Iterable[Mails], now: float, *, anew: bool) -> list[bytes]:
        """The PUBLISH packets of mails that are given to the connection. `anew`: of a new session, so what waits waits no more."""
        if anew:
            self._waiting.clear()
            self._since.clear()
        prefix = topic_prefix(topic)
        packets: list[bytes] = []
        for lane, first, payloads, redelivered in mails:
            waiting = self._waiting.get(lane)
            if waiting is None:
                waiting = self._waiting[lane] = set()
            self._since.setdefault(lane, now)
            packet_ids = [packet_id_of(lane, seq) for seq in range(first, first + len(payloads))]
            waiting.update(packet_ids)
            packets += encode_publishes(prefix, payloads, packet_ids, dup=redelivered)
        return packets

    def acknowledge(self, packet_id: int, now: float) -> bool:
        """A PUBACK came. False when nothing waits for it."""
        lane = lane_of(packet_id)
        waiting = self._waiting.get(lane, set())
        if packet_id not in waiting:
            return False
        waiting.discard(packet_id)
        if waiting:
            self._since[lane] = now
        else:
            del self._waiting[lane], self._since[lane]
        return True

    def wait_from(self, now: float) -> None:
        """Nothing was read meanwhile: every lane waits from now on."""
        self._since = dict.fromkeys(self._since, now)

    @property
    def since(self) -> float | None:
        """When the longest-waiting lane last made progress, monotonic seconds; None when no lane waits for a PUBACK."""
        return min(self._since.values(), default=None)
