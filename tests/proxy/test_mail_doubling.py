"""A proxy's mail while Xiu is doubled: what moved goes to the child, in its place, and no stream ends."""

from __future__ import annotations

from pixiu.errors import Refusal
from pixiu.ids import MSG_SEQUENCE_BITS, msg_partition
from pixiu.wire.inbox_operations import APPEND, Appends, decode
from pixiu.wire.record import split
from proxy import mail_events as ev
from tests.proxy.test_mail import Pipeline, record

SEQUENCES = (1 << MSG_SEQUENCE_BITS) - 1


def keys(sent: ev.SendStore) -> list[int]:
    """The users of a request, in order."""
    return [int.from_bytes(each[24:32], "little") for each in split(sent.data, sent.count)]


def refuse(pipeline: Pipeline, sent: ev.SendStore, partitions: int, *, moved: int) -> None:
    """A Xiu that counts by so many stores what is its own and refuses the rest."""
    runs = [
        ev.StoredRun(sent.position + index, 1, 0, 0, Refusal("WRONG_PARTITION", "moved"), partitions)
        if key % partitions == moved
        else ev.StoredRun(sent.position + index, 1, 500 + index, 0)
        for index, key in enumerate(keys(sent))
    ]
    pipeline.stored(*runs, partition=sent.partition)


def appended(pipeline: Pipeline) -> list[tuple[int, int, int]]:
    """(UIN, partition of the MsgID, its sequence) of all that goes to Pi's inboxes, in order."""
    found: list[tuple[int, int, int]] = []
    for sent in pipeline.take(ev.SendAppend):
        for operation in decode(sent.operations):
            assert isinstance(operation, Appends)
            found += [(uin, msg_partition(number), number & SEQUENCES) for number, uin in APPEND.iter_unpack(operation.items)]
        pipeline.appended(sent, [1] * len(found))
    return found


def test_what_moved_goes_to_the_child_and_stays_in_the_order_of_its_user() -> None:
    pipeline = Pipeline(xius=1)
    pipeline.mail(record(1, 4), record(2, 5), record(3, 5), position=1)
    pipeline.mail(record(4, 5), record(5, 4), position=4)
    first, second = pipeline.take(ev.SendStore)
    refuse(pipeline, first, 2, moved=1)
    to_child, to_parent = sorted(pipeline.take(ev.SendStore), key=lambda sent: -sent.partition)
    assert (to_child.partition, keys(to_child), to_parent.partition, keys(to_parent)) == (1, [5, 5], 0, [4])
    pipeline.stored(ev.StoredRun(to_parent.position, 1, 0, 500), partition=0)
    refuse(pipeline, second, 2, moved=1)
    again = pipeline.take(ev.SendStore)
    assert {sent.partition: keys(sent) for sent in again} == {0: [4], 1: [5]}
    for sent in (*again, to_child):  # the child answers the later mail first
        pipeline.stored(ev.StoredRun(sent.position, sent.count, 10 * sent.position, 0), partition=sent.partition)
    went = appended(pipeline)
    assert [uin for uin, _, _ in went if uin == 5] == [5, 5, 5]
    assert [sequence for uin, _, sequence in went if uin == 5] == [
        10 * to_child.position,
        10 * to_child.position + 1,
        10 * again[0].position if again[0].partition == 1 else 10 * again[1].position,
    ]
    assert {partition for uin, partition, _ in went if uin == 5} == {1}
    assert not pipeline.take(ev.EndWriter)
    assert (pipeline.core.under_way, pipeline.core.waiting_bytes) == (0, 0)
    assert sorted(
        position for result in pipeline.results() for position in range(result.position, result.position + result.count)
    ) == [1, 2, 3, 4, 5]


def test_new_mail_goes_to_the_child_at_once_when_its_parent_is_known_to_be_split() -> None:
    pipeline = Pipeline(xius=2)
    pipeline.mail(record(1, 7), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 4, moved=3)
    pipeline.take(ev.SendStore)
    pipeline.mail(record(2, 7), record(3, 5), record(4, 6), position=2)
    assert {each.partition: keys(each) for each in pipeline.take(ev.SendStore)} == {3: [7], 1: [5], 0: [6]}


def test_a_child_that_is_not_open_sends_back_to_its_parent_a_moment_later() -> None:
    pipeline = Pipeline(xius=1)
    pipeline.mail(record(1, 5), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 2, moved=1)
    (sent,) = pipeline.take(ev.SendStore)
    assert sent.partition == 1
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("WRONG_PARTITION", "not open"), 1), partition=1)
    assert not pipeline.take(ev.SendStore)
    pipeline.now = pipeline.core.next_deadline()
    pipeline.turn()
    (sent,) = pipeline.take(ev.SendStore)
    assert (sent.partition, keys(sent)) == (0, [5])
    assert not pipeline.take(ev.Disconnect)


def test_when_the_layout_flips_nothing_ends_and_what_waits_goes_where_it_belongs() -> None:
    pipeline = Pipeline(xius=1, linked=False)
    pipeline.mail(record(1, 4), record(2, 5), position=1)
    pipeline.step(ev.StoresChanged(2, 1))
    pipeline.turn()
    for partition in (0, 1):
        pipeline.up(ev.Store(False, partition))
    pipeline.turn()
    assert {each.partition: keys(each) for each in pipeline.take(ev.SendStore)} == {0: [4], 1: [5]}
    assert not pipeline.take(ev.EndWriter)


def test_a_mail_to_many_moves_with_its_first_receiver_and_nothing_overtakes_it() -> None:
    pipeline = Pipeline(xius=2)
    pipeline.mail(record(1, 7), record(2, 5), position=1, m0=[4])
    for sent in pipeline.take(ev.SendStore):
        refuse(pipeline, sent, 4, moved=3)
    resent = pipeline.take(ev.SendStore)
    assert {(each.partition, *keys(each)) for each in resent} == {(3, 7), (1, 5)}
    (later,) = [each for each in resent if each.partition == 1]
    pipeline.stored(ev.StoredRun(later.position, 1, 0, 501), partition=1)
    assert not pipeline.take(ev.SendAppend), "user 5 waits for the mail to 7 and 4 of the same channel"


def test_a_partition_that_is_two_doublings_ahead_is_believed_and_others_mail_goes_on() -> None:
    pipeline = Pipeline(xius=1)
    pipeline.mail(record(1, 4), record(2, 5), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 4, moved=1)
    assert not pipeline.take(ev.Disconnect)
    assert [(each.partition, *keys(each)) for each in pipeline.take(ev.SendStore)] == [(0, 4), (1, 5)]
    pipeline.mail(record(3, 4), record(4, 5), position=3)
    assert {each.partition: keys(each) for each in pipeline.take(ev.SendStore)} == {0: [4], 1: [5]}


def test_links_to_children_are_open_before_the_cut_where_their_parents_links_are() -> None:
    pipeline = Pipeline(xius=1, linked=False)
    pipeline.step(ev.StoresChanged(1, 1, 2, 2))
    assert not pipeline.take(ev.Connect), "who sends no mail needs none"
    pipeline.mail(record(1, 5), position=1)
    pipeline.step(ev.StoresChanged(1, 1, 2, 2))
    assert ev.Connect(ev.Store(False, 1)) in pipeline.take(ev.Connect)


def test_a_link_to_a_child_that_could_not_be_opened_is_tried_at_once_when_its_parent_is_split() -> None:
    pipeline = Pipeline(xius=1)
    pipeline.mail(record(1, 5), position=1)
    pipeline.step(ev.StoresChanged(1, 1, 2, 1))
    child = ev.Store(False, 1)
    pipeline.step(ev.LinkDown(child, pipeline.links[child], "it has no leader"))
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 2, moved=1)
    assert pipeline.take(ev.Hurry) == [ev.Hurry(child)]


def test_the_pause_of_who_moves_is_from_the_parents_refusal_to_the_childs_first_answer() -> None:
    pipeline = Pipeline(xius=1)
    pipeline.step(ev.StoresChanged(1, 1, 2, 1))
    pipeline.mail(record(1, 5), position=1)
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 2, moved=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.stored(ev.StoredRun(sent.position, 1, 0, 0, Refusal("WRONG_PARTITION", "not open"), 1), partition=1)
    pipeline.now = pipeline.core.next_deadline()
    pipeline.turn()
    (sent,) = pipeline.take(ev.SendStore)
    refuse(pipeline, sent, 2, moved=1)
    (sent,) = pipeline.take(ev.SendStore)
    pipeline.step(ev.StoresChanged(2, 1))
    pipeline.now = 100.25
    pipeline.stored(ev.StoredRun(sent.position, 1, 500, 0), partition=1)
    assert pipeline.core.pauses.longest == {"xiu": 0.25}
    pipeline.step(ev.StoresChanged(2, 1, 4, 1))
    assert not pipeline.core.pauses.longest, "those of the next doubling"
    pipeline.core.pauses.refused(ev.Store(False, 3), 2, 100.0)
    pipeline.step(ev.StoresChanged(2, 1))
    pipeline.core.pauses.confirmed(ev.Store(False, 3), 999.0)
    assert not pipeline.core.pauses.longest, "it was taken back"
