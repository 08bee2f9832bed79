"""The filters of one MQTT connection: those that it has, and those that wait for the cluster. Pure.

Source: OASIS MQTT 3.1.1 section 3.8; docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.core.contract import NEVER
from cluster.mqtt.packets import SUBACK_FAILURE
from pixiu.ids import TOPIC_ROOM, UIN, RoomID
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import USER_PREFIX, TopicRefusal


class Asked(NamedTuple):
    """The filters of a SUBSCRIBE, as far as it was decoded."""

    answers: list[str | None]
    """One item per filter: its name if it waits for the cluster, None if it was refused."""
    joined: dict[str, RoomID | UIN]
    mail: set[str]
    """Those of `joined` for which the client requests mail."""
    in_vain: bool
    """True if all of it is refused, whatever it contains."""


class Subscriptions:
    """Filters of one connection, and what is to be answered to its SUBSCRIBEs.

    resolve: finds the destination of a name. topics: the rooms of free topics. in_vain: the shell's policy for a SUBSCRIBE that
    comes in parts: whether to refuse all of it, by the number of filters in the first part.
    """

    __slots__ = (
        "_bytes", "_in_vain", "_max_bytes", "_max_filters", "_resolve", "_topics", "asking", "fruitless", "pending", "rooms",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        max_filters: int,
        max_bytes: int,
        resolve: Callable[[str], RoomID | UIN | TopicRefusal],
        topics: TopicRooms,
        in_vain: Callable[[int], bool] | None,
    ) -> None:
        self._max_filters, self._max_bytes = max_filters, max_bytes
        self._resolve, self._topics, self._in_vain = resolve, topics, in_vain
        self.rooms: dict[str, RoomID | UIN] = {}
        """The filters that the client has or waits for, and their rooms. Not to be changed outside."""
        self._bytes = 0
        self.asking: Asked | None = None
        """The SUBSCRIBE of which more parts follow."""
        self.pending: dict[int, tuple[float, Asked]] = {}
        """Packet identifier → time of the SUBSCRIBE and what waits for the cluster, in order."""
        self.waiting = 0
        """Number of filters in `pending`."""
        self.fruitless = 0
        """Number of filters that were refused, or left although they were not joined: work that no effect shows."""

    def since(self) -> float:
        """Time since which the oldest SUBSCRIBE waits for the cluster; NEVER: none does."""
        return next(iter(self.pending.values()))[0] if self.pending else NEVER

    def ask(self, filters: Sequence[tuple[str, int]], *, more: bool, keep: bool) -> Asked:
        """Add the filters of a SUBSCRIBE, or of a part of one, with QoS. keep: the session is to be kept, so its user filters of
        QoS 1 take mail."""
        asked = self.asking
        if asked is None:
            asked = Asked([], {}, set(), more and self._in_vain is not None and self._in_vain(len(filters)))
        self.asking = asked if more else None
        answers, joined, mail, in_vain = asked
        if in_vain:
            answers.extend([None] * len(filters))
            return asked
        for name, qos in filters:
            # The limit is checked first: it costs the least, and a client that sends endless filters has reached it.
            if not self._has_space_for(name) or isinstance(room := self._resolve(name), TopicRefusal):
                self.fruitless += 1
                answers.append(None)
                continue
            if name not in self.rooms:
                self._bytes += len(name)
            if room >= TOPIC_ROOM and not name.startswith(USER_PREFIX):
                room = self._topics.room(name)
            answers.append(name)
            joined[name] = self.rooms[name] = room
            if qos and keep and name.startswith(USER_PREFIX):
                mail.add(name)
            else:
                mail.discard(name)
        return asked

    def wait(self, packet_id: int, asked: Asked, now: float) -> None:
        """Have a whole SUBSCRIBE wait for the cluster."""
        self.pending[packet_id] = now, asked
        self.waiting += len(asked.answers)

    def confirm(self, packet_id: int, codes: Sequence[int] | None) -> list[int] | None:
        """End the wait of a SUBSCRIBE: `codes` has one for each filter of `Asked.joined`, None: QoS 0 for all. Returns the codes of
        its SUBACK; None: it does not wait."""
        _, asked = self.pending.pop(packet_id, (0.0, None))
        if not self.pending:
            self.pending = {}  # an emptied dict keeps its table, 170 bytes
        if asked is None:
            return None
        self.waiting -= len(asked.answers)
        granted = dict(zip(asked.joined, codes or [0] * len(asked.joined), strict=True))
        for name, code in granted.items():
            if code == SUBACK_FAILURE:
                self._forget(name)
        return [SUBACK_FAILURE if name is None else granted[name] for name in asked.answers]

    def leave(self, names: Sequence[str]) -> list[tuple[str, RoomID | UIN]]:
        """Remove filters. Returns those that were there, with their rooms."""
        left = [(name, room) for name in dict.fromkeys(names) if (room := self._forget(name)) is not None]
        self.fruitless += len(names) - len(left)
        return left

    def _has_space_for(self, name: str) -> bool:
        if name in self.rooms:
            return True
        return len(self.rooms) < self._max_filters and self._bytes + len(name) <= self._max_bytes

    def _forget(self, name: str) -> RoomID | UIN | None:
        room = self.rooms.pop(name, None)
        if room is not None:
            self._bytes -= len(name)
        return room
