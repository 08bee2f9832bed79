"""The MQTT side of a gateway: one asyncio protocol around the session of `cluster.mqtt.server`.

Source: docs/mqtt.md.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any

from cluster.access.login_guard import MAX_HOLD_S, LoginSession
from cluster.access.tenants.use import TenantUse
from cluster.core.contract import NEVER
from cluster.core.reading_gate import Hold
from cluster.core.turn import SMALL_READ_BYTES
from cluster.listeners.clients import close_once, host_of
from cluster.mqtt import events as session_events
from cluster.mqtt.events import CloseReason, Effect
from cluster.mqtt.mail import Mails
from cluster.mqtt.outbound import KeptDelivery
from cluster.mqtt.packets import MQTT_5
from cluster.mqtt.properties import Property, number
from cluster.mqtt.properties_in_records import extension_for_will
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.server import ServerSession
from gateway import events as ev
from gateway.clients.access import foresee_publish
from gateway.clients.backlog import Grade
from gateway.clients.clients import SLOW, Clients, ClientSession
from gateway.mail.queue import OVERRUN
from gateway.mail.run import MailRun
from gateway.mqtt.effects import IN_TURN, LOGOUT_REASONS
from gateway.mqtt.keeping import KEPT_EFFECTS, Keeping
from gateway.mqtt.login import REFUSAL_DELAY_S, Login
from gateway.mqtt.publishing import Publishing
from gateway.mqtt.sockets import keep_alive, reset_at_close
from gateway.mqtt.subscribing import Subscribing
from gateway.sessions.service import Sessions
from gateway.sessions.session import Session
from gateway.tenants.packets import Insider, delivered, kept_delivered, translate
from pixiu.ids import device_class_of_name, device_of_name, uin_of_name
from pixiu.placement.topics import USER_PREFIX

WRITE_BYTES = 64 << 10
"""Bytes written at a time to a client that catches up. What it does not take at once waits in asyncio's buffer; while that is not
empty, messages wait in our own bounded backlog."""
MAX_ANSWER_BYTES = 256 << 10
"""Bytes of answers that may wait for a client that does not read; beyond it the client is closed."""
READ_BYTES = 64 << 10
"""Bytes read from one client in a turn: asyncio would read 256 KiB without asking whether the turn has time for it."""
LONG_BYTES = 4096
SLOW_READ_BYTES_PER_S = 64 << 10
"""Read rate for a client that publishes `LONG_BYTES` or more to topics that no room carries; and, while little packet memory is
left, for a client with an unfinished packet of that size."""
CONNECT_SPREAD_S = 1.0
"""Connections without a CONNECT are closed late by a random time up to this, seconds: those that came together would otherwise be
closed in one turn of the loop, while nobody is served, and come back together."""
CLOSE_TIMEOUT_S = 5.0
"""Time that a client being closed has to read what was written before, seconds."""


class MQTTConnection(ClientSession):
    """The connection of one MQTT client: an `asyncio.Protocol` in all but name, because a compiled class cannot derive from it."""

    __slots__ = (
        "_address",
        "_answer_bytes",
        "_answers",
        "_asking",
        "_behind",
        "_held",
        "_login",
        "_loop",
        "_new_until",
        "_out",
        "_out_count",
        "_paused",
        "_published",
        "_publishing",
        "_session",
        "_subscribing",
        "_timer",
        "_timer_at",
        "_transport",
        "_unread",
        "client_id",
        "dialect",
        "keeping",
    )

    packets = True

    def __init__(self, clients: Clients, sessions: Sessions | None = None) -> None:
        super().__init__(clients)
        self.keeping: Keeping | None = None
        """Its session, if that outlives the connection."""
        self.client_id: str | None = None
        """The name among the gateway's clients, once it is connected."""
        self.dialect = 3
        self._login = Login(self, clients, sessions)
        self._loop = asyncio.get_running_loop()
        self._session: ServerSession | None = None
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._out: list[bytes] = []
        self._out_count = 0
        self._answers: list[bytes] = []
        """Answers, written before anything else: when the gateway has finished its present work, or at the end of its turn."""
        self._answer_bytes = 0
        """Bytes of answers written since the client last took everything."""
        self._unread = b""
        """Bytes read in a turn that had no time for them."""
        self._held = 0
        """Bytes that count for the memory of all clients: unread, of an unfinished packet, or waiting to be published."""
        self._new_until = 0.0
        """Until when the connection counts as new."""
        self._paused = False
        self._asking: asyncio.Task[None] | None = None
        """Set while callbacks are asked, or while the client waits to join; its later effects wait."""
        self._behind: list[Effect] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._publishing = Publishing(self, clients)
        self._published: list[int] | None = None
        """Packet IDs to acknowledge at the end of the turn."""
        self._subscribing = Subscribing(self, clients)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the client has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = self._login.transport = transport
        self.id = self._clients.arrived(self, host_of(transport))
        self._new_until = self._clients.newcomers.arrived()
        transport.set_write_buffer_limits(high=1, low=0)  # at 0 asyncio's TLS takes an empty buffer for a full one
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's own; with TLS it is another one
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._clients.options.socket_send_buffer_bytes)
        if self._clients.pacer is not None:
            self._clients.pacer.be_patient(sock)
        self._address = keep_alive(sock, self._clients.options.tcp_keep_alive_s)
        clients, in_vain = self._clients, self._subscribing.in_vain
        self._session = ServerSession(
            clients.now(), self.assigned_id, clients.limits, self._login.admit, clients.vrooms, in_vain, self.gate, clients.counters
        )  # fmt: skip
        self._arm()

    @property
    def sessions(self) -> Sessions | None:
        """The gateway's sessions that outlive their connections; None: there are none."""
        return self._login.sessions

    @property
    def assigned_id(self) -> str:
        """Client ID if it sends none: unlike every other client's in the cluster, because two with one ID would replace each
        other."""
        return f"pixiu-{self._clients.endpoint:x}-{self.id:x}"

    def data_received(self, data: bytes) -> None:
        """Process a client's bytes: some packets at once, the rest in later turns of the loop, before more is read."""
        turn = self._clients.turn
        small = self.client_id is not None and len(data) <= SMALL_READ_BYTES
        waits = not self.gate.reads and self.gate.holds(Hold.TURN)
        if waits or not (small or (turn.has_time and not self._is_in_a_crowd())):
            self._unread += data
            self._hold_memory()
            self._work_later()
            return
        began = turn.now()
        self._receive(data)
        turn.spend(began)

    def _receive(self, data: bytes) -> None:
        session = self._session
        if session is None:
            return
        before = session.subscriptions.fruitless
        effects = session.receive(data, self._clients.now())
        fruitless = session.subscriptions.fruitless - before
        self._perform(effects)
        if session.sending is not None:
            self._write_outgoing()
        if fruitless:
            self._subscribing.pace(fruitless)
        self._hold_memory()
        if session.has_more:
            if self.gate.reads:
                self._work_later()
        elif self._held >= LONG_BYTES and session.buffered_bytes >= LONG_BYTES and self._clients.memory.is_crowded(self._address):
            self.hold(Hold.MEMORY, len(data) / SLOW_READ_BYTES_PER_S)

    def _work_later(self) -> None:
        """Continue in a later turn; nothing more is read meanwhile."""
        if not self.gate.holds(Hold.TURN):
            self.gate.hold(Hold.TURN, self._clients.now())
            line = self._clients.paced if self._is_in_a_crowd() else self._clients.turn
            line.later(self._work_on, first=self._session is not None and self._session.subscriptions.asking is not None)

    def _is_in_a_crowd(self) -> bool:
        return self._clients.now() < self._new_until and self._clients.newcomers.is_crowd()

    def _work_on(self) -> None:
        """Process the next packets that were read, unless the client is held for another reason as well."""
        if self.gate.holds_only(Hold.TURN):
            turn = self._clients.turn
            began = turn.now()
            data, self._unread = self._unread, b""
            self._receive(data)
            turn.spend(began)
        self.gate.release(Hold.TURN, self._clients.now())

    def _turned(self, reads: bool) -> None:
        """Stop reading, or go on: with what was read already, if there is more of it."""
        if self._session is None or self._transport is None or self._transport.is_closing():
            return
        super()._turned(reads)
        if not reads:
            self._transport.pause_reading()
        elif self._unread or self._session.has_more:
            self._work_later()
        else:
            self._transport.resume_reading()

    def _hold_memory(self) -> None:
        session = self._session
        before, self._held = self._held, 0
        if session is not None:
            self._held = len(self._unread) + session.buffered_bytes + self._publishing.waiting_bytes
        if before or self._held:
            self._clients.hold_memory(self, self._address, self._held)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._transport = None
        self._clients.slow_consumers.discard(self)
        if self._session is not None:
            self._perform(self._session.connection_lost(self._clients.now()))

    def eof_received(self) -> None:
        """Handle the end of what the client sends: the transport closes."""

    def pause_writing(self) -> None:
        """Let messages wait in the backlog, because the client did not take everything."""
        self._paused = True
        self._backlog.leaving(self._clients.slow_consumers.now())
        self._clients.slow_consumers.add(self)

    def resume_writing(self) -> None:
        """Write what waits, because the client took what was written: at once or, if it lags, after a while."""
        self._paused, self._answer_bytes = False, 0
        now = self._clients.slow_consumers.now()
        grade = self._backlog.grade(now)
        self._clients.slow_consumers.waited(self._backlog.behind_s(now))
        self._backlog.left()
        if self._backlog and grade is not Grade.PROMPT:
            self._clients.slow_consumers.catch_up_in_a_batch(self)
        else:
            self.catch_up()

    # What the slow consumers' timers call.

    def catch_up(self) -> None:
        """Write what waits, as far as the client takes it."""
        self._write_mail()
        while self._backlog and not self._paused and self._transport is not None:
            chunks, _ = self._backlog.take(WRITE_BYTES)
            self._write(b"".join(chunks))
            if not self._paused:
                self._backlog.left()
        self._write_outgoing()
        if not self._backlog and not self._mail and not self._paused:
            self._clients.slow_consumers.discard(self)

    # What the gateway calls.

    @property
    def _tenant(self) -> TenantUse | None:
        return self.access.tenant if self.access is not None else None

    def deliver(self, data: bytes, count: int) -> None:
        """Take `count` packets; they leave at `flush`."""
        self._out.append(data)
        self._out_count += count

    def deliver_each(self, messages: Sequence[ev.Delivery]) -> None:
        """Take messages to make packets of, for this client alone; they leave at `flush`, or when its window has space."""
        if self._session is not None:
            now, tenant = self._clients.now(), self._tenant
            messages = messages if self.keeping is None else self.keeping.live(messages)
            messages = messages if tenant is None else delivered(tenant, messages, now)
            self._perform(self._session.deliver(messages, now, time.time_ns() // 1_000_000))

    def takes_more(self) -> bool:
        """True if nothing waits for the client to read or to acknowledge."""
        session = self._session
        return session is not None and not self._paused and not self._backlog and not session.outbound_bytes

    def flush(self) -> None:
        """Write the answers and deliveries of this turn."""
        if self._published is not None:
            packet_ids, self._published = self._published, None
            if self._session is not None:
                arms = not self.gate.reads  # else no deadline comes nearer
                self._perform(self._session.publish_accepted(packet_ids, self._clients.now()), arms=arms)
        if self._answers:
            self._write_answers()
        if self._out:
            self._write_shared()
        if self._session is not None and self._session.sending is not None:
            self._write_outgoing()

    def _write_shared(self) -> None:
        """Write what was delivered as bytes that several clients share, or have it wait."""
        out, count = self._out, self._out_count
        self._out, self._out_count = [], 0
        if self._transport is None:
            return
        data = b"".join(out) if len(out) > 1 else out[0]
        if not self._paused and not self._backlog:
            self._write(data)
            return
        if not self._wait(data, count):
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def shown(self) -> dict[str, Any]:
        """Values for the page /sessions; see `ClientSession.shown`."""
        inflight, waiting = self._session.backlog if self._session is not None else (0, 0)
        shown = super().shown()
        name = self.client_id or ""
        shown |= {"address": self._address, "client": name if self.access is None else name.removeprefix(f"{self.uin} ")}
        if self.keeping is not None:
            shown |= self.keeping.shown()
        return {**shown, "protocol": f"mqtt {self.dialect}", "inflight": inflight, "backlog": shown["backlog"] + waiting}

    def deliver_mail(self, runs: Sequence[MailRun], anew: bool) -> None:
        """Write mail, as the client takes it."""
        if self._session is not None:
            mails, tenant = [Mails(run.lane, run.first, run.bodies, run.redelivered) for run in runs], self._tenant
            uin = self.uin if tenant is None else tenant.names.uin_inward(self.uin)
            self._perform(self._session.deliver_mail(f"{USER_PREFIX}{uin}", mails, self._clients.now(), anew=anew))

    def deliver_inbox(self, runs: Sequence[MailRun], anew: bool) -> None:
        """Write messages of its session's inbox, as the client takes them."""
        if self.keeping is not None and self._session is not None:
            self.keeping.deliver(runs, anew)
            self._clients.deliveries.flush_soon(self)

    def deliver_kept(self, messages: Sequence[KeptDelivery], anew: bool) -> None:
        """Take messages of its session's inbox to make packets of; they leave when its window has space."""
        if self._session is not None:
            now, tenant = self._clients.now(), self._tenant
            if tenant is not None and self.keeping is not None:
                messages, others = kept_delivered(tenant, messages, now)
                if others:
                    self.keeping.acknowledge(others)
            self._perform(self._session.deliver_kept(messages, now, anew=anew))
            self._write_outgoing()

    def release(self, packet_id: int) -> None:
        """Send the PUBREL of a message of its session's inbox."""
        if self._session is not None:
            self._perform(self._session.kept_released(packet_id, self._clients.now()))

    def write_answer(self, data: bytes) -> None:
        """Write an answer that waited for the session to be stored."""
        if self._session is not None:
            self._perform([session_events.Send(data)])

    def answer(self, answer: ev.Answer) -> None:
        """Report the result of a subscription, including what of it was refused."""
        self._subscribing.answer(answer)

    def subscribed(self, packet_id: int, codes: Sequence[int]) -> None:
        """Answer a SUBSCRIBE, together with the others of this turn."""
        if self._session is not None:
            self._perform(self._session.subscription_confirmed(packet_id, self._clients.now(), codes), soon=True)

    @property
    def subscriptions(self) -> Collection[str] | None:
        """Its filters; None: the session is over."""
        return self._session.subscriptions.filters if self._session is not None else None

    def forget(self, names: Sequence[str]) -> None:
        """Remove filters that the client may not have any more."""
        if self._session is not None:
            self._session.subscriptions.revoke(names)

    def passed(self, size: int) -> None:
        """Note that `size` bytes of QoS 0 that it published are no longer in flight."""
        self._publishing.passed(size)

    def replaced(self, moved: bool) -> None:
        """End the connection because a newer login took its place. MQTT 3 has no message for it."""
        if moved:
            self.end(CloseReason.TAKEN_OVER, "the same client connected to another gateway")
        else:
            self.end(CloseReason.REPLACED, "another device of the user connected, and the login policy allows one")

    def evict(self) -> None:
        """End the connection: too many are not identified, and this is the oldest."""
        self.admitted(ReasonCode.SERVER_BUSY)
        self.end(CloseReason.EVICTED, "no CONNECT yet, and others needed the place")

    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection to the client."""
        if self._session is not None:
            self._perform(self._session.close(reason, text, self._clients.now()))

    @property
    def is_open(self) -> bool:
        """True while the session continues."""
        return self._session is not None

    def hold(self, reason: Hold, seconds: float) -> None:
        """Do not read from the client for a time."""
        if seconds and self._session is not None:
            now = self._clients.now()
            self.gate.hold(reason, now, now + seconds)
            self._arm()

    def published(self, packet_id: int) -> None:
        """Acknowledge a message of QoS 1, together with all others of this turn."""
        if self._published is None:
            self._published = []
            self._clients.deliveries.flush_soon(self)
        self._published.append(packet_id)

    def refused(self, packet_id: int, code: ReasonCode, text: str) -> None:
        """Answer a message of QoS 1 or 2 that is refused, after those before it."""
        if self.keeping is not None and self.dialect == 5 and code >= ReasonCode.UNSPECIFIED:
            self.keeping.refused(packet_id)
        if self._session is not None:
            self._perform(self._session.publish_refused(packet_id, code, text, self._clients.now()), soon=True)

    # Inside.

    def refuse_later(self, code: ReasonCode) -> None:
        """Refuse the client after a while; until then its connection counts as not connected."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.call_later(random.uniform(0.5, 1.0) * REFUSAL_DELAY_S, self.admitted, code)

    def admitted(self, code: ReasonCode, session: Session | None = None) -> None:
        """Answer a CONNECT about which the decision took time. session: the client's, if that outlives the connection."""
        sessions, kept = self.sessions, None
        if session is not None and sessions is not None:
            if self._session is None:
                sessions.end(session, -1)
                return
            self.keeping = Keeping(self, sessions, session, self._clients.step)
            kept = self.keeping.kept
        if self._session is not None:
            self._perform(self._session.admitted(code, self._clients.now(), kept))

    def enter(self, tenant: TenantUse) -> None:
        """Use the names of the client's tenant from now on, in both directions."""
        if self._session is not None:
            translate(self._session, tenant.names)

    def login_over(self, text: str) -> None:
        """End the connection: its login is over."""
        self.end(CloseReason.LOGIN_OVER, text)

    def _rules_changed(self) -> None:
        """End the connection if the client lost a right that it uses: MQTT cannot revoke a subscription."""
        if not self._subscribing.is_allowed():
            self.end(CloseReason.NOT_ALLOWED, "the rules have changed for what it subscribed to")

    def _perform(self, effects: list[Effect], *, soon: bool = False, asked: bool = False, arms: bool = True) -> None:
        """Carry out effects. `soon`: answers leave at the turn's end. `asked`: about the first. `arms`: one may be due sooner."""
        for effect in effects:
            if asked:
                asked = False
                self._carry_out(effect)
            elif self._asks():
                self._wait_or_close(effect)
            elif type(effect) is session_events.SubscribeFilters:
                self._join_in_turn(effect)
            elif self.access is not None and self.access.asks and self._asks_about(self.access, effect):
                self._ask_first(effect, 0.0)
            else:
                self._carry_out(effect)
        if effects and arms:
            self._arm()
        if self._answers:
            if soon and self._session is not None:
                self._clients.deliveries.flush_soon(self)
            else:
                self._write_answers()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, session_events.PublishMessages):
            self._publishing.publish(effect.messages)
        elif isinstance(effect, session_events.Send):
            self._answers.append(effect.data)
        elif isinstance(effect, session_events.SubscribeFilters):
            self._subscribing.subscribe(effect)
        elif isinstance(effect, session_events.FiltersInVain):
            self._subscribing.refused(effect.number)
        elif isinstance(effect, session_events.UnsubscribeFilters):
            self._subscribing.unsubscribe(effect)
        elif isinstance(effect, session_events.SendMail):
            self._send_mail(effect)
        elif isinstance(effect, session_events.PacketsAcknowledged):
            self._clients.step(ev.PacketsAcknowledged(self.id, effect.packet_ids))
        elif isinstance(effect, session_events.SendMessages):
            self.deliver(effect.data, effect.number)
        elif isinstance(effect, session_events.SharedAcknowledged):
            self._clients.step(ev.SharedAcknowledged(self.id, effect.numbers))
        elif isinstance(effect, session_events.Connected):
            self._connected(effect)
        elif self.keeping is not None and isinstance(effect, KEPT_EFFECTS):
            self.keeping.carry_out(effect)
        elif isinstance(effect, session_events.DropMessages):
            self._clients.counters.unroutable += effect.number
            if effect.size >= LONG_BYTES:
                self.hold(Hold.UNROUTABLE, min(effect.size / SLOW_READ_BYTES_PER_S, MAX_HOLD_S))
        elif isinstance(effect, session_events.Close):
            self._closed(effect)

    def _asks_about(self, access: LoginSession, effect: Effect) -> bool:
        return isinstance(effect, session_events.PublishMessages) and foresee_publish(access, effect.messages)

    def _join_in_turn(self, effect: session_events.SubscribeFilters) -> None:
        """Subscribe once callbacks were asked and it is the client's turn among those that join much."""
        wait_s = self._subscribing.wait_s(len(effect.filters))
        if wait_s is None:
            self._subscribing.refuse(effect)
        elif wait_s or self._subscribing.must_ask(effect):
            self._ask_first(effect, wait_s)
        else:
            self._carry_out(effect)

    def _ask_first(self, effect: Effect, wait_s: float) -> None:
        """Carry out an effect later: after a time, and after callbacks were asked; the client's next effects wait."""
        self._behind.append(effect)
        self.gate.hold(Hold.JOIN_QUEUE if wait_s else Hold.ACCESS_CHECK, self._clients.now())
        self._asking = self._loop.create_task(self._ask(wait_s))

    async def _ask(self, wait_s: float) -> None:
        now, gate = self._clients.now, self.gate
        if wait_s:
            await asyncio.sleep(wait_s)
        if self.access is not None and self.access.asks:
            gate.hold(Hold.ACCESS_CHECK, now())
            gate.release(Hold.JOIN_QUEUE, now())
            await self.access.ask()
        self._asking = None
        behind, self._behind = self._behind, []
        gate.release(Hold.JOIN_QUEUE, now())
        gate.release(Hold.ACCESS_CHECK, now())
        self._perform(behind, asked=True)

    def _wait_or_close(self, effect: Effect) -> None:
        """Queue an effect that comes while `_ask` is running. A client that leaves loses its place in the queue."""
        if not isinstance(effect, IN_TURN):
            self._carry_out(effect)
            return
        self._behind.append(effect)
        if self._asking is not None and self.gate.holds(Hold.JOIN_QUEUE) and isinstance(effect, session_events.Close):
            self._asking.cancel()
            self._asking = None
            behind, self._behind = self._behind, []
            for item in behind:
                if not isinstance(item, session_events.SubscribeFilters):
                    self._carry_out(item)

    def _asks(self) -> bool:
        """Return the state by a call, because performing changes it: mypyc assumes that a tested attribute keeps its value."""
        return self._asking is not None

    def _write_answers(self) -> None:
        if not self._answers:
            return
        data, self._answers = b"".join(self._answers), []
        if self._paused:
            self._answer_bytes += len(data)
        self._write(data)
        if self._answer_bytes > MAX_ANSWER_BYTES:
            self.end(CloseReason.SLOW_CONSUMER, SLOW)

    def _write_outgoing(self) -> None:
        """Make and write packets of the messages that are for this client alone, as far as it takes them: after those before them
        that several clients share."""
        while (session := self._session) is not None and session.has_outgoing and not self._paused and not self._backlog:
            if self._transport is None:
                return
            data = session.outgoing(WRITE_BYTES, self._clients.now(), time.time_ns() // 1_000_000)
            if data:
                self._write(data)
            if self.keeping is not None and (over := session.left_out()):
                self.keeping.acknowledge(over)

    def _write(self, data: bytes) -> None:
        # asyncio would log every write to a peer that is gone.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _connected(self, effect: session_events.Connected) -> None:
        connect, terms = effect.connect, effect.terms
        self.client_id = effect.client_id
        self.dialect = 5 if terms.dialect is MQTT_5 else 3
        if self.access is None:
            self.uin = uin_of_name(connect.user_name or effect.client_id)
        else:
            self.uin = self.access.identity.uin
            self.access.rules_changed = self._rules_changed
            self.access.filters, self.access.revoked = self._subscribing.filters, self._subscribing.revoked
            # Two users may have clients of the same name, and neither must end the other's.
            self.client_id = f"{self.uin} {effect.client_id}"
        self._publishing.earlier = self._clients.client_ids.take_over(self.client_id, self)
        device_class, named, _ = effect.client_id.partition(":")
        tenant = self._tenant
        class_number = device_class_of_name(device_class) if named else 0
        self._clients.opened(
            self, self.uin, device_of_name(effect.client_id), class_number, name=effect.client_id, exact=terms.limited,
            credit=terms.receive_maximum, session=self.keeping.session.uin if self.keeping is not None else 0,
            inside=Insider(tenant, self._clients.now) if tenant is not None else None,
        )  # fmt: skip
        will = connect.will
        if will is not None:
            delay_s = min(number(will.properties, Property.WILL_DELAY, 0), number(connect.properties, Property.SESSION_EXPIRY, 0))
            self._clients.set_will(self, will, delay_s, extension_for_will(will.properties))

    def _send_mail(self, effect: session_events.SendMail) -> None:
        if self._mail.put([(packet, 1) for packet in effect.packets], anew=effect.anew):
            self._write_mail()
        else:
            self.end(CloseReason.MAIL_OVERRUN, OVERRUN)

    def _write_mail(self) -> None:
        self._write_answers()
        while self._mail and not self._paused and self._transport is not None:
            self._write(self._mail.take(WRITE_BYTES)[0])

    def _closed(self, effect: session_events.Close) -> None:
        self._clients.counters.closed[effect.reason.value] += 1
        if effect.malformed is not None:
            self._clients.counters.malformed[effect.malformed.name.lower()] += 1
        self._session = None
        self.joins.has_now(0)
        self._subscribing.count()
        self._write_answers()
        self._clients.memory.forget(self)
        self._publishing.closed(elsewhere=effect.reason is CloseReason.TAKEN_OVER)
        self._clients.slow_consumers.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._login.cancel()
        if self.access is not None:
            self.access.close()
        if self.client_id is not None:
            self._clients.client_ids.gone(self.client_id, self, self._publishing.unacknowledged)
        if self.keeping is not None:
            self.keeping.end(effect.expiry_s)
        self._clients.closed(self, LOGOUT_REASONS.get(effect.reason, 1))
        if self.client_id is not None:
            self._clients.end_will(self, effect.publish_will)
        if self._transport is not None:
            if effect.reason is CloseReason.SLOW_CONSUMER:
                self._reset()
                return
            close_once(self._transport)
            if self._transport.get_write_buffer_size():
                self._loop.call_later(CLOSE_TIMEOUT_S, self._reset)

    def _reset(self) -> None:
        """Drop the connection with everything untaken: a client that does not read would keep it in our memory and, after an
        ordinary close, for minutes in the kernel's."""
        if self._transport is not None:
            reset_at_close(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def _arm(self) -> None:
        """Keep one timer per connection: it is set again only to ring earlier; otherwise it checks again when it rings."""
        if self._session is None:
            return
        deadline = self._session.next_deadline()
        if deadline == NEVER or (self._timer is not None and deadline >= self._timer_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        wait_s = max(deadline - self._clients.now(), 0.01)
        if self.client_id is None:
            wait_s += random.uniform(0.0, CONNECT_SPREAD_S)
        self._timer = self._loop.call_later(wait_s, self._timeout)

    def _timeout(self) -> None:
        self._timer = None
        if self._session is not None:
            if self.access is not None:
                self.hold(Hold.QUOTA, min(self.access.owed(), MAX_HOLD_S))  # the time is over, and there may be debt left
            self._perform(self._session.timeout(self._clients.now()))
            self._arm()
