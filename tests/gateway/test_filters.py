"""Filters of a gateway's clients: wildcards, overlaps, options of MQTT 5, groups, and what is retained."""

from __future__ import annotations

from typing import Any

from cluster.core.contract import NEVER, SendControl, Tick
from cluster.mqtt.properties_in_records import origin_of
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.core import Core
from gateway.delivery.shared import OUTCOME
from gateway.delivery.system_topics import INTERVAL_S
from gateway.joining import LINGER_S
from gateway.membership.shared import share_number
from pixiu.ids import ALL_TOPICS, EndpointID, snowflake, topic_room
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import ORIGIN_AT, Flag, Kind, encode, with_topic
from pixiu.wire.uin_list import address, uin_list
from tests.gateway.world import arrive, memberships, of, turn

NOW_MS = 1_700_000_000_000
R1 = EndpointID(101)


def gateway(topics: str = "", max_wide_rooms: int = 2048) -> Core:
    core = Core(
        instance=1, generation=1, topics=TopicRooms(topics), max_wide_rooms=max_wide_rooms, unix_ms=lambda: NOW_MS
    )  # fmt: skip
    core.step(ev.RoutersChanged(1, (ev.Replica(R1, 0),)), 0.0)
    return core


def wanted(*filters: str, qos: int = 0, **options: Any) -> list[ev.Wanted]:
    return [ev.Wanted(name, qos, **{"retain_handling": 2, **options}) for name in filters]


def client(core: Core, connection: int, *filters: ev.Wanted, dialect: int = 3) -> ev.Answer:
    """Connect a client that subscribes; routers confirm."""
    effects = turn(core, ev.Opened(connection, connection + 100, dialect), ev.Join(connection, 1, list(filters)))
    for send in memberships(effects):
        effects += core.step(ev.Confirmed(send.peer, [message.id for message in send.messages]), 1.0)
    while not of(ev.Answer, effects):  # a window of reports at a time
        more = turn(core)
        for send in memberships(more):
            effects += core.step(ev.Confirmed(send.peer, [message.id for message in send.messages]), 1.0)
        assert more or of(ev.Answer, effects), "nothing waits, and there is no answer"
    (answer,) = of(ev.Answer, effects)
    return answer


def message(topic: str, number: int, *, qos: int = 0, retain: bool = False, age_ms: int = 60_000, payload: bytes = b"hi") -> bytes:
    identity = snowflake(NOW_MS - age_ms, 1, number)
    record = encode(Kind.ROOM, topic_room(topic), with_topic(topic, payload), identity, flags=Flag.TO_ROOM | Flag.TOPIC)
    return record[:ORIGIN_AT] + bytes((record[ORIGIN_AT] | origin_of(qos, retain=retain),)) + record[ORIGIN_AT + 1 :]


def receivers(effects: list[ev.Effect]) -> list[int]:
    """Connections that get something, one for each message."""
    shared = [connection for each in of(ev.Deliver, effects) for connection in each.connections for _ in range(each.count)]
    return sorted([*shared, *(each.connection for each in of(ev.DeliverEach, effects) for _ in each.messages)])


def delivered(effects: list[ev.Effect]) -> list[tuple[int, str, int, bool, tuple[int, ...]]]:
    return [
        (each.connection, one.topic.decode(), one.qos, one.retain, one.identifiers)
        for each in of(ev.DeliverEach, effects)
        for one in each.messages
    ]


def test_a_wildcard_gets_what_it_matches_and_exact_filters_go_on() -> None:
    """Each client that matches: MQTT-4.5.0-1 MQTT5-4.5.0-1. Nothing new after UNSUBSCRIBE: MQTT-3.10.4-2 MQTT5-3.10.4-2. A session
    ends with its connection, as its expiry of 0 says: MQTT5-4.1.0-2."""
    core = gateway()
    client(core, 1, *wanted("home/+/heat"))
    client(core, 2, *wanted("home/kitchen/heat"))
    client(core, 3, *wanted("home/#"), dialect=0)
    assert receivers(arrive(core, message("home/kitchen/heat", 1))) == [1, 2, 3]
    assert receivers(arrive(core, message("home/hall/light", 2))) == [3]
    turn(core, ev.Leave(1, ["home/+/heat"]))
    assert receivers(arrive(core, message("home/kitchen/heat", 3))) == [2, 3]
    turn(core, ev.Closed(3, 1))
    assert receivers(arrive(core, message("home/kitchen/heat", 4))) == [2]


def test_a_filter_over_all_topics_joins_a_room_of_each_partition_once() -> None:
    core = gateway()
    first = memberships(turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wanted("#"))))
    assert [(m.group, m.member) for send in first for m in send.messages] == [(ALL_TOPICS + room, 0) for room in range(128)]
    for send in first:
        core.step(ev.Confirmed(R1, [m.id for m in send.messages]), 1.0)
    assert memberships(turn(core, ev.Opened(2, 8, 3), ev.Join(2, 1, wanted("+/a")))) == [], "the gateway has them all"
    assert receivers(arrive(core, message("weather/a", 1))) == [1, 2]
    assert of(SendControl, arrive(core, message("weather/b", 2))) == []
    turn(core, ev.Leave(1, ["#"]))
    assert of(SendControl, arrive(core, message("weather/c", 3))) == [], "what matches nothing is no sign of an old membership"
    assert memberships(turn(core, ev.Leave(2, ["+/a"]), now=5.0)) == [], "a client may come back"
    assert memberships(turn(core, ev.Join(2, 2, wanted("#")), now=6.0)) == []
    turn(core, ev.Leave(2, ["#"]), now=7.0)
    assert core.next_deadline() == 7.0 + LINGER_S
    left = memberships(turn(core, Tick(), now=7.0 + LINGER_S))
    assert sorted(m.group - ALL_TOPICS for send in left for m in send.messages if not m.login) == list(range(128))


def test_rooms_of_wide_filters_are_limited_for_each_connection() -> None:
    core = gateway("devices=2:64", max_wide_rooms=100)
    answer = client(core, 1, *wanted("devices/+/t", "devices/+/u", "devices/7/#", "home/#"))
    assert answer.refused == {"devices/+/u"}
    turn(core, ev.Leave(1, ["devices/+/t"]))
    effects = turn(core, ev.Join(1, 2, wanted("devices/+/u")))
    for send in memberships(effects):
        effects += core.step(ev.Confirmed(R1, [m.id for m in send.messages]), 1.0)
    assert of(ev.Answer, effects) == [ev.Answer(1, 2, True)]


def test_a_filter_that_no_room_carries_is_refused() -> None:
    core = gateway()
    assert client(core, 1, *wanted("a/#/b", "$internal/x", "a/b")).refused == {"a/#/b", "$internal/x"}
    assert receivers(arrive(core, message("a/b", 1))) == [1]


def test_overlapping_filters_give_one_copy_with_the_highest_qos_and_all_identifiers() -> None:
    core = gateway()
    client(core, 1, *wanted("a/#", qos=1, identifier=7), *wanted("a/b", qos=2, identifier=8), *wanted("+/b"), dialect=5)
    assert delivered(arrive(core, message("a/b", 1, qos=2))) == [(1, "a/b", 2, False, (7, 8))]
    assert delivered(arrive(core, message("a/b", 2, qos=0))) == [(1, "a/b", 0, False, (7, 8))]
    assert delivered(arrive(core, message("a/c", 3, qos=2))) == [(1, "a/c", 1, False, (7,))]
    client(core, 2, *wanted("x/#", "x/+"))
    assert receivers(arrive(core, message("x/y", 4))) == [2], "plain filters that overlap share bytes once"


def test_with_relays_users_are_reported_for_all_free_topics_and_groups_are_refused() -> None:
    core = Core(instance=1, generation=1, through_relays=True, max_wide_rooms=2048)
    core.step(ev.RoutersChanged(1, (ev.Replica(R1, 0),)), 0.0)
    effects = turn(core, ev.Opened(1, 7, 5), ev.Join(1, 1, wanted("#", "$share/g/a/#")))
    assert {(m.member, m.group >= ALL_TOPICS) for send in memberships(effects) for m in send.messages} == {(7, True)}
    for send in memberships(effects):
        effects += core.step(ev.Confirmed(R1, [m.id for m in send.messages]), 1.0)
    assert of(ev.Answer, effects) == [ev.Answer(1, 1, True, frozenset({"$share/g/a/#"}))]


def test_options_of_a_filter_that_is_there_are_replaced() -> None:
    core = gateway()
    client(core, 1, *wanted("a/b"))
    assert of(ev.Deliver, arrive(core, message("a/b", 1, qos=1)))
    turn(core, ev.Join(1, 2, wanted("a/b", qos=1)))
    assert delivered(arrive(core, message("a/b", 2, qos=1))) == [(1, "a/b", 1, False, ())]
    turn(core, ev.Join(1, 3, wanted("a/b")))
    assert of(ev.Deliver, arrive(core, message("a/b", 3, qos=1)))


def test_mqtt_5_shares_bytes_with_the_length_of_properties() -> None:
    core = gateway()
    client(core, 1, *wanted("a/b"), dialect=5)
    client(core, 2, *wanted("a/b"), dialect=5)
    client(core, 3, *wanted("a/b"))
    five, three = sorted(of(ev.Deliver, arrive(core, message("a/b", 1))), key=lambda each: len(each.connections), reverse=True)
    assert (five.connections, five.data) == ((1, 2), b"\x30\x08\x00\x03a/b\x00hi")
    assert (three.connections, three.data) == ((3,), b"\x30\x07\x00\x03a/bhi")


def test_a_client_may_want_none_of_its_own_messages_and_retain_as_published() -> None:
    core = gateway()
    core.step(ev.ProxiesChanged((ev.Replica(EndpointID(9), 0),)), 0.0)
    client(core, 1, *wanted("a/b", no_local=True), dialect=5)
    client(core, 2, *wanted("a/b", retain_as_published=True), dialect=5)
    own = message("a/b", 1, retain=True)
    turn(core, ev.Publish([(topic_room("a"), own)], 1))
    assert delivered(arrive(core, own)) == [(2, "a/b", 0, True, ())]
    assert receivers(arrive(core, message("a/b", 2))) == [1, 2]


# --- groups


def for_group(record: bytes, *numbers: int) -> bytes:
    return address(record, uin_list(numbers))


def outcomes(effects: list[ev.Effect]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(SnowflakeID, group) of what brokers are told: taken, returned."""
    found = [control_pb2.Control.FromString(data).shared_outcome for each in of(SendControl, effects) for data in each.messages]
    return (
        [pair for each in found for pair in OUTCOME.iter_unpack(each.taken)],
        [pair for each in found for pair in OUTCOME.iter_unpack(each.returned)],
    )  # fmt: skip


GROUP = share_number("g", "jobs/+")


def test_a_group_is_a_member_of_its_room_that_says_whether_it_acknowledges() -> None:
    core = gateway()
    first = memberships(turn(core, ev.Opened(1, 7, 5), ev.Join(1, 1, wanted("$share/g/jobs/+"))))
    assert [(m.group, m.member, m.value) for send in first for m in send.messages] == [(topic_room("jobs"), GROUP, 1)]
    second = memberships(turn(core, ev.Opened(2, 8, 5), ev.Join(2, 1, wanted("$share/g/jobs/+", qos=1))))
    assert [(m.member, m.login, m.value) for send in second for m in send.messages] == [(GROUP, True, 2)]
    turn(core, ev.Leave(1, ["$share/g/jobs/+"]))
    last = memberships(turn(core, ev.Leave(2, ["$share/g/jobs/+"])))
    assert [(m.member, m.login) for send in last for m in send.messages] == [(GROUP, False)]


def test_each_message_of_a_group_goes_to_one_member_and_to_all_others_as_ever() -> None:
    core = gateway()
    for connection in range(1, 5):
        client(core, connection, *wanted("$share/g/jobs/+"), dialect=5)
    client(core, 9, *wanted("jobs/#"))
    got: list[int] = []
    for number in range(40):
        found = receivers(arrive(core, for_group(message("jobs/x", number), GROUP, 0)))
        assert 9 in found
        assert len(found) == 2
        got += found
    assert set(got) == {1, 2, 3, 4, 9}, "the members share the work"
    assert receivers(arrive(core, for_group(message("jobs/x", 50), GROUP))) != [9], "a message for the group alone"
    assert receivers(arrive(core, for_group(message("jobs/x/y", 51), GROUP))) == [], "the room carries more than the filter"


def test_a_member_that_goes_gives_what_it_has_not_acknowledged_to_another_one() -> None:
    core = gateway()
    for connection in (1, 2):
        client(core, connection, *wanted("$share/g/jobs/+", qos=1), dialect=5)
    effects: list[ev.Effect] = []
    for number in range(1, 9):
        effects += arrive(core, for_group(message("jobs/x", number, qos=1), GROUP))
    given = {each.connection: each.messages for each in of(ev.DeliverEach, effects) for _ in (0,)}
    assert set(given) == {1, 2}
    of_one = [one for each in of(ev.DeliverEach, effects) if each.connection == 1 for one in each.messages]
    taken, returned = outcomes(turn(core, ev.SharedAcknowledged(1, [of_one[0].shared])))
    assert (len(taken), returned) == (1, [])
    again = of(ev.DeliverEach, turn(core, ev.Closed(1, 2)))
    assert {each.connection for each in again} == {2}
    assert [one.record for each in again for one in each.messages] == [one.record for one in of_one[1:]]
    taken, returned = outcomes(turn(core, ev.Closed(2, 2)))
    assert (taken, len(returned)) == ([], 7), "nobody is here any more: another gateway gets them"
    assert core.shared.unacknowledged == 0


def test_a_repeat_for_a_group_is_dropped_and_one_that_went_back_may_come_again() -> None:
    core = gateway()
    record = for_group(message("jobs/x", 1, qos=1), GROUP)
    assert outcomes(arrive(core, record))[1] == [(int.from_bytes(record[16:24], "little"), GROUP)]
    client(core, 1, *wanted("$share/g/jobs/+", qos=1), dialect=5)
    assert receivers(arrive(core, record)) == [1]
    assert receivers(arrive(core, record)) == []


def test_mqtt5_4_8_2_3_a_member_gets_a_message_with_at_most_the_qos_that_it_was_granted() -> None:
    core = gateway()
    client(core, 1, *wanted("$share/g/jobs/+", qos=1), dialect=5)
    found = [arrive(core, for_group(message("jobs/x", number, qos=number), GROUP)) for number in range(3)]
    assert [one[2] for effects in found for one in delivered(effects)] == [0, 1, 1]


def test_members_without_credit_are_passed_over() -> None:
    core = gateway()
    turn(core, ev.Opened(1, 7, 5, credit=1), ev.Join(1, 1, wanted("$share/g/jobs/+", qos=1)))
    turn(core, ev.Opened(2, 8, 5, credit=100), ev.Join(2, 1, wanted("$share/g/jobs/+", qos=1)))
    got = [
        receivers(
            arrive(core, for_group(message("jobs/x", number, qos=1), GROUP)),
        )[0]
        for number in range(20)
    ]
    assert got.count(1) == 1


# --- retained messages


def fetch_of(core: Core, connection: int, *filters: ev.Wanted, dialect: int = 5) -> ev.FetchRetained:
    effects = turn(core, ev.Opened(connection, connection + 100, dialect), ev.Join(connection, 1, list(filters)))
    assert not of(ev.FetchRetained, effects), "nothing is fetched before the subscription is in effect"
    for send in memberships(effects):
        effects += core.step(ev.Confirmed(send.peer, [m.id for m in send.messages]), 1.0)
    answer, fetch = (each for each in effects if isinstance(each, ev.Answer | ev.FetchRetained))
    assert isinstance(answer, ev.Answer)
    assert isinstance(fetch, ev.FetchRetained)
    return fetch


def test_a_new_subscription_gets_what_is_retained_with_its_options() -> None:
    core = gateway()
    fetch = fetch_of(core, 1, ev.Wanted("a/#", 1, identifier=4), ev.Wanted("b", 0, retain_handling=2))
    assert fetch.filters == ["a/#"]
    found = [message("a/b", 1, qos=2, retain=True), message("a/c", 2, retain=True)]
    effects = turn(core, ev.RetainedFound(1, fetch.fetch, found))
    assert delivered(effects) == [(1, "a/b", 1, True, (4,)), (1, "a/c", 0, True, (4,))]
    turn(core, ev.RetainedFetched(1, fetch.fetch))
    assert len(core.retained) == 0


def test_retained_messages_come_again_unless_the_client_does_not_want_them() -> None:
    """MQTT5-3.3.1-10: retain handling 1."""
    core = gateway()
    turn(core, ev.RetainedFetched(1, fetch_of(core, 1, ev.Wanted("a", retain_handling=1)).fetch))
    assert not of(ev.FetchRetained, turn(core, ev.Join(1, 2, [ev.Wanted("a", retain_handling=1)]))), "it has the filter already"
    assert of(ev.FetchRetained, turn(core, ev.Join(1, 3, [ev.Wanted("a")])))
    assert not of(ev.FetchRetained, turn(core, ev.Opened(2, 7, 0), ev.Join(2, 1, [ev.Wanted("a")]))), "records have none"
    assert not of(ev.FetchRetained, turn(core, ev.Join(1, 4, [ev.Wanted("$share/g/a")])))


def test_live_messages_that_cross_a_fetch_are_delivered_once_and_never_followed_by_older_ones() -> None:
    core = gateway()
    fetch = fetch_of(core, 1, ev.Wanted("a/#"))
    same, newer = message("a/b", 5, retain=True), message("a/c", 7, retain=True)
    assert receivers(arrive(core, same)) == [1]
    assert receivers(arrive(core, newer)) == [1]
    found = [same, message("a/c", 6, retain=True), message("a/d", 1, retain=True)]
    assert [each[1] for each in delivered(turn(core, ev.RetainedFound(1, fetch.fetch, found)))] == ["a/d"]


def test_a_message_that_was_delivered_as_retained_does_not_come_live_as_well() -> None:
    core = gateway()
    fetch = fetch_of(core, 1, ev.Wanted("a/#"))
    client(core, 2, *wanted("a/b"))
    fresh = message("a/b", 5, retain=True, age_ms=10)
    turn(core, ev.RetainedFound(1, fetch.fetch, [fresh]), ev.RetainedFetched(1, fetch.fetch))
    assert receivers(arrive(core, fresh)) == [2]
    assert receivers(arrive(core, message("a/b", 6, age_ms=5))) == [1, 2]


def test_a_retained_message_that_stands_for_a_live_one_has_the_highest_qos_of_all_filters() -> None:
    core = gateway()
    others = [*wanted("a/#", qos=1, identifier=4), *wanted("$share/g/a/+", "b", qos=2)]
    fetch = fetch_of(core, 1, *others, ev.Wanted("a/+", 0))
    assert fetch.filters == ["a/+"]
    fresh, old = message("a/b", 5, qos=2, retain=True, age_ms=10), message("a/c", 6, qos=1, retain=True)
    effects = turn(core, ev.RetainedFound(1, fetch.fetch, [fresh, old]), ev.RetainedFetched(1, fetch.fetch))
    assert delivered(effects) == [(1, "a/b", 1, True, (4,)), (1, "a/c", 0, True, ())]
    assert receivers(arrive(core, fresh)) == []


def test_a_fetch_ends_with_its_client_and_its_filter() -> None:
    core = gateway()
    fetch = fetch_of(core, 1, ev.Wanted("a/#"))
    turn(core, ev.Leave(1, ["a/#"]))
    assert delivered(turn(core, ev.RetainedFound(1, fetch.fetch, [message("a/b", 1)]))) == []
    turn(core, ev.Closed(1, 1))
    assert delivered(turn(core, ev.RetainedFound(1, fetch.fetch, [message("a/b", 1)]))) == []
    assert len(core.retained) == 0


# --- $SYS


def test_topics_of_the_gateway_are_published_while_somebody_listens() -> None:
    core = gateway()
    assert core.next_deadline() == NEVER
    effects = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 1, wanted("$SYS/broker/clients/+")), now=5.0)
    assert [each.data for each in of(ev.Deliver, effects)] == [b"0 \x00\x1d$SYS/broker/clients/connected1"]
    assert of(ev.Answer, effects) == [ev.Answer(1, 1, True)], "no router need know"
    assert core.next_deadline() == 5.0 + INTERVAL_S
    assert of(ev.Deliver, turn(core, now=6.0)) == []
    client(core, 2, *wanted("#"))
    assert receivers(turn(core, now=15.0)) == [1], "a wildcard in the first level does not match them"
    turn(core, ev.Leave(1, ["$SYS/broker/clients/+"]), now=16.0)
    assert core.system.next_deadline() == NEVER


def test_the_gateway_says_its_version_clients_and_messages() -> None:
    core = gateway()
    effects = turn(core, ev.Opened(1, 7, 5), ev.Join(1, 1, [ev.Wanted("$SYS/#", 1)]), now=5.0)
    assert sorted(each[1] for each in delivered(effects)) == [
        "$SYS/broker/clients/connected", "$SYS/broker/messages/received", "$SYS/broker/messages/sent",
        "$SYS/broker/subscriptions/count", "$SYS/broker/uptime", "$SYS/broker/version",
    ]  # fmt: skip
    assert {each[2] for each in delivered(effects)} == {0}
