"""The filters of one MQTT connection: those that it has, and those that wait for the cluster. Pure.

Source: OASIS MQTT 3.1.1 section 3.8; MQTT 5.0 sections 3.8 to 3.11; docs/mqtt.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from cluster.core.contract import NEVER
from cluster.mqtt.events import CloseReason, Problem, Wanted
from cluster.mqtt.reason_codes import ReasonCode
from pixiu.ids import UIN, RoomID
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topics import USER_PREFIX, TopicRefusal, destination, parse_filter

QOS_BITS: Final = 3
NO_LOCAL: Final = 4
RETAIN_AS_PUBLISHED: Final = 8
RETAIN_HANDLING_SHIFT: Final = 4
"""Of the options byte of a filter in a SUBSCRIBE."""
LARGE_ANSWER: Final = Problem(CloseReason.LARGE_ANSWER, "the answer has more filters than the client's maximum packet size allows")


def judge_filter(resolve: Callable[[str], RoomID | UIN | TopicRefusal], text: str) -> TopicRefusal | None:
    """The reason to refuse a filter."""
    found = parse_filter(text)
    if isinstance(found, TopicRefusal):
        return found
    if found.wild:
        return None
    room = resolve(found.name)
    # The server's own topics may be subscribed to, but not published to.
    return room if isinstance(room, TopicRefusal) and room is not TopicRefusal.SYSTEM else None


def outside_vrooms(vrooms: VRooms, name: str) -> RoomID | UIN | TopicRefusal:
    """`destination` in a cluster with big rooms: their VRooms are not valid topics."""
    found = destination(name)
    if isinstance(found, TopicRefusal) or name.startswith(USER_PREFIX):
        return found
    return TopicRefusal.VROOM if vrooms.is_vroom(found) else found


class Asked(NamedTuple):
    """The filters of a SUBSCRIBE, as far as it was decoded."""

    answers: list[tuple[str, int] | int]
    """One item per filter: its text and QoS if it waits for the cluster, a reason code if it was refused."""
    joined: dict[str, Wanted]
    mail: set[str]
    """Those of `joined` for which the client requests mail."""
    in_vain: bool
    """True if all of it is refused, whatever it contains."""


class Subscriptions:
    """Filters of one connection, and what is to be answered to its SUBSCRIBEs.

    judge: checks a filter; returns the reason to refuse it, or None. in_vain: the shell's policy for a SUBSCRIBE that comes in
    parts: whether to refuse all of it, by the number of filters in the first part.
    """

    __slots__ = (
        "_bytes", "_in_vain", "_judge", "_left", "_max_bytes", "_max_filters", "asking", "filters", "fruitless", "pending",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        max_filters: int,
        max_bytes: int,
        judge: Callable[[str], TopicRefusal | None],
        in_vain: Callable[[int], bool] | None,
    ) -> None:
        self._max_filters, self._max_bytes = max_filters, max_bytes
        self._judge, self._in_vain = judge, in_vain
        self.filters: dict[str, int] = {}
        """The filters that the client has or waits for, and their subscription identifiers (0: none). Not to be changed outside."""
        self._bytes = 0
        self._left: list[int] | None = None
        """Reason codes of an UNSUBSCRIBE of which more parts follow."""
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

    def ask(self, filters: Sequence[tuple[str, int]], identifier: int = 0, *, more: bool, keep: bool) -> Asked:
        """Add the filters of a SUBSCRIBE, or of a part of one, with their options. keep: the session is to be kept, so its user
        filters of QoS 1 take mail."""
        asked = self.asking
        if asked is None:
            asked = Asked([], {}, set(), more and self._in_vain is not None and self._in_vain(len(filters)))
        self.asking = asked if more else None
        answers, joined, mail, in_vain = asked
        if in_vain:
            answers.extend([ReasonCode.QUOTA_EXCEEDED] * len(filters))
            return asked
        for name, options in filters:
            # The limit is checked first: it costs the least, and a client that sends endless filters has reached it.
            if not self._has_space_for(name):
                self.fruitless += 1
                answers.append(ReasonCode.QUOTA_EXCEEDED)
                continue
            if self._judge(name) is not None:
                self.fruitless += 1
                answers.append(ReasonCode.TOPIC_FILTER_INVALID)
                continue
            if name not in self.filters:
                self._bytes += len(name)
            self.filters[name] = identifier
            qos = options & QOS_BITS
            answers.append((name, qos))
            joined[name] = Wanted(
                name,
                qos,
                bool(options & NO_LOCAL),
                bool(options & RETAIN_AS_PUBLISHED),
                options >> RETAIN_HANDLING_SHIFT,
                identifier,
            )
            if qos and keep and name.startswith(USER_PREFIX):
                mail.add(name)
            else:
                mail.discard(name)
        return asked

    def restore(self, filters: Iterable[Wanted]) -> None:
        """Add the filters that the client's session has from earlier connections."""
        for wanted in filters:
            self._bytes += len(wanted.filter)
            self.filters[wanted.filter] = wanted.identifier

    def wait(self, packet_id: int, asked: Asked, now: float) -> None:
        """Have a whole SUBSCRIBE wait for the cluster."""
        self.pending[packet_id] = now, asked
        self.waiting += len(asked.answers)

    def confirm(self, packet_id: int, codes: Sequence[int] | None) -> tuple[list[int], bool] | None:
        """End the wait of a SUBSCRIBE: `codes` has one for each filter of `Asked.joined`, None: each its QoS. Returns the codes of
        its SUBACK, and whether mail was granted; None: it does not wait."""
        _, asked = self.pending.pop(packet_id, (0.0, None))
        if not self.pending:
            self.pending = {}  # an emptied dict keeps its table, 170 bytes
        if asked is None:
            return None
        self.waiting -= len(asked.answers)
        if codes is None:
            codes = [wanted.qos for wanted in asked.joined.values()]
        granted = dict(zip(asked.joined, codes, strict=True))
        for name, code in granted.items():
            if code >= ReasonCode.UNSPECIFIED:
                self._forget(name)
        mail = any(0 < granted[name] < ReasonCode.UNSPECIFIED for name in asked.mail)
        return [
            one if isinstance(one, int) else _granted(granted[one[0]], one[1], asked.joined[one[0]].qos) for one in asked.answers
        ], mail

    def leave(self, names: Sequence[str], *, more: bool) -> tuple[list[str], list[int]]:
        """Remove the filters of an UNSUBSCRIBE, or of a part of one. Returns those that were there, and the reason codes of the
        whole UNSUBSCRIBE once no more follows."""
        left: list[str] = []
        codes = self._left or []
        for name in names:
            if self._forget(name):
                left.append(name)
                codes.append(ReasonCode.SUCCESS)
            else:
                codes.append(ReasonCode.NO_SUBSCRIPTION_EXISTED)
        self.fruitless += len(names) - len(left)
        self._left = codes if more else None
        return left, codes

    def revoke(self, names: Sequence[str]) -> None:
        """Remove filters that the client may not have any more."""
        for name in names:
            self._forget(name)

    def _has_space_for(self, name: str) -> bool:
        if name in self.filters:
            return True
        return len(self.filters) < self._max_filters and self._bytes + len(name) <= self._max_bytes

    def _forget(self, name: str) -> bool:
        there = self.filters.pop(name, None) is not None
        if there:
            self._bytes -= len(name)
        return there


def _granted(code: int, qos: int, last: int) -> int:
    """The code of one of several equal filters of a SUBSCRIBE, which are as several SUBSCRIBEs [MQTT-3.8.4-4]. last: the QoS that
    the last of them asks for; a higher code is meant as it is."""
    return code if code >= ReasonCode.UNSPECIFIED or code > last else min(code, qos)
