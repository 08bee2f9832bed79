"""Messages for kept sessions: the core asks, stores in each room's order, sends marked records, and refuses what is not stored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.contract import TICK, RecordsReceived, SendControl, SendRecords
from cluster.wire.v1 import control_pb2
from pixiu.errors import Refusal
from pixiu.ids import EndpointID, topic_room
from pixiu.wire.inbox_operations import MAX_RECEIVERS
from pixiu.wire.record import FLAGS_AT, KIND_AT, QOS_SHIFT, Flag, Kind, Record, decode, encode, split, with_topic
from proxy import events as ev
from proxy import kept_events as kept_ev
from proxy.core import Core
from proxy.kept import stage
from proxy.publishers.rates import Rates
from tests.proxy.driver import GATEWAY, failures, forward, publish, replies, sends, settle

BROKER, SECOND = EndpointID(1), EndpointID(2)
QOS_0, QOS_1 = 1 << QOS_SHIFT, 2 << QOS_SHIFT


def core_with(*, available: bool = True, limit: int = 100_000) -> Core:
    core = Core(max_record_bytes=limit)
    core.step(ev.BrokersChanged(2, (ev.Replica(BROKER, 0), ev.Replica(SECOND, 1))), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    core.step(kept_ev.KeptAvailable(available), 0.0)
    return core


def room(key: int, number: int, *, origin: int = 0, flags: int = 0, kind: int = Kind.ROOM) -> bytes:
    return encode(kind, key, b"hello", number, flags=Flag.TO_ROOM | flags, origin=origin)


def questions(effects: Sequence[ev.Effect]) -> list[kept_ev.Question]:
    return [question for effect in effects if isinstance(effect, kept_ev.AskKept) for question in effect.questions]


def mails(effects: Sequence[ev.Effect]) -> list[kept_ev.KeptMail]:
    return [mail for effect in effects if isinstance(effect, kept_ev.StoreKept) for mail in effect.mails]


def sent(effects: Sequence[ev.Effect]) -> list[tuple[int, bool]]:
    """SnowflakeID of each record that is sent, and whether it is marked."""
    found = [decode(record) for parcel in sends(effects) for record in parcel.records]
    return [(record.snowflake_id, bool(record.flags & Flag.KEPT)) for record in found]


def answer(core: Core, asked: Sequence[kept_ev.Question], *sessions: Sequence[int], now: float = 0.0) -> list[ev.Effect]:
    return core.step(kept_ev.KeptMatched([(each.number, found) for each, found in zip(asked, sessions, strict=True)]), now)


def stored(core: Core, to_store: Sequence[kept_ev.KeptMail], why: Refusal | None = None, now: float = 0.0) -> list[ev.Effect]:
    return core.step(kept_ev.KeptStored([(mail.number, why) for mail in to_store]), now)


def make_known(core: Core, key: int = 4, number: int = 900) -> None:
    """Let the core learn that a room is kept."""
    returned = settle(core, sends(forward(core, room(key, number))), 0.0, handled=False)
    settle(core, sends(stored(core, mails(answer(core, questions(returned), [77])))), 0.0)


def test_what_a_broker_refused_is_stored_and_then_sent_marked_and_accepted() -> None:
    core = core_with()
    effects = settle(core, sends(publish(core, [room(4, 1)])), 0.1, handled=False)
    assert not replies(effects), "nobody is told before it is stored"
    (question,) = questions(effects)
    assert (question.room, question.topic, question.session) == (4, b"room/4", 0)
    (mail,) = to_store = mails(answer(core, [question], [70, 71]))
    assert (mail.mail.room, list(mail.mail.uins)) == (4, [70, 71])
    record = decode(mail.mail.record)
    assert (record.kind, record.key, record.snowflake_id, record.flags) == (Kind.MAIL, 4, 1, Flag.TOPIC)
    assert record.topic_and_payload() == ("room/4", b"hello")
    effects = stored(core, to_store)
    assert sent(effects) == [(1, True)]
    assert not replies(effects), "it counts as accepted when the broker has it, too"
    (reply,) = replies(settle(core, sends(effects), 0.2))
    assert (reply.up_to, reply.failures) == (1, [])


def test_what_is_for_no_session_is_sent_marked_at_once_and_its_room_is_not_remembered() -> None:
    core = core_with()
    returned = settle(core, sends(publish(core, [room(4, 1)])), 0.1, handled=False)
    effects = answer(core, questions(returned), [])
    assert sent(effects) == [(1, True)]
    assert not mails(effects)
    assert replies(settle(core, sends(effects), 0.2))[0].failures == []
    assert sent(publish(core, [room(4, 2)], 2)) == [(2, False)]


def test_a_known_room_is_asked_for_without_a_detour_and_forgotten_after_a_minute() -> None:
    core = core_with()
    make_known(core)
    effects = publish(core, [room(4, 1), room(6, 2)])
    assert sent(effects) == [(2, False)], "other rooms go on"
    assert [question.room for question in questions(effects)] == [4]
    settle(core, sends(effects), 0.0)
    settle(core, sends(answer(core, questions(effects), [])), 0.0)
    assert core.next_deadline() == pytest.approx(stage.KNOWN_S)
    core.step(TICK, stage.KNOWN_S)
    assert sent(publish(core, [room(4, 3)], 3, now=stage.KNOWN_S)) == [(3, False)]


def test_the_terms_and_the_identity_of_a_message_are_those_of_its_mail() -> None:
    core = core_with()
    key = topic_room("plant/7")
    body, flags = with_topic("plant/7", b"hot"), Flag.TO_ROOM | Flag.TOPIC | Flag.TRACED | Flag.COMPRESSED
    record = encode(
        Kind.ROOM, key, body, 9, sender=5, flags=flags, type=130, lifetime_min=3, extension=b"{}", origin=QOS_1,
    )  # fmt: skip
    effects = settle(core, sends(forward(core, record)), 0.0, handled=False)
    assert questions(effects)[0].topic == b"plant/7"
    (mail,) = mails(answer(core, questions(effects), [70]))
    found = decode(mail.mail.record)
    expected = Flag.TOPIC | Flag.COMPRESSED
    assert found == Record(Kind.MAIL, expected, 130, QOS_1 | 1, 3, found.crc, 9, key, 5, b"{}", body)
    assert found.crc == decode(record).crc


def test_signals_chat_and_qos_0_do_not_wait() -> None:
    core = core_with()
    make_known(core)
    core.step(ev.RelaysChanged(1, (ev.Replica(EndpointID(9), 0),)), 0.0)
    batch = [room(4, 1, origin=QOS_0), room(4, 2, kind=Kind.SIGNAL), encode(Kind.CHAT, 4, b"x", 3)]
    effects = publish(core, batch)
    assert not questions(effects)
    assert sorted(sent(effects)) == [(1, False), (2, False), (3, False)]
    (reply,) = replies(settle(core, sends(effects), 0.0))
    assert (reply.up_to, reply.failures) == (3, [])


def test_of_a_parcel_that_was_not_handled_only_what_is_kept_is_asked_for() -> None:
    core = core_with()
    effects = settle(core, sends(publish(core, [room(4, 1), room(4, 2, origin=QOS_0), room(6, 3)])), 0.0, handled=False)
    asked = questions(effects)
    assert [question.room for question in asked] == [4, 6]
    effects = answer(core, asked, [70], [])
    assert sent(effects) == [(3, True)]
    settle(core, sends(effects), 0.1)
    (reply,) = replies(settle(core, sends(stored(core, mails(effects))), 0.2))
    assert failures([reply]) == [(2, 2, "DROPPED")], "QoS 0 was lost as before"


def test_a_room_s_messages_are_stored_and_sent_in_order_however_answers_come() -> None:
    core = core_with()
    make_known(core)
    first, second, third = (questions(publish(core, [room(4, number)], number))[0] for number in (1, 2, 3))
    assert not mails(answer(core, [second], [70]))
    effects = answer(core, [first], [70])
    assert [decode(mail.mail.record).snowflake_id for mail in mails(effects)] == [1, 2]
    assert not sends(answer(core, [third], [])), "it waits for those before it"
    one, two = mails(effects)
    assert not sends(stored(core, [two]))
    assert sent(stored(core, [one])) == [(1, True), (2, True), (3, True)]


def test_what_comes_after_a_room_is_learnt_waits_for_parcels_that_may_still_come_back() -> None:
    core = core_with()
    learnt, other = (sends(publish(core, [room(4, number)], number))[0] for number in (1, 2))
    effects = settle(core, [learnt], 0.0, handled=False)
    late = publish(core, [room(4, 3)], 3)
    asked = [*questions(effects), *questions(late)]
    effects = answer(core, asked, [70], [70])
    assert [decode(mail.mail.record).snowflake_id for mail in mails(effects)] == [1], "2 may still come back"
    effects = settle(core, [other], 0.0, handled=False)
    effects = answer(core, questions(effects), [70])
    assert [decode(mail.mail.record).snowflake_id for mail in mails(effects)] == [2, 3]


def test_parcels_that_come_back_in_another_order_are_stored_in_theirs() -> None:
    core = core_with()
    parcels = [sends(publish(core, [room(4, number)], number))[0] for number in (1, 2, 3)]
    found: list[int] = []
    asked = [question for parcel in reversed(parcels) for question in questions(settle(core, [parcel], 0.0, handled=False))]
    for question in asked:
        found += [decode(mail.mail.record).snowflake_id for mail in mails(answer(core, [question], [70]))]
    assert found == [1, 2, 3]


def publish_two(core: Core, *streams: int) -> list[SendRecords]:
    """Publish messages 1 and 2 to a room, by these streams, which leave in a parcel each."""
    first = sends(publish(core, [room(4, 1)], stream=streams[0]))
    return [*first, *sends(publish(core, [room(4, 2)], 2 if streams[0] == streams[1] else 1, stream=streams[1]))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("sessions", [[], [70]])
def test_a_lost_message_that_a_later_one_of_its_publisher_overtook_is_for_sessions_alone(
    order: tuple[int, int], sessions: list[int]
) -> None:
    core = core_with()
    parcels = publish_two(core, 1, 1)
    effects = [*settle(core, [parcels[order[0]]], 0.1, handled=bool(order[0]))]
    effects += settle(core, [parcels[order[1]]], 0.2, handled=bool(order[1]))
    effects += answer(core, questions(effects), sessions)
    assert bool(mails(effects)) == bool(sessions)
    effects += stored(core, mails(effects))
    assert sent(effects) == [], "those who are connected have the later one"
    assert failures(effects) == [(1, 1, "DROPPED")]
    assert core.under_way == 0


def test_a_lost_message_that_another_publisher_s_overtook_is_sent_again() -> None:
    core = core_with()
    core.step(ev.PublisherOpened(2), 0.0)
    lost, handled = publish_two(core, 1, 2)
    effects = settle(core, [lost], 0.1, handled=False) + settle(core, [handled], 0.2)
    assert sent(answer(core, questions(effects), [])) == [(1, True)]


def test_a_lost_message_waits_for_later_parcels_of_its_room_that_may_overtake_it() -> None:
    core = core_with()
    lost, later = publish_two(core, 1, 1)
    effects = settle(core, [lost], 0.1, handled=False)
    assert sent(answer(core, questions(effects), [])) == []
    effects = settle(core, [later], 0.2, handled=False)
    assert sent([*effects, *answer(core, questions(effects), [])]) == [(1, True), (2, True)]


def test_a_message_refused_for_now_takes_those_behind_it_along_but_not_those_of_other_rooms() -> None:
    core = core_with()
    make_known(core)
    make_known(core, 5, 901)
    first, second, other = questions(publish(core, [room(4, 1), room(4, 2), room(5, 3)]))
    (mail,) = mails(answer(core, [other], [71]))
    assert not mails(answer(core, [second], [70])), "it waits for the first"
    core.step(kept_ev.KeptRefused([first.number], Refusal("UNAVAILABLE", "nobody answers", 300)), 0.0)
    effects = stored(core, [mail])
    assert sent(effects) == [(3, True)]
    (reply,) = replies(settle(core, sends(effects), 0.1))
    assert failures([reply]) == [(1, 2, "UNAVAILABLE")], "else the second would be there before the first, which comes again"
    assert reply.failures[0].retry_after_ms == 300
    assert not core.kept.under_way


def test_a_message_that_can_never_be_stored_lets_those_behind_it_go_on() -> None:
    core = core_with()
    make_known(core)
    first, second = mails(answer(core, questions(publish(core, [room(4, 1), room(4, 2)])), [70], [70]))
    assert not sends(stored(core, [first], Refusal("RECORD_TOO_LARGE", "too large")))
    assert sent(stored(core, [second])) == [(2, True)]


def test_what_stores_refuse_or_do_not_confirm_in_time_is_refused_with_a_retry() -> None:
    core = core_with()
    make_known(core)
    make_known(core, 5, 901)
    first, second = mails(answer(core, questions(publish(core, [room(4, 1), room(5, 2)])), [70], [70]))
    assert not sends(stored(core, [first], Refusal("OVERLOADED", "no space", 1000)))
    assert core.next_deadline() == stage.TIMEOUT_S == second.until
    (reply,) = replies(core.step(TICK, stage.TIMEOUT_S))
    assert failures([reply]) == [(1, 1, "OVERLOADED"), (2, 2, "UNAVAILABLE")]
    assert all(failure.retry_after_ms for failure in reply.failures)
    assert not stored(core, [second]), "its outcome comes too late"
    assert not core.kept.under_way


def test_a_message_for_many_sessions_is_several_mails_and_counts_when_all_are_stored() -> None:
    core = core_with()
    make_known(core)
    sessions = range(1, 2 * MAX_RECEIVERS + 2)
    parts = mails(answer(core, questions(publish(core, [room(4, 1)])), list(sessions)))
    assert [uin for part in parts for uin in part.mail.uins] == list(sessions)
    assert [len(part.mail.uins) for part in parts] == [MAX_RECEIVERS, MAX_RECEIVERS, 1]
    assert len({part.mail.record for part in parts}) == 1
    assert not sends(stored(core, parts[:2]))
    assert sent(stored(core, parts[2:])) == [(1, True)]


def test_a_part_that_is_refused_refuses_the_message_once() -> None:
    core = core_with()
    make_known(core)
    parts = mails(answer(core, questions(publish(core, [room(4, 1)])), list(range(1, MAX_RECEIVERS + 2))))
    (reply,) = replies(stored(core, parts, Refusal("OVERLOADED", "no space")))
    assert failures([reply]) == [(1, 1, "OVERLOADED")]


@pytest.mark.parametrize("handled", [True, False])
def test_a_marked_record_that_a_broker_loses_is_reported_and_not_asked_for_again(handled: bool) -> None:
    core = core_with()
    make_known(core)
    effects = stored(core, mails(answer(core, questions(publish(core, [room(4, 1)])), [70])))
    effects = settle(core, sends(effects), 0.0, handled=handled)
    assert failures(effects) == ([] if handled else [(1, 1, "DROPPED")])
    assert not questions(effects)


def test_a_lost_broker_is_asked_for_and_the_record_goes_to_the_one_after_it() -> None:
    core = core_with()
    parcel = sends(publish(core, [room(4, 1)]))
    core.step(ev.BrokersChanged(2, (ev.Replica(EndpointID(3), 0), ev.Replica(SECOND, 1))), 0.0)
    effects = settle(core, parcel, 0.0, handled=False)
    effects = answer(core, questions(effects), [])
    assert [each.peer for each in sends(effects)] == [EndpointID(3)]
    settle(core, sends(effects), 0.0)
    effects = settle(core, sends(publish(core, [room(4, 2)], 2)), 0.0, handled=False)
    core.step(ev.BrokersChanged(2, (ev.Replica(SECOND, 1),)), 0.0)
    assert failures(answer(core, questions(effects), [])) == [(2, 2, "UNAVAILABLE")], "its partition has no broker any more"


def test_without_stores_or_routers_a_lost_parcel_is_reported_as_before() -> None:
    core = core_with(available=False)
    effects = settle(core, sends(publish(core, [room(4, 1)])), 0.0, handled=False)
    assert not questions(effects)
    assert failures(effects) == [(1, 1, "DROPPED")]


def test_known_rooms_are_forgotten_when_stores_go() -> None:
    core = core_with()
    make_known(core)
    core.step(kept_ev.KeptAvailable(False), 0.0)
    assert sent(publish(core, [room(4, 1)])) == [(1, False)]


def test_what_waits_is_bounded_and_one_room_may_have_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MAX_RECORDS", 4)
    core = core_with()
    make_known(core)
    make_known(core, 6, 901)
    publish(core, [room(4, 1), room(4, 2), room(4, 3), room(6, 4), room(6, 5)])
    effects = publish(core, [room(6, 6)], 6)
    assert not questions(effects)
    (reply,) = replies(core.step(TICK, stage.TIMEOUT_S))
    found = {position: each.code for each in reply.failures for position in range(each.first, each.last + 1)}
    assert found == {1: "UNAVAILABLE", 2: "UNAVAILABLE", 3: "OVERLOADED", 4: "UNAVAILABLE", 5: "UNAVAILABLE", 6: "OVERLOADED"}
    assert core.kept.under_way == 0


def test_rooms_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MAX_KNOWN", 2)
    core = core_with()
    for number, key in enumerate((4, 6, 8)):
        make_known(core, key, 900 + number)
    assert sent(publish(core, [room(4, 1), room(8, 2)])) == [(1, False)]


def test_only_proxies_set_the_flag_whatever_is_published_and_however() -> None:
    core = core_with()
    core.step(ev.RelaysChanged(1, (ev.Replica(EndpointID(9), 0),)), 0.0)
    kinds = [room(4, 1), room(4, 2, flags=Flag.KEPT), room(4, 3, kind=Kind.SIGNAL, flags=Flag.KEPT)]
    kinds += [encode(Kind.CHAT, 7, b"x", 4, flags=Flag.KEPT)]
    kinds += [room(4, 5, flags=Flag.KEPT | Flag.TRACED), room(6, 6, flags=Flag.KEPT)]
    data = b"".join(kinds)
    for effects in (
        publish(core, kinds),
        core.step(RecordsReceived(GATEWAY, b"pad" + data, 3, 3 + len(data), len(kinds)), 0.0),
        core.step(ev.GatewayPublished(50, GATEWAY, 1, data, len(kinds)), 0.0),
    ):
        assert sorted(sent(effects)) == [(number, False) for number in range(1, 7)]


def test_a_malformed_batch_with_the_flag_is_refused() -> None:
    core = core_with()
    record = room(4, 1, flags=Flag.KEPT)
    effects = publish(core, [record, record[:30]])
    assert failures(effects) == [(1, 2, "MALFORMED")]


def test_a_damaged_message_is_not_stored() -> None:
    core = core_with()
    make_known(core)
    damaged = room(4, 1)[:-1] + b"?"
    effects = answer(core, questions(core.step(ev.GatewayPublished(60, GATEWAY, 1, damaged, 1), 0.0)), [70])
    assert not mails(effects)
    (control,) = [effect for effect in effects if isinstance(effect, SendControl)]
    outcome = control_pb2.Control.FromString(control.messages[0]).publish_outcome
    assert [failure.code for failure in outcome.failures] == ["CHECKSUM_WRONG"]


def test_a_gateway_s_batch_names_the_session_of_each_message() -> None:
    core = core_with()
    make_known(core)
    data = room(4, 1, origin=QOS_1) + room(4, 2, origin=QOS_1)
    asked = questions(core.step(ev.GatewayPublished(60, GATEWAY, 1, data, 2, (0, 78)), 0.0))
    assert [question.session for question in asked] == [0, 78]
    to_store = mails(answer(core, asked, [70], [70]))
    effects = settle(core, sends(stored(core, to_store)), 0.0)
    (control,) = [effect for effect in effects if isinstance(effect, SendControl)]
    assert not control_pb2.Control.FromString(control.messages[0]).publish_outcome.failures


def test_a_publisher_that_is_gone_is_stored_for_nevertheless() -> None:
    core = core_with()
    make_known(core)
    asked = questions(publish(core, [room(4, 1)]))
    core.step(ev.PublisherClosed(1), 0.0)
    effects = stored(core, mails(answer(core, asked, [70])))
    assert sent(effects) == [(1, True)]
    assert not settle(core, sends(effects), 0.0)
    assert not core.under_way


def test_a_draining_proxy_waits_for_what_is_being_stored() -> None:
    core = core_with()
    make_known(core)
    before = core.under_way
    effects = publish(core, [room(4, 1)])
    assert core.under_way == before + 1
    effects = stored(core, mails(answer(core, questions(effects), [70])))
    settle(core, sends(effects), 0.0)
    assert core.under_way == before == 0


def test_nothing_is_sent_while_routes_change_and_the_order_holds_across_the_change() -> None:
    core = core_with()
    make_known(core)
    to_store = mails(answer(core, questions(publish(core, [room(4, 1)])), [70]))
    under_way = [parcel for key in (2, 6, 8, 10, 12) for parcel in sends(publish(core, [room(key, 50 + key)], key + 10))]
    replicas = (ev.Replica(BROKER, 0), ev.Replica(EndpointID(3), 0), ev.Replica(SECOND, 1))
    core.step(ev.BrokersChanged(2, replicas), 0.0)
    assert not sends(stored(core, to_store)), "keys may move"
    effects = settle(core, under_way, 0.1)
    assert (1, True) in sent(effects)


def test_batches_of_a_publisher_are_sent_one_after_the_other() -> None:
    core = core_with()
    make_known(core)
    make_known(core, 6, 901)
    first = questions(publish(core, [room(4, 1), room(6, 2)]))
    second = questions(publish(core, [room(6, 3), room(4, 4)], 3))
    to_store = mails(answer(core, [*second, *first], [70], [70], [70], [70]))
    found = [number for number, _ in sent(stored(core, to_store))]
    assert found.index(1) < found.index(4)
    assert found.index(2) < found.index(3)


def test_a_room_over_its_rate_is_refused_before_it_is_asked_for() -> None:
    core = Core(max_record_bytes=1000, rates=Rates(room_messages_per_s=1.0, burst_s=1.0))
    core.step(ev.BrokersChanged(2, (ev.Replica(BROKER, 0), ev.Replica(SECOND, 1))), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    core.step(kept_ev.KeptAvailable(True), 0.0)
    make_known(core)
    assert failures(publish(core, [room(4, 1)])) == [(1, 1, "OVERLOADED")]
    asked = questions(publish(core, [room(4, 2)], 2, now=5.0))
    assert [question.room for question in asked] == [4]


def test_the_records_that_leave_are_those_that_came_but_for_the_flag() -> None:
    core = core_with()
    record = room(4, 1)
    returned = settle(core, sends(publish(core, [record])), 0.0, handled=False)
    (parcel,) = sends(answer(core, questions(returned), []))
    (marked,) = split(b"".join(parcel.records), 1)
    assert marked[FLAGS_AT] == record[FLAGS_AT] | Flag.KEPT
    assert (marked[:FLAGS_AT], marked[FLAGS_AT + 1 :]) == (record[:FLAGS_AT], record[FLAGS_AT + 1 :])
    assert marked[KIND_AT] == Kind.ROOM
