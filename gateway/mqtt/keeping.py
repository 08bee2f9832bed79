"""One MQTT connection of a session that outlives it: what of its inbox the client gets, and what is stored before it is answered.

Source: docs/mqtt.md, "Sessions".
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol

from cluster.mqtt.events import CloseReason, Effect, ForgetMessage, Kept, KeptAcknowledged, KeptReceived, UnsubscribeFilters, Wanted
from cluster.mqtt.outbound import Delivery, KeptDelivery
from cluster.mqtt.packets import MQTT_5, Connect
from cluster.mqtt.properties import Property, number
from cluster.mqtt.reason_codes import ReasonCode
from gateway import events as ev
from gateway.delivery.fan_out import sent_at_ms_of
from gateway.mail.run import MailRun
from gateway.sessions.service import Sessions
from gateway.sessions.session import Session, is_keepable
from gateway.sessions.states import MAX_INBOUND, NEVER_EXPIRES
from pixiu.errors import OldSession, PixiuError
from pixiu.ids import SnowflakeID
from pixiu.placement.topics import Filter, parse_filter

KEPT_EFFECTS: Final = (KeptAcknowledged, KeptReceived, ForgetMessage)
"""Effects of a connection that concern its session."""
MOVED: Final = "the same client connected to another gateway"
UNRELEASED: Final = f"{MAX_INBOUND} messages of QoS 2 without a PUBREL"


class KeptClient(Protocol):
    """The connection, as its session needs it."""

    id: int

    @property
    def is_open(self) -> bool:
        """True while its session continues."""

    def deliver_each(self, messages: Sequence[Delivery]) -> None:
        """Take messages to make packets of."""

    def deliver_kept(self, messages: Sequence[KeptDelivery], anew: bool) -> None:
        """Take messages of the session's inbox."""

    def release(self, packet_id: int) -> None:
        """Send the PUBREL of one of them."""

    def write_answer(self, data: bytes) -> None:
        """Write an answer."""

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection."""


def asked_expiry_s(connect: Connect) -> int:
    """Session expiry that a client asks for, seconds."""
    if connect.dialect is MQTT_5:
        return number(connect.properties, Property.SESSION_EXPIRY, 0)
    return 0 if connect.clean_session else NEVER_EXPIRES


class Keeping:
    """The session of one connection."""

    __slots__ = ("_client", "_early", "_joining", "_kept_at_ms", "_sessions", "_step", "session")

    def __init__(self, client: KeptClient, sessions: Sessions, session: Session, step: Callable[[ev.Event], None]) -> None:
        self._client, self._sessions, self._step, self.session = client, sessions, step, session
        self._early: list[tuple[Sequence[MailRun], bool]] | None = [] if session.filters else None
        """Messages that came before the rules were asked about the restored filters; None: they were."""
        self._joining: set[int] = set()
        """Packet IDs of SUBSCRIBEs that are not answered."""
        self._kept_at_ms = 0
        """Time since which every filter is kept, Unix milliseconds."""

    @property
    def kept(self) -> Kept:
        """The session as CONNACK reports it, with the filters that are restored."""
        session = self.session
        return Kept(session.present, session.note.expiry_s, tuple(session.filters.values()))

    # --- the inbox

    def deliver(self, runs: Sequence[MailRun], anew: bool) -> None:
        """Pass messages of the inbox on to the client."""
        if self._early is not None:
            self._early.append((runs, anew))
            return
        taken = self.session.take(runs)
        if taken.gaps:
            self._sessions.lost(taken.gaps)
        if self.session.pruned:
            self._run(self._sessions.store_released(self.session))
        if taken.plain:
            self._client.deliver_each(taken.plain)
        if taken.over:
            self.acknowledge(taken.over)
        if taken.kept or anew:
            self._client.deliver_kept(taken.kept, anew)

    def live(self, messages: Sequence[Delivery]) -> Sequence[Delivery]:
        """Messages that came live, without those that the inbox may have, too. They were published before the SUBACK: a broker
        passed them on before it knew their room's mark, with others that it refused, so that their proxy asked for them as well."""
        if not any(message.early for message in messages):
            return messages
        return [message for message in messages if not (message.early and self._is_older(message.record))]

    def _is_older(self, record: bytes) -> bool:
        """True if a record was published before all filters were kept."""
        return bool(self._joining) or sent_at_ms_of(record) <= self._kept_at_ms

    def restored(self, denied: Iterable[str]) -> None:
        """Pass on what waited for the rules, without what only filters match that they deny now."""
        self.session.withhold(denied)
        early, self._early = self._early, None
        for runs, anew in early or ():
            self.deliver(runs, anew)

    def acknowledge(self, packet_ids: Sequence[int]) -> None:
        """Acknowledge messages in the inbox."""
        self._step(ev.PacketsAcknowledged(-self._client.id, self.session.done(packet_ids)))

    def carry_out(self, effect: Effect) -> None:
        """Carry out an effect of the connection that concerns its session."""
        if isinstance(effect, KeptAcknowledged):
            self.acknowledge(effect.packet_ids)
        elif isinstance(effect, KeptReceived):
            packet_id = effect.packet_id
            self.session.released.packet_ids.add(packet_id)
            self._run(self._sessions.store_released(self.session), lambda: self._client.release(packet_id))
        elif isinstance(effect, ForgetMessage):
            answer = effect.answer
            if self.session.inbound.messages.pop(effect.packet_id, None) is None:
                self._client.write_answer(answer)
            else:
                self._run(self._sessions.store_inbound(self.session), lambda: self._client.write_answer(answer))

    # --- messages of QoS 2 from the client

    def snowflake(self, packet_id: int) -> SnowflakeID | None:
        """The ID of a message that is stored already: it may have been published."""
        found = self.session.inbound.messages.get(packet_id)
        return None if found is None else SnowflakeID(found)

    def store(self, packet_id: int, snowflake: SnowflakeID, stored: Callable[[], None]) -> None:
        """Store the ID of a message of QoS 2 before it is published."""
        messages = self.session.inbound.messages
        if len(messages) >= MAX_INBOUND:
            self._client.end(CloseReason.UNRELEASED, UNRELEASED)
            return
        messages[packet_id] = snowflake
        self._run(self._sessions.store_inbound(self.session), stored)

    def refused(self, packet_id: int) -> None:
        """Forget a message whose exchange a refusal has ended."""
        if self.session.inbound.messages.pop(packet_id, None) is not None:
            self._run(self._sessions.store_inbound(self.session))

    # --- filters

    def wanted(self, wanted: Wanted) -> Wanted:
        """A filter with the QoS that is granted: 0 where messages are not kept, and 1 at least for important topics."""
        parsed = parse_filter(wanted.filter)
        if not isinstance(parsed, Filter) or not is_keepable(parsed):
            return wanted
        if not self._sessions.rooms_of(parsed):
            return wanted._replace(qos=0)
        qos = max(wanted.qos, 1) if self._sessions.is_important(parsed.name) else wanted.qos
        return wanted._replace(qos=qos, kept=qos > 0)

    def subscribing(self, packet_id: int) -> None:
        """Note that filters of a SUBSCRIBE are being joined."""
        self._joining.add(packet_id)

    def subscribed(self, packet_id: int, filters: Sequence[Wanted], answer: Callable[[dict[str, ReasonCode]], None]) -> None:
        """Store filters that were joined, then answer with those that are refused after all."""

        async def keep() -> None:
            refused = await self._sessions.keep(self.session, filters)
            self._joining.discard(packet_id)
            self._kept_at_ms = time.time_ns() // 1_000_000
            if self._client.is_open:
                answer(dict.fromkeys(refused, ReasonCode.QUOTA_EXCEEDED))

        self._run(keep())

    def unsubscribed(self, effect: UnsubscribeFilters) -> None:
        """Store the session without filters, then answer."""
        self.left(effect.filters, lambda: self._client.write_answer(effect.answer) if effect.answer else None)

    def left(self, names: Iterable[str], done: Callable[[], object] | None = None) -> None:
        """Store the session without filters."""
        self._run(self._sessions.leave(self.session, list(names)), done)

    def end(self, expiry_s: int) -> None:
        """Store the end of the connection. expiry_s: that the client set at its end; -1: none."""
        self._sessions.unmatched += self.session.unmatched
        self._sessions.end(self.session, expiry_s)

    def shown(self) -> dict[str, object]:
        """Values for the page /sessions."""
        session = self.session
        return {"expiry_s": session.note.expiry_s, "lost": session.dropped + session.gaps, "waited": session.waiting}

    def _run(self, work: Awaitable[None], done: Callable[[], object] | None = None) -> None:
        """Store something, then go on. If that fails, the connection ends, and the client repeats what was not answered."""

        async def run() -> None:
            try:
                await work
            except OldSession:
                self._client.end(CloseReason.TAKEN_OVER, MOVED)
            except PixiuError as error:
                self._client.end(CloseReason.UNANSWERED, f"the session cannot be stored now: {error}")
            else:
                if done is not None and self._client.is_open:
                    done()

        self._sessions.run(run())
