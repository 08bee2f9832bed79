"""Mail over MQTT: packet identifiers made of a mail's place, and mail that waits for its PUBACK. Pure.

    packet identifier   2 bits 0 | 2 bits lane | 12 bits InboxSeq % 4095 + 1

So no map has to survive a gateway: at most 64 mails of a lane wait at a time, and they never share an identifier. The inbox of a
session that outlives its connection has the same identifiers from `FIRST_KEPT_ID` on. Those from `FIRST_OUTBOUND_ID` on are for all
other messages of topics (`cluster.mqtt.outbound`).

Source: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.mqtt.codec import encode_publishes, topic_prefix
from cluster.mqtt.packets import MQTT_3_1_1, MQTT_5, Dialect
from pixiu.wire.cursor import MAP_BITS
from pixiu.wire.record import INBOX_LANES

SEQ_BITS: Final = 12
SEQS: Final = (1 << SEQ_BITS) - 1
"""Number of identifiers of a lane: MQTT does not use identifier 0, so no lane uses its first one."""


FIRST_KEPT_ID: Final = INBOX_LANES << SEQ_BITS
"""The lowest identifier of messages from a session's inbox: those of mail plus this."""


FIRST_OUTBOUND_ID: Final = 2 * FIRST_KEPT_ID
"""The lowest identifier that nothing from an inbox has."""


LARGEST_WINDOW: Final = INBOX_LANES * MAP_BITS
"""Mails that may be sent to one client without a PUBACK."""


class Mails(NamedTuple):
    """Mails for a client with consecutive InboxSeqs."""

    lane: int
    first: int
    """InboxSeq of the first one."""
    payloads: Sequence[bytes]
    redelivered: bool
    """The mails may have arrived before: sets DUP."""


def packet_id_of(lane: int, seq: int) -> int:
    """Compute the packet identifier of a mail."""
    return lane << SEQ_BITS | (seq % SEQS + 1)


def lane_of(packet_id: int) -> int:
    """The lane of a packet identifier."""
    return packet_id >> SEQ_BITS


def seq_from(packet_id: int, least: int) -> int:
    """The lowest InboxSeq from `least` on that has this packet identifier; 0 if the identifier is not one of mail."""
    number = packet_id & SEQS
    return least + (number - 1 - least) % SEQS if number else 0


def packet_ids_of(mails: Iterable[Mails]) -> list[int]:
    """The packet identifiers of mails, in their order."""
    return [packet_id_of(lane, seq) for lane, first, payloads, _ in mails for seq in range(first, first + len(payloads))]


class Unacknowledged:
    """Packet identifiers of one connection that wait for their PUBACK, and the time since which each lane waits.

    Source: docs/operations.md.
    """

    __slots__ = ("_properties", "_since", "_waiting")

    def __init__(self, dialect: Dialect = MQTT_3_1_1) -> None:
        self._properties = b"\0" if dialect is MQTT_5 else b""
        self._waiting: dict[int, set[int]] = {}
        self._since: dict[int, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def send(self, topic: str, mails: Iterable[Mails], now: float, *, anew: bool) -> list[bytes]:
        """Make the PUBLISH packets of mails for the connection. `anew`: they are of a new session, so the earlier ones no longer
        wait."""
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
            packets += encode_publishes(prefix, payloads, packet_ids, dup=redelivered, properties=self._properties)
        return packets

    def acknowledge(self, packet_id: int, now: float) -> bool:
        """Take a PUBACK. False when nothing waits for it."""
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

    @property
    def since(self) -> float | None:
        """Time at which the longest-waiting lane last made progress, monotonic seconds; None when no lane waits for a PUBACK."""
        return min(self._since.values(), default=None)
