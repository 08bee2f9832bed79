"""A client's messages of QoS 1 and 2 on their way to the cluster, by packet identifier, and its topic aliases. Pure.

Source: OASIS MQTT 3.1.1 sections 4.3 and 4.6; MQTT 5.0 sections 3.3.2.3.4 and 4.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from cluster.core.contract import NEVER
from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason, Problem
from cluster.mqtt.packets import MQTT_5, Puback, Pubcomp, Publish, Pubrec
from cluster.mqtt.properties import Property, number
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.terms import Terms
from pixiu.placement.topics import MAX_TOPIC_LENGTH

IN_USE: Final = Problem(CloseReason.PACKET_ID_IN_USE, "a packet identifier was used again before its answer [MQTT-2.3.1-2]")
EARLY_PUBREL: Final = Problem(CloseReason.UNEXPECTED_PACKET, "a PUBREL before the PUBREC")
HIGH_ALIAS: Final = Problem(CloseReason.TOPIC_ALIAS, "a topic alias is above the maximum")
UNKNOWN_ALIAS: Final = Problem(CloseReason.UNEXPECTED_PACKET, "a topic alias that stands for no topic")


class Begun(Enum):
    """A PUBLISH of QoS 1 or 2 that is not new."""

    REPEATED = "repeated"
    """The same message again, while its first copy waits for the cluster."""
    RECEIVED = "received"
    """The same message again, after its PUBREC."""


class Inbound:
    """Identifiers of one connection, from their PUBLISH to the PUBACK, or to the PUBREL."""

    __slots__ = ("refused", "unreleased", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, float] = {}
        """Identifier → time since which the message waits for the cluster, in order of the PUBLISHes; NEVER once it was taken."""
        self.unreleased: dict[int, None] = {}
        """Identifiers of QoS 2 whose PUBREL has not arrived. A dict, because most connections have none and an empty set takes 216
        bytes."""
        self.refused: dict[int, tuple[int, str]] | None = None
        """Identifier → reason code and text, of messages in `waiting` that the cluster refused; None: there was none yet."""

    def since(self) -> float:
        """Time since which the oldest message waits; NEVER: none does."""
        return next(iter(self.waiting.values()), NEVER)

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the client may not take for acknowledged."""
        return len(self.waiting.keys() | self.unreleased.keys())

    def accept(self, packet_ids: Iterable[int]) -> list[int]:
        """Note that the cluster took messages, or refused them (`refused`). Returns those to acknowledge: all before the first that
        still waits [MQTT-4.6.0-2]."""
        waiting = self.waiting
        for packet_id in packet_ids:
            if packet_id in waiting:
                waiting[packet_id] = NEVER
        done: list[int] = []
        for packet_id, since in waiting.items():
            if since < NEVER:
                break
            done.append(packet_id)
        for packet_id in done:
            del waiting[packet_id]
        if not waiting:
            self.waiting = {}  # an emptied dict keeps its table, which a look at its first item then passes
        return done

    def begin(self, packet: Publish, terms: Terms, most: int, now: float) -> Begun | Problem | None:
        """Take a PUBLISH of QoS 1 or 2. Returns None for a new message; a `Problem` ends the connection.

        most: messages that may be unacknowledged.
        """
        packet_id, exactly, waiting, unreleased = packet.packet_id, packet.qos == 2, self.waiting, self.unreleased
        if packet_id in waiting:
            return Begun.REPEATED if packet.dup and (exactly or packet_id not in unreleased) else IN_USE
        if packet_id in unreleased:
            return Begun.RECEIVED if exactly else IN_USE
        if terms.dialect is MQTT_5:
            # The sum counts twice what waits with QoS 2: only near the limit is it counted exactly.
            if len(waiting) + len(unreleased) >= most and self.unacknowledged >= most:
                return Problem(CloseReason.RECEIVE_MAXIMUM, f"{most} messages were not acknowledged yet")
        elif exactly and len(unreleased) >= 2 * most:
            return Problem(CloseReason.UNRELEASED, f"{len(unreleased)} messages of QoS 2 without a PUBREL")
        if exactly:
            unreleased[packet_id] = None
        waiting[packet_id] = now
        return None

    def refuse(self, packet_id: int, code: int, text: str) -> None:
        """Note that the cluster refuses a message; `accept` follows."""
        if packet_id in self.waiting:
            if self.refused is None:
                self.refused = {}
            self.refused[packet_id] = code, text

    def answers(self, packet_ids: list[int], terms: Terms) -> bytes:
        """Encode PUBACKs and PUBRECs, with the reason codes of what was refused: its exchange of QoS 2 is over."""
        refused = self.refused
        if refused is None:
            return codec.encode_pubacks(packet_ids, self.unreleased)
        packets: list[bytes] = []
        for packet_id in packet_ids:
            code, text = refused.pop(packet_id, (0, ""))
            properties = terms.explained(text)
            if packet_id not in self.unreleased:
                packets.append(codec.encode(Puback(packet_id, code, properties), terms.dialect))
                continue
            if code:
                del self.unreleased[packet_id]
            packets.append(codec.encode(Pubrec(packet_id, code, properties), terms.dialect))
        self.refused = refused or None
        return b"".join(packets)

    def release(self, packet_id: int, terms: Terms) -> bytes | None:
        """Take a PUBREL. Returns the PUBCOMP; None: it comes before the PUBREC."""
        if packet_id in self.waiting:
            return None
        known = packet_id in self.unreleased
        self.unreleased.pop(packet_id, None)
        code = ReasonCode.SUCCESS if known or terms.dialect is not MQTT_5 else ReasonCode.PACKET_ID_NOT_FOUND
        return codec.encode(Pubcomp(packet_id, code), terms.dialect)


class Aliases:
    """Topic aliases of a client of MQTT 5: alias → topic. maximum: the highest alias."""

    __slots__ = ("_maximum", "_topics")

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._topics: dict[int, str] | None = None

    def resolve(self, packet: Publish) -> Publish | Problem:
        """Replace the alias of a message by its topic, and remember it."""
        alias = number(packet.properties, Property.TOPIC_ALIAS, 0)
        if not alias:
            return packet
        if alias > self._maximum:
            return HIGH_ALIAS
        if self._topics is None:
            self._topics = {}
        topic = packet.topic
        if not topic:
            topic = self._topics.get(alias, "")
            if not topic:
                return UNKNOWN_ALIAS
        elif len(topic) <= MAX_TOPIC_LENGTH:  # a longer one is refused anyway, and would take much memory
            self._topics[alias] = topic
        else:
            self._topics.pop(alias, None)
        properties = {which: value for which, value in (packet.properties or {}).items() if which != Property.TOPIC_ALIAS}
        return packet._replace(topic=topic, properties=properties or None)
