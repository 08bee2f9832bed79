"""Mail on the server's side of a connection: packet identifiers, DUP, PUBACKs in any order and none at all."""

from __future__ import annotations

import pytest

from cluster.core.contract import NEVER
from cluster.mqtt import codec
from cluster.mqtt.events import (
    Close,
    CloseReason,
    Effect,
    PacketsAcknowledged,
    SendMail,
    SubscribeFilters,
    Wanted,
)
from cluster.mqtt.mail import FIRST_KEPT_ID, SEQS, Mails, Unacknowledged, lane_of, packet_id_of, seq_from
from cluster.mqtt.packets import Connect, Packet, Puback, Publish, Side, Subscribe
from cluster.mqtt.server import ServerSession
from cluster.mqtt.states import State
from cluster.mqtt.terms import SessionLimits

TOPIC = "user/7"


def send(session: ServerSession, *packets: Packet, now: float = 1.0) -> list[Effect]:
    return session.receive(b"".join(codec.encode(packet) for packet in packets), now)


def connected(*, clean: bool = False, keep_alive_s: int = 0, limits: SessionLimits | None = None) -> ServerSession:
    session = ServerSession(0.0, "assigned", limits)
    send(session, Connect("phone", clean, keep_alive_s, "7"))
    assert session.state is State.CONNECTED
    return session


def taking(**options: object) -> ServerSession:
    """A session that was granted mail."""
    session = connected(**options)  # type: ignore[arg-type]
    (asked,) = send(session, Subscribe(1, ((TOPIC, 1),)))
    assert asked == SubscribeFilters(1, [Wanted(TOPIC, 1)], frozenset({TOPIC}))
    session.subscription_confirmed(1, 1.0, [1])
    return session


def packets(effects: list[Effect]) -> list[Packet]:
    (effect,) = effects
    assert isinstance(effect, SendMail)
    return [codec.decode(data, Side.CLIENT) for data in effect.packets]


def mails(*seqs: int, lane: int = 1, redelivered: bool = False) -> list[Mails]:
    return [Mails(lane, seq, [b"%d" % seq], redelivered) for seq in seqs]


def closed(effects: list[Effect]) -> Close:
    assert isinstance(effects[-1], Close)
    return effects[-1]


def test_a_packet_identifier_is_the_mails_place_and_never_0() -> None:
    assert [packet_id_of(lane, 4_094) for lane in range(4)] == [4_095, 8_191, 12_287, FIRST_KEPT_ID - 1]
    assert [packet_id_of(lane, 4_095) for lane in range(4)] == [1, 4_097, 8_193, 12_289]
    for lane in range(4):
        for start in (0, 4_060, 5_000_000_000):
            window = [packet_id_of(lane, seq) for seq in range(start + 1, start + 65)]
            assert len(set(window)) == 64
            assert [seq_from(number, start + 1) for number in window] == list(range(start + 1, start + 65))
            assert {lane_of(number) for number in window} == {lane}
            assert seq_from(window[0], start + 2) == start + 1 + SEQS
    assert seq_from(1 << 12, 1) == 0


def test_mail_leaves_with_qos_1_and_dup_where_it_may_have_arrived() -> None:
    """MQTT-3.3.1-1 MQTT5-3.3.1-1."""
    session = taking()
    found = packets(session.deliver_mail(TOPIC, mails(4) + mails(4, lane=0, redelivered=True), 2.0))
    assert found == [
        Publish(TOPIC, b"4", 1, packet_id=1 << 12 | 5),
        Publish(TOPIC, b"4", 1, dup=True, packet_id=5),
    ]


def test_pubacks_are_reported_in_any_order_and_so_are_those_of_nothing() -> None:
    session = taking()
    session.deliver_mail(TOPIC, mails(1, 2, 3), 2.0)
    third, first, nothing = packet_id_of(1, 3), packet_id_of(1, 1), 9
    assert send(session, Puback(third), Puback(first), Puback(nothing), Puback(first)) == [
        PacketsAcknowledged([third, first, nothing, first])
    ]
    assert session.state is State.CONNECTED


def test_a_puback_of_who_takes_no_mail_is_ignored() -> None:
    session = connected()
    send(session, Subscribe(1, ((TOPIC, 1),)))
    session.subscription_confirmed(1, 1.0, [0])
    assert send(session, Puback(5)) == []


@pytest.mark.parametrize(
    ("clean", "filters", "mail"),
    [
        (False, ((TOPIC, 1),), {TOPIC}),
        (False, ((TOPIC, 2), ("user/8", 1), ("room/5", 1)), {TOPIC, "user/8"}),
        (False, ((TOPIC, 1), (TOPIC, 0)), set()),
        (False, ((TOPIC, 0),), set()),
        (True, ((TOPIC, 1),), set()),
    ],
)
def test_mail_is_for_who_asks_for_qos_1_and_wants_a_session_that_is_kept(
    clean: bool, filters: tuple[tuple[str, int], ...], mail: set[str]
) -> None:
    (asked,) = send(connected(clean=clean), Subscribe(1, filters))
    assert isinstance(asked, SubscribeFilters)
    assert asked.mail == mail
    assert {wanted.filter for wanted in asked.filters} <= {TOPIC, "user/8", "room/5"}


def test_a_lane_that_gets_no_puback_for_so_long_closes_the_connection() -> None:
    limit = SessionLimits().puback_timeout_s
    session = taking()
    assert session.next_deadline() == NEVER
    session.deliver_mail(TOPIC, mails(1, 2), 10.0)
    session.deliver_mail(TOPIC, mails(1, lane=0), 20.0)
    assert session.next_deadline() == 10.0 + limit
    send(session, Puback(packet_id_of(1, 2)), now=9.0 + limit)
    assert session.timeout(10.0 + limit) == []
    assert session.next_deadline() == 20.0 + limit
    send(session, Puback(packet_id_of(0, 1)), now=15.0 + limit)
    assert session.next_deadline() == 9.0 + 2 * limit
    close = closed(session.timeout(9.0 + 2 * limit))
    assert (close.reason, close.text) == (CloseReason.MAIL_UNACKNOWLEDGED, f"no PUBACK for {limit:g} s")


def test_a_client_that_takes_35_s_for_each_mail_gets_through_all_of_them() -> None:
    session, now = taking(), 0.0
    session.deliver_mail(TOPIC, mails(*range(1, 21)), now)
    for seq in range(1, 21):
        now += 35.0
        assert session.timeout(now) == []
        assert not any(isinstance(effect, Close) for effect in send(session, Puback(packet_id_of(1, seq)), now=now))
    assert session.next_deadline() == NEVER


def test_a_lane_that_waits_for_nothing_begins_anew_with_its_next_mail() -> None:
    session = taking(limits=SessionLimits(puback_timeout_s=30.0))
    session.deliver_mail(TOPIC, mails(1), 10.0)
    send(session, Puback(packet_id_of(1, 1)), now=11.0)
    assert session.next_deadline() == NEVER
    session.deliver_mail(TOPIC, mails(2), 500.0)
    assert session.next_deadline() == 530.0


def test_a_new_session_waits_for_nothing_of_the_older_one() -> None:
    session = taking(limits=SessionLimits(puback_timeout_s=30.0))
    session.deliver_mail(TOPIC, mails(1, 2), 10.0)
    (effect,) = session.deliver_mail(TOPIC, mails(2, redelivered=True), 30.0, anew=True)
    assert isinstance(effect, SendMail)
    assert effect.anew
    assert session.next_deadline() == 60.0
    send(session, Puback(packet_id_of(1, 1)), now=31.0)
    assert session.next_deadline() == 60.0, "of the older session"
    send(session, Puback(packet_id_of(1, 2)), now=31.0)
    assert session.next_deadline() == NEVER


def test_while_the_server_does_not_read_no_puback_is_missed() -> None:
    session = connected(limits=SessionLimits(max_inflight=2, puback_timeout_s=30.0))
    session.deliver_mail(TOPIC, mails(1), 10.0)
    send(session, *(Publish("a", b"", 1, packet_id=number) for number in (1, 2)), now=20.0)
    assert not session.gate.reads
    assert session.timeout(45.0) == []
    session.publish_accepted([1, 2], 49.0)
    assert session.gate.reads
    assert session.timeout(49.0) == []
    assert session.next_deadline() == 69.0, "for ten of the thirty seconds it was read"


def test_mail_for_a_connection_that_has_ended_goes_nowhere() -> None:
    session = taking(limits=SessionLimits(puback_timeout_s=30.0))
    session.connection_lost(2.0)
    assert session.deliver_mail(TOPIC, mails(1), 3.0) == []


def test_what_waits_is_counted() -> None:
    waiting = Unacknowledged()
    waiting.send(TOPIC, mails(1, 2) + mails(1, lane=0), 1.0, anew=False)
    assert len(waiting) == 3
    assert waiting.acknowledge(packet_id_of(1, 2), 2.0)
    assert not waiting.acknowledge(packet_id_of(1, 2), 2.0)
    assert not waiting.acknowledge(packet_id_of(3, 2), 2.0)
    assert (len(waiting), waiting.since) == (2, 1.0)
