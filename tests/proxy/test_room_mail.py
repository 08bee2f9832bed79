"""Messages to rooms in the mail pipeline: stored by their room, appended to sessions alone, refused one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.contract import TICK
from pixiu.errors import Refusal
from pixiu.ids import msg_id
from pixiu.wire.inbox_operations import U64, Code, Fanout
from pixiu.wire.inbox_operations import Writer as PiWriter
from pixiu.wire.inbox_operations import decode as decode_operations
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import Flag, Kind, encode
from proxy import mail_events as ev
from proxy.mail import pipeline as module
from tests.proxy.test_mail import Pipeline
from tests.proxy.test_mail_doubling import keys, refuse

OWN = -1


def record(number: int, room: int) -> bytes:
    return encode(Kind.MAIL, room, b"\0\1ahello", number, flags=Flag.TOPIC)


def opened(xius: int = 1, pis: int = 1, *, taken: bool = True) -> Pipeline:
    pipeline = Pipeline(xius, pis, taken=taken)
    pipeline.effects.clear()
    pipeline.step(ev.WriterOpened(OWN, 12, 80, own=True))
    return pipeline


def offer(pipeline: Pipeline, position: int, *mails: tuple[int, int, Sequence[int]]) -> None:
    """Mails: (SnowflakeID, room, sessions)."""
    made = [ev.RoomMail(room, record(number, room), uins) for number, room, uins in mails]
    pipeline.step(ev.RoomMailReceived(OWN, position, made))
    pipeline.turn()


def fanouts(pipeline: Pipeline) -> list[tuple[int, int, list[int]]]:
    """(partition of Pi, MsgID, receivers) of every append."""
    found = []
    for sent in pipeline.take(ev.SendAppend):
        for operation in decode_operations(sent.operations):
            assert isinstance(operation, Fanout)
            assert operation.writer == PiWriter(12, 80, 3)
            found.append((sent.partition, operation.msg_id, [uin for (uin,) in U64.iter_unpack(operation.receivers)]))
        pipeline.effects.append(sent)
    return found


def test_the_room_chooses_the_xiu_and_each_session_its_pi() -> None:
    pipeline = opened(xius=2, pis=2)
    offer(pipeline, 1, (5, 41, [10, 11, 13]))
    (sent,) = pipeline.take(ev.SendStore)
    assert (sent.partition, sent.level, sent.data) == (1, Level.REPLICATED, record(5, 41))
    pipeline.stored(ev.StoredRun(sent.position, 1, 7, 0), partition=1)
    assert sorted(fanouts(pipeline)) == [(0, msg_id(1, 64, 7), [10]), (1, msg_id(1, 64, 7), [11, 13])]
    for sent_append, results in zip(pipeline.take(ev.SendAppend), ([1], [1, 1]), strict=True):
        assert not pipeline.results(OWN)
        pipeline.appended(sent_append, results)
    (result,) = pipeline.results(OWN)
    assert (result.position, result.count, result.code) == (1, 1, "")
    grown = [item[0] for effect in pipeline.take(ev.InboxesGrew) for item in effect.items()]
    assert sorted(grown) == [10, 11, 13], "the relays of the sessions are notified, and nobody for the room"
    assert (pipeline.core.under_way, pipeline.core.waiting_bytes) == (0, 0)


def test_a_room_s_messages_go_on_in_order_and_rooms_do_not_wait_for_each_other() -> None:
    pipeline = opened(xius=2)
    offer(pipeline, 1, (1, 40, [10]), (2, 41, [10]), (3, 40, [11]))
    to_even, to_odd = sorted(pipeline.take(ev.SendStore), key=lambda sent: sent.partition)
    assert (keys(to_even), keys(to_odd)) == ([40, 40], [41])
    pipeline.stored(ev.StoredRun(to_odd.position, 1, 7, 0), partition=1)
    assert [receivers for _, _, receivers in fanouts(pipeline)] == [[10]]
    pipeline.take(ev.SendAppend)
    pipeline.stored(ev.StoredRun(to_even.position, 2, 8, 0), partition=0)
    assert [receivers for _, _, receivers in fanouts(pipeline)] == [[10], [11]]


def test_several_mails_of_one_message_are_one_record_for_xiu_and_several_fan_outs() -> None:
    pipeline = opened()
    offer(pipeline, 1, (5, 41, [10, 11]), (5, 41, [12]))
    (sent,) = pipeline.take(ev.SendStore)
    assert sent.count == 2
    pipeline.stored(ev.StoredRun(sent.position, 1, 7, 0), ev.StoredRun(sent.position + 1, 1, 0, msg_id(0, 64, 7)))
    assert [receivers for _, _, receivers in fanouts(pipeline)] == [[10, 11], [12]]
    assert len({number for _, number, _ in fanouts(pipeline)}) == 1


def test_while_xiu_is_doubled_a_room_s_messages_go_to_the_child() -> None:
    pipeline = opened(xius=1)
    offer(pipeline, 1, (1, 40, [11]), (2, 41, [10]), (3, 41, [11]))
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 2, moved=1)
    again = sorted(pipeline.take(ev.SendStore), key=lambda sent: sent.partition)
    assert [(sent.partition, keys(sent)) for sent in again] == [(0, [40]), (1, [41, 41])], "by the room, not by the sessions"
    for sent in again:
        pipeline.stored(ev.StoredRun(sent.position, sent.count, 50 * (sent.partition + 1), 0), partition=sent.partition)
    assert sorted(receivers for _, _, receivers in fanouts(pipeline)) == [[10], [11], [11]]
    assert not pipeline.take(ev.EndWriter)


def test_while_pi_is_doubled_each_session_s_part_goes_where_it_belongs() -> None:
    pipeline = opened(pis=1)
    offer(pipeline, 1, (1, 40, [10, 11]))
    pipeline.store_all()
    (sent,) = pipeline.take(ev.SendAppend)
    store = ev.Store(True, 0)
    why = Refusal("WRONG_PARTITION", "moved")
    triple = Triple(1, 3, 60)
    pipeline.step(ev.Appended(0, pipeline.links[store], sent.request, [], why, triple, 0, 2))
    pipeline.turn()
    assert sorted((partition, receivers) for partition, _, receivers in fanouts(pipeline)) == [(0, [10]), (1, [11])]


def test_what_finds_no_space_is_refused_alone_and_its_writer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(record(1, 40)) + 8
    monkeypatch.setattr(module, "MIN_SHARE_BYTES", size)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 8 * size)
    pipeline = opened(xius=8)
    offer(pipeline, 1, (1, 40, [10]), (2, 40, [10]), (3, 41, [10]), (4, 43, [10]))
    assert [(result.position, result.code) for result in pipeline.results(OWN)] == [(2, "OVERLOADED"), (4, "OVERLOADED")]
    assert not pipeline.take(ev.EndWriter)
    assert sorted(keys(sent) for sent in pipeline.take(ev.SendStore)) == [[40], [41]]


def test_what_is_not_confirmed_in_time_ends_the_own_stream_before_those_of_clients() -> None:
    pipeline = opened()
    offer(pipeline, 1, (1, 40, [10]))
    pipeline.now += module.ROOM_TIMEOUT_S
    pipeline.step(TICK)
    (ended,) = pipeline.take(ev.EndWriter)
    assert ended.stream == OWN
    assert pipeline.core.waiting_bytes == 0


def test_a_disk_that_is_full_counts_more_than_a_full_inbox() -> None:
    pipeline = opened()
    offer(pipeline, 1, (1, 40, [10, 11, 12, 13]))
    pipeline.store_all()
    (sent,) = pipeline.take(ev.SendAppend)
    pipeline.appended(sent, [1, -Code.INBOX_FULL, -Code.DISK_FULL, -Code.INBOX_FULL])
    (result,) = pipeline.results(OWN)
    assert (result.code, list(result.open)) == ("DISK_FULL", [11, 12, 13])


def test_the_own_writer_is_taken_whatever_kinds_the_proxy_takes() -> None:
    pipeline = opened(taken=False)
    offer(pipeline, 1, (1, 40, [10]))
    assert pipeline.take(ev.SendStore)
    assert not pipeline.take(ev.EndWriter)


def test_mail_of_a_stream_that_has_ended_is_ignored() -> None:
    pipeline = opened()
    pipeline.step(ev.WriterClosed(OWN))
    offer(pipeline, 1, (1, 40, [10]))
    assert not pipeline.take(ev.SendStore)
