"""A client's messages of QoS 1 and 2 on their way to the cluster, by packet identifier. Pure.

Source: OASIS MQTT 3.1.1 sections 4.3 and 4.6.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.contract import NEVER


class Inbound:
    """Identifiers of one connection, from their PUBLISH to the PUBACK, or to the PUBREL."""

    __slots__ = ("unreleased", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, float] = {}
        """Identifier → time since which the message waits for the cluster, in order of the PUBLISHes; NEVER once it was taken."""
        self.unreleased: dict[int, None] = {}
        """Identifiers of QoS 2 whose PUBREL has not arrived. A dict, because most connections have none and an empty set takes 216
        bytes."""

    def since(self) -> float:
        """Time since which the oldest message waits; NEVER: none does."""
        return next(iter(self.waiting.values()), NEVER)

    def accept(self, packet_ids: Iterable[int]) -> list[int]:
        """Note that the cluster took messages. Returns those to acknowledge: all before the first that still waits
        [MQTT-4.6.0-2]."""
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
