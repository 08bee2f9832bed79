"""The client's session alone, and against the server's in memory."""

from __future__ import annotations

import pytest

from cluster.mqtt import codec
from cluster.mqtt.events import (
    Accepted,
    Answered,
    ClientEffect,
    Close,
    Closed,
    CloseReason,
    Effect,
    Messages,
    PublishMessages,
    Send,
    SubscribeFilters,
)
from cluster.mqtt.packets import (
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
    Unsuback,
)
from cluster.mqtt.server import ServerSession
from pixiu.errors import InvalidArgument, NotConnected, Overloaded, RecordTooLarge, RemoteError, Unavailable
from tools.mqtt.client import ANSWER_TIMEOUT_S, MAX_INFLIGHT, TABLE, ClientSession, ConnectionRefused, Event, State


def feed(session: ClientSession, *packets: Packet, now: float = 1.0) -> list[ClientEffect]:
    return session.receive(b"".join(codec.encode(packet) for packet in packets), now)


def connected(keep_alive_s: int = 10) -> ClientSession:
    session = ClientSession("client", keep_alive_s=keep_alive_s)
    assert session.connect(0.0) == [Send(codec.encode(Connect("client", True, keep_alive_s)))]
    assert feed(session, Connack(False, 0), now=0.5) == [Accepted(False)]
    return session


def failure(effects: list[ClientEffect]) -> BaseException | None:
    """The error of the Closed effect, which is the last and the only one."""
    last = effects[-1]
    assert isinstance(last, Closed)
    assert sum(isinstance(effect, Closed) for effect in effects) == 1
    return last.error


def test_the_table_has_a_row_for_every_state_and_event() -> None:
    assert set(TABLE) == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize("code", [code for code in ConnackCode if code])
def test_a_refusal_has_its_return_code_and_says_why(code: ConnackCode) -> None:
    session = ClientSession("client")
    session.connect(0.0)
    error = failure(feed(session, Connack(False, code)))
    assert isinstance(error, ConnectionRefused)
    assert error.return_code is code
    assert f"return code {code.value}" in str(error)


def test_no_connack_in_time() -> None:
    session = ClientSession("client")
    session.connect(5.0)
    assert session.next_deadline() == 15.0
    assert session.timeout(14.9) == []
    assert isinstance(failure(session.timeout(15.0)), Unavailable)


def test_mqtt_3_1_2_23_a_pingreq_is_sent_when_nothing_else_was() -> None:
    session = connected(keep_alive_s=10)
    session.publish("a", b"", 0, 4.0)
    assert session.timeout(13.9) == []
    assert session.timeout(14.0) == [Send(codec.PINGREQ)]
    assert session.next_deadline() == 14.0 + ANSWER_TIMEOUT_S
    assert feed(session, Pingresp()) == []
    assert session.next_deadline() == 24.0


def test_no_answer_to_pingreq() -> None:
    session = connected(keep_alive_s=10)
    session.timeout(10.0)
    assert isinstance(failure(session.timeout(10.0 + ANSWER_TIMEOUT_S)), Unavailable)


def test_no_answer_to_a_subscription() -> None:
    session = connected(keep_alive_s=0)
    session.subscribe(["a"], 0, 3.0)
    assert session.next_deadline() == 3.0 + ANSWER_TIMEOUT_S
    assert isinstance(failure(session.timeout(3.0 + ANSWER_TIMEOUT_S)), Unavailable)


def test_requests_get_different_identifiers_and_their_own_answers() -> None:
    session = connected()
    first, data = session.subscribe(["a", "b"], 0, 1.0)
    second, _ = session.unsubscribe(["c"], 1.0)
    third, _ = session.publish("a", b"x", 1, 1.0)
    assert len({first, second, third}) == 3
    assert len(codec.Decoder(Side.SERVER).feed(codec.encode(Connect("c")) + data)) == 2
    answers = feed(session, Puback(third), Suback(first, (0, 0x80)), Unsuback(second))
    assert answers == [Answered(third), Answered(first, (0, 0x80)), Answered(second)]
    assert session.unanswered == 0


@pytest.mark.slow
def test_an_identifier_that_waits_is_not_given_again() -> None:
    session = connected()
    kept, _ = session.publish("a", b"", 1, 0.0)
    given = set()
    for _ in range(65534):
        packet_id, _ = session.publish("a", b"", 1, 0.0)
        given.add(packet_id)
        feed(session, Puback(packet_id))
    assert session.publish("a", b"", 1, 0.0)[0] != kept
    assert given == set(range(1, 65536)) - {kept}


def test_more_requests_than_the_maximum_are_refused() -> None:
    session = connected()
    for _ in range(MAX_INFLIGHT):
        session.publish("a", b"", 1, 0.0)
    with pytest.raises(Overloaded):
        session.publish("a", b"", 1, 0.0)
    session.publish("a", b"", 0, 0.0)


@pytest.mark.parametrize(
    "packet", [Puback(9), Suback(1, (0, 0)), Unsuback(1), Puback(1), Connack(False, 0), Publish("a", b"", 2, packet_id=1)], ids=repr
)
def test_a_packet_that_answers_nothing_closes(packet: Packet) -> None:
    session = connected()
    assert session.subscribe(["a"], 0, 0.0)[0] == 1
    assert isinstance(failure(feed(session, packet)), RemoteError)
    assert session.state is State.DISCONNECTED


def test_malformed_bytes_close_after_the_messages_before_them() -> None:
    session = connected()
    effects = session.receive(codec.encode(Publish("a", b"x")) + b"\xff", 1.0)
    assert effects[0] == Messages([Publish("a", b"x")])
    assert isinstance(failure(effects), MalformedPacket)


def test_messages_of_one_read_are_one_effect_and_qos_1_is_acknowledged_after_it() -> None:
    messages = [Publish("a", b"1"), Publish("b", b"2", 1, packet_id=5), Publish("a", b"3"), Publish("b", b"4", 1, packet_id=6)]
    effects = feed(connected(), *messages)
    assert effects == [Messages(messages), Send(codec.encode_pubacks([5, 6]))]


@pytest.mark.parametrize(("topic", "qos"), [("", 0), ("a/#", 0), ("a\0", 1), ("a", 2), ("a", -1)])
def test_what_cannot_be_published(topic: str, qos: int) -> None:
    session = connected()
    with pytest.raises(InvalidArgument):
        session.publish(topic, b"", qos, 0.0)
    assert session.unanswered == 0


def test_a_message_that_the_server_would_refuse_is_too_large() -> None:
    session = ClientSession("client", max_packet_bytes=5000)
    session.connect(0.0)
    feed(session, Connack(False, 0))
    with pytest.raises(RecordTooLarge):
        session.publish("a", b"x" * 5000, 0, 0.0)
    largest = session.publish("a", b"x" * (5000 - 7 - 3), 1, 0.0)[1]
    assert len(largest) <= 5000


def test_an_invalid_filter_leaves_no_request_behind() -> None:
    session = connected()
    with pytest.raises(InvalidArgument):
        session.subscribe(["a#"], 0, 0.0)
    assert session.unanswered == 0


def test_requests_need_a_connection() -> None:
    session = ClientSession("client")
    with pytest.raises(NotConnected):
        session.publish("a", b"", 0, 0.0)
    with pytest.raises(NotConnected):
        session.subscribe(["a"], 0, 0.0)
    with pytest.raises(NotConnected):
        session.unsubscribe(["a"], 0.0)


def test_an_identity_that_cannot_be_sent_changes_nothing() -> None:
    session = ClientSession("nul\0")
    with pytest.raises(InvalidArgument):
        session.connect(0.0)
    assert session.state is State.NEW


def test_close_says_goodbye_once() -> None:
    session = connected()
    assert session.close(1.0) == [Send(codec.DISCONNECT), Closed(None)]
    assert session.close(1.0) == []
    assert session.connection_lost("gone", 1.0) == []
    assert feed(session, Publish("a", b"")) == []


# ---------------------------------------------------------------------------------------------- both sides


class Pair:
    """A client and a server session with two byte streams between them, carried `step` bytes at a time."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.client = ClientSession("pair", "42")
        self.server = ServerSession(0.0, "assigned")
        self.client_effects: list[ClientEffect] = []
        self.server_effects: list[Effect] = []

    def to_server(self, data: bytes) -> None:
        for start in range(0, len(data), self.step):
            effects = self.server.receive(data[start : start + self.step], 1.0)
            self.server_effects += effects
            for effect in effects:
                if isinstance(effect, Send):
                    self.to_client(effect.data)

    def to_client(self, data: bytes) -> None:
        for start in range(0, len(data), self.step):
            effects = self.client.receive(data[start : start + self.step], 1.0)
            self.client_effects += effects
            for effect in effects:
                if isinstance(effect, Send):
                    self.to_server(effect.data)

    def run(self, effects: list[Effect]) -> None:
        """Carry out effects of the server."""
        self.server_effects += effects
        for effect in effects:
            if isinstance(effect, Send):
                self.to_client(effect.data)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_client_and_a_server_in_memory(step: int) -> None:
    pair = Pair(step)
    for effect in pair.client.connect(0.0):
        assert isinstance(effect, Send)
        pair.to_server(effect.data)
    assert pair.client.state is State.CONNECTED

    packet_id, data = pair.client.subscribe(["room/5", "user/01", "news/today"], 0, 1.0)
    pair.to_server(data)
    joined = [effect for effect in pair.server_effects if isinstance(effect, SubscribeFilters)]
    assert [name for name, _ in joined[0].filters] == ["room/5", "news/today"]
    assert pair.client.unanswered == 1
    pair.run(pair.server.subscription_confirmed(joined[0].packet_id, 1.0))
    assert pair.client_effects[-1] == Answered(packet_id, (0, 0x80, 0))

    first, data = pair.client.publish("room/5", b"one", 1, 1.0)
    second, more = pair.client.publish("room/5", b"two", 1, 1.0)
    pair.to_server(data + more + pair.client.publish("news/today", b"three", 0, 1.0)[1])
    published = [m for effect in pair.server_effects if isinstance(effect, PublishMessages) for _, m in effect.messages]
    assert [message.payload for message in published] == [b"one", b"two", b"three"]
    pair.run(pair.server.publish_accepted([second], 1.0))
    pair.run(pair.server.publish_accepted([first], 1.0))
    assert pair.client_effects[-2:] == [Answered(first), Answered(second)]

    pair.to_client(b"".join(codec.publish_qos0(codec.topic_prefix(m.topic) + m.payload) for m in published))
    received = [m for effect in pair.client_effects if isinstance(effect, Messages) for m in effect.messages]
    assert received == [m._replace(qos=0, packet_id=0) for m in published]

    packet_id, data = pair.client.unsubscribe(["room/5"], 1.0)
    pair.to_server(data)
    assert pair.client_effects[-1] == Answered(packet_id)
    assert list(pair.server.subscriptions) == ["news/today"]

    for effect in pair.client.timeout(100.0):
        assert effect == Send(codec.PINGREQ)
        pair.to_server(codec.PINGREQ)
    assert pair.client.timeout(101.0) == []
    for effect in pair.client.close(102.0):
        if isinstance(effect, Send):
            pair.to_server(effect.data)
    last = pair.server_effects[-1]
    assert isinstance(last, Close)
    assert last.reason is CloseReason.CLIENT_DISCONNECTED
