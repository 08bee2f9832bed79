"""The server's session: its table, its timers, its limits. No sockets and no clock."""

from __future__ import annotations

import pytest

from cluster.core.contract import NEVER
from cluster.core.reading_gate import Hold
from cluster.mqtt import codec
from cluster.mqtt.events import (
    Close,
    CloseReason,
    Connected,
    DropMessages,
    Effect,
    FiltersInVain,
    PublishMessages,
    Send,
    SubscribeFilters,
    UnsubscribeFilters,
    Wanted,
)
from cluster.mqtt.packets import (
    SUBACK_FAILURE,
    Connack,
    ConnackCode,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.server import TABLE, ServerSession
from cluster.mqtt.states import Event, State
from cluster.mqtt.terms import SessionLimits
from pixiu.errors import ConfigurationError
from pixiu.ids import UIN, RoomID, topic_room
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topics import TopicRefusal
from tests.support.builds import plain_only


def send(session: ServerSession, *packets: Packet, now: float = 1.0) -> list[Effect]:
    return session.receive(b"".join(codec.encode(packet) for packet in packets), now)


def sent(effects: list[Effect]) -> list[Packet]:
    """The packets in the Send effects."""
    decoder = codec.Decoder(Side.CLIENT)
    decoder.feed(b"\x20\x02\x00\x00")
    packets = [packet for effect in effects if isinstance(effect, Send) for packet in decoder.feed(effect.data)]
    assert decoder.error is None
    assert decoder.buffered_bytes == 0
    return packets


def connack(effects: list[Effect]) -> Connack:
    """The CONNACK in the first Send effect."""
    data = next(effect.data for effect in effects if isinstance(effect, Send))
    packet = codec.decode(data, Side.CLIENT)
    assert isinstance(packet, Connack)
    return packet


def connected(limits: SessionLimits | None = None, keep_alive_s: int = 10) -> ServerSession:
    session = ServerSession(0.0, "assigned", limits)
    effects = send(session, Connect("client", True, keep_alive_s), now=1.0)
    assert isinstance(effects[0], Connected)
    assert (effects[0].client_id, effects[0].terms.keep_alive_s) == ("client", keep_alive_s)
    assert connack(effects) == Connack(False, 0)
    return session


def closed(effects: list[Effect]) -> CloseReason:
    """The reason of the Close effect, which is the last and the only one."""
    closes = [effect for effect in effects if isinstance(effect, Close)]
    assert len(closes) == 1
    assert effects[-1] is closes[0]
    return closes[0].reason


# ---------------------------------------------------------------------------------------------- the table


def test_the_table_has_a_row_for_every_state_and_event() -> None:
    assert set(TABLE) == {(state, event) for state in State for event in Event}


def test_nothing_leads_out_of_disconnected() -> None:
    assert {row.state for (state, _), row in TABLE.items() if state is State.DISCONNECTED} == {State.DISCONNECTED}


@plain_only
def test_every_row_that_leads_to_disconnected_closes() -> None:
    for (state, event), (target, action) in TABLE.items():
        if target is State.DISCONNECTED and state is not target:
            assert "lose" in (action.__doc__ or ""), (state, event)


# ---------------------------------------------------------------------------------------------- CONNECT


def test_mqtt_3_1_0_2_a_second_connect_closes() -> None:
    session = connected()
    assert closed(send(session, Connect("client"))) is CloseReason.SECOND_CONNECT
    assert session.state is State.DISCONNECTED


def test_mqtt_3_1_2_2_another_protocol_level_gets_return_code_1() -> None:
    session = ServerSession(0.0, "assigned")
    effects = session.receive(b"\x10\x0d\x00\x04MQTT\x03\x02\x00\x3c\x00\x00\x00", 0.0)  # level 3 was called MQIsdp
    assert connack(effects) == Connack(False, ConnackCode.UNACCEPTABLE_PROTOCOL_LEVEL)
    assert closed(effects) is CloseReason.CONNECT_REFUSED


def test_mqtt_3_1_3_8_an_empty_client_id_with_clean_session_off_gets_return_code_2() -> None:
    session = ServerSession(0.0, "assigned")
    effects = send(session, Connect("", False))
    assert connack(effects) == Connack(False, ConnackCode.IDENTIFIER_REJECTED)
    assert closed(effects) is CloseReason.CONNECT_REFUSED


def test_mqtt_3_1_3_6_an_empty_client_id_is_assigned() -> None:
    session = ServerSession(0.0, "assigned")
    begun = send(session, Connect("", True, 5, "me"))[0]
    assert isinstance(begun, Connected)
    assert (begun.client_id, begun.connect.user_name) == ("assigned", "me")
    assert session.client_id == "assigned"


def test_clean_session_off_is_accepted_without_a_session_present() -> None:
    session = ServerSession(0.0, "assigned")
    effects = send(session, Connect("client", False))
    assert isinstance(effects[0], Connected)
    assert effects[0].terms.keep
    assert connack(effects) == Connack(False, 0)


def test_a_will_whose_topic_no_room_carries_is_refused() -> None:
    session = ServerSession(0.0, "assigned")
    effects = send(session, Connect("client", will=Will("$SYS/gone", b"")))
    assert connack(effects) == Connack(False, ConnackCode.NOT_AUTHORISED)
    assert closed(effects) is CloseReason.CONNECT_REFUSED


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, 1),
        (ReasonCode.CLIENT_ID_NOT_VALID, 2),
        (ReasonCode.SERVER_BUSY, 3),
        (ReasonCode.USE_ANOTHER_SERVER, 3),
        (ReasonCode.BAD_USER_NAME_OR_PASSWORD, 4),
        (ReasonCode.NOT_AUTHORISED, 5),
    ],
)
def test_what_the_shell_does_not_admit_is_refused_with_its_code(code: ReasonCode, answer: int) -> None:
    asked: list[Connect] = []

    def admit(connect: Connect) -> ReasonCode:
        asked.append(connect)
        return code

    session = ServerSession(0.0, "assigned", admit=admit)
    effects = send(session, Connect("client", user_name="u", password=b"p"), Pingreq())
    assert asked == [Connect("client", user_name="u", password=b"p")]
    assert connack(effects) == Connack(False, answer)
    assert closed(effects) is CloseReason.CONNECT_REFUSED


def test_mqtt_3_1_4_1_a_malformed_connect_is_closed_without_a_connack() -> None:
    session = ServerSession(0.0, "assigned")
    effects = session.receive(b"\x10\x0c\x00\x04MQTT\x04\x03\x00\x3c\x00\x00", 0.0)
    assert closed(effects) is CloseReason.MALFORMED
    assert len(effects) == 1


def test_packets_after_connect_in_the_same_read() -> None:
    session = ServerSession(0.0, "assigned")
    effects = send(session, Connect("c"), Subscribe(1, (("room/1", 0),)), Publish("room/1", b"x"), Pingreq())
    assert [type(effect) for effect in effects] == [Connected, Send, SubscribeFilters, PublishMessages, Send]


def test_packets_before_a_malformed_one_are_done() -> None:
    session = connected()
    effects = session.receive(codec.encode(Publish("a", b"1")) + b"\x00\x00", 1.0)
    assert effects[0] == PublishMessages([(topic_room("a"), Publish("a", b"1"))])
    assert closed(effects) is CloseReason.MALFORMED


# ---------------------------------------------------------------------------------------------- timers


def test_a_connection_without_connect_is_closed_after_five_seconds() -> None:
    session = ServerSession(100.0, "assigned")
    assert session.next_deadline() == 105.0
    assert session.receive(b"\x10", 104.0) == []
    assert session.timeout(104.9) == []
    assert closed(session.timeout(105.0)) is CloseReason.CONNECT_TIMEOUT
    assert session.next_deadline() == NEVER


def test_mqtt_3_1_2_24_silence_of_one_and_a_half_keep_alives_closes() -> None:
    session = connected(keep_alive_s=10)
    assert session.next_deadline() == 16.0
    send(session, Pingreq(), now=5.0)
    assert session.next_deadline() == 20.0
    assert session.timeout(19.9) == []
    assert closed(session.timeout(20.0)) is CloseReason.KEEP_ALIVE


def test_bytes_that_complete_no_packet_do_not_keep_alive() -> None:
    session = connected(keep_alive_s=10)
    session.receive(b"\x30", 15.0)
    assert closed(session.timeout(16.0)) is CloseReason.KEEP_ALIVE


def test_without_keep_alive_silence_is_allowed() -> None:
    assert connected(keep_alive_s=0).next_deadline() == NEVER


def test_mqtt_3_12_4_1_pingreq_is_answered() -> None:
    assert sent(send(connected(), Pingreq())) == [Pingresp()]


def test_a_subscription_that_the_cluster_does_not_confirm_closes() -> None:
    session = connected(keep_alive_s=0)
    send(session, Subscribe(1, (("room/1", 0),)), now=2.0)
    assert session.next_deadline() == 32.0
    assert closed(session.timeout(32.0)) is CloseReason.UNANSWERED


def test_a_message_that_the_cluster_does_not_accept_closes() -> None:
    """MQTT-4.8.0-2."""
    session = connected(keep_alive_s=0)
    send(session, Publish("a", b"", 1, packet_id=1), now=2.0)
    send(session, Publish("a", b"", 1, packet_id=2), now=9.0)
    session.publish_accepted([1], 9.0)
    assert session.next_deadline() == 39.0
    assert closed(session.timeout(39.0)) is CloseReason.UNANSWERED


# ---------------------------------------------------------------------------------------------- SUBSCRIBE, UNSUBSCRIBE


def test_suback_is_sent_only_when_the_subscription_took_effect() -> None:
    session = connected()
    effects = send(session, Subscribe(7, (("room/5", 2), ("a/b", 0))))
    assert effects == [SubscribeFilters(7, [Wanted("room/5", 2), Wanted("a/b")])]
    assert sent(session.subscription_confirmed(7, 2.0)) == [Suback(7, (2, 0))]
    assert session.subscription_confirmed(7, 2.0) == []


def test_mqtt_3_8_4_5_one_code_for_each_filter_in_order() -> None:
    session = connected()
    filters = ("user/01", "room/1", "a/#", "b", "$other/x", "room/01", "room/1", "room/+")
    effects = send(session, Subscribe(1, tuple((name, 1) for name in filters)))
    assert effects == [SubscribeFilters(1, [Wanted("room/1", 1), Wanted("a/#", 1), Wanted("b", 1)])]
    codes = tuple(1 if name in ("room/1", "a/#", "b") else SUBACK_FAILURE for name in filters)
    assert sent(session.subscription_confirmed(1, 1.0)) == [Suback(1, codes)]


def test_when_no_filter_can_be_granted_suback_is_sent_at_once() -> None:
    assert sent(send(connected(), Subscribe(3, (("user/01", 0), ("$x/#", 0))))) == [Suback(3, (0x80, 0x80))]


def test_the_shell_can_refuse_a_filter() -> None:
    session = connected()
    send(session, Subscribe(1, (("a", 0), ("b", 0))))
    assert sent(session.subscription_confirmed(1, 1.0, [0, SUBACK_FAILURE])) == [Suback(1, (0, SUBACK_FAILURE))]
    assert list(session.subscriptions.filters) == ["a"]


def test_filters_above_the_maximum_of_a_connection_are_refused_and_known_ones_are_not() -> None:
    session = connected(SessionLimits(max_subscriptions=2))
    send(session, Subscribe(1, (("a", 0), ("b", 0), ("c", 0), ("a", 0))))
    assert sent(session.subscription_confirmed(1, 1.0)) == [Suback(1, (0, 0, SUBACK_FAILURE, 0))]
    send(session, Unsubscribe(2, ("a",)))
    assert send(session, Subscribe(3, (("c", 0),))) == [SubscribeFilters(3, [Wanted("c")])]


def test_the_bytes_of_all_filters_are_bounded_and_free_again_when_one_goes() -> None:
    session = connected(SessionLimits(max_filter_bytes=4))
    send(session, Subscribe(1, (("long", 0), ("b", 0))))
    assert sent(session.subscription_confirmed(1, 1.0)) == [Suback(1, (0, SUBACK_FAILURE))]
    send(session, Unsubscribe(2, ("long",)))
    assert send(session, Subscribe(3, (("b", 0),))) == [SubscribeFilters(3, [Wanted("b")])]


def test_filters_that_the_shell_has_no_space_for_are_refused_unseen_and_those_before_stay() -> None:
    asked = list[int]()

    def in_vain(filters: int) -> bool:
        asked.append(filters)
        return len(asked) == 1

    session = ServerSession(0.0, "assigned", in_vain=in_vain)
    send(session, Connect("me"))
    send(session, Subscribe(1, (("a", 0),)))
    session.subscription_confirmed(1, 1.0)
    assert asked == [], "one that comes whole is judged by its filters"
    names = [f"room/{number}" for number in range(1, 900)]
    for packet_id, granted in ((2, False), (3, True)):
        effects = session.receive(codec.encode(Subscribe(packet_id, tuple((name, 0) for name in ("a", *names)))), 1.0)
        while session.has_more:
            assert session.subscriptions.asking
            effects += session.receive(b"", 1.0)
        assert not session.subscriptions.asking
        assert list(session.subscriptions.filters) == (["a", *names] if granted else ["a"])
        if not granted:
            assert effects[0] == FiltersInVain(900)
            assert sent(effects) == [Suback(2, (SUBACK_FAILURE,) * 900)]
    assert [type(effect) for effect in effects] == [SubscribeFilters]
    assert len(asked) == 2


def test_too_many_filters_in_one_subscribe_are_malformed() -> None:
    session = connected(SessionLimits(max_filters=2))
    effects = send(session, Subscribe(1, (("a", 0), ("b", 0), ("c", 0))))
    assert closed(effects) is CloseReason.MALFORMED


def test_subscribing_again_joins_again() -> None:
    session = connected()
    send(session, Subscribe(1, (("a", 0),)))
    assert send(session, Subscribe(2, (("a", 0),))) == [SubscribeFilters(2, [Wanted("a")])]


def test_mqtt_2_3_1_2_a_packet_identifier_that_waits_cannot_be_used_again() -> None:
    for first in (Subscribe(1, (("a", 0),)), Publish("a", b"", 1, packet_id=1)):
        for second in (Subscribe(1, (("b", 0),)), Publish("b", b"", 1, packet_id=1)):
            session = connected()
            send(session, first)
            assert closed(send(session, second)) is CloseReason.PACKET_ID_IN_USE


def test_mqtt_3_10_4_4_unsubscribe_is_answered_after_leaving() -> None:
    session = connected()
    send(session, Subscribe(1, (("a", 0), ("room/2", 0))))
    session.subscription_confirmed(1, 1.0)
    effects = send(session, Unsubscribe(2, ("room/2", "never", "room/2")))
    assert effects[0] == UnsubscribeFilters(["room/2"])
    assert sent(effects) == [Unsuback(2)]
    assert list(session.subscriptions.filters) == ["a"]


def test_mqtt_3_10_4_5_unsubscribe_is_answered_even_when_nothing_matches() -> None:
    effects = send(connected(), Unsubscribe(2, ("never",)))
    assert sent(effects) == [Unsuback(2)]
    assert len(effects) == 1


# ---------------------------------------------------------------------------------------------- PUBLISH


def test_messages_of_one_read_are_one_effect_in_order() -> None:
    session = connected()
    messages = [Publish("room/9", b"1"), Publish("a/b", b"2", 1, packet_id=4), Publish("room/9", b"3")]
    assert send(session, *messages) == [
        PublishMessages([(RoomID(9), messages[0]), (topic_room("a"), messages[1]), (RoomID(9), messages[2])])
    ]


def test_qos_0_is_not_acknowledged_and_qos_1_only_when_the_cluster_accepted_it() -> None:
    session = connected()
    send(session, Publish("a", b"", 0), Publish("a", b"", 1, packet_id=4))
    assert session.waiting == 1
    assert sent(session.publish_accepted([4], 1.0)) == [Puback(4)]
    assert session.waiting == 0
    assert session.publish_accepted([4, 5], 1.0) == []


def test_mqtt_4_6_0_2_pubacks_leave_in_the_order_of_the_publishes() -> None:
    session = connected()
    send(session, *(Publish("a", b"", 1, packet_id=number) for number in (5, 3, 9)))
    assert session.publish_accepted([9], 1.0) == []
    assert session.publish_accepted([3], 1.0) == []
    assert sent(session.publish_accepted([5], 1.0)) == [Puback(5), Puback(3), Puback(9)]


def test_a_duplicate_of_a_message_that_waits_is_published_and_acknowledged_once() -> None:
    session = connected()
    send(session, Publish("a", b"x", 1, packet_id=1))
    assert send(session, Publish("a", b"x", 1, dup=True, packet_id=1)) == []
    assert sent(session.publish_accepted([1], 1.0)) == [Puback(1)]


def test_a_duplicate_from_an_earlier_connection_is_published_with_its_flag() -> None:
    message = Publish("a", b"x", 1, dup=True, packet_id=1)
    assert send(connected(), message) == [PublishMessages([(topic_room("a"), message)])]


def test_a_refused_message_closes_without_a_puback() -> None:
    session = connected()
    send(session, Publish("a", b"", 1, packet_id=1))
    effects = session.close(CloseReason.PUBLISH_REFUSED, "overloaded", 1.0)
    assert closed(effects) is CloseReason.PUBLISH_REFUSED
    assert sent(effects) == []


@pytest.mark.parametrize(
    ("topic", "refusal"),
    [
        ("user/07", TopicRefusal.USER),
        ("$SYS/x", TopicRefusal.SYSTEM),
        ("room/01", TopicRefusal.ROOM_NUMBER),
        ("x" * 4097, TopicRefusal.LONG),
    ],
)
def test_qos_0_to_a_topic_without_a_room_is_dropped_and_counted(topic: str, refusal: TopicRefusal) -> None:
    session = connected()
    assert send(session, Publish(topic, b""), Publish(topic, b"")) == [DropMessages(refusal, 2, 2 * len(topic))]
    assert session.state is State.CONNECTED


def test_mqtt_4_3_3_2_a_message_of_qos_2_is_published_once_until_its_pubrel() -> None:
    session = connected()
    message = Publish("a", b"x", 2, packet_id=7)
    again = Publish("a", b"x", 2, dup=True, packet_id=7)
    assert send(session, message) == [PublishMessages([(topic_room("a"), message)])]
    assert send(session, again) == []
    assert sent(session.publish_accepted((7,), 1.0)) == [Pubrec(7)]
    assert sent(send(session, again)) == [Pubrec(7)]
    assert sent(send(session, Pubrel(7))) == [Pubcomp(7)]
    assert sent(send(session, Pubrel(7))) == [Pubcomp(7)]
    assert send(session, message) == [PublishMessages([(topic_room("a"), message)])]


def test_mqtt_4_6_0_answers_of_qos_1_and_2_keep_the_order_of_their_messages() -> None:
    session = connected()
    send(session, Publish("a", b"", 2, packet_id=1), Publish("a", b"", 1, packet_id=2), Publish("$SYS", b"", 2, packet_id=3))
    assert sent(session.publish_accepted((2,), 1.0)) == []
    assert sent(session.publish_accepted((1,), 1.0)) == [Pubrec(1), Puback(2), Pubrec(3)]


def test_a_client_that_never_releases_or_releases_too_early_is_closed() -> None:
    session = connected()
    assert closed([*send(session, Publish("a", b"", 2, packet_id=1)), *send(session, Pubrel(1))]) is CloseReason.UNEXPECTED_PACKET
    session = connected()
    for number in range(1, 2049):
        send(session, Publish("a", b"", 2, packet_id=number))
        session.publish_accepted((number,), 1.0)
    assert closed(send(session, Publish("a", b"", 2, packet_id=2049))) is CloseReason.UNRELEASED
    session = connected()
    send(session, Publish("a", b"", 2, packet_id=1))
    session.publish_accepted((1,), 1.0)
    assert closed(send(session, Publish("a", b"", 1, packet_id=1))) is CloseReason.PACKET_ID_IN_USE


@pytest.mark.parametrize("message", [Publish("a", b"x", 0, retain=True), Publish("a", b"x", 1, retain=True, packet_id=1)])
def test_mqtt_3_3_1_7_a_retained_message_that_need_not_be_kept_is_published(message: Publish) -> None:
    assert send(connected(), message) == [PublishMessages([(topic_room("a"), message)])]


def test_a_pubrec_that_answers_nothing_is_answered_and_a_pubcomp_ignored() -> None:
    assert sent(send(connected(), Pubrec(3))) == [Pubrel(3)]
    assert send(connected(), Pubcomp(3)) == []


@pytest.mark.parametrize("topic", ["user/07", "$SYS/x", "room/0"])
def test_mqtt_3_3_5_2_qos_1_that_is_never_done_is_acknowledged_in_order_and_counted(topic: str) -> None:
    session = connected()
    effects = send(session, Publish("a", b"x", 1, packet_id=1), Publish(topic, b"", 1, packet_id=2))
    assert [type(effect) for effect in effects] == [PublishMessages, DropMessages]
    assert sent(session.publish_accepted((1,), 1.0)) == [Puback(1), Puback(2)]
    assert (session.state, session.waiting) == (State.CONNECTED, 0)


def test_a_client_of_a_later_mqtt_is_told_in_the_words_of_mqtt_5() -> None:
    session = ServerSession(0.0, "assigned")
    effects = session.receive(bytes.fromhex("100e00044d515454060200 3c00000161".replace(" ", "")), 0.0)
    assert effects[0] == Send(b"\x20\x03\x00\x84\x00")
    assert closed(effects) is CloseReason.CONNECT_REFUSED


def test_a_puback_that_answers_nothing_is_ignored() -> None:
    assert send(connected(), Puback(1)) == []


# ---------------------------------------------------------------------------------------------- limits


def test_reading_pauses_at_the_maximum_and_resumes_at_half() -> None:
    session = connected(SessionLimits(max_inflight=4), keep_alive_s=10)
    effects = send(session, *(Publish("a", b"", 1, packet_id=number) for number in range(1, 6)))
    assert sum(len(effect.messages) for effect in effects if isinstance(effect, PublishMessages)) == 5
    assert session.gate.reasons == {Hold.UNANSWERED: 1.0}
    assert session.next_deadline() == 31.0  # the silence of a client that is not read is no silence
    session.publish_accepted([1, 2], 20.0)
    assert not session.gate.reads
    session.publish_accepted([3], 20.0)
    assert session.gate.reads
    assert session.next_deadline() == 31.0
    session.publish_accepted([4, 5], 21.0)
    assert session.next_deadline() == 35.0


def test_filters_that_wait_count_for_the_pause() -> None:
    session = connected(SessionLimits(max_inflight=4))
    send(session, Subscribe(1, (("a", 0), ("b", 0))))
    assert session.gate.reads
    send(session, Subscribe(2, (("a", 0), ("b", 0))))
    assert not session.gate.reads
    session.subscription_confirmed(1, 1.0)
    assert session.gate.reads


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_inflight", 0), ("max_subscriptions", -1), ("max_filters", 0), ("connect_timeout_s", 0), ("max_packet_bytes", 4095)],
)
def test_limits_name_the_key_at_fault(key: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=key):
        SessionLimits(**{key: value}).validate()


def test_the_default_limits_are_valid() -> None:
    SessionLimits().validate()


# ---------------------------------------------------------------------------------------------- the end


def test_mqtt_3_14_4_2_nothing_is_done_after_disconnect() -> None:
    session = connected()
    effects = send(session, Publish("a", b"1"), Disconnect(), Publish("a", b"2"))
    assert effects[0] == PublishMessages([(topic_room("a"), Publish("a", b"1"))])
    assert closed(effects) is CloseReason.CLIENT_DISCONNECTED
    assert send(session, Pingreq()) == []
    assert session.connection_lost(1.0) == []
    assert session.close(CloseReason.DRAINING, "", 1.0) == []
    assert session.subscription_confirmed(1, 1.0) == []
    assert session.timeout(1e9) == []


def test_a_lost_connection_ends_the_session() -> None:
    assert closed(connected().connection_lost(1.0)) is CloseReason.CONNECTION_LOST


def test_the_shell_can_close_in_every_state() -> None:
    assert closed(connected().close(CloseReason.TAKEN_OVER, "", 1.0)) is CloseReason.TAKEN_OVER
    assert closed(ServerSession(0.0, "assigned").close(CloseReason.STOPPED, "", 1.0)) is CloseReason.STOPPED


def test_the_numbers_of_vrooms_are_nobodys_topics() -> None:
    session = ServerSession(0.0, "assigned", vrooms=VRooms(1000, 1010))
    send(session, Connect("client", True, 10))
    effects = send(session, Subscribe(1, (("room/64005", 0), ("room/1000", 0), ("a/b", 0))))
    assert effects == [SubscribeFilters(1, [Wanted("room/1000"), Wanted("a/b")])]
    assert sent(session.subscription_confirmed(1, 2.0)) == [Suback(1, (SUBACK_FAILURE, 0, 0))]
    assert send(session, Publish("room/64639", b"x")) == [DropMessages(TopicRefusal.VROOM, 1, 11)]
    assert isinstance(send(session, Publish("room/64640", b"x"))[0], PublishMessages)
    assert send(session, Publish("room/64639", b"x", qos=1, packet_id=2))[0] == DropMessages(TopicRefusal.VROOM, 1, 11)


def test_a_client_that_is_held_is_not_read_from_until_then_and_its_silence_is_ours() -> None:
    session = connected(keep_alive_s=10)
    session.gate.hold(Hold.RATE, 2.0, until=60.0)
    assert session.next_deadline() == 60.0
    assert session.timeout(59.0) == []
    assert not session.gate.reads
    assert session.timeout(60.0) == []
    assert session.gate.reads
    assert session.next_deadline() == 74.0, "fifteen seconds from the CONNECT, and it was read for one of them"
    assert closed(session.timeout(74.0)) is CloseReason.KEEP_ALIVE


def test_a_hold_that_ends_leaves_the_pause_for_unanswered_messages() -> None:
    session = connected(SessionLimits(max_inflight=2), keep_alive_s=0)
    send(session, Publish("room/1", b"x", qos=1, packet_id=1), Publish("room/1", b"x", qos=1, packet_id=2))
    session.gate.hold(Hold.RATE, 2.0, until=5.0)
    assert session.timeout(5.0) == []
    assert session.gate.reasons == {Hold.UNANSWERED: 1.0}
    session.publish_accepted([1, 2], 6.0)
    assert session.gate.reads


def test_a_user_is_left_to_the_shell_which_may_refuse_it() -> None:
    session = connected()
    assert send(session, Subscribe(1, (("user/7", 1), ("user/8", 0)))) == [
        SubscribeFilters(1, [Wanted("user/7", 1), Wanted("user/8")])
    ]
    assert sent(session.subscription_confirmed(1, 1.0, [0, SUBACK_FAILURE])) == [Suback(1, (0, SUBACK_FAILURE))]
    message = Publish("user/9", b"hi", 1, packet_id=2)
    assert send(session, message) == [PublishMessages([(UIN(9), message)])]


def test_large_subscribes_are_taken_one_in_a_turn_and_none_is_lost() -> None:
    session = connected()
    packets = [Subscribe(number, tuple((f"$x/{number}/{one}", 0) for one in range(1000))) for number in range(1, 6)]
    data = b"".join(map(codec.encode, packets)) + codec.encode(Pingreq())
    answers = sent(session.receive(data, 1.0))
    turns = 1
    while session.has_more:
        turns += 1
        answers += sent(session.receive(b"", 1.0))
    assert [type(answer) for answer in answers] == [Suback] * 5 + [Pingresp]
    assert turns >= 5


def test_a_subscribe_of_many_filters_is_one_request_however_many_turns_it_takes() -> None:
    session = connected(limits=SessionLimits(max_packets_a_turn=100))
    names = [f"room/{number}" for number in range(1, 251)]
    data = codec.encode(Subscribe(3, tuple((name, 0) for name in ("$x", *names))))
    assert session.receive(data, 1.0) == session.receive(b"", 1.0) == []
    (asked,) = session.receive(b"", 1.0)
    assert isinstance(asked, SubscribeFilters)
    assert (asked.packet_id, [wanted.filter for wanted in asked.filters]) == (3, names)
    assert not session.has_more
    assert sent(session.subscription_confirmed(3, 2.0)) == [Suback(3, (SUBACK_FAILURE, *(0 for _ in names)))]
    left = session.receive(codec.encode(Unsubscribe(4, tuple(names))), 3.0)
    assert UnsubscribeFilters not in map(type, left[1:])
    while session.has_more:
        assert not sent(left)
        left += session.receive(b"", 3.0)
    assert [name for effect in left if isinstance(effect, UnsubscribeFilters) for name in effect.filters] == names
    assert sent(left) == [Unsuback(4)]
    assert not session.subscriptions.filters
