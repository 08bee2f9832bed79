"""Channels with members: credit, time-outs, refusals, dead letters, lanes; a settlement counts when it is committed."""

from __future__ import annotations

from cluster.topics import entries as en
from cluster.topics.entries import Dead, Deferred, Reason, Settlement
from tests.topic.builders import CHANNEL, PART, Log
from topic.dispatch.dispatcher import Dispatcher
from topic.dispatch.flights import Pending
from topic.dispatch.lanes import BATCH
from topic.dispatch.members import Member
from topic.dispatch.paces import Paces
from topic.events import Deliver, LoadTest


class Bench:
    """A dispatcher over a store; settlements are committed by hand."""

    def __init__(self, *slots: int, **settings: object) -> None:
        self.log = Log()
        self.log.open_part()
        self.log.channel(**settings)
        if slots:
            self.log.write(*slots)
        self.again(0.0)

    def again(self, now: float) -> None:
        """The dispatcher of the next leader."""
        state = self.log.store.state
        clock_us = state.clock_us
        self.dispatcher = Dispatcher(
            state.channels[CHANNEL], state, self.log.store.blocks, lambda at: clock_us + int((at - now) * 1_000_000), Paces(state)
        )
        self.dispatcher.look(now)

    def join(self, *members: int, credit: int = 10, tag: str = "", load_test: LoadTest = LoadTest.BLOCK) -> None:
        for member in members:
            self.dispatcher.join(member, Member(credit, tag=tag), load_test)

    def pump(self, now: float = 0.0) -> list[tuple[int, list[int]]]:
        found = list[Deliver]()
        for pending in [*self.dispatcher.tick(now), *self.dispatcher.pump(now, found)]:
            self.commit(pending, now)
        return [(each.member, [offset for run in each.runs for offset in range(run.low, run.high)]) for each in found]

    def tick(self, now: float) -> list[Settlement]:
        return [pending.settlement for pending in self.dispatcher.tick(now)]

    def commit(self, pending: Pending | None, now: float = 0.0) -> None:
        assert pending is not None
        self.log.apply(en.SETTLE, pending.settlement.encode())
        self.dispatcher.committed(pending, now)
        self.dispatcher.check_finished(pending.settlement.part)

    def write(self, *slots: int, **fields: int) -> None:
        self.log.write(*slots, **fields)
        self.dispatcher.wake(PART)

    def report(self, member: int, *offsets: int, refused: list[tuple[int, float]] | None = None) -> Pending | None:
        return self.dispatcher.report(member, PART, [(offset, offset + 1) for offset in offsets], refused or [])

    def settlement(self, member: int, *offsets: int, **fields: list[tuple[int, float]]) -> Settlement | None:
        pending = self.report(member, *offsets, **fields)
        return pending.settlement if pending else None


def test_members_share_by_credit() -> None:
    bench = Bench(*range(7))
    bench.join(1, 2, credit=2)
    assert bench.pump() == [(1, [0, 1]), (2, [2, 3])]
    assert bench.pump() == []
    bench.commit(bench.report(1, 0))
    assert bench.pump() == [(1, [4])]


def test_a_range_over_everything_settles_what_the_member_has() -> None:
    bench = Bench(*range(6))
    bench.join(1, 2, credit=3)
    bench.pump()
    pending = bench.dispatcher.report(1, PART, [(0, 1 << 47)], [])
    assert pending is not None
    assert pending.settlement == Settlement(CHANNEL, PART, [(0, 3)], [], [])
    assert bench.report(1, 3, 4) is None


def test_a_rejected_message_is_dead_at_once_and_frees_its_slot() -> None:
    bench = Bench(1, 1)
    bench.join(1, credit=1)
    bench.pump()
    assert bench.dispatcher.report(2, PART, [], [], [(0, "not its own")]) is None
    pending = bench.dispatcher.report(1, PART, [], [], [(0, "too large")])
    assert pending is not None
    assert pending.settlement.dead == [Dead(0, 1, Reason.REJECTED, "too large")]
    bench.commit(pending)
    assert bench.pump() == [(1, [1])]


def test_nothing_is_done_before_it_is_committed() -> None:
    bench = Bench(0, 0)
    bench.join(1, credit=1)
    bench.pump()
    pending = bench.report(1, 0)
    assert pending is not None
    bench.dispatcher.refused(pending, 0.0)
    assert bench.pump() == []
    assert bench.tick(60.0) == [Settlement(CHANNEL, PART, (), [Deferred(0, 0, 1)], [])]


def test_a_refused_message_comes_again_after_its_delay() -> None:
    bench = Bench(1, 2)
    bench.join(1, credit=1)
    bench.pump()
    bench.commit(bench.report(1, refused=[(0, 5.0)]))
    assert bench.pump(1.0) == [(1, [1])]
    bench.commit(bench.report(1, 1), 2.0)
    assert (bench.pump(4.9), bench.dispatcher.next_deadline()) == ([], 5.0)
    assert bench.tick(5.0) == []
    found = list[Deliver]()
    bench.dispatcher.pump(5.0, found)
    assert found[0].runs == [(0, 1, 2)]


def test_attempts_end_among_the_dead_letters() -> None:
    bench = Bench(1, max_attempts=2)
    bench.join(1)
    bench.pump()
    bench.commit(bench.report(1, refused=[(0, 0.0)]))
    bench.pump()
    assert bench.settlement(1, refused=[(0, 0.0)]) == Settlement(CHANNEL, PART, [], [], [Dead(0, 2, Reason.ATTEMPTS)])


def test_who_keeps_a_message_too_long_loses_it() -> None:
    bench = Bench(1, 2, timeout_s=10.0)
    bench.join(1, 2, credit=1)
    bench.pump()
    bench.dispatcher.touch(1, PART, [0, 1], 6.0)
    assert bench.dispatcher.next_deadline() == 10.0
    (pending,) = bench.dispatcher.tick(10.0)
    assert pending.settlement.deferred == [Deferred(1, 0, 1)]
    assert bench.report(2, 1) is None
    bench.commit(pending, 10.0)
    assert bench.pump(10.0) == [(2, [1])]
    assert bench.dispatcher.next_deadline() == 16.0


def test_what_a_leaving_member_had_goes_to_others_at_once() -> None:
    bench = Bench(1, 2)
    bench.join(1)
    bench.pump()
    (pending,) = bench.dispatcher.leave(1)
    bench.join(2)
    assert bench.pump() == []
    bench.commit(pending)
    assert bench.pump() == [(2, [0, 1])]


def test_the_next_leader_begins_with_what_is_not_acknowledged() -> None:
    bench = Bench(*range(5))
    bench.join(1)
    bench.pump()
    bench.commit(bench.report(1, 1, 3, refused=[(2, 7.0)]))
    bench.again(100.0)
    bench.join(2)
    assert bench.pump(100.0) == [(2, [0, 4])]
    assert bench.pump(106.9) == []
    assert bench.pump(107.0) == [(2, [2])]


def test_a_message_that_waited_is_not_given_by_the_scan_as_well() -> None:
    bench = Bench(*range(5))
    bench.log.settle(deferred=[en.Deferred(3, 0, 1)])
    bench.again(100.0)
    bench.join(1, 2, credit=3)
    assert bench.pump(100.0) == [(1, [0, 1, 3]), (2, [2, 4])]


def test_a_lane_is_with_one_member_until_all_of_it_is_settled() -> None:
    bench = Bench(5, 6, 5, 6, ordered=True)
    bench.join(1, 2, 3)
    assert bench.pump() == [(1, [0, 2]), (2, [1, 3])]
    bench.write(5, 6, first=5)
    assert bench.pump() == []
    settlement = bench.report(1, 0, 2)
    assert bench.pump() == []
    bench.commit(settlement)
    assert bench.pump() == [(3, [4])]


def test_a_failing_message_holds_its_lane_only() -> None:
    bench = Bench(5, 5, 6, ordered=True)
    bench.join(1, 2, credit=1)
    assert bench.pump() == [(1, [0]), (2, [2])]
    bench.commit(bench.report(1, refused=[(0, 9.0)]))
    bench.commit(bench.report(2, 2))
    assert (bench.pump(1.0), bench.dispatcher.next_deadline()) == ([], 9.0)
    assert bench.pump(9.0) == [(1, [0])]


def test_a_long_lane_is_given_in_batches() -> None:
    bench = Bench(*[5] * (BATCH + 3), ordered=True)
    bench.join(1, credit=1000)
    assert bench.pump() == [(1, list(range(BATCH)))]
    bench.commit(bench.dispatcher.report(1, PART, [(0, BATCH)], []))
    assert bench.pump() == [(1, [BATCH, BATCH + 1, BATCH + 2])]


def test_an_ordered_channel_finishes_parents_first_also_empty_ones() -> None:
    """Part 3 follows part 2, which is empty and sealed, and that follows part 1 of another group."""
    bench = Bench(1, ordered=True)
    log, number = bench.log, 3
    log.open_part(2, parents=(9,))
    log.apply(en.SEAL, en.encode_seal(en.part_id(1, 2), (en.Child(number, 0, 65_536, 0),)))
    log.open_part(number, parents=(2,))
    log.write(4, part=number)
    bench.dispatcher.look(0.0)
    bench.join(1)
    assert bench.pump() == [(1, [0])]
    assert bench.dispatcher.missing_parents() == {en.part_id(1, 9)}
    assert not bench.dispatcher.finished(en.part_id(1, 2))
    bench.dispatcher.parent_finished(en.part_id(1, 9))
    assert bench.pump() == [(1, [0])]


def test_what_retention_dropped_is_not_given() -> None:
    for ordered in (False, True):
        bench = Bench(1, 2, 3, ordered=ordered)
        bench.join(1, credit=1)
        bench.pump()
        bench.log.apply(en.TRIM, en.encode_trim(PART, 2))
        bench.commit(bench.report(1, 0))
        assert bench.pump() == [(1, [2])]
