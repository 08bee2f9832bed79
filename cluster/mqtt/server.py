"""The server's side of one connection of MQTT 3.1, 3.1.1 or 5: packets, answers and timers in, effects out. No I/O, no clock.

The session coordinates four parts, each alone in its module: the terms of the connection (`terms.py`), messages from the client
(`inbound.py`) and to it (`outbound.py`), and its filters (`subscriptions.py`). `TABLE` holds the actions; `docs/mqtt_states.md` is
drawn from it.

Promises to stock clients, and the choices that MQTT leaves open (all are in docs/mqtt.md):

- *Sessions outlive their connection* where the shell keeps them (`Kept`). Elsewhere session present is 0, and a client of MQTT 5
  that asks for more gets session expiry 0. A client of such a session that subscribes to its `user/{UIN}` with QoS 1 takes mail.
- *Mail* goes out with QoS 1 and a packet identifier made of its place in the inbox (`cluster.mqtt.mail`). PUBACKs may come in any
  order; mail without one is sent again on the next connection, with DUP. A lane without any PUBACK for `puback_timeout_s` closes
  the connection. A PUBACK that nothing waits for is ignored.
- *SUBACK waits for the whole cluster*: a message published after it is delivered.
- *A PUBLISH of QoS 1 or 2 that can never succeed* is acknowledged where the client speaks MQTT 3, which has no negative PUBACK; it
  allows this, or closing the connection [MQTT-3.3.5-2], after which stock clients reconnect and send the message again, for ever. A
  client of MQTT 5 gets the reason code. Acknowledgements leave in the order of the PUBLISHes [MQTT-4.6.0-2].
- *QoS 2 from the client*: until its PUBREL the same identifier is the same message [MQTT-4.3.3-2].
- *Enhanced authentication* is refused with 0x8C, and an AUTH later is a protocol error.

Source: OASIS MQTT 3.1.1 and 5.0; docs/mqtt.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from cluster.core.contract import NEVER
from cluster.core.reading_gate import Hold, ReadingGate
from cluster.mqtt import codec
from cluster.mqtt.events import (
    DISCONNECT_CODES,
    MALFORMED_CODES,
    Close,
    CloseReason,
    Connected,
    DropMessages,
    Effect,
    FiltersInVain,
    ForgetMessage,
    Kept,
    Problem,
    PublishMessages,
    Send,
    SubscribeFilters,
    UnsubscribeFilters,
)
from cluster.mqtt.inbound import EARLY_PUBREL, IN_USE, Aliases, Begun, Inbound
from cluster.mqtt.mail import Mails
from cluster.mqtt.outbound import Delivery, KeptDelivery, OutboundCounters, Sending, disconnect, pubrel
from cluster.mqtt.packets import (
    MQTT_3_1_1,
    MQTT_5,
    SUBACK_FAILURE,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    MalformedPacket,
    Packet,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Reason,
    Side,
    Suback,
    Subscribe,
    UnacceptableConnect,
    Unsuback,
    Unsubscribe,
)
from cluster.mqtt.properties import Property, number
from cluster.mqtt.reason_codes import ReasonCode, name_of, return_code
from cluster.mqtt.states import ANSWERS_OF_THE_SHELL, PACKET_EVENTS, Event, State
from cluster.mqtt.subscriptions import LARGE_ANSWER, Subscriptions, judge_filter, outside_vrooms
from cluster.mqtt.terms import SessionLimits, Terms, agree, connack, fault_of
from pixiu.placement.big_rooms import NO_BIG_ROOMS, VRooms
from pixiu.placement.topics import USER_PREFIX, TopicRefusal, destination


class Transition(NamedTuple):
    """One row of the table: the next state, and the action on the way."""

    state: State
    action: Callable[[ServerSession, Any, float, list[Effect]], None]


class _Refusal(NamedTuple):
    code: ReasonCode
    dialect: Dialect


def accept_all(connect: Connect) -> ReasonCode:
    """Admit every client: the policy of a server without authentication."""
    return ReasonCode.SUCCESS


_NO_TERMS: Final = Terms(MQTT_3_1_1, 0)
_PINGRESP: Final = Send(codec.PINGRESP)
_NO_INBOUND: Final = Inbound()
"""Stays empty: most connections never publish with QoS 1, and one of their own would take 180 bytes."""


class ServerSession:
    """One connection, from accept to close.

    now: monotonic seconds. assigned_client_id: the name for a client that sends none. admit: the shell's policy, called once, for a
    CONNECT that is valid otherwise; it returns the reason code of the CONNACK, and None if the answer follows by `admitted`.
    vrooms: the cluster's big rooms, whose VRooms are refused as topics. gate: of the connection; the session holds it while too
    much waits for the cluster and while `admitted` is due, and measures the client's silence by its clock. counters: of all
    connections.

    Each method returns effects to perform in order; after `Close` there are none. After every call the shell takes what may leave
    (`outgoing`) while `has_outgoing` is True and it can write.

    Source: docs/mqtt.md; OASIS MQTT 3.1.1 and 5.0, sections 3 and 4.
    """

    __slots__ = (
        "_admit",
        "_aliases",
        "_assigned_client_id",
        "_client_id",
        "_connect_by",
        "_counters",
        "_decoder",
        "_inbound",
        "_judged_later",
        "_kept",
        "_last_packet",
        "_limits",
        "_partial_since",
        "_resolve",
        "_silence_s",
        "_state",
        "_terms",
        "gate",
        "sending",
        "subscriptions",
    )

    def __init__(
        self,
        now: float,
        assigned_client_id: str,
        limits: SessionLimits | None = None,
        admit: Callable[[Connect], ReasonCode | None] = accept_all,
        vrooms: VRooms = NO_BIG_ROOMS,
        in_vain: Callable[[int], bool] | None = None,
        gate: ReadingGate | None = None,
        counters: OutboundCounters | None = None,
    ) -> None:
        self.gate = gate or ReadingGate()
        self._limits = limits = limits or SessionLimits()
        self._admit = admit
        self._resolve = resolve = destination if vrooms == NO_BIG_ROOMS else partial(outside_vrooms, vrooms)
        self._assigned_client_id = assigned_client_id
        self._state = State.CONNECTING
        self._decoder = codec.Decoder(Side.SERVER, self._limits.max_packet_bytes, self._limits.max_filters)
        self._connect_by = now + self._limits.connect_timeout_s
        self._silence_s = 0.0
        self._last_packet = now
        self._inbound = _NO_INBOUND
        self.subscriptions = Subscriptions(
            limits.max_subscriptions, limits.max_filter_bytes, partial(judge_filter, resolve), in_vain
        )
        self._partial_since: float | None = None
        """Time at which the first byte of an unfinished packet arrived; like `_last_packet` by the gate's clock, since while we do
        not read, the silence is ours."""
        self._client_id = ""
        self._judged_later: tuple[Connect, list[Packet]] | None = None
        """A CONNECT that waits for `admitted`, and the packets after it."""
        self._kept: Kept | None = None
        """The session, if it outlives its connection."""
        self._terms = _NO_TERMS
        self._aliases: Aliases | None = None
        self.sending: Sending | None = None
        """Messages to the client; created at the first message, because most connections get theirs as shared bytes."""
        self._counters = counters if counters is not None else OutboundCounters()

    # ------------------------------------------------------------------------------------------ queries

    @property
    def state(self) -> State:
        """The state of the connection."""
        return self._state

    @property
    def client_id(self) -> str:
        """The client's ID; empty before CONNECT."""
        return self._client_id

    @property
    def has_outgoing(self) -> bool:
        """True if `outgoing` would return something."""
        return self._state is State.CONNECTED and self.sending is not None and self.sending.outbound.is_ready

    @property
    def waiting(self) -> int:
        """Number of messages of QoS 1 and filters that wait for the cluster."""
        return len(self._inbound.waiting) + self.subscriptions.waiting

    @property
    def has_more(self) -> bool:
        """True if packets that arrived earlier were too many for one turn and still wait: call `receive` again, soon."""
        return self._decoder.has_more and self._state is not State.DISCONNECTED

    @property
    def buffered_bytes(self) -> int:
        """Bytes that arrived and are not yet decoded to packets."""
        return self._decoder.buffered_bytes

    @property
    def outbound_bytes(self) -> int:
        """Bytes of messages that wait until the client has read or acknowledged others."""
        return self.sending.outbound.waiting_bytes if self.sending is not None else 0

    @property
    def backlog(self) -> tuple[int, int]:
        """Messages that wait for an acknowledgement of the client, and bytes of messages that wait to be sent."""
        outbound = self.sending.outbound if self.sending is not None else None
        return (outbound.inflight, outbound.waiting_bytes) if outbound is not None else (0, 0)

    def next_deadline(self) -> float:
        """Time at which to call `timeout`, monotonic seconds; `NEVER`: not before another event.

        It changes with every packet: a shell asks again when its timer fires, and not at every packet.
        """
        if self._state is State.DISCONNECTED:
            return NEVER
        deadline = self._connect_by if self._state is State.CONNECTING else NEVER
        if self._inbound.waiting or self.subscriptions.waiting:
            unanswered_since = min(self._inbound.since(), self.subscriptions.since())
            deadline = min(deadline, unanswered_since + self._limits.answer_timeout_s)
        if not self.gate.reads:
            return min(deadline, self.gate.next_deadline())
        return min(deadline, *self._client_deadlines())

    # ------------------------------------------------------------------------------------------ events

    def receive(self, data: bytes, now: float) -> list[Effect]:
        """Process bytes that arrived, or continue after `has_more` (then `data` is empty). Never raises for their content."""
        effects: list[Effect] = []
        if self._state is State.DISCONNECTED:
            return effects
        packets = self._decoder.feed(data, self._limits.max_packets_a_turn)
        if packets or not self._decoder.buffered_bytes:
            self._partial_since = None
        if packets:
            self._last_packet = self.gate.clock(now)
        if self._partial_since is None and self._decoder.buffered_bytes:
            self._partial_since = self.gate.clock(now)
        if self._judged_later is not None:
            self._judged_later[1].extend(packets)
            return effects
        self._take(packets, now, effects)
        return effects

    def admitted(self, code: ReasonCode, now: float, kept: Kept | None = None) -> list[Effect]:
        """Take the shell's delayed decision about a CONNECT. kept: its session, if that outlives the connection."""
        effects: list[Effect] = []
        if self._judged_later is not None and self._state is State.CONNECTING:
            (connect, behind), self._judged_later = self._judged_later, None
            self._kept = kept
            if code is ReasonCode.SUCCESS:
                self._step(Event.CONNECT, connect, now, effects)
                self.gate.release(Hold.LOGIN, now)
                self._take(behind, now, effects)
            else:
                self._step(Event.CONNECT_REFUSED, _Refusal(code, connect.dialect), now, effects)
        return effects

    def _take(self, packets: Sequence[Packet], now: float, effects: list[Effect]) -> None:
        for index, packet in enumerate(packets):
            # A PUBLISH runs the action of its row without looking it up in the table: the look-up costs as much as the action.
            if type(packet) is Publish and self._state is State.CONNECTED:
                self._publish(packet, now, effects)
            elif type(packet) is Connect:
                judged = self._judge_connect(packet)
                if judged is None:
                    self._judged_later = packet, list(packets[index + 1 :])
                    self.gate.hold(Hold.LOGIN, now)
                    return
                self._step(*judged, now, effects)
            elif type(packet) is UnacceptableConnect:
                # A CONNACK of MQTT 5 for whatever comes after it, so that its clients can report the problem.
                dialect = MQTT_5 if packet.level >= MQTT_5 else MQTT_3_1_1
                self._step(Event.CONNECT_REFUSED, _Refusal(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, dialect), now, effects)
            else:
                self._step(PACKET_EVENTS[type(packet)], packet, now, effects)
        if self._decoder.error is not None:
            self._step(Event.MALFORMED, self._decoder.error, now, effects)

    def subscription_confirmed(self, packet_id: int, now: float, codes: Sequence[int] | None = None) -> list[Effect]:
        """Note that the subscription has taken effect in the whole cluster.

        codes: one for each filter of the effect, the granted QoS or the reason code of a failure; None: each gets the QoS that it
        asked for.
        """
        return self._run(Event.SUBSCRIPTION_CONFIRMED, (packet_id, codes), now)

    def deliver_mail(self, topic: str, mails: Sequence[Mails], now: float, *, anew: bool = False) -> list[Effect]:
        """Send mail to the client. `anew`: it is of a new session, and mail of an older one no longer waits for its PUBACK."""
        return self._run(Event.MAIL, (topic, mails, anew), now)

    def deliver_kept(self, messages: Iterable[KeptDelivery], now: float, *, anew: bool = False) -> list[Effect]:
        """Have messages of the session's inbox wait for the client, as `deliver`. `anew`: discard those that wait."""
        return self._run(Event.KEPT, (messages, anew), now)

    def kept_released(self, packet_id: int, now: float) -> list[Effect]:
        """Note that the session is stored with this `KeptReceived`."""
        return self._run(Event.KEPT_RELEASED, packet_id, now)

    def left_out(self) -> list[int]:
        """Take the identifiers of kept messages that were over or too large at `outgoing`: nobody waits for them."""
        outbound = self.sending.outbound if self.sending is not None else None
        if outbound is None or outbound.left_out is None:
            return []
        found, outbound.left_out = outbound.left_out, None
        return found

    def publish_accepted(self, packet_ids: Iterable[int], now: float) -> list[Effect]:
        """Note that the cluster has taken these messages of QoS 1."""
        effects: list[Effect] = []
        if self._state is State.CONNECTED:  # the row's action, as for a PUBLISH; the other rows do nothing
            self._acknowledge(packet_ids, now, effects)
        return effects

    def publish_refused(self, packet_id: int, code: ReasonCode, text: str, now: float) -> list[Effect]:
        """Note that the cluster refuses a message of QoS 1 or 2. MQTT 3 has no answer that says so: its clients get the one of a
        message that was taken."""
        return self._run(Event.PUBLISH_REFUSED, (packet_id, code, text), now)

    def deliver(self, messages: Iterable[Delivery], now: float, now_ms: int) -> list[Effect]:
        """Have messages of topics wait for the client; `outgoing` makes packets of them. now_ms: Unix milliseconds."""
        return self._run(Event.DELIVERY, (messages, now_ms), now)

    def outgoing(self, max_bytes: int, now: float, now_ms: int) -> bytes:
        """Make packets of about `max_bytes` of what may leave now; empty if there is nothing. now_ms: Unix milliseconds."""
        if self.sending is None or self._state is not State.CONNECTED:
            return b""
        return self.sending.outbound.take(max_bytes, self.gate.clock(now), now_ms)

    def timeout(self, now: float) -> list[Effect]:
        """Run the action of a time-out if the time of `next_deadline` has come; else nothing."""
        if now < self.next_deadline():
            return []
        if self.gate.expire(now):
            return []
        silence, unfinished, puback, acknowledgement = self._client_deadlines()
        if self._state is State.CONNECTING:
            problem = Problem(CloseReason.CONNECT_TIMEOUT, "no CONNECT in time")
        elif now >= silence:
            problem = Problem(CloseReason.KEEP_ALIVE, f"no packet for {self._silence_s:g} s")
        elif now >= unfinished:
            problem = Problem(CloseReason.PACKET_UNFINISHED, f"a packet took longer than {self._limits.packet_timeout_s:g} s")
        elif now >= puback:
            problem = Problem(CloseReason.MAIL_UNACKNOWLEDGED, f"no PUBACK for {self._limits.puback_timeout_s:g} s")
        elif now >= acknowledgement:
            problem = Problem(CloseReason.UNACKNOWLEDGED, f"no acknowledgement for {self._limits.puback_timeout_s:g} s")
        else:
            problem = Problem(CloseReason.UNANSWERED, "the cluster did not answer in time")
        return self._run(Event.TIMEOUT, problem, now)

    def close(self, reason: CloseReason, text: str, now: float, server_reference: str = "") -> list[Effect]:
        """Close the connection for the shell. server_reference: another server for a client of MQTT 5."""
        return self._run(Event.CLOSE, Problem(reason, text, server_reference), now)

    def connection_lost(self, now: float) -> list[Effect]:
        """Handle the loss of the connection."""
        return self._run(Event.CONNECTION_LOST, Problem(CloseReason.CONNECTION_LOST, "the connection was lost"), now)

    # ------------------------------------------------------------------------------------------ decisions

    def _run(self, event: Event, argument: object, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._step(event, argument, now, effects)
        return effects

    def _step(self, event: Event, argument: object, now: float, effects: list[Effect]) -> None:
        self._state, action = TABLE[self._state, event]
        action(self, argument, now, effects)

    def _client_deadlines(self) -> tuple[float, float, float, float]:
        """Until when the client has to send a packet, the rest of one, a mail's PUBACK, and another acknowledgement: never while it
        is not read from."""
        silence = unfinished = puback = acknowledgement = NEVER
        if self.gate.reads and self._state is State.CONNECTED:
            held_s = self.gate.held_s
            if self._silence_s:
                silence = self._last_packet + self._silence_s + held_s
            if self._partial_since is not None:
                unfinished = self._partial_since + self._limits.packet_timeout_s + held_s
            if self.sending is not None:
                puback, acknowledgement = self.sending.deadlines(self._limits.puback_timeout_s + held_s)
        return silence, unfinished, puback, acknowledgement

    def _judge_connect(self, packet: Connect) -> tuple[Event, object] | None:
        if self._state is not State.CONNECTING:
            return Event.CONNECT, packet
        code: ReasonCode | None = fault_of(packet, self._limits, self._assigned_client_id)
        if code is ReasonCode.SUCCESS and packet.will is not None and isinstance(self._resolve(packet.will.topic), TopicRefusal):
            code = ReasonCode.TOPIC_NAME_INVALID
        if code is ReasonCode.SUCCESS:
            code = self._admit(packet)
        if code is None:
            return None
        if code is ReasonCode.SUCCESS:
            return Event.CONNECT, packet
        return Event.CONNECT_REFUSED, _Refusal(code, packet.dialect)

    def _leave(self, problem: Problem, effects: list[Effect], code: ReasonCode | None, malformed: Reason | None = None) -> None:
        """Append a DISCONNECT, if the client's dialect has it and it is connected, and the end."""
        if self._terms.dialect is MQTT_5 and code is not None:
            effects.append(Send(disconnect(self._terms, problem, code)))
        effects.append(Close(problem.reason, problem.text, malformed))

    # ------------------------------------------------------------------------------------------ actions of the table

    def _accept(self, packet: Connect, now: float, effects: list[Effect]) -> None:
        """Start the session or resume it, CONNACK 0."""
        self._client_id = packet.client_id or self._assigned_client_id
        self._terms = terms = agree(packet, self._limits)
        self._silence_s = terms.keep_alive_s * self._limits.keep_alive_factor
        if terms.dialect is MQTT_5:
            self._aliases = Aliases(self._limits.max_topic_aliases)
        effects.append(Connected(self._client_id, packet, terms))
        kept = self._kept
        if kept is None:
            effects.append(Send(connack(packet, terms, self._limits, self._assigned_client_id)))
            return
        present, expiry_s, filters = kept
        data = connack(packet, terms, self._limits, self._assigned_client_id, present=present, expiry_s=expiry_s)
        effects.append(Send(data))
        self._kept = Kept(present, expiry_s)
        if filters:
            self.subscriptions.restore(filters)
            mail = frozenset(wanted.filter for wanted in filters if wanted.qos and wanted.filter.startswith(USER_PREFIX))
            effects.append(SubscribeFilters(0, list(filters), mail))

    def _refuse(self, refusal: _Refusal, now: float, effects: list[Effect]) -> None:
        """CONNACK with the reason, close."""
        code, dialect = refusal
        data = codec.encode(Connack(False, code if dialect is MQTT_5 else return_code(code)), dialect)
        effects.append(Send(data))
        effects.append(Close(CloseReason.CONNECT_REFUSED, name_of(code)))

    def _publish(self, packet: Publish, now: float, effects: list[Effect]) -> None:
        """Publish, or drop and count where no room carries the topic."""
        if packet.properties is not None and self._aliases is not None:
            resolved = self._aliases.resolve(packet)
            if isinstance(resolved, Problem):
                self._step(Event.PUBLISH_UNACCEPTABLE, resolved, now, effects)
                return
            packet = resolved
        room = self._resolve(packet.topic)
        if packet.qos:
            inbound = self._inbound
            if inbound is _NO_INBOUND:
                inbound = self._inbound = Inbound()
            in_use = packet.packet_id in self.subscriptions.pending
            begun = IN_USE if in_use else inbound.begin(packet, self._terms, self._limits.max_inflight, now)
            if begun is not None:
                if isinstance(begun, Problem):
                    self._step(Event.PUBLISH_UNACCEPTABLE, begun, now, effects)
                elif begun is Begun.RECEIVED:
                    effects.append(Send(codec.encode(Pubrec(packet.packet_id))))
                return
            self._bound_unanswered(now)
        last = effects[-1] if effects else None
        if isinstance(room, TopicRefusal):
            size = len(packet.topic) + len(packet.payload)
            if type(last) is DropMessages and last.reason is room:
                effects[-1] = DropMessages(room, last.number + 1, last.size + size)
            else:
                effects.append(DropMessages(room, 1, size))
            if packet.qos:
                self._refuse_message((packet.packet_id, ReasonCode.TOPIC_NAME_INVALID, room.value), now, effects)
        elif type(last) is PublishMessages:
            last.messages.append((room, packet))
        else:
            effects.append(PublishMessages([(room, packet)]))

    def _subscribe(self, packet: Subscribe, now: float, effects: list[Effect]) -> None:
        """Join the filters; SUBACK follows when the cluster confirms, or at once where nothing can be granted."""
        subscriptions, packet_id = self.subscriptions, packet.packet_id
        if subscriptions.asking is None and (packet_id in subscriptions.pending or packet_id in self._inbound.waiting):
            self._step(Event.CLOSE, IN_USE, now, effects)
            return
        identifiers = packet.properties.get(Property.SUBSCRIPTION_IDENTIFIER) if packet.properties else None
        identifier = identifiers[0] if isinstance(identifiers, tuple) else 0
        asked = subscriptions.ask(packet.filters, identifier, more=packet.more, keep=self._terms.keep)
        if packet.more:
            return
        if asked.in_vain:
            effects.append(FiltersInVain(len(asked.answers)))
        if not asked.joined:
            self._send_suback(packet_id, [code for code in asked.answers if isinstance(code, int)], now, effects)
            return
        subscriptions.wait(packet_id, asked, now)
        effects.append(SubscribeFilters(packet_id, list(asked.joined.values()), frozenset(asked.mail)))
        self._bound_unanswered(now)

    def _send_suback(self, packet_id: int, codes: list[int], now: float, effects: list[Effect]) -> None:
        self._counters.filters_over_limit += codes.count(ReasonCode.QUOTA_EXCEEDED)
        codes = codes if self._terms.dialect is MQTT_5 else [min(code, SUBACK_FAILURE) for code in codes]
        self._answer(Suback(packet_id, tuple(codes)), now, effects)

    def _answer(self, packet: Suback | Unsuback, now: float, effects: list[Effect]) -> None:
        data = codec.encode(packet, self._terms.dialect)
        if len(data) > self._terms.max_packet_bytes:
            self._step(Event.CLOSE, LARGE_ANSWER, now, effects)
        else:
            effects.append(Send(data))

    def _confirm(self, confirmed: tuple[int, Sequence[int] | None], now: float, effects: list[Effect]) -> None:
        """SUBACK."""
        packet_id, codes = confirmed
        answer = self.subscriptions.confirm(packet_id, codes)
        if answer is None:
            return
        if answer[1]:
            self._begin_sending().takes_mail = True
        self._send_suback(packet_id, answer[0], now, effects)
        self._bound_unanswered(now)

    def _unsubscribe(self, packet: Unsubscribe, now: float, effects: list[Effect]) -> None:
        """Leave the filters, UNSUBACK."""
        left, codes = self.subscriptions.leave(packet.filters, more=packet.more)
        if left:
            effects.append(UnsubscribeFilters(left))
        if not packet.more:
            self._answer(Unsuback(packet.packet_id, tuple(codes) if self._terms.dialect is MQTT_5 else ()), now, effects)
            answer = effects[-1]
            if self._kept is not None and left and type(answer) is Send:
                effects[-2:] = [UnsubscribeFilters(left, answer.data)]

    def _acknowledge(self, packet_ids: Iterable[int], now: float, effects: list[Effect]) -> None:
        """PUBACK, or PUBREC, of all messages before the first one that still waits."""
        inbound = self._inbound
        done = inbound.accept(packet_ids)
        if done:
            effects.append(Send(inbound.answers(done, self._terms)))
            self._bound_unanswered(now)

    def _refuse_message(self, refused: tuple[int, ReasonCode, str], now: float, effects: list[Effect]) -> None:
        """PUBACK or PUBREC with the reason code, in MQTT 3 without."""
        packet_id, code, text = refused
        if self._terms.dialect is MQTT_5:
            self._inbound.refuse(packet_id, code, text)
        self._acknowledge((packet_id,), now, effects)

    def _release(self, packet: Pubrel, now: float, effects: list[Effect]) -> None:
        """PUBCOMP, also where nothing is known of the message: its PUBREC was on an earlier connection."""
        answer = self._inbound.release(packet.packet_id, self._terms)
        if answer is None:
            self._step(Event.CLOSE, EARLY_PUBREL, now, effects)
        elif self._kept is not None:
            effects.append(ForgetMessage(packet.packet_id, answer))
        else:
            effects.append(Send(answer))

    def _begin_sending(self) -> Sending:
        if self.sending is None:
            self.sending = Sending(self._terms, self._limits.max_outbound_bytes, self._counters)
        return self.sending

    def _deliver(self, delivered: tuple[Iterable[Delivery], int], now: float, effects: list[Effect]) -> None:
        """PUBLISH, as far as the client's window has space."""
        messages, now_ms = delivered
        problem = self._begin_sending().deliver(messages, now_ms, effects)
        if problem is not None:
            self._step(Event.CLOSE, problem, now, effects)

    def _send_mail(self, what: tuple[str, Sequence[Mails], bool], now: float, effects: list[Effect]) -> None:
        """PUBLISH of QoS 1."""
        topic, mails, anew = what
        problem = self._begin_sending().send_mail(topic, mails, self.gate.clock(now), effects, anew=anew)
        if problem is not None:
            self._step(Event.CLOSE, problem, now, effects)

    def _deliver_kept(self, what: tuple[Iterable[KeptDelivery], bool], now: float, effects: list[Effect]) -> None:
        """PUBLISH of QoS 1 and 2, as far as the client's receive maximum has space."""
        messages, anew = what
        problem = self._begin_sending().send_kept(messages, anew=anew)
        if problem is not None:
            self._step(Event.CLOSE, problem, now, effects)

    def _release_kept(self, packet_id: int, now: float, effects: list[Effect]) -> None:
        """PUBREL."""
        self._begin_sending().release(packet_id, effects)

    def _acknowledged(self, packet: Puback, now: float, effects: list[Effect]) -> None:
        """Report it; ignore what answers nothing, as of a client that acknowledges before it has subscribed again."""
        if self.sending is not None:
            self.sending.acknowledge(packet, self.gate.clock(now), effects)

    def _received(self, packet: Pubrec, now: float, effects: list[Effect]) -> None:
        """PUBREL; after a failure nothing."""
        if self.sending is not None:
            self.sending.receive(packet, self.gate.clock(now), effects)
        elif packet.code < ReasonCode.UNSPECIFIED:
            effects.append(Send(pubrel(packet.packet_id, self._terms, known=False)))

    def _completed(self, packet: Pubcomp, now: float, effects: list[Effect]) -> None:
        """End of the exchange; ignore what answers nothing."""
        if self.sending is not None:
            self.sending.complete(packet, self.gate.clock(now), effects)

    def _bound_unanswered(self, now: float) -> None:
        waiting = len(self._inbound.waiting) + self.subscriptions.waiting
        if waiting >= self._limits.max_inflight:
            self.gate.hold(Hold.UNANSWERED, now)
        elif not self.gate.reads and waiting <= self._limits.max_inflight // 2:
            self.gate.release(Hold.UNANSWERED, now)

    def _pong(self, _: Pingreq, now: float, effects: list[Effect]) -> None:
        """PINGRESP."""
        effects.append(_PINGRESP)

    def _goodbye(self, packet: Disconnect, now: float, effects: list[Effect]) -> None:
        """Close."""
        if not self._terms.keep and number(packet.properties, Property.SESSION_EXPIRY, 0):
            problem = Problem(CloseReason.UNEXPECTED_PACKET, "a DISCONNECT sets the session expiry that CONNECT left at 0")
            self._leave(problem, effects, ReasonCode.PROTOCOL_ERROR)
            return
        normal, expiry_s = packet.code == ReasonCode.SUCCESS, number(packet.properties, Property.SESSION_EXPIRY, -1)
        effects.append(Close(CloseReason.CLIENT_DISCONNECTED, "the client disconnected", None, not normal, expiry_s))

    def _second_connect(self, _: object, now: float, effects: list[Effect]) -> None:
        """Close: a protocol violation [MQTT-3.1.0-2]."""
        self._close(Problem(CloseReason.SECOND_CONNECT, "a second CONNECT"), now, effects)

    def _unexpected(self, packet: Packet, now: float, effects: list[Effect]) -> None:
        """Close: the packet answers nothing that was sent, or comes before CONNECT."""
        self._close(Problem(CloseReason.UNEXPECTED_PACKET, f"an unexpected {type(packet).__name__.upper()}"), now, effects)

    def _malformed(self, error: MalformedPacket, now: float, effects: list[Effect]) -> None:
        """Close: a protocol violation [MQTT-4.8.0-1]."""
        code = MALFORMED_CODES.get(error.reason, ReasonCode.MALFORMED_PACKET)
        if error.dialect is MQTT_5 and self._terms is _NO_TERMS:
            effects.append(Send(codec.encode(Connack(False, code), MQTT_5)))
        self._leave(Problem(CloseReason.MALFORMED, error.reason.value), effects, code, error.reason)

    def _close(self, problem: Problem, now: float, effects: list[Effect]) -> None:
        """Close."""
        self._leave(problem, effects, DISCONNECT_CODES.get(problem.reason))

    def _ignore(self, _: object, now: float, effects: list[Effect]) -> None:
        """Nothing."""


TABLE: Final[dict[tuple[State, Event], Transition]] = {
    (State.CONNECTING, Event.CONNECT): Transition(State.CONNECTED, ServerSession._accept),
    (State.CONNECTING, Event.CONNECT_REFUSED): Transition(State.DISCONNECTED, ServerSession._refuse),
    **{(State.CONNECTING, event): Transition(State.DISCONNECTED, ServerSession._unexpected) for event in PACKET_EVENTS.values()},
    (State.CONNECTING, Event.PUBLISH_UNACCEPTABLE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTING, Event.MALFORMED): Transition(State.DISCONNECTED, ServerSession._malformed),
    **{(State.CONNECTING, event): Transition(State.CONNECTING, ServerSession._ignore) for event in ANSWERS_OF_THE_SHELL},
    (State.CONNECTING, Event.TIMEOUT): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTING, Event.CLOSE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTING, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.CONNECT): Transition(State.DISCONNECTED, ServerSession._second_connect),
    (State.CONNECTED, Event.CONNECT_REFUSED): Transition(State.DISCONNECTED, ServerSession._second_connect),
    (State.CONNECTED, Event.PUBLISH): Transition(State.CONNECTED, ServerSession._publish),
    (State.CONNECTED, Event.PUBLISH_UNACCEPTABLE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.SUBSCRIBE): Transition(State.CONNECTED, ServerSession._subscribe),
    (State.CONNECTED, Event.UNSUBSCRIBE): Transition(State.CONNECTED, ServerSession._unsubscribe),
    (State.CONNECTED, Event.PINGREQ): Transition(State.CONNECTED, ServerSession._pong),
    (State.CONNECTED, Event.DISCONNECT): Transition(State.DISCONNECTED, ServerSession._goodbye),
    (State.CONNECTED, Event.PUBACK): Transition(State.CONNECTED, ServerSession._acknowledged),
    (State.CONNECTED, Event.PUBREL): Transition(State.CONNECTED, ServerSession._release),
    (State.CONNECTED, Event.PUBREC): Transition(State.CONNECTED, ServerSession._received),
    (State.CONNECTED, Event.PUBCOMP): Transition(State.CONNECTED, ServerSession._completed),
    (State.CONNECTED, Event.AUTH): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTED, Event.MALFORMED): Transition(State.DISCONNECTED, ServerSession._malformed),
    (State.CONNECTED, Event.SUBSCRIPTION_CONFIRMED): Transition(State.CONNECTED, ServerSession._confirm),
    (State.CONNECTED, Event.PUBLISH_ACCEPTED): Transition(State.CONNECTED, ServerSession._acknowledge),
    (State.CONNECTED, Event.PUBLISH_REFUSED): Transition(State.CONNECTED, ServerSession._refuse_message),
    (State.CONNECTED, Event.MAIL): Transition(State.CONNECTED, ServerSession._send_mail),
    (State.CONNECTED, Event.DELIVERY): Transition(State.CONNECTED, ServerSession._deliver),
    (State.CONNECTED, Event.KEPT): Transition(State.CONNECTED, ServerSession._deliver_kept),
    (State.CONNECTED, Event.KEPT_RELEASED): Transition(State.CONNECTED, ServerSession._release_kept),
    (State.CONNECTED, Event.TIMEOUT): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.CLOSE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ServerSession._close),
    **{(State.DISCONNECTED, event): Transition(State.DISCONNECTED, ServerSession._ignore) for event in Event},
}
"""Next state and action for each state and event."""
