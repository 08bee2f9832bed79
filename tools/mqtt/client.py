"""The client's side of one MQTT 3.1.1 connection: requests, packets and timers in, effects out. No I/O, no clock.

`TABLE` holds the actions of a session; `docs/mqtt_states.md` is drawn from it. A session is one connection with a clean
session: to reconnect, make a new session and subscribe again.

Source: OASIS MQTT 3.1.1; docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from cluster.mqtt import codec
from cluster.mqtt.events import Accepted, Answered, ClientEffect, Closed, Messages, Send
from cluster.mqtt.packets import (
    MAX_PACKET_BYTES,
    MAX_PACKET_ID,
    Connack,
    ConnackCode,
    Connect,
    MalformedPacket,
    Packet,
    Pingresp,
    Puback,
    Publish,
    Side,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from pixiu.errors import InvalidArgument, NotConnected, Overloaded, PixiuError, RecordTooLarge, RemoteError, Unavailable

CONNECT_TIMEOUT_S: Final = 10.0
"""Time limit from CONNECT to CONNACK, seconds."""
ANSWER_TIMEOUT_S: Final = 30.0
"""Time limit from a SUBSCRIBE, UNSUBSCRIBE or PUBLISH of QoS 1 to its answer, and from a PINGREQ to any packet, seconds."""
MAX_INFLIGHT: Final = 1024
"""Limit of requests without an answer; one more raises `Overloaded`."""
PUBLISH_OVERHEAD_BYTES: Final = 7
"""Most bytes that a PUBLISH adds to topic and payload: the fixed header and the packet identifier."""
CACHED_PREFIXES: Final = 256
"""Limit of topics whose encoded form is cached; beyond it the cache is emptied."""
CACHED_TOPIC_LENGTH: Final = 256
"""Longest topic that is cached, in characters; longer ones are encoded each time."""

_REFUSALS: Final = {
    ConnackCode.UNACCEPTABLE_PROTOCOL_LEVEL: "it does not speak MQTT 3.1.1",
    ConnackCode.IDENTIFIER_REJECTED: "it rejects the client ID",
    ConnackCode.SERVER_UNAVAILABLE: "it accepts no clients now; try again, or try another server",
    ConnackCode.BAD_USER_NAME_OR_PASSWORD: "user name or password is wrong",
    ConnackCode.NOT_AUTHORISED: "the client is not authorised",
}


class ConnectionRefused(RemoteError):
    """The server answered CONNECT with a return code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server refused the connection: {_REFUSALS[ConnackCode(code)]} (return code {code})")
        self.return_code = ConnackCode(code)


class State(Enum):
    """State of a connection."""

    NEW = "New"
    CONNECTING = "Connecting"
    CONNECTED = "Connected"
    DISCONNECTED = "Disconnected"


class Event(Enum):
    """Events of a connection."""

    CONNECT = "connect"
    CONNACK = "CONNACK 0"
    CONNACK_REFUSED = "CONNACK other than 0"
    PUBLISH = "PUBLISH"
    ANSWER = "PUBACK, SUBACK or UNSUBACK"
    PINGRESP = "PINGRESP"
    UNEXPECTED = "packet that answers nothing, or PUBLISH of QoS 2"
    MALFORMED = "malformed packet"
    PING_DUE = "keep-alive"
    TIMEOUT = "timeout"
    CLOSE = "close"
    CONNECTION_LOST = "connection lost"


class Transition(NamedTuple):
    """One row of the table: the next state, and the action on the way."""

    state: State
    action: Callable[[ClientSession, Any, float, list[ClientEffect]], None]


class _Request(NamedTuple):
    since: float
    answer: type[Packet]
    number: int
    """Number of codes in the answer."""


class ClientSession:
    """One connection of a client.

    keep_alive_s: a PINGREQ is sent after this time without another packet; 0: never.

    `connect`, `receive`, `timeout`, `close` and `connection_lost` return effects to perform in order; the requests return a packet
    identifier (0 for QoS 0) and bytes to send.

    Source: OASIS MQTT 3.1.1 sections 3 and 4.
    """

    def __init__(
        self,
        client_id: str,
        user_name: str | None = None,
        password: bytes | None = None,
        keep_alive_s: int = 60,
        max_packet_bytes: int = MAX_PACKET_BYTES,
    ) -> None:
        self._connect = Connect(client_id, True, keep_alive_s, user_name, password)
        self._decoder = codec.Decoder(Side.CLIENT, max_packet_bytes)
        self._largest = max_packet_bytes - PUBLISH_OVERHEAD_BYTES
        self._state = State.NEW
        self._since = 0.0
        self._last_sent = 0.0
        self._pinged: float | None = None
        self._requests: dict[int, _Request] = {}
        self._last_packet_id = 0
        self._prefixes: dict[str, bytes] = {}

    @property
    def state(self) -> State:
        """The state of the connection."""
        return self._state

    @property
    def unanswered(self) -> int:
        """Number of requests that wait for their answer."""
        return len(self._requests)

    def next_deadline(self) -> float | None:
        """Time at which to call `timeout`, monotonic seconds; None: not before another event."""
        if self._state is State.CONNECTING:
            return self._since + CONNECT_TIMEOUT_S
        if self._state is not State.CONNECTED:
            return None
        deadlines = [] if self._oldest is None else [self._oldest + ANSWER_TIMEOUT_S]
        if self._pinged is not None:
            deadlines.append(self._pinged + ANSWER_TIMEOUT_S)
        elif self._connect.keep_alive_s:
            deadlines.append(self._last_sent + self._connect.keep_alive_s)
        return min(deadlines, default=None)

    # ------------------------------------------------------------------------------------------ requests

    def connect(self, now: float) -> list[ClientEffect]:
        """Send CONNECT. Raises `InvalidArgument` for a client ID, user name or keep-alive that cannot be sent."""
        codec.encode(self._connect)  # before anything changes
        return self._run(Event.CONNECT, None, now)

    def publish(self, topic: str, payload: bytes, qos: int, now: float) -> tuple[int, bytes]:
        """Encode a PUBLISH of QoS 0 or 1. Raises `InvalidArgument`, `RecordTooLarge`, `NotConnected` or `Overloaded`.

        Source: OASIS MQTT 3.1.1 section 3.3.
        """
        if self._state is not State.CONNECTED:
            raise NotConnected("publish() needs a connection: await connect() first")
        prefix = self._prefixes.get(topic) or self._prefix(topic)
        if len(prefix) + len(payload) > self._largest:
            raise RecordTooLarge(f"topic and payload have at most {self._largest} bytes, these {len(prefix) + len(payload)}")
        if qos == 0:
            self._last_sent = now
            return 0, codec.publish_qos0_parts(prefix, payload)
        if qos != 1:
            raise InvalidArgument(f"QoS is 0 or 1, not {qos}")
        packet_id = self._next_packet_id()
        data = codec.encode_publish_parts(prefix, payload, 1, packet_id)
        self._requests[packet_id] = _Request(now, Puback, 0)
        self._last_sent = now
        return packet_id, data

    def subscribe(self, filters: Sequence[str], qos: int, now: float) -> tuple[int, bytes]:
        """Encode a SUBSCRIBE. Raises `InvalidArgument`, `NotConnected` or `Overloaded`."""
        return self._request(
            lambda packet_id: Subscribe(packet_id, tuple((name, qos) for name in filters)), Suback, len(filters), now
        )

    def unsubscribe(self, filters: Sequence[str], now: float) -> tuple[int, bytes]:
        """Encode an UNSUBSCRIBE. Raises `InvalidArgument`, `NotConnected` or `Overloaded`."""
        return self._request(lambda packet_id: Unsubscribe(packet_id, tuple(filters)), Unsuback, 0, now)

    # ------------------------------------------------------------------------------------------ events

    def receive(self, data: bytes, now: float) -> list[ClientEffect]:
        """Process bytes that arrived. Never raises for their content."""
        effects: list[ClientEffect] = []
        if self._state is State.DISCONNECTED:
            return effects
        packets = self._decoder.feed(data)
        if packets:
            self._pinged = None  # any packet shows that the server is alive
        for packet in packets:
            # A PUBLISH runs the action of its row without looking it up in the table: the look-up costs as much as the action.
            if type(packet) is Publish and packet.qos < 2 and self._state is State.CONNECTED:
                self._deliver(packet, now, effects)
            else:
                self._step(self._event_of(packet), packet, now, effects)
        if self._decoder.error is not None:
            self._step(Event.MALFORMED, self._decoder.error, now, effects)
        return _join_pubacks(effects)

    def timeout(self, now: float) -> list[ClientEffect]:
        """Run the action of a time-out if the time of `next_deadline` has come; else nothing."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        if self._state is State.CONNECTING:
            return self._run(Event.TIMEOUT, Unavailable(f"the server did not answer CONNECT within {CONNECT_TIMEOUT_S:g} s"), now)
        if any(since is not None and now >= since + ANSWER_TIMEOUT_S for since in (self._pinged, self._oldest)):
            return self._run(Event.TIMEOUT, Unavailable(f"the server did not answer within {ANSWER_TIMEOUT_S:g} s"), now)
        return self._run(Event.PING_DUE, None, now)

    def close(self, now: float) -> list[ClientEffect]:
        """End the connection for the application: DISCONNECT, close."""
        return self._run(Event.CLOSE, None, now)

    def connection_lost(self, text: str, now: float) -> list[ClientEffect]:
        """Handle the loss of the connection."""
        return self._run(Event.CONNECTION_LOST, Unavailable(text), now)

    # ------------------------------------------------------------------------------------------ decisions

    def _run(self, event: Event, argument: object, now: float) -> list[ClientEffect]:
        effects: list[ClientEffect] = []
        self._step(event, argument, now, effects)
        return effects

    def _step(self, event: Event, argument: object, now: float, effects: list[ClientEffect]) -> None:
        self._state, action = TABLE[self._state, event]
        action(self, argument, now, effects)

    def _event_of(self, packet: Packet) -> Event:
        if isinstance(packet, Connack):
            return Event.CONNACK_REFUSED if packet.code else Event.CONNACK
        if isinstance(packet, (Puback, Suback, Unsuback)):
            request = self._requests.get(packet.packet_id)
            codes = len(packet.codes) if isinstance(packet, Suback) else 0
            fits = request is not None and request.answer is type(packet) and request.number == codes
            return Event.ANSWER if fits else Event.UNEXPECTED
        if isinstance(packet, Publish) and packet.qos < 2:
            return Event.PUBLISH
        return Event.PINGRESP if isinstance(packet, Pingresp) else Event.UNEXPECTED

    @property
    def _oldest(self) -> float | None:
        return next(iter(self._requests.values())).since if self._requests else None

    def _request(
        self, packet: Callable[[int], Subscribe | Unsubscribe], answer: type[Packet], number: int, now: float
    ) -> tuple[int, bytes]:
        if self._state is not State.CONNECTED:
            raise NotConnected("subscribe() and unsubscribe() need a connection: await connect() first")
        packet_id = self._next_packet_id()
        data = codec.encode(packet(packet_id))
        self._requests[packet_id] = _Request(now, answer, number)
        self._last_sent = now
        return packet_id, data

    def _next_packet_id(self) -> int:
        if len(self._requests) >= MAX_INFLIGHT:
            raise Overloaded(f"{MAX_INFLIGHT} requests wait for the server; wait for some of them", retry_after_ms=100)
        packet_id = self._last_packet_id
        while True:
            packet_id = packet_id % MAX_PACKET_ID + 1
            if packet_id not in self._requests:
                self._last_packet_id = packet_id
                return packet_id

    def _prefix(self, topic: str) -> bytes:
        prefix = codec.topic_prefix(topic)
        if len(topic) <= CACHED_TOPIC_LENGTH:
            if len(self._prefixes) >= CACHED_PREFIXES:
                self._prefixes.clear()
            self._prefixes[topic] = prefix
        return prefix

    # ------------------------------------------------------------------------------------------ actions of the table

    def _begin(self, _: None, now: float, effects: list[ClientEffect]) -> None:
        """Send CONNECT."""
        self._since = self._last_sent = now
        effects.append(Send(codec.encode(self._connect)))

    def _accepted(self, packet: Connack, now: float, effects: list[ClientEffect]) -> None:
        """Tell the application."""
        effects.append(Accepted(packet.session_present))

    def _refused(self, packet: Connack, now: float, effects: list[ClientEffect]) -> None:
        """Close with the server's reason."""
        effects.append(Closed(ConnectionRefused(packet.code)))

    def _deliver(self, packet: Publish, now: float, effects: list[ClientEffect]) -> None:
        """Hand the message to the application; PUBACK for QoS 1."""
        # Appended to the previous messages, so that a read is one effect; `_join_pubacks` puts the PUBACKs after it.
        last = effects[-1] if effects else None
        if type(last) is Messages:
            last.messages.append(packet)
        else:
            effects.append(Messages([packet]))

    def _answer(self, packet: Puback | Suback | Unsuback, now: float, effects: list[ClientEffect]) -> None:
        """Tell who asked."""
        del self._requests[packet.packet_id]
        effects.append(Answered(packet.packet_id, packet.codes if isinstance(packet, Suback) else ()))

    def _ping(self, _: None, now: float, effects: list[ClientEffect]) -> None:
        """Send PINGREQ."""
        self._pinged = self._last_sent = now
        effects.append(Send(codec.PINGREQ))

    def _unexpected(self, packet: Packet, now: float, effects: list[ClientEffect]) -> None:
        """Close: the server breaks the protocol."""
        effects.append(Closed(RemoteError(f"the server sent an unexpected {type(packet).__name__.upper()}")))

    def _malformed(self, error: MalformedPacket, now: float, effects: list[ClientEffect]) -> None:
        """Close: the server breaks the protocol."""
        effects.append(Closed(error))

    def _fail(self, error: PixiuError, now: float, effects: list[ClientEffect]) -> None:
        """Close with the error."""
        effects.append(Closed(error))

    def _goodbye(self, _: None, now: float, effects: list[ClientEffect]) -> None:
        """Send DISCONNECT, close."""
        effects.append(Send(codec.DISCONNECT))
        effects.append(Closed(None))

    def _give_up(self, _: None, now: float, effects: list[ClientEffect]) -> None:
        """Close."""
        effects.append(Closed(None))

    def _ignore(self, _: object, now: float, effects: list[ClientEffect]) -> None:
        """Nothing."""


def _join_pubacks(effects: list[ClientEffect]) -> list[ClientEffect]:
    """Put the PUBACKs of each batch of messages after it, joined."""
    joined: list[ClientEffect] = []
    for effect in effects:
        joined.append(effect)
        if type(effect) is Messages:
            packet_ids = [message.packet_id for message in effect.messages if message.qos]
            if packet_ids:
                joined.append(Send(codec.encode_pubacks(packet_ids)))
    return joined


TABLE: Final[dict[tuple[State, Event], Transition]] = {
    **{(State.NEW, event): Transition(State.NEW, ClientSession._ignore) for event in Event},
    (State.NEW, Event.CONNECT): Transition(State.CONNECTING, ClientSession._begin),
    (State.NEW, Event.CLOSE): Transition(State.DISCONNECTED, ClientSession._give_up),
    (State.NEW, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ClientSession._fail),
    (State.CONNECTING, Event.CONNECT): Transition(State.CONNECTING, ClientSession._ignore),
    (State.CONNECTING, Event.CONNACK): Transition(State.CONNECTED, ClientSession._accepted),
    (State.CONNECTING, Event.CONNACK_REFUSED): Transition(State.DISCONNECTED, ClientSession._refused),
    (State.CONNECTING, Event.PUBLISH): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTING, Event.ANSWER): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTING, Event.PINGRESP): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTING, Event.UNEXPECTED): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTING, Event.MALFORMED): Transition(State.DISCONNECTED, ClientSession._malformed),
    (State.CONNECTING, Event.PING_DUE): Transition(State.CONNECTING, ClientSession._ignore),
    (State.CONNECTING, Event.TIMEOUT): Transition(State.DISCONNECTED, ClientSession._fail),
    (State.CONNECTING, Event.CLOSE): Transition(State.DISCONNECTED, ClientSession._give_up),
    (State.CONNECTING, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ClientSession._fail),
    (State.CONNECTED, Event.CONNECT): Transition(State.CONNECTED, ClientSession._ignore),
    (State.CONNECTED, Event.CONNACK): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTED, Event.CONNACK_REFUSED): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTED, Event.PUBLISH): Transition(State.CONNECTED, ClientSession._deliver),
    (State.CONNECTED, Event.ANSWER): Transition(State.CONNECTED, ClientSession._answer),
    (State.CONNECTED, Event.PINGRESP): Transition(State.CONNECTED, ClientSession._ignore),
    (State.CONNECTED, Event.UNEXPECTED): Transition(State.DISCONNECTED, ClientSession._unexpected),
    (State.CONNECTED, Event.MALFORMED): Transition(State.DISCONNECTED, ClientSession._malformed),
    (State.CONNECTED, Event.PING_DUE): Transition(State.CONNECTED, ClientSession._ping),
    (State.CONNECTED, Event.TIMEOUT): Transition(State.DISCONNECTED, ClientSession._fail),
    (State.CONNECTED, Event.CLOSE): Transition(State.DISCONNECTED, ClientSession._goodbye),
    (State.CONNECTED, Event.CONNECTION_LOST): Transition(State.DISCONNECTED, ClientSession._fail),
    **{(State.DISCONNECTED, event): Transition(State.DISCONNECTED, ClientSession._ignore) for event in Event},
}
"""Next state and action for each state and event."""
