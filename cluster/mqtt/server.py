"""The server's side of one MQTT 3.1.1 connection: packets, answers and timers in, effects out. No I/O, no clock.

`TABLE` holds the actions of a session; `docs/mqtt_states.md` is drawn from it.

Promises to stock clients, and the choices that MQTT leaves open:

- *Will*: a CONNECT with a will is refused by return code 5 (not authorised). Wills are not kept yet. Accepting a will and never
  publishing it would be a lie that shows only on the day it matters, and code 3 would make clients retry for ever.
- *Clean session off* is accepted with session present 0: a session ends with its connection. Departs from [MQTT-3.1.2-4] because
  sessions are not stored yet; the 0 tells the client.
- *Subscriptions*: `room/{RoomID}` and free topics without wildcards are granted QoS 0, and so is the client's own
  `user/{UIN}` by the shell; another user's, `$…`, wildcards and names of more than 4,096 characters get 0x80. SUBACK waits for
  the whole cluster: a message published after it is delivered. With clean session off and QoS 1 `user/{UIN}` takes the user's
  mail, too.
- *Mail* goes out with QoS 1 and a packet identifier made of its place in the inbox (`cluster.mqtt.mail`). PUBACKs may come in any
  order; mail without one is sent again on the next connection, with DUP. A lane without any PUBACK for `puback_timeout_s` closes
  the connection. A PUBACK that nothing waits for is ignored.
- *PUBLISH is done as far as possible*: to `$…`, or a longer name, it is dropped and counted. RETAIN is taken as "discard the
  retained copy at once", which [MQTT-3.3.1-7] allows for QoS 0, and departs from [MQTT-3.3.1-5] for QoS 1; subscribers get it
  without the flag.
- *PUBLISH of QoS 1 that can never succeed is acknowledged*: MQTT 3.1.1 has no negative PUBACK; it allows this, or closing the
  connection [MQTT-3.3.5-2], after which stock clients reconnect and send the message again, for ever. PUBACKs leave in the order
  of the PUBLISHes [MQTT-4.6.0-2].
- *PUBLISH of QoS 2* is treated as QoS 1, with PUBREC for PUBACK; until its PUBREL the same identifier is the same message
  [MQTT-4.3.3-2]. That ends with the connection, as the session does. Subscribers get it with QoS 0.
- *MQTT 5* gets a CONNACK of MQTT 5 with reason 0x84, so that its clients can report the problem; other levels get code 1.

Source: OASIS MQTT 3.1.1; docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

from cluster.core.contract import NEVER
from cluster.core.reading_gate import Hold, ReadingGate
from cluster.mqtt import codec
from cluster.mqtt.events import (
    Close,
    CloseReason,
    Connected,
    DropMessages,
    Effect,
    FiltersInVain,
    PacketsAcknowledged,
    PublishMessages,
    Send,
    SendMail,
    SubscribeFilters,
    UnsubscribeFilters,
)
from cluster.mqtt.inbound import Inbound
from cluster.mqtt.mail import Mails, Unacknowledged
from cluster.mqtt.packets import (
    FIRST_PACKET_BYTES,
    MAX_FILTERS,
    MAX_PACKET_BYTES,
    SUBACK_FAILURE,
    Connack,
    ConnackCode,
    Connect,
    Disconnect,
    MalformedPacket,
    Packet,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Subscribe,
    UnacceptableConnect,
    Unsuback,
    Unsubscribe,
)
from cluster.mqtt.subscriptions import Subscriptions
from pixiu.errors import ConfigurationError
from pixiu.ids import UIN, RoomID
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms
from pixiu.placement.topics import USER_PREFIX, TopicRefusal, destination


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one connection."""

    connect_timeout_s: float = 5.0
    """Time limit from the connection to its CONNECT, seconds."""
    keep_alive_factor: float = 1.5
    """The connection is closed after this multiple of the client's keep-alive without a packet [MQTT-3.1.2-24]."""
    answer_timeout_s: float = 30.0
    """Time limit for the cluster to confirm a subscription or accept a message, seconds; then the connection is closed."""
    puback_timeout_s: float = 300.0
    """Time for which a lane of mail may wait for any PUBACK, seconds; then the connection is closed."""
    max_packet_bytes: int = MAX_PACKET_BYTES
    """Largest packet after CONNECT, header included, bytes."""
    max_subscriptions: int = 1000
    """Limit of filters of one connection; more are answered by 0x80."""
    max_filters: int = MAX_FILTERS
    """Limit of filters in one SUBSCRIBE or UNSUBSCRIBE; more are malformed."""
    max_packets_a_turn: int = 256
    """Limit of packets, and filters of SUBSCRIBEs, in one call of `receive`, about 8 µs each; the rest waits for the next call."""
    packet_timeout_s: float = 120.0
    """Time limit for a packet from its first byte to its last, seconds; then the connection is closed."""
    max_filter_bytes: int = 64 << 10
    """Limit of the bytes of all filters of one connection; more are answered by 0x80."""
    max_inflight: int = 1024
    """Messages of QoS 1 and filters that wait for the cluster: at this number reading pauses, at half of it reading resumes.
    Packets read before the pause still count, so there may be more, at most one for each packet identifier."""

    def validate(self) -> None:
        """Check all limits. Raises `ConfigurationError` that names the key."""
        for limit in fields(self):
            least = FIRST_PACKET_BYTES if limit.name == "max_packet_bytes" else 1
            value = getattr(self, limit.name)
            if limit.name.startswith("max_") and value < least:
                raise ConfigurationError(f"{limit.name} = {value}: must be at least {least}")
            if value <= 0:
                raise ConfigurationError(f"{limit.name} = {value}: must be above 0")


class State(Enum):
    """State of a connection."""

    CONNECTING = "Connecting"
    CONNECTED = "Connected"
    DISCONNECTED = "Disconnected"


class Event(Enum):
    """Events of a connection. Packets with different consequences are different events."""

    CONNECT = "CONNECT"
    CONNECT_REFUSED = "CONNECT that is refused"
    PUBLISH = "PUBLISH"
    PUBLISH_UNACCEPTABLE = "PUBLISH that cannot be done"
    SUBSCRIBE = "SUBSCRIBE"
    UNSUBSCRIBE = "UNSUBSCRIBE"
    PINGREQ = "PINGREQ"
    DISCONNECT = "DISCONNECT"
    PUBACK = "PUBACK"
    PUBREL = "PUBREL"
    UNEXPECTED = "PUBREC or PUBCOMP"
    MALFORMED = "malformed packet"
    SUBSCRIPTION_CONFIRMED = "subscription confirmed"
    PUBLISH_ACCEPTED = "publish accepted"
    MAIL = "mail"
    TIMEOUT = "timeout"
    CLOSE = "close"
    CONNECTION_LOST = "connection lost"


class Transition(NamedTuple):
    """One row of the table: the next state, and the action on the way."""

    state: State
    action: Callable[[ServerSession, Any, float, list[Effect]], None]


class _Problem(NamedTuple):
    reason: CloseReason
    text: str


_IN_USE: Final = _Problem(CloseReason.PACKET_ID_IN_USE, "a packet identifier was used again before its answer [MQTT-2.3.1-2]")
_PACKET_EVENTS: Final[dict[type[Packet], Event]] = {
    UnacceptableConnect: Event.CONNECT_REFUSED,
    Publish: Event.PUBLISH,
    Subscribe: Event.SUBSCRIBE,
    Unsubscribe: Event.UNSUBSCRIBE,
    Pingreq: Event.PINGREQ,
    Disconnect: Event.DISCONNECT,
    Pubrel: Event.PUBREL,
}


def accept_all(connect: Connect) -> ConnackCode:
    """Admit every client: the policy of a server without authentication."""
    return ConnackCode.ACCEPTED


NO_BIG_ROOMS: Final = VRooms()
_MQTT_5: Final = 5
UNSUPPORTED_VERSION: Final = bytes((0x20, 3, 0, 0x84, 0))
"""A CONNACK of MQTT 5: no session, reason "unsupported protocol version", no properties."""
_PINGRESP: Final = Send(codec.PINGRESP)
_NO_INBOUND: Final = Inbound()
"""Stays empty: most connections never publish with QoS 1, and one of their own would take 180 bytes."""


def _outside_vrooms(vrooms: VRooms, name: str) -> RoomID | UIN | TopicRefusal:
    """`destination` in a cluster with big rooms: their VRooms are not valid topics."""
    found = destination(name)
    if isinstance(found, TopicRefusal) or name.startswith(USER_PREFIX):
        return found
    return TopicRefusal.VROOM if vrooms.is_vroom(found) else found


class ServerSession:
    """One connection, from accept to close.

    now: monotonic seconds. assigned_client_id: the name for a client that sends none. admit: the shell's policy, called once, for a
    CONNECT that is valid otherwise; it returns SERVER_UNAVAILABLE while the shell drains, and None if the answer follows by
    `admitted`. vrooms: the cluster's big rooms, whose VRooms are refused as topics. topics: the rooms of free topics, for
    subscriptions; for publishes a proxy chooses the room. gate: of the connection; the session holds it while too much waits for
    the cluster and while `admitted` is due, and measures the client's silence by its clock.

    Each method returns effects to perform in order; after `Close` there are none.

    Source: docs/operations.md; OASIS MQTT 3.1.1 sections 3 and 4.
    """

    __slots__ = (
        "_admit",
        "_assigned_client_id",
        "_clean_session",
        "_client_id",
        "_connect_by",
        "_decoder",
        "_inbound",
        "_judged_later",
        "_last_packet",
        "_limits",
        "_mail",
        "_partial_since",
        "_resolve",
        "_silence_s",
        "_state",
        "_takes_mail",
        "gate",
        "subscriptions",
    )

    def __init__(
        self,
        now: float,
        assigned_client_id: str,
        limits: SessionLimits | None = None,
        admit: Callable[[Connect], ConnackCode | None] = accept_all,
        vrooms: VRooms = NO_BIG_ROOMS,
        topics: TopicRooms = BY_FIRST_LEVEL,
        in_vain: Callable[[int], bool] | None = None,
        gate: ReadingGate | None = None,
    ) -> None:
        self.gate = gate or ReadingGate()
        self._limits = limits = limits or SessionLimits()
        self._admit = admit
        self._resolve = destination if vrooms == NO_BIG_ROOMS else partial(_outside_vrooms, vrooms)
        self._assigned_client_id = assigned_client_id
        self._state = State.CONNECTING
        self._decoder = codec.Decoder(Side.SERVER, self._limits.max_packet_bytes, self._limits.max_filters)
        self._connect_by = now + self._limits.connect_timeout_s
        self._silence_s = 0.0
        self._last_packet = now
        self._inbound = _NO_INBOUND
        self.subscriptions = Subscriptions(limits.max_subscriptions, limits.max_filter_bytes, self._resolve, topics, in_vain)
        self._partial_since: float | None = None
        """Time at which the first byte of an unfinished packet arrived; like `_last_packet` by the gate's clock, since while we do
        not read, the silence is ours."""
        self._client_id = ""
        self._judged_later: tuple[Connect, list[Packet]] | None = None
        """A CONNECT that waits for `admitted`, and the packets after it."""
        self._clean_session = True
        self._takes_mail = False
        self._mail = Unacknowledged()

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

    def admitted(self, code: ConnackCode, now: float) -> list[Effect]:
        """Take the shell's delayed decision about a CONNECT."""
        effects: list[Effect] = []
        if self._judged_later is not None and self._state is State.CONNECTING:
            (connect, behind), self._judged_later = self._judged_later, None
            if code is ConnackCode.ACCEPTED:
                self._step(Event.CONNECT, connect, now, effects)
                self.gate.release(Hold.LOGIN, now)
                self._take(behind, now, effects)
            else:
                self._step(Event.CONNECT_REFUSED, code, now, effects)
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
            elif type(packet) is Puback:
                self._step(Event.PUBACK, packet, now, effects)
            else:
                self._step(_PACKET_EVENTS.get(type(packet), Event.UNEXPECTED), packet, now, effects)
        if self._decoder.error is not None:
            self._step(Event.MALFORMED, self._decoder.error, now, effects)

    def subscription_confirmed(self, packet_id: int, now: float, codes: Sequence[int] | None = None) -> list[Effect]:
        """Note that the subscription has taken effect in the whole cluster.

        codes: one for each filter of the effect, the QoS or `SUBACK_FAILURE`; None: all were granted QoS 0.
        """
        return self._run(Event.SUBSCRIPTION_CONFIRMED, (packet_id, codes), now)

    def deliver_mail(self, topic: str, mails: Sequence[Mails], now: float, *, anew: bool = False) -> list[Effect]:
        """Send mail to the client. `anew`: it is of a new session, and mail of an older one no longer waits for its PUBACK."""
        return self._run(Event.MAIL, (topic, mails, anew), now)

    def publish_accepted(self, packet_ids: Iterable[int], now: float) -> list[Effect]:
        """Note that the cluster has taken these messages of QoS 1."""
        effects: list[Effect] = []
        if self._state is State.CONNECTED:  # the row's action, as for a PUBLISH; the other rows do nothing
            self._acknowledge(packet_ids, now, effects)
        return effects

    def timeout(self, now: float) -> list[Effect]:
        """Run the action of a time-out if the time of `next_deadline` has come; else nothing."""
        if now < self.next_deadline():
            return []
        if self.gate.expire(now):
            return []
        silence, unfinished, puback = self._client_deadlines()
        if self._state is State.CONNECTING:
            problem = _Problem(CloseReason.CONNECT_TIMEOUT, "no CONNECT in time")
        elif now >= silence:
            problem = _Problem(CloseReason.KEEP_ALIVE, f"no packet for {self._silence_s:g} s")
        elif now >= unfinished:
            text = f"a packet was not finished within {self._limits.packet_timeout_s:g} s"
            problem = _Problem(CloseReason.PACKET_UNFINISHED, text)
        elif now >= puback:
            problem = _Problem(CloseReason.MAIL_UNACKNOWLEDGED, f"no PUBACK for {self._limits.puback_timeout_s:g} s")
        else:
            problem = _Problem(CloseReason.UNANSWERED, "the cluster did not answer in time")
        return self._run(Event.TIMEOUT, problem, now)

    def close(self, reason: CloseReason, text: str, now: float) -> list[Effect]:
        """Close the connection for the shell."""
        return self._run(Event.CLOSE, _Problem(reason, text), now)

    def connection_lost(self, now: float) -> list[Effect]:
        """Handle the loss of the connection."""
        return self._run(Event.CONNECTION_LOST, _Problem(CloseReason.CONNECTION_LOST, "the connection was lost"), now)

    # ------------------------------------------------------------------------------------------ decisions

    def _run(self, event: Event, argument: object, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._step(event, argument, now, effects)
        return effects

    def _step(self, event: Event, argument: object, now: float, effects: list[Effect]) -> None:
        self._state, action = TABLE[self._state, event]
        action(self, argument, now, effects)

    def _client_deadlines(self) -> tuple[float, float, float]:
        """Until when the client has to send a packet, the rest of one, and a PUBACK: never while it is not read from."""
        silence = unfinished = puback = NEVER
        if self.gate.reads and self._state is State.CONNECTED:
            held_s, mail_since = self.gate.held_s, self._mail.since if self._takes_mail else None
            if self._silence_s:
                silence = self._last_packet + self._silence_s + held_s
            if self._partial_since is not None:
                unfinished = self._partial_since + self._limits.packet_timeout_s + held_s
            if mail_since is not None:
                puback = mail_since + self._limits.puback_timeout_s + held_s
        return silence, unfinished, puback

    def _judge_connect(self, packet: Connect) -> tuple[Event, object] | None:
        if self._state is not State.CONNECTING:
            return Event.CONNECT, packet
        if not packet.client_id and not packet.clean_session:
            code = ConnackCode.IDENTIFIER_REJECTED
        elif packet.will is not None:
            code = ConnackCode.NOT_AUTHORISED
        else:
            admitted = self._admit(packet)
            if admitted is None:
                return None
            code = admitted
        return (Event.CONNECT, packet) if code is ConnackCode.ACCEPTED else (Event.CONNECT_REFUSED, code)

    def _judge_publish(self, packet: Publish) -> _Problem | None:
        inbound = self._inbound
        exactly = packet.packet_id in inbound.unreleased
        if packet.qos == 2 and not exactly and len(inbound.unreleased) >= 2 * self._limits.max_inflight:
            return _Problem(CloseReason.UNRELEASED, f"{len(inbound.unreleased)} messages of QoS 2 without a PUBREL")
        if (
            packet.packet_id in self.subscriptions.pending
            or (packet.packet_id in inbound.waiting and not packet.dup)
            or (exactly and packet.qos != 2)
        ):
            return _IN_USE
        return None

    # ------------------------------------------------------------------------------------------ actions of the table

    def _accept(self, packet: Connect, now: float, effects: list[Effect]) -> None:
        """Start the session, CONNACK 0."""
        self._client_id = packet.client_id or self._assigned_client_id
        self._clean_session = packet.clean_session
        self._silence_s = packet.keep_alive_s * self._limits.keep_alive_factor
        effects.append(Connected(self._client_id, packet.user_name, packet.clean_session, packet.keep_alive_s))
        effects.append(Send(codec.encode(Connack(False, ConnackCode.ACCEPTED))))

    def _refuse(self, why: ConnackCode | UnacceptableConnect, now: float, effects: list[Effect]) -> None:
        """CONNACK with the return code, close."""
        code = ConnackCode.UNACCEPTABLE_PROTOCOL_LEVEL if isinstance(why, UnacceptableConnect) else why
        five = isinstance(why, UnacceptableConnect) and why.level >= _MQTT_5
        effects.append(Send(UNSUPPORTED_VERSION if five else codec.encode(Connack(False, code))))
        effects.append(Close(CloseReason.CONNECT_REFUSED, code.name.lower()))

    def _publish(self, packet: Publish, now: float, effects: list[Effect]) -> None:
        """Publish, or drop and count where no room carries the topic."""
        room = self._resolve(packet.topic)
        if packet.qos:
            problem = self._judge_publish(packet)
            if problem is not None:
                self._step(Event.PUBLISH_UNACCEPTABLE, problem, now, effects)
                return
            inbound = self._inbound
            if inbound is _NO_INBOUND:
                inbound = self._inbound = Inbound()
            if packet.packet_id in inbound.waiting:
                return  # the same message again, while its first copy waits for the cluster
            if packet.qos == 2:
                if packet.packet_id in inbound.unreleased:
                    effects.append(Send(codec.encode(Pubrec(packet.packet_id))))
                    return
                inbound.unreleased[packet.packet_id] = None
            inbound.waiting[packet.packet_id] = now
            self._bound_unanswered(now)
        last = effects[-1] if effects else None
        if isinstance(room, TopicRefusal):
            size = len(packet.topic) + len(packet.payload)
            if type(last) is DropMessages and last.reason is room:
                effects[-1] = DropMessages(room, last.number + 1, last.size + size)
            else:
                effects.append(DropMessages(room, 1, size))
            if packet.qos:
                self._acknowledge((packet.packet_id,), now, effects)
        elif type(last) is PublishMessages:
            last.messages.append((room, packet))
        else:
            effects.append(PublishMessages([(room, packet)]))

    def _subscribe(self, packet: Subscribe, now: float, effects: list[Effect]) -> None:
        """Join the rooms; SUBACK follows when the cluster confirms, or at once where nothing can be granted."""
        subscriptions, packet_id = self.subscriptions, packet.packet_id
        if subscriptions.asking is None and (packet_id in subscriptions.pending or packet_id in self._inbound.waiting):
            self._step(Event.CLOSE, _IN_USE, now, effects)
            return
        asked = subscriptions.ask(packet.filters, more=packet.more, keep=not self._clean_session)
        if packet.more:
            return
        if asked.in_vain:
            effects.append(FiltersInVain(len(asked.answers)))
        if not asked.joined:
            effects.append(Send(codec.encode(Suback(packet_id, (SUBACK_FAILURE,) * len(asked.answers)))))
            return
        subscriptions.wait(packet_id, asked, now)
        effects.append(SubscribeFilters(packet_id, list(asked.joined.items()), frozenset(asked.mail)))
        self._bound_unanswered(now)

    def _confirm(self, confirmed: tuple[int, Sequence[int] | None], now: float, effects: list[Effect]) -> None:
        """SUBACK."""
        packet_id, codes = confirmed
        answer = self.subscriptions.confirm(packet_id, codes)
        if answer is None:
            return
        self._takes_mail = self._takes_mail or 1 in answer
        effects.append(Send(codec.encode(Suback(packet_id, tuple(answer)))))
        self._bound_unanswered(now)

    def _unsubscribe(self, packet: Unsubscribe, now: float, effects: list[Effect]) -> None:
        """Leave the rooms, UNSUBACK."""
        left = self.subscriptions.leave(packet.filters)
        if left:
            effects.append(UnsubscribeFilters(left))
        if not packet.more:
            effects.append(Send(codec.encode(Unsuback(packet.packet_id))))

    def _acknowledge(self, packet_ids: Iterable[int], now: float, effects: list[Effect]) -> None:
        """PUBACK, or PUBREC, of all messages before the first one that still waits."""
        done = self._inbound.accept(packet_ids)
        if done:
            effects.append(Send(codec.encode_pubacks(done, self._inbound.unreleased)))
            self._bound_unanswered(now)

    def _release(self, packet: Pubrel, now: float, effects: list[Effect]) -> None:
        """PUBCOMP, also where nothing is known of the message: its PUBREC was on an earlier connection."""
        if packet.packet_id in self._inbound.waiting:
            self._step(Event.CLOSE, _Problem(CloseReason.UNEXPECTED_PACKET, "a PUBREL before the PUBREC"), now, effects)
            return
        self._inbound.unreleased.pop(packet.packet_id, None)
        effects.append(Send(codec.encode(Pubcomp(packet.packet_id))))

    def _send_mail(self, what: tuple[str, Sequence[Mails], bool], now: float, effects: list[Effect]) -> None:
        """PUBLISH of QoS 1."""
        topic, mails, anew = what
        self._takes_mail = True
        effects.append(SendMail(self._mail.send(topic, mails, self.gate.clock(now), anew=anew), anew))

    def _mail_acknowledged(self, packet: Puback, now: float, effects: list[Effect]) -> None:
        """Report it; ignore what answers nothing, as of a client that acknowledges before it has subscribed again."""
        if not self._takes_mail:
            return
        self._mail.acknowledge(packet.packet_id, self.gate.clock(now))
        last = effects[-1] if effects else None
        if type(last) is PacketsAcknowledged:
            last.packet_ids.append(packet.packet_id)
        else:
            effects.append(PacketsAcknowledged([packet.packet_id]))

    def _bound_unanswered(self, now: float) -> None:
        waiting = self.waiting
        if waiting >= self._limits.max_inflight:
            self.gate.hold(Hold.UNANSWERED, now)
        elif not self.gate.reads and waiting <= self._limits.max_inflight // 2:
            self.gate.release(Hold.UNANSWERED, now)

    def _pong(self, _: Pingreq, now: float, effects: list[Effect]) -> None:
        """PINGRESP."""
        effects.append(_PINGRESP)

    def _goodbye(self, _: Disconnect, now: float, effects: list[Effect]) -> None:
        """Close."""
        effects.append(Close(CloseReason.CLIENT_DISCONNECTED, "the client disconnected"))

    def _second_connect(self, _: Connect, now: float, effects: list[Effect]) -> None:
        """Close: a protocol violation [MQTT-3.1.0-2]."""
        effects.append(Close(CloseReason.SECOND_CONNECT, "a second CONNECT"))

    def _unexpected(self, packet: Packet, now: float, effects: list[Effect]) -> None:
        """Close: the packet answers nothing that was sent, or comes before CONNECT."""
        effects.append(Close(CloseReason.UNEXPECTED_PACKET, f"an unexpected {type(packet).__name__.upper()}"))

    def _malformed(self, error: MalformedPacket, now: float, effects: list[Effect]) -> None:
        """Close: a protocol violation [MQTT-4.8.0-1]."""
        effects.append(Close(CloseReason.MALFORMED, error.reason.name.lower()))

    def _close(self, problem: _Problem, now: float, effects: list[Effect]) -> None:
        """Close."""
        effects.append(Close(problem.reason, problem.text))

    def _ignore(self, _: object, now: float, effects: list[Effect]) -> None:
        """Nothing."""


TABLE: Final[dict[tuple[State, Event], Transition]] = {
    (State.CONNECTING, Event.CONNECT): Transition(State.CONNECTED, ServerSession._accept),
    (State.CONNECTING, Event.CONNECT_REFUSED): Transition(State.DISCONNECTED, ServerSession._refuse),
    (State.CONNECTING, Event.PUBLISH): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.PUBLISH_UNACCEPTABLE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTING, Event.SUBSCRIBE): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.UNSUBSCRIBE): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.PINGREQ): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.DISCONNECT): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.PUBACK): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.PUBREL): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.UNEXPECTED): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTING, Event.MALFORMED): Transition(State.DISCONNECTED, ServerSession._malformed),
    (State.CONNECTING, Event.SUBSCRIPTION_CONFIRMED): Transition(State.CONNECTING, ServerSession._ignore),
    (State.CONNECTING, Event.PUBLISH_ACCEPTED): Transition(State.CONNECTING, ServerSession._ignore),
    (State.CONNECTING, Event.MAIL): Transition(State.CONNECTING, ServerSession._ignore),
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
    (State.CONNECTED, Event.PUBACK): Transition(State.CONNECTED, ServerSession._mail_acknowledged),
    (State.CONNECTED, Event.PUBREL): Transition(State.CONNECTED, ServerSession._release),
    (State.CONNECTED, Event.UNEXPECTED): Transition(State.DISCONNECTED, ServerSession._unexpected),
    (State.CONNECTED, Event.MALFORMED): Transition(State.DISCONNECTED, ServerSession._malformed),
    (State.CONNECTED, Event.SUBSCRIPTION_CONFIRMED): Transition(State.CONNECTED, ServerSession._confirm),
    (State.CONNECTED, Event.PUBLISH_ACCEPTED): Transition(State.CONNECTED, ServerSession._acknowledge),
    (State.CONNECTED, Event.MAIL): Transition(State.CONNECTED, ServerSession._send_mail),
    (State.CONNECTED, Event.TIMEOUT): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.CLOSE): Transition(State.DISCONNECTED, ServerSession._close),
    (State.CONNECTED, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ServerSession._close),
    **{(State.DISCONNECTED, event): Transition(State.DISCONNECTED, ServerSession._ignore) for event in Event},
}
"""Next state and action for each state and event."""
