"""What entries mean: blocks, writers, seals, channels, retention; and that rows bring all of it back."""

from __future__ import annotations

import pytest

from cluster.replication.model import Entry
from cluster.topics import entries as en
from pixiu.errors import MalformedData
from pixiu.placement.slots import SLOTS
from tests.topic.builders import CHANNEL, PART, TOPIC, Log
from topic.state import channels, parts, state
from topic.state.parts import Appended, Verdict
from topic.state.state import MAX_TOPICS, OK, Done, Sealed, State


def same(one: State, other: State) -> bool:
    def flat(state: State) -> object:
        progress = {
            key: (each.acks.floor, each.acks.chunks, each.waiting, each.dead, each.forgotten, each.lost)
            for key, each in state.progress.items()
        }
        return state.topics, state.parts, state.channels, state.fences, progress, state.applied, state.clock_us

    return flat(one) == flat(other)


def refused(answer: object) -> str:
    assert isinstance(answer, Done)
    assert not answer.ok
    return answer.why


def test_offsets_are_dense_and_blocks_are_stored_once() -> None:
    log = Log()
    log.open_part()
    assert log.write(1, 2, 3) == Appended(Verdict.STORED, 3, 0)
    assert log.write(4, 5, first=4) == Appended(Verdict.STORED, 5, 3)
    assert log.write(4, 5, first=4) == Appended(Verdict.REPEATED, 5, 3)
    assert log.write(1, 2, 3) == Appended(Verdict.REPEATED, 5, -1)
    assert log.write(9, writer=6) == Appended(Verdict.STORED, 1, 5)
    assert log.store.state.parts[PART].end == 6


def test_what_is_not_dense_is_refused_whole() -> None:
    log = Log()
    log.open_part()
    log.write(1, 2, 3)
    for first, slots in ((5, (1,)), (3, (1, 2)), (2, (1, 2, 3))):
        assert log.write(*slots, first=first) == Appended(Verdict.HOLE, 3)
    assert log.write(1, part=2) == Appended(Verdict.NOT_HERE, 0)
    assert log.store.state.parts[PART].end == 3


def test_a_seal_ends_a_part_and_names_its_children() -> None:
    log = Log()
    log.open_part()
    log.write(1, 2, progress=70)
    children = (en.Child(2, 0, 9, 0), en.Child(3, 9, 65_536, 1))
    sealed = log.apply(en.SEAL, en.encode_seal(PART, children))
    assert sealed == Sealed(PART, 2, children, [en.KnownWriter(1, 5, 2, 70)], [])
    assert log.apply(en.SEAL, en.encode_seal(PART, ())) == sealed
    assert log.write(3, first=3) == Appended(Verdict.SEALED, 2)
    assert log.write(1, 2) == Appended(Verdict.REPEATED, 2, 0)
    assert "not in this group" in refused(log.apply(en.SEAL, en.encode_seal(99, ())))


def test_a_child_knows_what_its_parents_took() -> None:
    log = Log()
    known = [en.KnownWriter(1, 5, 2, 70), en.KnownWriter(2, 5, 9, 80)]
    log.open_part(3, parents=(1, 2), writers=[*known, en.KnownWriter(1, 6, 4, 0)])
    child = log.store.state.parts[en.part_id(TOPIC, 3)]
    assert child.inherited == {(1, 5): (2, 70), (2, 5): (9, 80), (1, 6): (4, 0)}
    assert child.inherited_of(6) == [(1, 4, 0)]
    log.write(1, part=3)
    assert child.writers[5].progress == 80
    log.write(1, part=3, first=2, progress=81)
    assert child.known_writers() == [en.KnownWriter(3, 5, 2, 81)]  # what was before says no more
    log.open_part(3)
    assert child.end == 2


def test_what_children_inherit_does_not_grow_with_each_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle writer keeps what it had, one that writes what it has last; and there is a bound."""
    log, known = Log(), [en.KnownWriter(1, 5, 2, 70), en.KnownWriter(1, 6, 9, 80), en.KnownWriter(1, 7, 9, 0)]
    for number in range(2, 30):
        log.open_part(number, parents=(number - 1,), writers=known)
        log.write(1, part=number, progress=100 + number)
        sealed = log.apply(en.SEAL, en.encode_seal(en.part_id(TOPIC, number), ()))
        assert isinstance(sealed, Sealed)
        known = list(sealed.writers)
        assert known == [en.KnownWriter(1, 6, 9, 80), en.KnownWriter(number, 5, 1, 100 + number)]
    log.open_part(30, parents=(29,), writers=[en.KnownWriter(part, 8, 1, part) for part in range(1, 20)])
    monkeypatch.setattr(parts, "MAX_INHERITED", 3)
    assert [each.part for each in log.store.state.parts[en.part_id(TOPIC, 30)].known_writers()] == [17, 18, 19]


def test_a_fence_shuts_out_lower_epochs_and_goes_with_the_writer_to_children() -> None:
    log = Log()
    log.open_part()
    assert log.apply(en.FENCE, en.encode_fence(TOPIC, 5, 20)) == OK
    assert log.apply(en.FENCE, en.encode_fence(TOPIC, 5, 20)) == OK
    assert "epoch 20" in refused(log.apply(en.FENCE, en.encode_fence(TOPIC, 5, 19)))
    assert "not known" in refused(log.apply(en.FENCE, en.encode_fence(99, 5, 30)))
    log.write(1, writer=5)
    log.write(1, writer=6)
    sealed = log.apply(en.SEAL, en.encode_seal(PART, ()))
    assert isinstance(sealed, Sealed)
    assert sealed.writers == [en.KnownWriter(1, 5, 1, 0, 20), en.KnownWriter(1, 6, 1, 0)]
    child = Log()
    child.open_part(2, parents=(1,), writers=sealed.writers)
    assert child.store.state.fences == {(TOPIC, 5): 20}
    child = child.reopened()
    assert child.store.state.fences == {(TOPIC, 5): 20}
    child.topic(deleted=True)
    child.apply(en.DROP, en.encode_drop(en.part_id(TOPIC, 2)))
    assert not child.store.state.fences
    assert not child.reopened().store.state.fences


def test_of_too_many_fences_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_FENCES", 2)
    log = Log()
    for writer, epoch in ((1, 30), (2, 10), (3, 20), (2, 40)):
        log.apply(en.FENCE, en.encode_fence(TOPIC, writer, epoch))
    assert log.store.state.fences == {(TOPIC, 1): 30, (TOPIC, 2): 40}
    assert log.reopened().store.state.fences == log.store.state.fences


def test_a_part_takes_nothing_before_it_knows_all_of_its_parents_writers() -> None:
    log = Log()
    log.open_part(3, parents=(1,), writers=[en.KnownWriter(1, 5, 2, 70)], more=True)
    log = log.reopened()
    assert log.write(1, part=3) == Appended(Verdict.NOT_HERE, 0)
    for _ in range(2):
        log.open_part(3, parents=(1,), writers=[en.KnownWriter(1, 6, 4, 80)])
        child = log.reopened().store.state.parts[en.part_id(TOPIC, 3)]
        assert child.inherited == {(1, 5): (2, 70), (1, 6): (4, 80)}
    log.open_part(3, parents=(1,), writers=[en.KnownWriter(1, 5, 2, 70)], more=True)  # it comes late
    assert log.write(1, part=3) == Appended(Verdict.STORED, 1, 0)


def test_writers_are_forgotten_after_a_month_and_only_for_place(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.open_part()
    monkeypatch.setattr(parts, "MAX_WRITERS", 2)
    log.write(1, writer=1, at_us=0)
    log.write(1, writer=2, at_us=10)
    assert log.write(1, writer=3, at_us=20) == Appended(Verdict.TOO_MANY_WRITERS, 0)
    assert log.write(1, writer=3, at_us=parts.WRITER_KEPT_US + 5) == Appended(Verdict.STORED, 1, 2)
    assert sorted(log.store.state.parts[PART].writers) == [2, 3]
    assert same(log.store.state, log.reopened().store.state)


def test_settlements_acknowledge_defer_and_bury() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(10))
    progress = log.store.state.progress[CHANNEL, PART]
    log.settle((0, 2), (5, 7), deferred=[en.Deferred(3, 500, 1)], dead=[en.Dead(4, 16, 1)], at_us=2000)
    assert (progress.acks.floor, progress.waiting[3], progress.dead[4].attempts) == (2, (2500, 1), 16)
    log.settle((3, 4), (2, 3), deferred=[en.Deferred(5, 0, 2)])
    assert (progress.acks.floor, progress.waiting) == (7, {})
    log.settle((7, 1 << 47))
    assert progress.acks.floor == 10
    assert same(log.store.state, log.reopened().store.state)


def test_dead_letters_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(9))
    monkeypatch.setattr(channels, "MAX_DEAD", 2)
    log.settle(dead=[en.Dead(offset, 1, 1) for offset in (3, 1, 2)])
    progress = log.store.state.progress[CHANNEL, PART]
    assert (sorted(progress.dead), progress.forgotten) == ([2, 3], 1)
    assert same(log.store.state, log.reopened().store.state)


def test_a_channel_begins_where_it_says_and_with_children_at_the_beginning() -> None:
    log = Log()
    log.open_part()
    log.write(*range(4))
    log.channel(from_end=True)
    assert log.store.state.progress[CHANNEL, PART].acks.floor == 4
    settings = log.store.state.channels[CHANNEL]
    child = Log()
    child.open_part(2, channels=[settings], parents=(1,))
    assert child.store.state.progress[CHANNEL, en.part_id(TOPIC, 2)].acks.floor == 0
    log.channel(removed=True)
    assert (log.store.state.channels, log.store.state.progress) == ({}, {})
    assert same(log.store.state, log.reopened().store.state)


def test_retention_counts_what_a_channel_loses() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(10))
    log.settle((1, 3), deferred=[en.Deferred(4, 0, 1)], dead=[en.Dead(5, 1, 1)])
    assert log.apply(en.TRIM, en.encode_trim(PART, 6)) == Done(True)
    progress = log.store.state.progress[CHANNEL, PART]
    assert (progress.acks.floor, progress.lost, progress.waiting, progress.dead) == (6, 3, {}, {})
    assert "not between" in refused(log.apply(en.TRIM, en.encode_trim(PART, 6)))
    assert "not between" in refused(log.apply(en.TRIM, en.encode_trim(PART, 11)))
    assert same(log.store.state, log.reopened().store.state)


def test_a_part_needs_its_topic_and_stays_until_it_is_sealed_or_the_topic_is_deleted() -> None:
    log = Log()
    unknown = en.Opening(en.part_id(9, 1), 0, 9).encode()
    assert "TOPIC entry first" in refused(log.apply(en.OPEN, unknown))
    log.open_part()
    log.channel()
    log.write(1, 2)
    log.settle((0, 1), deferred=[en.Deferred(1, 0, 1)])
    assert "seal it" in refused(log.apply(en.DROP, en.encode_drop(PART)))
    log.topic(deleted=True)
    assert log.write(3, first=3) == Appended(Verdict.DELETED, 2)
    assert log.write(1, 2) == Appended(Verdict.REPEATED, 2, 0)
    again = log.reopened()
    assert again.write(3, first=3) == Appended(Verdict.DELETED, 2)
    again.topic()
    assert again.write(3, first=3) == Appended(Verdict.STORED, 3, 2)
    again.topic(deleted=True)
    assert again.apply(en.DROP, en.encode_drop(PART)) == again.apply(en.DROP, en.encode_drop(PART)) == Done(True)
    state = again.store.state
    assert (state.topics, state.parts, state.channels, state.progress, state.topic_named("orders")) == ({}, {}, {}, {}, None)
    again.store.flush()
    assert again.table.rows == {}
    assert again.files.names(f"parts/{TOPIC}-1") == []


def test_a_name_is_the_live_topics_and_old_versions_change_nothing() -> None:
    log = Log()
    log.topic(deleted=True)
    assert log.store.state.topics == {}
    for number, deleted in ((1, False), (2, False), (2, True)):
        log.apply(en.TOPIC, en.TopicSettings(number, "orders", deleted=deleted, version=number).encode())
        log.apply(en.OPEN, en.Opening(en.part_id(number, 1), 0, 65_536).encode())
    found = log.store.state.topic_named("orders")
    assert found is not None
    assert found.topic == 1
    log.apply(en.CHANNEL, en.ChannelSettings(CHANNEL, 1, "c", version=5).encode())
    assert log.apply(en.CHANNEL, en.ChannelSettings(CHANNEL, 1, "c", removed=True, version=5).encode()) == Done(True)
    assert "version 5" in refused(log.apply(en.CHANNEL, en.ChannelSettings(CHANNEL, 1, "c", version=4).encode()))
    assert "version 5" in refused(log.apply(en.TOPIC, en.TopicSettings(1, "other", version=4).encode()))
    assert log.store.state.channels == {}
    assert same(log.store.state, log.reopened().store.state)


def test_a_seek_moves_the_floor_either_way() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(10))
    progress = log.store.state.progress[CHANNEL, PART]
    log.settle((0, 2), (5, 7), deferred=[en.Deferred(3, 500, 1)], dead=[en.Dead(4, 16, 1), en.Dead(8, 16, 1)])
    assert log.apply(en.SEEK, en.encode_seek(CHANNEL, PART, 6)) == Done(True, changed=4)
    assert (progress.acks.floor, progress.acks.chunks, progress.waiting, list(progress.dead)) == (6, {}, {}, [4])
    assert log.apply(en.SEEK, en.encode_seek(CHANNEL, PART, 2)) == Done(True, changed=4)
    assert (progress.acks.floor, progress.dead) == (2, {})
    log.apply(en.TRIM, en.encode_trim(PART, 1))
    log.apply(en.SEEK, en.encode_seek(CHANNEL, PART, 0))
    assert progress.acks.floor == 1
    log.apply(en.SEEK, en.encode_seek(CHANNEL, PART, 1 << 40))
    assert progress.acks.floor == 10
    assert "has no part" in refused(log.apply(en.SEEK, en.encode_seek(99, PART, 2)))
    assert same(log.store.state, log.reopened().store.state)


def test_resent_dead_letters_wait_with_no_attempts_and_can_be_acknowledged_again() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(6))
    progress = log.store.state.progress[CHANNEL, PART]
    log.settle((0, 1), (2, 5), dead=[en.Dead(1, 16, 1), en.Dead(5, 16, 1)])
    assert (progress.acks.floor, progress.unacknowledged(6)) == (6, 0)
    assert log.apply(en.RESEND, en.encode_resend(CHANNEL, PART, [1, 3])) == Done(True, changed=1, offsets=[1])
    assert log.apply(en.RESEND, en.encode_resend(CHANNEL, PART)) == Done(True, changed=1, offsets=[5])
    assert (list(progress.dead), progress.waiting, progress.unacknowledged(6)) == ([], {1: (1000, 0), 5: (1000, 0)}, 2)
    assert same(log.store.state, log.reopened().store.state)
    log.settle((5, 6), deferred=[en.Deferred(1, 0, 1)])
    assert progress.waiting == {1: (1000, 1)}
    log.settle(dead=[en.Dead(1, 2, 1)])
    assert (progress.waiting, list(progress.dead), progress.acks.floor) == ({}, [1], 6)


def test_a_dead_letter_keeps_what_its_member_said() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(6))
    log.settle(dead=[en.Dead(1, 1, en.Reason.REJECTED, "zu groß"), en.Dead(2, 3, en.Reason.ATTEMPTS), en.Dead(4, 1, 3, "no")])
    assert same(log.store.state, log.reopened().store.state)
    dead = log.reopened().store.state.progress[CHANNEL, PART].dead
    assert {offset: letter.text for offset, letter in dead.items()} == {1: "zu groß", 2: "", 4: "no"}
    entry = en.Settlement(CHANNEL, PART, dead=[en.Dead(1, 1, 3, "zu groß")]).encode()
    for wrong in (entry[:-1], entry + b"x", entry[:-1] + b"\xff", entry[:-7]):
        with pytest.raises(MalformedData):
            en.Settlement.decode(wrong)


def test_what_is_asked_for_is_checked_before_it_comes_into_the_log() -> None:
    for kind, payload in (
        (en.TOPIC, b'{"topic": "1", "name": "x"}'), (en.TOPIC, b'{"topic": 1}'), (en.OPEN, b"[]"), (en.SEAL, b"{}"),
        (en.CHANNEL, b"\xff"), (en.DROP, b"123"), (en.SEEK, b""), (en.RESEND, en.encode_resend(1, 2, [3])[:-1]), (en.BLOCK, b""),
        (en.TOPIC, en.TopicSettings(1 << 32, "x").encode()), (en.CHANNEL, en.ChannelSettings(1, 1, "x", max_attempts=0).encode()),
        (en.CHANNEL, en.ChannelSettings(1, 1, "x", timeout_s=0).encode()), (en.OPEN, en.Opening(1, 9, 9).encode()),
        (en.OPEN, en.Opening(1, 0, 65_537).encode()), (en.OPEN, en.Opening(1, 0, 9).encode().replace(b"[]", b'["x"]', 1)),
        (en.OPEN, en.Opening(1, 0, 9, (), [en.KnownWriter(1, 1 << 64, 0, 0)]).encode()),
        (en.SEAL, en.encode_seal(-1, ())), (en.SEAL, en.encode_seal(1, [en.Child(1, 0, 9, 1 << 32)])),
    ):  # fmt: skip
        with pytest.raises(MalformedData):
            en.check(kind, payload)
    en.check(en.SEAL, en.encode_seal(PART, [en.Child(2, 0, 65_536, 0)]))
    en.check(en.OPEN, en.Opening(PART, 0, 65_536, (1,), [en.KnownWriter(1, 2, 3, 4)], [en.ChannelSettings(1, 1, "x")]).encode())
    en.check(en.TOPIC, b'{"topic": 1, "name": "x", "of the next release": 1}')


def test_entries_are_read_as_they_were_written() -> None:
    settlement = en.Settlement(1, 2, [(3, 4), (5, 6)], [en.Deferred(7, 8, 9)], [en.Dead(10, 11, 1)])
    assert en.Settlement.decode(settlement.encode()) == settlement
    channel = en.ChannelSettings(1, 2, "ü", True, True, 3, 4.5)
    assert en.ChannelSettings.decode(channel.encode()) == channel
    opening = en.Opening(1, 2, 3, (4, 5), [en.KnownWriter(6, 7, 8, 9)], [channel])
    assert en.Opening.decode(opening.encode()) == opening


def test_what_nobody_can_read_is_lost_and_counted() -> None:
    log = Log()
    log.open_part()
    log.channel()
    log.write(*range(10))
    log.settle((4, 5), deferred=[en.Deferred(5, 0, 1)])
    assert log.apply(en.LOST, en.encode_lost(PART, 3, 7)) == Done(True)
    progress = log.store.state.progress[CHANNEL, PART]
    assert (progress.lost, progress.waiting, progress.acks.next_missing(3)) == (3, {}, 7)
    assert "ends at 10" in refused(log.apply(en.LOST, en.encode_lost(PART, 3, 11)))
    assert "not in this group" in refused(log.apply(en.LOST, en.encode_lost(9, 0, 1)))
    assert same(log.store.state, log.reopened().store.state)


def test_a_group_knows_ten_thousand_topics_and_no_more() -> None:
    log = Log()
    state = log.store.state
    for number in range(2, MAX_TOPICS + 1):
        made = en.TopicSettings(number, f"orders-{number}").encode()
        assert state.apply(Entry(1, state.applied + 1, en.TOPIC, 1000, made)) == Done(True)
    assert "at most 10000 topics" in refused(log.apply(en.TOPIC, en.TopicSettings(MAX_TOPICS + 1, "more").encode()))
    assert log.topic(version=2) == Done(True)
    for number in (2, MAX_TOPICS):
        named = state.topic_named(f"orders-{number}")
        assert named is not None
        assert named.topic == number
    assert same(state, log.reopened().store.state)


def test_of_topics_with_one_name_a_live_one_has_it_and_else_the_latest() -> None:
    log = Log()

    def named(state: State) -> int:
        found = state.topic_named("orders")
        assert found is not None
        return found.topic

    for number in (TOPIC, 5, 3):
        log.apply(en.TOPIC, en.TopicSettings(number, "orders").encode())
        log.apply(en.OPEN, en.Opening(en.part_id(number, 1), 0, SLOTS).encode())
    assert named(log.store.state) == 5
    for topic, deleted, expected in ((5, False, 5), (5, True, 3), (TOPIC, True, 3), (3, True, 5), (3, False, 3), (5, False, 5)):
        log.apply(en.TOPIC, en.TopicSettings(topic, "orders", deleted=deleted).encode())
        assert named(log.store.state) == named(log.reopened().store.state) == expected
