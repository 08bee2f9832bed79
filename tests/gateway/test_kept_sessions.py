"""What a session that outlives its connection gets of its inbox, keeps at routers, and lets its connection leave out."""

from __future__ import annotations

from dataclasses import replace

from cluster.core.contract import SendControl
from cluster.membership.map.devices import connection_of
from cluster.mqtt.events import Wanted
from cluster.mqtt.mail import FIRST_KEPT_ID, SEQS
from cluster.mqtt.properties_in_records import origin_of
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.core import SESSION_DEVICE, Core
from gateway.sessions.session import Session, is_over, renewal_s
from gateway.sessions.states import SessionNote
from pixiu.ids import EndpointID, SnowflakeID, session_uin, topic_room
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import Filter
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery
from pixiu.wire.record import FLAGS_AT, Flag, Kind, encode, with_topic
from tests.gateway.test_filters import client, gateway, message, receivers, wanted
from tests.gateway.world import arrive, of, runs_of, turn, updates

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
S = session_uin(7, "phone")


def session(*filters: Wanted, expiry_s: int = 3600) -> Session:
    found = Session(SessionNote("phone", 7, expiry_s), 5, present=False)
    found.add(filters)
    return found


def mail(seq: int, topic: str = "a", *, qos: int = 1, flags: int = 0) -> Delivery:
    record = encode(
        Kind.MAIL, 1, with_topic(topic, b"%d" % seq), seq, flags=Flag.TOPIC, origin=origin_of(qos, retain=False)
    )  # fmt: skip
    return Delivery(1000 + seq, seq, S, 1, SESSION_DEVICE, 1, flags, b"" if flags & GAP else record)


def identifier(seq: int) -> int:
    return FIRST_KEPT_ID + (1 << 12) + seq % SEQS + 1


def rooms_of(parsed: Filter) -> list[int]:
    return list(TopicRooms("").rooms(parsed.name))


def test_a_message_gets_the_lower_qos_and_what_its_own_filters_ask_for() -> None:
    found = session(Wanted("a", 1, identifier=3), Wanted("+/deep", 2, identifier=4), Wanted("x/#", 1), Wanted("b", 0))
    mails = [mail(1), mail(2, "x/deep", qos=2), mail(3, "b"), mail(4, "other"), mail(5, "a", qos=0)]
    taken = found.take(runs_of(mails))
    assert [(each.packet_id, each.delivery.qos, each.delivery.identifiers, each.dup) for each in taken.kept] == [
        (identifier(1), 1, (3,), False),
        (identifier(2), 2, (4,), False),
    ]
    # A filter of QoS 0 has nothing kept, and what matches no filter any more is acknowledged.
    assert taken.over == [identifier(3), identifier(4), identifier(5)]
    assert [each.topic for each in taken.plain] == [b"a"]


def test_nothing_is_sent_again_that_the_client_has() -> None:
    found = session(Wanted("a", 2))
    first = found.take(runs_of([mail(1), mail(2, qos=2), mail(3)]))
    assert len(first.kept) == 3
    found.released.packet_ids.add(identifier(2))  # its PUBREC is stored
    assert found.done([identifier(1)]) == [identifier(1) - FIRST_KEPT_ID]
    again = found.take(runs_of([mail(seq, qos=2 if seq == 2 else 1, flags=REDELIVERED) for seq in (1, 2, 3)]))
    assert again.over == [identifier(1)]
    assert [(each.packet_id, each.dup, each.released) for each in again.kept] == [
        (identifier(2), True, True),
        (identifier(3), True, False),
    ]


def test_a_released_identifier_is_forgotten_before_it_can_be_another_messages() -> None:
    found = session(Wanted("a", 2))
    found.take(runs_of([mail(1, qos=2)]))
    found.released.packet_ids.add(identifier(1))
    found.take(runs_of([mail(seq) for seq in range(2, 100)]))
    assert found.released.packet_ids == {identifier(1)}
    assert not found.pruned
    found.take(runs_of([mail(seq) for seq in range(100, 200)]))
    assert not found.released.packet_ids
    assert found.pruned, "the stored ones have to be replaced"
    taken = found.take(runs_of([mail(1 + SEQS, qos=2)]))
    assert [(each.packet_id, each.released) for each in taken.kept] == [(identifier(1), False)]


def test_a_gap_is_counted() -> None:
    found = session(Wanted("a", 1))
    taken = found.take(runs_of([mail(9, flags=GAP), mail(10)]))
    assert (taken.gaps, found.gaps, [each.packet_id for each in taken.kept]) == (1, 1, [identifier(10)])


def test_a_session_comes_back_from_its_note() -> None:
    before = session(Wanted("a", 1, no_local=True, identifier=9), Wanted("$share/g/b", 1), Wanted("user/7", 1), Wanted("c", 0))
    note = SessionNote.decode(before.state(NOW_MS))
    after = Session(note, 6, present=True)
    assert [(each.filter, each.qos, each.no_local, each.identifier, each.kept) for each in after.filters.values()] == [
        ("a", 1, True, 9, True),
        ("$share/g/b", 1, False, 0, False),
        ("user/7", 1, False, 0, False),
        ("c", 0, False, 0, False),
    ]
    assert after.uin == before.uin == S


def test_entries_of_a_newer_connection_win_and_cover_every_room() -> None:
    older, newer = session(Wanted("a/b", 1), Wanted("#", 1)), Session(SessionNote("phone", 7, 3600), 6, present=True)
    newer.add([Wanted("a/b", 1)])
    kept = older.entries(["a/b", "#", "$share/g/x", "user/7"], rooms_of, NOW_MS)
    assert {name: len(entries) for name, entries in kept.items()} == {"a/b": 1, "#": 128}
    assert kept["a/b"][0].until_ms > NOW_MS + HOUR_MS
    last = [older.entries(["a/b"], rooms_of, NOW_MS, removed=True)["a/b"][0].version for _ in range(3)][-1]
    assert newer.entries(["a/b"], rooms_of, NOW_MS)["a/b"][0].version > last > kept["a/b"][0].version


def test_a_filter_that_gets_qos_0_is_kept_no_longer() -> None:
    found = session(Wanted("a", 1))
    assert found.add([Wanted("a", 0)]) == ["a"]
    assert found.entries(["a"], rooms_of, NOW_MS)["a"][0].removed
    assert found.remove(["a", "b"]) == ["a"]


def test_a_session_is_over_after_its_expiry_and_later_if_its_gateway_died() -> None:
    note = SessionNote("phone", 7, 3600, connected=False, ended_at_ms=NOW_MS)
    assert not is_over(note, NOW_MS + HOUR_MS - 1)
    assert is_over(note, NOW_MS + HOUR_MS)
    died = replace(note, connected=True)
    assert not is_over(died, NOW_MS + HOUR_MS)
    assert is_over(died, NOW_MS + HOUR_MS + renewal_s(3600) * 1000)


def test_a_connection_leaves_out_what_its_sessions_inbox_has() -> None:
    core = gateway()
    client(core, 1, *wanted("a", qos=1, kept=True))
    client(core, 2, *wanted("a", qos=1))
    kept = message("a", 1, qos=1)
    kept = kept[:FLAGS_AT] + bytes((kept[FLAGS_AT] | Flag.KEPT,)) + kept[FLAGS_AT + 1 :]
    assert receivers(arrive(core, kept)) == [2]
    assert sorted(receivers(arrive(core, message("a", 2, qos=0)))) == [1, 2]


def test_the_inbox_is_a_device_of_its_own_until_the_connection_ends() -> None:
    core = Core(instance=3, generation=5)
    core.step(ev.RelaysChanged(1, (ev.Replica(EndpointID(201), 0),)), 0.0)
    reports = updates(turn(core, ev.Opened(1, 7, 3, 9, 0, NOW_MS, session=S, name="phone")))
    taking = {(each.group, each.member): connection_of(each) for each in reports}
    assert taking[S, SESSION_DEVICE].mail
    assert core.samples()["mail_connections"] == 0, "the client takes no mail of its user"
    core.step(ev.MailStreamOpened(1, EndpointID(201)), 0.0)
    place = ev.MailDevice(S, SESSION_DEVICE, taking[S, SESSION_DEVICE].connect_time, SESSION_DEVICE)
    (write,) = of(ev.WriteMail, turn(core, ev.MailArrived(1, [place], runs_of([mail(1), mail(2, flags=GAP), mail(3)]))))
    assert write.connection == -1
    assert [run.gap for run in write.runs] == [False, True, False], "with the marker of a gap"
    assert of(ev.AcknowledgementsDue, turn(core, ev.PacketsAcknowledged(-1, [identifier(1) - FIRST_KEPT_ID])))
    assert [each.up_to for each in core.mail.take_acknowledgements(1, 10)] == [2]
    assert of(ev.Disconnect, turn(core, ev.Replaced(S, SESSION_DEVICE, place.connect_time, 5))) == [ev.Disconnect(1, 5)]
    left = updates(turn(core, ev.Closed(1, 1)))
    assert (S, SESSION_DEVICE, False) in [(each.group, each.member, each.login) for each in left]
    assert (core.mail.unacknowledged, core.samples()["mail_connections"]) == (0, 0)


def test_proxies_learn_whose_session_published() -> None:
    core = Core(instance=3, generation=5)
    core.step(ev.ProxiesChanged((ev.Replica(EndpointID(301), 0),)), 0.0)
    turn(core, ev.Opened(1, 7, 5, session=S), ev.Opened(2, 8, 5))
    messages = [
        ev.Confirmable(lambda *_: None, 1, topic_room("a"), message("a", number, qos=1), SnowflakeID(number), ev.Sender(connection))
        for number, connection in enumerate((1, 2), 1)
    ]
    (sent,) = of(SendControl, turn(core, ev.PublishConfirmed(messages)))
    batch = control_pb2.Control.FromString(sent.messages[0]).publish_batch
    assert list(batch.sessions) == [S, 0]
    turn(core, ev.BatchResolved(EndpointID(301), batch.number, []), ev.Closed(1, 1))
    (sent,) = of(SendControl, turn(core, ev.PublishConfirmed(messages[1:])))
    assert not control_pb2.Control.FromString(sent.messages[0]).publish_batch.sessions
