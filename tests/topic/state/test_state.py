"""What entries mean: blocks, writers, seals, channels, retention; and that rows bring all of it back."""

from __future__ import annotations

import pytest

from tests.topic.builders import CHANNEL, PART, TOPIC, Log
from topic import entries as en
from topic.state import channels, parts
from topic.state.parts import Appended, Verdict
from topic.state.state import Done, Sealed, State


def same(one: State, other: State) -> bool:
    def flat(state: State) -> object:
        progress = {
            key: (each.acks.floor, each.acks.chunks, each.waiting, each.dead, each.forgotten, each.lost)
            for key, each in state.progress.items()
        }
        return state.parts, state.channels, progress, state.applied, state.clock_us

    return flat(one) == flat(other)


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
    assert log.apply(en.SEAL, en.encode_seal(99, ())) == Done(False)


def test_a_child_knows_what_its_parents_took() -> None:
    log = Log()
    known = [en.KnownWriter(1, 5, 2, 70), en.KnownWriter(2, 5, 9, 80)]
    log.open_part(3, parents=(1, 2), writers=known)
    child = log.store.state.parts[en.part_id(TOPIC, 3)]
    assert child.inherited == {(1, 5): (2, 70), (2, 5): (9, 80)}
    log.write(1, part=3)
    assert child.writers[5].progress == 80
    log.write(1, part=3, first=2, progress=81)
    assert child.known_writers() == [*known, en.KnownWriter(3, 5, 2, 81)]
    log.open_part(3)
    assert child.end == 2


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
    assert log.apply(en.TRIM, en.encode_trim(PART, 6)) == log.apply(en.TRIM, en.encode_trim(PART, 11)) == Done(False)
    assert same(log.store.state, log.reopened().store.state)


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
    assert log.apply(en.LOST, en.encode_lost(PART, 3, 11)) == log.apply(en.LOST, en.encode_lost(9, 0, 1)) == Done(False)
    assert same(log.store.state, log.reopened().store.state)
