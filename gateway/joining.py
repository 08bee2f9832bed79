"""Clients of a gateway that join and leave: what they want, the reports of it, and their answers. Pure.

Source: docs/architecture.md, "A subscription"; docs/subscriptions.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.core.contract import NEVER
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.delivery.mail import MailBook
from gateway.delivery.retained import RetainedDeliveries
from gateway.membership.devices import DeviceIndex
from gateway.membership.reporter import Answered, MembershipReporter
from gateway.membership.rooms import THE_GATEWAY, Client, Present, RoomIndex
from pixiu.placement.topics import USER_PREFIX, Filter, parse_filter

LEAVES_A_TURN: Final = 128
"""Rooms that departed clients leave in one turn of the event loop, about 15 µs each; the rest follows in later turns."""
LINGER_S: Final = 30.0
"""Time for which a gateway stays in the rooms of a filter that spans several after the last client has left it, seconds: a client
that joins and leaves such a filter again and again costs routers nothing."""
MAX_WIDE_ROOMS: Final = 2048
"""Rooms that one connection's filters with wildcards may span by default: two rules of topics' rooms, or 16 times all topics."""


@dataclass(slots=True)
class _Asked:
    """A client's request that is not answered yet."""

    event: ev.Join
    joined: dict[str, tuple[int, ...]]
    """Filters of the event that no check refused, with their rooms."""
    fetch: int
    """Number of the fetch of retained messages; 0: none."""
    waits_for: int
    """Number of answers still missing: of the routers and, where needed, of the relays."""
    known: bool = True
    rooms_refused: frozenset[int] = frozenset()
    user_refused: bool = False


class Joining:
    """Joins and leaves.

    Args:
        rooms, users: report to routers and to relays.
        next_id: gives a GatewayMsgID.
        through_relays: room messages come through relays, so a join takes effect only when they know the user.
        max_wide_rooms: rooms that one connection's filters with wildcards may span, beyond one each.
    """

    def __init__(
        self,
        index: RoomIndex,
        rooms: MembershipReporter,
        users: MembershipReporter,
        devices: DeviceIndex,
        mail: MailBook,
        retained: RetainedDeliveries,
        next_id: Callable[[], int],
        *,
        through_relays: bool,
        max_wide_rooms: int,
    ) -> None:
        self.index, self.rooms, self.users, self.devices, self.mail, self.retained = index, rooms, users, devices, mail, retained
        self._next_id, self._through_relays, self.max_wide_rooms = next_id, through_relays, max_wide_rooms
        self._asked: dict[int, dict[int, _Asked]] = {}
        """Connection → requests that are not answered yet."""
        self._lingering: dict[int, float] = {}
        """Room that no filter spans any more → time at which the gateway leaves it, ascending."""
        self.leave_at = NEVER
        """Time at which rooms are left that no filter spans any more; `NEVER`: there are none."""
        self.leaving: deque[ev.Closed] = deque()
        """Departed clients that are still in rooms."""

    def closed(self, event: ev.Closed, client: Client) -> None:
        """Note that a client is gone; it leaves its rooms by `leave_some`."""
        self.index.leave_user(event.connection)
        self.rooms.forget(event.connection)
        self.users.forget(event.connection)
        self._asked.pop(event.connection, None)
        client.gone = True
        self.retained.closed(event.connection)
        self.leaving.append(event)

    def _say_rooms(self, present: list[Present], login: bool, reason: int, now: float) -> None:
        if not present:
            return
        if self._lingering or not login:
            present = [each for each in present if each.member != THE_GATEWAY or not self._lingers(each.room, login, now)]
        self.rooms.announce([Update(self._next_id(), room, member, login, reason, value) for room, member, value in present], now)

    def _lingers(self, room: int, login: bool, now: float) -> bool:
        """Note that the gateway enters or leaves a room for a filter that spans several. Returns True if routers need not know."""
        if login:
            found = self._lingering.pop(room, None) is not None
        else:
            self._lingering[room] = now + LINGER_S
            found = True
        self._set_time()
        return found

    def _set_time(self) -> None:
        self.leave_at = next(iter(self._lingering.values()), NEVER)

    def leave_wide(self, now: float) -> None:
        """Leave the rooms that no filter has spanned for a while."""
        due: list[int] = []
        for room, at in self._lingering.items():
            if at > now or len(due) >= LEAVES_A_TURN:
                break
            due.append(room)
        for room in due:
            del self._lingering[room]
        self._set_time()
        self.rooms.announce([Update(self._next_id(), room, THE_GATEWAY, False, 1) for room in due], now)

    def client(self, connection: int) -> Client | None:
        """A client that is connected; None: it is gone, or leaving."""
        client = self.index.clients.get(connection)
        return client if client is not None and not client.gone else None

    def leave_some(self, now: float) -> None:
        """Take departed clients out of their rooms. Until then they get messages that no connection takes."""
        left = LEAVES_A_TURN
        while self.leaving and left > 0:
            gone = self.leaving[0]
            client = self.index.clients[gone.connection]
            filters: list[str] = []
            for text, subscription in client.filters.items():
                filters.append(text)
                left -= max(len(subscription.rooms), 1)
                if left <= 0:
                    break
            left -= not filters
            self._say_rooms(self.index.leave(gone.connection, filters), False, gone.reason, now)
            if not client.filters:
                del self.index.clients[gone.connection]
                self.leaving.popleft()

    def join(self, event: ev.Join, now: float, out: list[ev.Effect]) -> None:
        """Subscribe a client; it is answered when routers, and where needed relays, know it."""
        client = self.client(event.connection)
        if client is None:
            return
        joined, pairs, retained = self._join_filters(event, client, now)
        fetch = self.retained.begin(event.connection, retained) if retained else 0
        to_user = event.chat or event.mail
        asked = _Asked(event, joined, fetch, 2 if to_user or self._through_relays else 1)
        self._asked.setdefault(event.connection, {})[event.request] = asked
        if asked.waits_for == 1:
            self.answered(self.rooms.request(event.connection, event.request, pairs, now), now, out)
            return
        if event.chat:
            self.index.join_user(event.connection)
        if to_user:
            # A device has one inbox: the older connection is notified, as a relay does if it is at another gateway.
            older = self.devices.older(event.connection) if event.mail and not self.devices.takes_mail(event.connection) else []
            out += [ev.Disconnect(connection, control_pb2.REASON_MOVED) for connection in older]
            self.users.announce(self.devices.join(event.connection, chat=event.chat, mail=event.mail), now)
        devices = self.devices.pairs(event.connection)
        self.answered(self.rooms.request(event.connection, event.request, pairs, now), now, out)
        self.answered(self.users.request(event.connection, event.request, devices, now), now, out, users=True)

    def _join_filters(
        self, event: ev.Join, client: Client, now: float
    ) -> tuple[dict[str, tuple[int, ...]], set[tuple[int, int]], list[str]]:
        """Join filters. Returns those that can be had, with their rooms; what routers must know for them; and those whose retained
        messages the client gets."""
        index, connection = self.index, event.connection
        joined: dict[str, tuple[int, ...]] = {}
        pairs: set[tuple[int, int]] = set()
        retained: list[str] = []
        present: list[Present] = []
        for wanted in event.channels:
            text = wanted.filter
            parsed = parse_filter(text)
            if not isinstance(parsed, Filter) or parsed.name.startswith(USER_PREFIX):
                continue
            rooms = index.rooms_of(client, parsed)
            if rooms is None or (parsed.group and self._through_relays):
                continue  # with relays brokers do not send to gateways, so they cannot choose one for a group
            new = text not in client.filters
            if new and len(rooms) > 1 and client.wide_rooms + len(rooms) - 1 > self.max_wide_rooms:
                continue
            joined[text] = rooms
            present += index.join(connection, client, wanted, parsed, rooms)
            member = index.member(client, parsed, rooms)
            for room in rooms:
                pairs.add((room, member))
            handling = wanted.retain_handling
            if rooms and not parsed.group and client.dialect and (not handling or (handling == 1 and new)):
                retained.append(text)
        self._say_rooms(present, True, 0, now)
        return joined, pairs, retained

    def answered(self, answers: list[Answered], now: float, out: list[ev.Effect], *, users: bool = False) -> None:
        """Answer the clients; a request that needs both routers and relays is answered after the second."""
        for answer in answers:
            asked = self._asked.get(answer.connection, {}).get(answer.request)
            if asked is None:
                continue
            asked.waits_for -= 1
            asked.known = asked.known and answer.known
            if users:
                asked.user_refused = bool(answer.refused)
            else:
                asked.rooms_refused = answer.refused
            if asked.waits_for:
                continue
            del self._asked[answer.connection][answer.request]
            if not self._asked[answer.connection]:
                del self._asked[answer.connection]
            refused = self._leave_refused(answer.connection, asked, now, out)
            to_user = asked.event.chat or asked.event.mail
            user_refused = to_user and (asked.user_refused or bool(refused and not self.index.clients[answer.connection].packets))
            out.append(ev.Answer(answer.connection, answer.request, asked.known, refused, user_refused))
            fetch = self.retained.effect(asked.fetch, refused) if asked.fetch else None
            if fetch is not None:
                out.append(fetch)

    def _leave_refused(self, connection: int, asked: _Asked, now: float, out: list[ev.Effect]) -> frozenset[str]:
        """Take a client out of the refused filters, or of all if the request must be refused whole. Returns these filters."""
        client, event = self.index.clients[connection], asked.event
        refused = {wanted.filter for wanted in event.channels if wanted.filter not in asked.joined}
        if not refused and not asked.rooms_refused and not asked.user_refused:
            return frozenset()
        whole = not client.packets or (asked.user_refused and self._through_relays)
        gone = [text for text, rooms in asked.joined.items() if whole or not asked.rooms_refused.isdisjoint(rooms)]
        self._say_rooms(self.index.leave(connection, gone), False, 1, now)
        if asked.user_refused or whole:
            if event.chat:
                self.index.leave_user(connection)
            self.users.announce(self.devices.leave(connection, chat=event.chat, mail=event.mail), now)
            if event.mail:
                out += self.mail.closed(connection)
        return frozenset((*refused, *gone))

    def leave(self, event: ev.Leave, now: float, out: list[ev.Effect]) -> None:
        """Unsubscribe a client."""
        client = self.client(event.connection)
        if client is None:
            return
        self._say_rooms(self.index.leave(event.connection, event.filters), False, 1, now)
        if event.chat:
            self.index.leave_user(event.connection)
        self.users.announce(self.devices.leave(event.connection, chat=event.chat, mail=event.mail), now)
        if event.mail:
            out += self.mail.closed(event.connection)
