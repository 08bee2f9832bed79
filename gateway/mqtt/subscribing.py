"""Subscriptions of one MQTT client: joins in steps, the reason codes of its SUBACKs, leaves, and their rate.

Source: docs/architecture.md, "The gateway's edge".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from cluster.core.reading_gate import Hold
from cluster.mqtt.events import CloseReason, SubscribeFilters, UnsubscribeFilters
from cluster.mqtt.reason_codes import ReasonCode
from gateway import events as ev
from gateway.clients.access import foresee_subscribe, may_read_mail, may_subscribe
from gateway.clients.clients import Clients
from gateway.mqtt.publishing import MQTTClient
from pixiu.placement.topics import USER_PREFIX, user_of_topic

RESTORED: Final = 0
"""In place of the packet ID of a SUBSCRIBE: filters of the client's session from before."""
BUSY: Final = "the filters of the client's session cannot be joined now"
JOINS_A_STEP: Final = 32
"""Filters of a SUBSCRIBE that are joined at a time."""


class Subscribing:
    """Subscribes and unsubscribes one MQTT client, within its rate."""

    __slots__ = ("_client", "_clients", "_codes", "_counted", "_takes_mail", "_wanted")

    def __init__(self, client: MQTTClient, clients: Clients) -> None:
        self._client, self._clients = client, clients
        self._takes_mail = False
        self._wanted: dict[int, dict[str, ev.Wanted]] | None = None
        """Packet ID of a SUBSCRIBE → its filters, in a session that outlives the connection."""
        self._counted = 0
        """Subscriptions that its tenant was charged."""
        self._codes: dict[int, dict[str, tuple[int, bool]]] = {}
        """Packet ID of a SUBSCRIBE → for each filter its reason code, and whether it is the user's own; as many as the session lets
        wait."""

    def wait_s(self, filters: int) -> float | None:
        """Take the client's turn among those that join much. Returns the seconds to wait; None: too many wait, or join in all."""
        return self._client.joins.wait_s(filters, self._clients.now())

    def must_ask(self, effect: SubscribeFilters) -> bool:
        """True if a callback must be asked before the client may subscribe."""
        access = self._client.access
        return (
            access is not None
            and access.asks
            and foresee_subscribe(access, self._client.uin, [wanted.filter for wanted in effect.filters])
        )

    def in_vain(self, filters: int) -> bool:
        """True if this number of filters would be refused."""
        return self._client.joins.is_vain(filters, self._clients.now())

    def refused(self, filters: int) -> None:
        """Count filters that were refused unread, and hold the client."""
        self._client.joins.refuse(filters)
        self._hold_refused()

    def refuse(self, effect: SubscribeFilters) -> None:
        """Refuse these filters because too many wait already; the client may retry later."""
        if effect.packet_id == RESTORED:
            self._client.end(CloseReason.UNANSWERED, BUSY)
            return
        self._codes[effect.packet_id] = {wanted.filter: (ReasonCode.QUOTA_EXCEEDED, False) for wanted in effect.filters}
        self._hold_refused()
        self.answer(ev.Answer(self._client.id, effect.packet_id, True))

    def subscribe(self, effect: SubscribeFilters) -> None:
        """Join filters; if one turn has no time for all, some now and the others in the paced queue."""
        if not self._has_places():
            if effect.packet_id == RESTORED:
                self.refuse(effect)
                return
            names = [wanted.filter for wanted in effect.filters]
            self._codes[effect.packet_id] = dict.fromkeys(names, (ReasonCode.QUOTA_EXCEEDED, False))
            self.unsubscribe(UnsubscribeFilters(names))  # one that it had before is refused as well
            self.answer(ev.Answer(self._client.id, effect.packet_id, True))
            return
        if effect.packet_id == RESTORED and self._client.keeping is not None:
            names = [wanted.filter for wanted in effect.filters]
            self._client.keeping.restored([name for name in names if not may_subscribe(self._client.access, name)])
        self._codes[effect.packet_id] = {}
        steps = self._client.steps.begin(effect.packet_id, (len(effect.filters) - 1) // JOINS_A_STEP + 1)
        self._join(effect, steps, 0)
        self.pace(len(effect.filters), joined=True)

    def unsubscribe(self, effect: UnsubscribeFilters) -> None:
        """Leave rooms, topics, and the messages to the user."""
        filters = [name for name in effect.filters if not name.startswith(USER_PREFIX)]
        user = len(filters) < len(effect.filters)
        self._clients.step(ev.Leave(self._client.id, filters, user, user and self._takes_mail))
        self._takes_mail = self._takes_mail and not user
        if self._client.keeping is not None:
            self._client.keeping.unsubscribed(effect)
        self.pace(len(effect.filters))

    def filters(self) -> list[str]:
        """Names of the client's subscriptions."""
        return list(self._client.subscriptions or ())

    def revoked(self, filters: Sequence[str], _why: str) -> None:
        """Leave filters. MQTT has no message for it."""
        self._client.forget(filters)
        self.unsubscribe(UnsubscribeFilters(list(filters)))

    def _has_places(self) -> bool:
        """Take places of the client's tenant for what it subscribes to. False: there are not enough."""
        access, there = self._client.access, self._client.subscriptions
        if access is None or access.tenant is None or there is None:
            return True
        more = len(there) - self._counted
        if more > 0 and not access.tenant.take_subscriptions(more):
            return False
        self._counted += max(more, 0)
        return True

    def count(self) -> None:
        """Give places of the client's tenant back that it does not need any more."""
        access = self._client.access
        if access is not None and access.tenant is not None:
            has = len(self._client.subscriptions or ())
            access.tenant.subscriptions -= max(self._counted - has, 0)
            self._counted = min(self._counted, has)

    def pace(self, changes: int, *, joined: bool = False) -> None:
        """Charge joins, leaves or vain requests, and read on when the rate allows it."""
        client, there = self._client, self._client.subscriptions
        if there is not None:
            client.joins.has_now(len(there))
            self.count()
            client.hold(Hold.JOINS, client.joins.hold_s(changes, self._clients.now(), joined=joined))

    def answer(self, answer: ev.Answer) -> None:
        """Report the result of a subscription, including what of it was refused."""
        whole = self._client.steps.answered(answer)
        if whole is None:
            return
        found = self._codes.pop(whole.request, None)
        if not self._codes:
            self._codes = {}  # an emptied one keeps its table, 170 bytes
        if found is None:
            return
        codes = {}
        for name, (code, user) in found.items():
            refused = whole.user_refused if user else name in whole.refused
            codes[name] = ReasonCode.QUOTA_EXCEEDED if refused else code
        if whole.user_refused:
            self._takes_mail = False
        if self._wanted is not None and self._client.keeping is not None:
            wanted, there = self._wanted.pop(whole.request, {}), self._client.subscriptions or ()
            # Those that the client has left since are answered, but not stored.
            granted = [
                wanted[name]._replace(qos=code) for name, code in codes.items() if code <= 2 and name in there and name in wanted
            ]
            self._client.keeping.subscribed(whole.request, granted, partial(self._stored, whole.request, codes))
        else:
            self._client.subscribed(whole.request, list(codes.values()))
            self.count()

    def _stored(self, request: int, codes: dict[str, int], refused: dict[str, ReasonCode]) -> None:
        """Answer a SUBSCRIBE in a session that outlives the connection, which is stored now."""
        codes.update(refused)
        if refused:
            self._clients.step(ev.Leave(self._client.id, list(refused)))
        if request != RESTORED:
            self._client.subscribed(request, list(codes.values()))
            self.count()
        elif ReasonCode.QUOTA_EXCEEDED in codes.values():
            self._client.end(CloseReason.UNANSWERED, BUSY)
        elif lost := [name for name, code in codes.items() if code >= ReasonCode.UNSPECIFIED]:
            self.revoked(lost, "")  # the rules have changed: MQTT has no message for it

    def is_allowed(self) -> bool:
        """True if the rules allow everything that the client has subscribed to."""
        client = self._client
        allowed = all(may_subscribe(client.access, name) for name in client.subscriptions or ())
        return allowed and (not self._takes_mail or may_read_mail(client.access, client.uin))

    def _note_wanted(self, packet_id: int, wanted: ev.Wanted) -> None:
        if self._wanted is None:
            self._wanted = {}
        self._wanted.setdefault(packet_id, {})[wanted.filter] = wanted

    def _hold_refused(self) -> None:
        self._client.hold(Hold.JOINS, self._client.joins.refusal_hold_s(random.random()))

    def _join(self, effect: SubscribeFilters, steps: Sequence[int], step: int) -> None:
        """Join rooms and topics as they are; of users only the client's own, and only if messages to users can arrive."""
        client, there = self._client, self._client.subscriptions
        if there is None:
            return
        codes, first = self._codes[effect.packet_id], step * JOINS_A_STEP
        if step + 1 < len(steps):
            self._clients.paced.later(partial(self._join, effect, steps, step + 1))
        channels: list[ev.Wanted] = []
        chat = mail = False
        keeping = client.keeping
        if keeping is not None:
            keeping.subscribing(effect.packet_id)
        for wanted in effect.filters[first : first + JOINS_A_STEP]:
            name = wanted.filter
            if keeping is not None:
                wanted = keeping.wanted(wanted)
                self._note_wanted(effect.packet_id, wanted)
            if not may_subscribe(client.access, name):
                codes[name] = (ReasonCode.NOT_AUTHORISED, False)
            elif not name.startswith(USER_PREFIX):
                codes[name] = (wanted.qos, False)
                if name in there:  # a filter that the client has left since is not joined, but still answered
                    channels.append(wanted)
            elif user_of_topic(name) == client.uin and self._clients.serves_users:
                chat = True
                mail = name in effect.mail and self._clients.serves_mail and may_read_mail(client.access, client.uin)
                codes[name] = (int(mail), True)
            else:
                codes[name] = (ReasonCode.NOT_AUTHORISED, False)
        if chat and self._takes_mail and not mail:
            self._clients.step(ev.Leave(client.id, [], False, True))
        self._takes_mail = mail if chat else self._takes_mail
        if channels or chat:
            self._clients.step(ev.Join(client.id, steps[step], channels, chat, mail))
        else:
            self.answer(ev.Answer(client.id, steps[step], True))
