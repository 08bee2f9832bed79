"""The proxy's core: messages to users go to relays; who was offline fails with that, in order."""

from __future__ import annotations

import pytest

from cluster.core.contract import NEVER
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous
from pixiu.wire.record import Flag, Kind, encode
from proxy import events as ev
from proxy.core import ALL_KINDS, Core
from proxy.records.offline_notices import MAX_NOTICED, OfflineNotices
from tests.proxy.driver import failures, forward, sends, settle

BROKER, EVEN, ODD, OTHER = EndpointID(1), EndpointID(11), EndpointID(12), EndpointID(13)
RELAYS = ev.RelaysChanged(2, (ev.Replica(EVEN, 0), ev.Replica(ODD, 1)))


def core_with(relays: ev.RelaysChanged = RELAYS, kinds: frozenset[str] = ALL_KINDS) -> Core:
    core = Core(max_record_bytes=1000, kinds=kinds)
    core.step(ev.BrokersChanged(1, (ev.Replica(BROKER, 0),)), 0.0)
    core.step(relays, 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    return core


def chat(uin: int, number: int, size: int = 5) -> bytes:
    return encode(Kind.CHAT, uin, bytes(size), number)


def room(key: int, number: int) -> bytes:
    return encode(Kind.ROOM, key, b"hello", number, flags=Flag.TO_ROOM)


def publish(core: Core, *records: bytes, position: int = 1) -> list[ev.Effect]:
    return core.step(ev.BatchPublished(1, b"".join(records), len(records), position), 1.0)


def test_messages_to_users_go_to_the_relay_of_their_partition_and_others_to_brokers() -> None:
    records = [chat(4, 1), room(5, 2), chat(5, 3), chat(4, 4)]
    made = {send.peer: send.records for send in sends(publish(core_with(), *records))}
    assert made == {EVEN: [records[0], records[3]], BROKER: [records[1]], ODD: [records[2]]}


def test_a_user_and_a_room_of_the_same_number_go_two_ways() -> None:
    core = core_with()
    for number in (1, 3):
        made = {send.peer for send in sends(publish(core, room(4, number), chat(4, number + 1), position=number))}
        assert made == {BROKER, EVEN}


def test_who_was_offline_fails_and_the_rest_is_accepted() -> None:
    core = core_with()
    (send,) = sends(publish(core, chat(4, 1), chat(6, 2), chat(8, 3), chat(10, 4)))
    assert core.step(ev.UsersOffline([2, 3]), 1.1) == []
    effects = settle(core, [send], 1.2)
    assert failures(effects) == [(2, 3, "OFFLINE")]
    assert core.counters.records_offline == 2
    assert core.under_way == 0


def test_a_notice_touches_only_the_message_it_names() -> None:
    core = core_with()
    sent = sends(publish(core, chat(4, 1), room(4, 2), chat(5, 3)))
    core.step(ev.UsersOffline([3]), 1.1)
    assert failures([e for send in sent for e in settle(core, [send], 1.2)]) == [(3, 3, "OFFLINE")]
    (send,) = sends(publish(core, chat(5, 4), position=4))
    assert failures(settle(core, [send], 1.3)) == []


def test_what_a_relay_lost_is_dropped_not_offline() -> None:
    core = core_with()
    (send,) = sends(publish(core, chat(4, 1), chat(6, 2)))
    core.step(ev.UsersOffline([2]), 1.1)
    assert failures(settle(core, [send], 1.2, handled=False)) == [(1, 2, "DROPPED")]


def test_a_proxy_that_has_not_read_the_registry_says_so() -> None:
    core = Core(max_record_bytes=1000, kinds=ALL_KINDS)
    core.step(ev.PublisherOpened(1), 0.0)
    for record in (room(4, 1), chat(4, 2)):
        (reply,) = publish(core, record)
        assert isinstance(reply, ev.Reply)
        assert [(failure.code, "just started" in failure.text) for failure in reply.failures] == [("UNAVAILABLE", True)]


def test_what_a_gateway_forwards_has_nobody_to_tell() -> None:
    core = core_with()
    (send,) = sends(forward(core, chat(4, 1)))
    core.step(ev.UsersOffline([1]), 1.1)
    assert settle(core, [send], 1.2) == []


@pytest.mark.parametrize(
    ("core", "record", "code", "word"),
    [
        (core_with(ev.RelaysChanged(0, ())), chat(4, 1), "UNAVAILABLE", "has no relays"),
        (core_with(ev.RelaysChanged(2, (ev.Replica(EVEN, 0),))), chat(5, 1), "UNAVAILABLE", "no relay of partition 1"),
        (core_with(kinds=frozenset({"room"})), chat(4, 1), "INVALID_ARGUMENT", "proxy.kinds"),
        (core_with(kinds=frozenset({"chat"})), room(4, 1), "INVALID_ARGUMENT", "proxy.kinds"),
        (core_with(), chat(4, 1, 2000), "RECORD_TOO_LARGE", "above the cluster's limit"),
        (core_with(), encode(Kind.MAIL, 4, b"", 1), "INVALID_ARGUMENT", "room messages, chat and signals"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(core: Core, record: bytes, code: str, word: str) -> None:
    (reply,) = publish(core, record)
    assert isinstance(reply, ev.Reply)
    assert [failure.code for failure in reply.failures] == [code]
    assert word in reply.failures[0].text


@pytest.mark.parametrize(("kinds", "record", "peer"), [("room", room(4, 1), BROKER), ("chat", chat(4, 1), EVEN)])
def test_a_proxy_for_some_kinds_takes_those(kinds: str, record: bytes, peer: EndpointID) -> None:
    assert [send.peer for send in sends(publish(core_with(kinds=frozenset({kinds})), record))] == [peer]


def test_a_change_of_relays_waits_for_what_is_under_way() -> None:
    core = core_with(ev.RelaysChanged(1, (ev.Replica(EVEN, 0),)))
    user = next(user for user in range(1, 100) if rendezvous(user, [EVEN, OTHER]) == OTHER)
    (send,) = sends(publish(core, chat(user, 1)))
    core.step(ev.RelaysChanged(1, (ev.Replica(EVEN, 0), ev.Replica(OTHER, 0))), 1.1)
    assert sends(publish(core, chat(user, 2), position=2)) == []
    assert core.next_deadline() != NEVER
    assert [send.peer for send in sends(settle(core, [send], 1.2))] == [OTHER]


def test_notices_that_nobody_waits_for_are_bounded() -> None:
    notices = OfflineNotices()
    notices.add(range(MAX_NOTICED + 10))
    assert len(notices) == MAX_NOTICED
    assert notices.take([chat(4, 5)]) == []
    assert notices.take([chat(4, 15), chat(4, 15)]) == [chat(4, 15)]


def test_the_copies_of_a_signal_to_a_user_go_to_different_relays() -> None:
    core = core_with(ev.RelaysChanged(1, (ev.Replica(EVEN, 0), ev.Replica(ODD, 0))))
    signal = encode(Kind.SIGNAL, 4, b"go", 77)
    peers = [send.peer for copy in (0, 1) for send in sends(core.step(ev.BatchPublished(1, signal, 1, copy + 1, copy), 1.0))]
    assert sorted(peers) == sorted((EVEN, ODD))


def test_each_copy_of_a_signal_that_nobody_took_fails() -> None:
    core = core_with(ev.RelaysChanged(1, (ev.Replica(EVEN, 0), ev.Replica(ODD, 0))))
    signal = encode(Kind.SIGNAL, 4, b"go", 77)
    sent = [send for copy in (0, 1) for send in sends(core.step(ev.BatchPublished(1, signal, 1, copy + 1, copy), 1.0))]
    core.step(ev.UsersOffline([77]), 1.1)
    core.step(ev.UsersOffline([77]), 1.1)
    effects = [effect for send in sent for effect in settle(core, [send], 1.2)]
    assert failures(effects) == [(1, 1, "OFFLINE"), (2, 2, "OFFLINE")]
