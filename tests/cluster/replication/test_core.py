"""A replica's core, sentence by sentence of docs/replication.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.core import TABLE
from cluster.replication.core.messages import Append, Appended, Mismatch, Refused
from cluster.replication.core.states import Cause, State
from cluster.replication.model import NOBODY, Damage, Entry, EntryKind, Forced, Position, Presence
from cluster.replication.options import ReplicationOptions
from pixiu.errors import ConfigurationError, DiskFull, LogDamaged
from tests.cluster.replication.replica import OPTIONS, A, B, C, Replica, entries, kinds, sent, state
from tests.support.effects import only

# --- write


def test_a_follower_refuses_an_epoch_below_the_one_it_promised() -> None:
    replica = Replica(B)
    replica.append(3, A, (0, 0), entries(3, 1, 1))
    assert sent(replica.append(2, C, (0, 0), entries(2, 1, 1)), Refused) == [Refused(3, B)]
    assert replica.log.last == Position(3, 1)


def test_a_follower_acknowledges_only_what_is_synced() -> None:
    replica = Replica(B)
    replica.append(1, A, (0, 0), [])
    replica.sync = False
    ticket = only(ev.Sync, replica.append(1, A, (0, 0), entries(1, 1, 3))).ticket
    assert sent(replica.append(1, A, (1, 3), []), Appended)[0].matched == 0
    assert sent(replica.step(ev.Synced(ticket)), Appended)[0].matched == 3


def test_a_promise_is_durable_before_anything_is_answered_in_its_epoch() -> None:
    replica = Replica(B)
    replica.sync = False
    effects = replica.append(4, A, (0, 0), [])
    assert not sent(effects, Appended)
    assert sent(replica.step(ev.Synced(only(ev.Sync, effects).ticket)), Appended)[0].epoch == 4


def test_a_follower_cuts_off_what_differs() -> None:
    replica = Replica(B, entries(1, 1, 6))
    replica.append(2, A, (1, 3), entries(2, 4, 5))
    assert [entry.position for entry in replica.log.entries[2:]] == [(1, 3), (2, 4), (2, 5)]


def test_a_follower_that_lacks_the_previous_entry_says_where_it_is() -> None:
    replica = Replica(B, entries(1, 1, 3))
    replica.append(1, A, (1, 3), [])
    assert sent(replica.append(1, A, (1, 9), entries(1, 10, 10)), Mismatch)[0].hint == 3
    assert sent(replica.append(1, A, (5, 2), []), Mismatch)[0].hint == 0


def test_entries_that_do_not_follow_each_other_are_dropped() -> None:
    replica = Replica(B)
    assert replica.append(1, A, (0, 0), entries(1, 2, 3)) == []
    assert replica.append(1, A, (0, 0), [*entries(1, 1, 1), *entries(1, 3, 3)]) == []
    assert replica.log.last.counter == 0


def test_what_is_committed_is_never_cut_off() -> None:
    replica = Replica(B, entries(1, 1, 6), applied=5)
    effects = replica.append(2, A, (1, 3), entries(2, 4, 4))
    assert replica.core.state is State.HALTED
    assert "5 are committed here" in only(ev.CloseSession, effects).reason
    assert replica.log.last == Position(1, 6)
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.NOT_LEADER)]


def test_a_leader_that_a_forced_promotion_made_is_not_followed_by_who_has_committed_more() -> None:
    replica = Replica(A, entries(5, 1, 300), applied=300)
    replica.step(ev.Flushed(300))
    replica.log.trim(200)
    effects = replica.append(6, B, (5, 100), entries(6, 101, 121), committed=121, end=121)
    assert not sent(effects, Appended)
    assert "forced promotion" in only(ev.CloseSession, effects).reason
    assert replica.core.state is State.HALTED


@pytest.mark.parametrize("applied", [300, 100, 0], ids=["committed", "flushed before", "only acknowledged"])
@pytest.mark.parametrize("previous", [(6, 400), (5, 100), None], ids=["ahead", "by the log", "before a snapshot"])
def test_who_has_what_a_forced_promotion_gave_up_follows_nobody_that_began_without_it(
    applied: int, previous: tuple[int, int] | None
) -> None:
    replica = Replica(A, entries(5, 1, 300), applied=applied)
    effects = replica.append(6, B, previous, [], committed=400, end=400, forced=(Forced(6, Position(5, 100)),))
    assert "gave up entries" in only(ev.CloseSession, effects).reason
    assert replica.core.state is State.HALTED
    assert replica.log.last == Position(5, 300)


@pytest.mark.parametrize(
    "log",
    [entries(5, 1, 100), [*entries(5, 1, 90), *entries(6, 91, 400)], entries(4, 1, 300)],
    ids=["equal", "followed it", "overtaken before"],
)
def test_who_has_no_more_than_a_forced_promotion_kept_follows(log: list[Entry]) -> None:
    """Also who has more of a lower epoch: a leader of epoch 5 that had all that was committed has overtaken it."""
    replica = Replica(A, log)
    replica.append(7, B, (7, 401), [], committed=400, end=401, forced=(Forced(6, Position(5, 100)),))
    assert replica.core.follower.epoch == 7
    assert replica.core.state is State.FOLLOWING


def test_a_forced_promotion_is_written_down_with_the_state_and_told_by_every_leader_after_it() -> None:
    before = replace(state(6, C, C), forced=(Forced(2, Position(1, 4)), Forced(6, Position(5, 9))))
    replica = Replica(A, [*entries(1, 1, 4), *entries(3, 5, 7)])
    replica.read(5, before)
    replica.step(ev.ForcePromotion("ann", "C burned down"))
    swap = only(ev.CompareAndSet, replica.read(5, before))
    assert swap.state.forced == (Forced(2, Position(1, 4)), Forced(7, Position(3, 7)))  # epoch 6 is not in this log
    replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))
    assert sent(replica.present(B) + replica.wait(1.0), Append)[-1].forced == swap.state.forced
    follower = Replica(B, entries(1, 1, 4))
    effects = follower.read(8, replace(swap.state, leader=NOBODY, in_sync=frozenset({B})))
    assert only(ev.CompareAndSet, effects).state.forced == swap.state.forced


def test_a_late_message_of_the_epoch_in_which_more_was_committed_is_no_contradiction() -> None:
    replica = Replica(B)
    replica.append(5, A, (0, 0), entries(5, 1, 9), committed=9, end=9)
    replica.append(5, A, (5, 3), entries(5, 4, 5), committed=3, end=5)
    assert replica.core.state is State.FOLLOWING


def test_a_snapshot_never_discards_entries_behind_one_that_is_here() -> None:
    replica = Replica(B, entries(1, 1, 9))
    replica.append(2, A, None, [], end=9)
    effects = replica.step(ev.SnapshotReceived(2, A, Position(1, 4)))
    assert ev.InstallSnapshot not in kinds(effects)
    assert replica.log.last == Position(1, 9)
    assert sent(effects, Appended)[0].matched == 4


def test_a_snapshot_replaces_a_log_that_does_not_reach_it() -> None:
    replica = Replica(B, entries(1, 1, 2))
    replica.append(2, A, None, [], end=9)
    effects = replica.step(ev.SnapshotReceived(2, A, Position(1, 4)))
    assert only(ev.InstallSnapshot, effects).position == Position(1, 4)
    assert (replica.log.first, replica.log.last) == (Position(1, 4), Position(1, 4))
    assert sent(effects, Appended)[0].matched == 4


# --- commit


def test_an_entry_is_committed_when_every_member_has_synced_it() -> None:
    replica = Replica(A)
    replica.lead(B, C)
    replica.propose(b"one")
    assert ev.Committed not in kinds(replica.appended(B, 2))
    assert only(ev.Committed, replica.appended(C, 2)) == ev.Committed(2, 3)


def test_nothing_is_committed_before_the_leaders_own_disk_has_it() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.sync = False
    ticket = only(ev.Sync, replica.propose(b"one")).ticket
    assert ev.Committed not in kinds(replica.appended(B, 2))
    assert ev.Committed(2, 2) in replica.step(ev.Synced(ticket))


def test_a_proposed_member_is_required_until_a_higher_version_was_seen() -> None:
    replica = Replica(A)
    replica.lead()
    replica.present(B)
    replica.appended(B, 1)
    grow = only(ev.CompareAndSet, replica.wait(0.25))
    assert grow.state.in_sync == {A, B}
    replica.step(ev.Swapped(grow.token, ev.CompareAndSetOutcome.UNKNOWN))
    replica.read(6, state(2, A, A))
    assert ev.Committed not in kinds(replica.propose(b"one"))
    again = only(ev.CompareAndSet, replica.wait(0.25))
    assert (again.expected, again.state) == (grow.expected, grow.state)
    replica.step(ev.Swapped(again.token, ev.CompareAndSetOutcome.UNKNOWN))
    assert ev.Committed not in kinds(replica.wait(OPTIONS.silence_s + 1) + replica.read(6, state(2, A, A)))
    shrink = only(ev.CompareAndSet, replica.wait(0.25))  # changes nothing but the version: what is under way can land no more
    assert (shrink.expected, shrink.state) == (6, state(2, A, A))
    assert ev.Committed(2, 1) in replica.step(ev.Swapped(shrink.token, ev.CompareAndSetOutcome.OK))


def test_an_acknowledgement_beyond_the_end_is_dropped() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"one")
    assert replica.appended(B, 3) == []
    assert ev.Committed(2, 2) in replica.appended(B, 2)


def test_a_follower_that_started_again_must_acknowledge_again() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"one")
    replica.appended(B, 0, incarnation=2)
    assert ev.Committed not in kinds(replica.appended(B, 2, incarnation=1))
    assert ev.Committed(2, 2) in replica.appended(B, 2, incarnation=2)


# --- shrink and grow


def test_a_silent_follower_leaves_before_anything_is_acknowledged_without_it() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"one")
    effects = replica.wait(OPTIONS.silence_s + 1)
    shrink = only(ev.CompareAndSet, effects)
    assert (shrink.expected, shrink.state) == (6, state(2, A, A))
    assert ev.Committed not in kinds(effects)
    assert ev.Committed(2, 1) in replica.step(ev.Swapped(shrink.token, ev.CompareAndSetOutcome.OK))


def test_a_follower_without_space_leaves_at_once_and_joins_when_it_has_kept_up() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"one")
    replica.step(ev.Received(Appended(2, B, 1, 1, replica.now, full=True)))
    shrink = only(ev.CompareAndSet, replica.wait(0.25))
    assert shrink.state == state(2, A, A)
    assert ev.Committed(2, 1) in replica.step(ev.Swapped(shrink.token, ev.CompareAndSetOutcome.OK))
    assert [message.entries for message in sent(replica.wait(OPTIONS.resend_s), Append) if message.entries]
    replica.appended(B, 2)
    assert ev.CompareAndSet not in kinds(replica.wait(OPTIONS.rejoin_s - 0.25) + replica.appended(B, 2))
    replica.wait(0.5)
    replica.appended(B, 2)
    assert only(ev.CompareAndSet, replica.wait(0.25)).state == state(2, A, A, B)


def test_a_follower_that_says_again_and_again_where_it_is_counts_as_silent() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"one")
    asked: list[ev.Effect] = []
    for _ in range(int(OPTIONS.silence_s / 0.25) + 4):
        asked += replica.step(ev.Received(Mismatch(2, B, 1, 1, replica.now)))
        asked += replica.appended(B, 1) + replica.wait(0.25)
    assert only(ev.CompareAndSet, asked).state == state(2, A, A)


def test_a_member_that_is_late_leaves_unless_it_would_be_missed() -> None:
    for min_in_sync, leaves in ((1, True), (2, False)):
        replica = Replica(A, options=replace(OPTIONS, min_in_sync=min_in_sync))
        replica.lead(B)
        asked: list[ev.Effect] = []
        for _ in range(8):  # each acknowledgement takes 1.5 s
            replica.propose(b"x")
            end = replica.log.last.counter
            asked += replica.wait(1.5)
            asked += replica.appended(B, end)
        assert (ev.CompareAndSet in kinds(asked)) is leaves


def test_a_member_whose_disk_hangs_is_late_however_often_it_comes_with_another_incarnation() -> None:
    replica = Replica(A)
    replica.lead(B)
    asked: list[ev.Effect] = []
    for incarnation in range(2, 10):  # its session ends at each sync, which takes 1.5 s
        replica.propose(b"x")
        end = replica.log.last.counter
        asked += replica.wait(1.5)
        asked += replica.appended(B, end, incarnation)
    assert ev.CompareAndSet in kinds(asked)


def test_a_write_waits_for_a_late_member_no_longer_than_it_takes_to_know_that_it_is_late() -> None:
    """What was not late yet when it left counts from when it left; a member that is probed meanwhile is not well for that."""
    replica = Replica(A)
    replica.lead(B)
    began, incarnation = replica.now, 1
    while ev.CompareAndSet not in kinds(replica.propose(b"x") + replica.wait(0.25)):
        assert replica.now < began + OPTIONS.slow_for_s + 1.0
        if replica.now - began >= 2.0 * incarnation:  # each sync takes 2 s, and then it is there with another incarnation
            incarnation += 1
            replica.step(ev.Received(Mismatch(2, B, incarnation, 1, replica.now)))


def test_nobody_is_late_while_the_leaders_own_disk_is() -> None:
    replica = Replica(A)
    replica.lead(B)
    asked: list[ev.Effect] = []
    for _ in range(20):  # both disks take 1.5 s
        replica.sync = False
        ticket = only(ev.Sync, replica.propose(b"x")).ticket
        end = replica.log.last.counter
        asked += replica.wait(1.5)
        replica.log.sync(replica.log.issued)
        asked += replica.step(ev.Synced(ticket)) + replica.appended(B, end) + replica.wait(0.25)
    assert ev.CompareAndSet not in kinds(asked)


def test_a_refused_shrink_makes_a_leader_step_down_when_another_leads() -> None:
    replica = Replica(A)
    replica.lead(B)
    shrink = only(ev.CompareAndSet, replica.wait(OPTIONS.silence_s + 1))
    assert ev.ReadState in kinds(replica.step(ev.Swapped(shrink.token, ev.CompareAndSetOutcome.CONFLICT)))
    assert ev.Deposed(2) in replica.read(7, state(3, B, A, B))
    assert replica.core.state is State.FOLLOWING


def test_a_follower_joins_when_it_has_the_end_that_was_noted() -> None:
    replica = Replica(A)
    replica.lead()
    replica.propose(*(b"%d" % i for i in range(20)))
    replica.present(B)
    replica.appended(B, 15)
    assert ev.CompareAndSet not in kinds(replica.wait(0.25))
    replica.appended(B, 21)
    grow = only(ev.CompareAndSet, replica.wait(0.25))
    assert grow.state.in_sync == {A, B}
    replica.step(ev.Swapped(grow.token, ev.CompareAndSetOutcome.OK))
    replica.propose(b"more")
    assert ev.Committed(22, 2) in replica.appended(B, 22)


def test_a_write_that_was_under_way_when_the_set_fell_below_min_in_sync_is_not_confirmed() -> None:
    replica = Replica(A, options=replace(OPTIONS, min_in_sync=2))
    replica.lead(B)
    replica.propose(b"x")
    swap = only(ev.CompareAndSet, replica.wait(OPTIONS.silence_s + 0.5))
    assert only(ev.Committed, replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))) == ev.Committed(2, 0)


def test_min_in_sync_refuses_replicated_writes() -> None:
    replica = Replica(A, options=replace(OPTIONS, min_in_sync=2))
    replica.lead()
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.TOO_FEW_IN_SYNC)]
    assert ev.Accepted in kinds(replica.step(ev.Propose(2, [(2, b"x")], 0, replicated=False)))


def test_too_much_uncommitted_is_refused() -> None:
    replica = Replica(A, options=replace(OPTIONS, max_uncommitted=3))
    replica.lead(B)
    assert ev.Accepted in kinds(replica.propose(b"1", b"2", b"3"))
    assert replica.propose(b"4") == [ev.Rejected(1, ev.Rejection.OVERLOADED)]


def test_a_follower_behind_the_oldest_kept_entry_gets_a_snapshot() -> None:
    replica = Replica(A)
    replica.lead()
    replica.propose(b"1", b"2", b"3")
    replica.step(ev.Flushed(4))
    assert replica.log.first.counter == 4
    replica.propose(b"4")
    replica.present(B)
    mismatch = ev.Received(Mismatch(2, B, 1, 0, replica.now))
    probe = sent(replica.step(mismatch), Append)[0]
    assert probe.previous == Position(2, 4)
    effects = replica.step(mismatch)
    assert only(ev.SendSnapshot, effects) == ev.SendSnapshot(B, 2)
    effects = replica.step(ev.SnapshotSent(B, Position(2, 4)))
    assert sent(effects, Append)[0].previous == Position(2, 4)
    assert sent(replica.appended(B, 4), Append)[0].entries[0].payload == b"4"


def test_a_pin_keeps_the_log() -> None:
    replica = Replica(A)
    replica.lead()
    replica.propose(b"1", b"2", b"3")
    replica.step(ev.Pinned("learner", 2))
    replica.step(ev.Flushed(4))
    assert replica.log.first.counter == 2
    replica.step(ev.Pinned("learner", None))
    assert replica.log.first.counter == 4


# --- promote


def test_only_a_member_of_the_in_sync_set_is_promoted() -> None:
    replica = Replica(C, entries(1, 1, 3))
    replica.read(5, state(1, A, A, B))
    assert ev.CompareAndSet not in kinds(replica.wait(20.0))


def test_nobody_is_promoted_while_the_leaders_session_lives() -> None:
    replica = Replica(B)
    replica.present(A)
    replica.read(5, state(1, A, A, B))
    assert ev.CompareAndSet not in kinds(replica.wait(20.0))
    assert only(ev.CompareAndSet, replica.present()).state == state(2, B, B)


def test_a_candidate_waits_a_second_for_each_smaller_live_node() -> None:
    replica = Replica(C)
    replica.wait(10.0)
    replica.present(B)
    replica.read(5, state(1, A, A, B, C))
    assert ev.CompareAndSet not in kinds(replica.wait(0.75))
    swap = only(ev.CompareAndSet, replica.wait(0.5))
    assert swap.state == state(2, C, B, C)


def test_a_promoted_replica_serves_after_its_promise_and_first_entry_are_synced() -> None:
    replica = Replica(A, entries(1, 1, 2))
    replica.read(5, state(1, B, A, B))
    swap = only(ev.CompareAndSet, replica.wait(5.0))
    replica.sync = False
    effects = replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))
    assert ev.Leading not in kinds(effects)
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.NOT_LEADER)]
    ticket = [effect.ticket for effect in effects if isinstance(effect, ev.Sync)][-1]
    assert ev.Leading(2) in replica.step(ev.Synced(ticket))
    assert (replica.log.promised, replica.log.last) == (2, Position(2, 3))


def test_a_promotion_whose_answer_is_lost_is_asked_for_again_and_never_assumed() -> None:
    replica = Replica(A)
    replica.read(5, state(1, B, A))
    swap = only(ev.CompareAndSet, replica.wait(5.0))
    replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.UNKNOWN))
    replica.read(6, state(2, A, A))
    effects = replica.wait(3.0)
    assert ev.Leading not in kinds(effects)
    assert replica.core.state is State.SEEKING


def test_the_first_replica_of_a_partition_makes_its_state() -> None:
    replica = Replica(A)
    swap = only(ev.CompareAndSet, replica.read(-1, None))
    assert (swap.expected, swap.state) == (-1, state(1, A, A))


def test_a_replica_with_data_never_makes_the_state_anew() -> None:
    replica = Replica(A, entries(1, 1, 2))
    assert ev.CompareAndSet not in kinds(replica.read(-1, None) + replica.wait(20.0))


# --- fence and lease


def test_a_leader_steps_down_before_a_higher_epoch() -> None:
    replica = Replica(A)
    replica.lead(B)
    assert ev.Deposed(2) in replica.step(ev.Received(Refused(3, B)))
    assert not replica.core.may_read(replica.now)


def test_a_leader_follows_one_of_a_higher_epoch() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"lost")
    replica.append(3, B, (2, 1), entries(3, 2, 2))
    assert replica.core.state is State.FOLLOWING
    assert replica.log.last == Position(3, 2)


def test_reads_are_served_while_every_member_confirmed_within_a_second() -> None:
    replica = Replica(A)
    replica.lead(B)
    assert replica.core.may_read(replica.now)
    assert not replica.core.may_read(replica.now + OPTIONS.lease_s)
    replica.wait(2.0)
    assert not replica.core.may_read(replica.now)
    replica.appended(B, 1)
    assert replica.core.may_read(replica.now)


def test_a_leader_alone_in_the_set_needs_no_one() -> None:
    replica = Replica(A)
    replica.lead()
    replica.now += 3600
    assert replica.core.may_read(replica.now)


def test_a_member_that_confirmed_waits_before_it_seeks_promotion() -> None:
    replica = Replica(B)
    replica.wait(10.0)
    replica.present(A)
    replica.read(5, state(1, A, A, B))
    replica.append(1, A, (0, 0), [])
    replica.present()
    assert ev.CompareAndSet not in kinds(replica.wait(OPTIONS.confirm_wait_s - 0.25))
    assert ev.CompareAndSet in kinds(replica.wait(0.5))


def test_a_candidate_confirms_nothing() -> None:
    replica = Replica(B)
    replica.read(5, state(1, A, A, B))
    replica.wait(5.0)
    assert replica.core.state is State.SEEKING
    assert replica.append(1, A, (0, 0), entries(1, 1, 1)) == []


def test_a_leader_whose_session_is_gone_steps_down() -> None:
    replica = Replica(A)
    replica.lead()
    assert ev.Deposed(2) in replica.step(ev.SessionLost())


# --- unclean start

DAMAGE = Damage(Position(1, 3), Position(1, 9), "entries are missing")


def test_a_damaged_replica_leaves_the_set_before_it_takes_anything() -> None:
    replica = Replica(B, entries(1, 1, 3), damage=DAMAGE)
    assert replica.append(1, A, (1, 3), entries(1, 4, 9)) == []
    leave = only(ev.CompareAndSet, replica.read(5, state(1, A, A, B)))
    assert leave.state == state(1, A, A)
    replica.step(ev.Swapped(leave.token, ev.CompareAndSetOutcome.OK))
    assert only(ev.ReportDamage, replica.read(6, state(1, A, A))) == ev.ReportDamage(DAMAGE, sole=False)
    assert sent(replica.append(1, A, (1, 3), entries(1, 4, 8), end=9), Appended)[0].matched == 8
    states = [replica.core.state]
    replica.append(1, A, (1, 8), entries(1, 9, 9), end=9)
    states.append(replica.core.state)
    assert states == [State.REPAIRING, State.FOLLOWING]
    assert not replica.disk.image.unclean


def test_a_leader_whose_folder_went_back_in_time_leaves_the_set_and_takes_what_it_lacks() -> None:
    replica = Replica(A, entries(1, 1, 3))  # an image of the machine was put back; it led as incarnation 4 after that
    replica.present(B)
    said = replica.read(5, state(1, A, A, B, incarnation=4)) + replica.wait(20.0)
    assert not [effect for effect in said if isinstance(effect, ev.CompareAndSet)]
    states = [replica.core.state]
    assert replica.disk.image.unclean
    leave = only(ev.CompareAndSet, replica.read(5, state(1, A, A, B, incarnation=4)))
    assert leave.state == state(1, NOBODY, B, incarnation=0)
    replica.step(ev.Swapped(leave.token, ev.CompareAndSetOutcome.OK))
    report = only(ev.ReportDamage, replica.read(7, state(2, B, B)))
    assert "was replaced by an older copy" in report.damage.reason
    replica.append(2, B, (1, 3), entries(2, 4, 9), end=9)
    states.append(replica.core.state)
    assert states == [State.LEAVING, State.FOLLOWING]


def test_the_only_replica_whose_folder_went_back_in_time_waits_for_an_operator() -> None:
    replica = Replica(A, entries(1, 1, 3))
    replica.read(5, state(1, A, A, incarnation=4))
    assert only(ev.ReportDamage, replica.read(5, state(1, A, A, incarnation=4))).sole
    assert replica.wait(20.0)
    assert replica.core.state is State.DAMAGED


def test_a_damaged_leader_gives_the_office_away_with_its_membership() -> None:
    replica = Replica(A, entries(1, 1, 3), damage=DAMAGE)
    leave = only(ev.CompareAndSet, replica.read(5, state(1, A, A, B)))
    assert leave.state == state(1, NOBODY, B, incarnation=0)


def test_a_sole_damaged_member_says_so_and_waits_for_an_operator() -> None:
    replica = Replica(A, entries(1, 1, 3), damage=DAMAGE)
    assert only(ev.ReportDamage, replica.read(5, state(1, A, A))) == ev.ReportDamage(DAMAGE, sole=True)
    assert ev.CompareAndSet not in kinds(replica.wait(60.0))
    replica.step(ev.ForcePromotion("ann", "the other disk is gone"))
    effects = replica.read(5, state(1, A, A))
    audit, swap = effects[-2:]
    assert audit == ev.Audit("ann", "the other disk is gone", Position(1, 3), state(1, A, A))
    assert isinstance(swap, ev.CompareAndSet)
    assert ev.Leading(2) in replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))
    assert not replica.disk.image.unclean


def test_a_damaged_replica_that_a_late_proposal_brought_back_into_the_set_leaves_it_again() -> None:
    replica = Replica(A, entries(1, 1, 3), damage=DAMAGE)
    replica.read(5, state(1, B, B))
    assert replica.core.state is State.REPAIRING
    replica.read(6, state(1, B, A, B))
    assert only(ev.CompareAndSet, replica.read(6, state(1, B, A, B))).state == state(1, B, B)
    alone = Replica(A, entries(1, 1, 3), damage=DAMAGE)
    alone.read(5, state(1, B, B))
    alone.read(7, state(1, NOBODY, A, incarnation=0))  # and the leader has handed over to it meanwhile
    assert only(ev.ReportDamage, alone.read(7, state(1, NOBODY, A, incarnation=0))).sole
    assert alone.core.state is State.DAMAGED


def test_a_forced_leader_does_not_use_positions_again_that_its_state_has() -> None:
    replica = Replica(A, entries(1, 1, 3), damage=DAMAGE, applied=7)
    replica.read(5, state(1, A, A))
    replica.step(ev.ForcePromotion("ann", "lost"))
    swap = only(ev.CompareAndSet, replica.read(5, state(1, A, A)))
    replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))
    assert replica.log.last == Position(2, 8)


def test_a_forced_promotion_that_fails_leaves_the_replica_unclean() -> None:
    replica = Replica(A, entries(1, 1, 3), damage=DAMAGE)
    replica.read(5, state(1, A, A))
    replica.step(ev.ForcePromotion("ann", "lost"))
    swap = only(ev.CompareAndSet, replica.read(5, state(1, A, A)))
    replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.CONFLICT))
    assert replica.core.state is State.LEAVING
    assert replica.log.unclean


# --- hand-over


def test_a_draining_leader_hands_over_when_a_member_has_everything() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.propose(b"last")
    assert ev.CompareAndSet not in kinds(replica.step(ev.Drain()))
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.DRAINING)]
    replica.appended(B, 2)
    effects = replica.wait(0.25)
    release = only(ev.CompareAndSet, effects)
    assert release.state == state(2, NOBODY, B, incarnation=0)
    assert ev.Deposed(2) in effects
    assert ev.HandedOver() in replica.step(ev.Swapped(release.token, ev.CompareAndSetOutcome.OK))
    assert ev.CompareAndSet not in kinds(replica.read(7, release.state) + replica.wait(20.0))


def test_a_draining_follower_leaves_the_set_so_that_nobody_waits_for_it() -> None:
    replica = Replica(B)
    replica.present(A)
    replica.read(5, state(1, A, A, B))
    leave = only(ev.CompareAndSet, replica.step(ev.Drain()))
    assert (leave.expected, leave.state) == (5, state(1, A, A))
    assert ev.HandedOver() in replica.step(ev.Swapped(leave.token, ev.CompareAndSetOutcome.OK))


def test_a_draining_follower_that_nobody_requires_goes_at_once() -> None:
    replica = Replica(B)
    replica.read(5, state(1, A, A))
    assert replica.step(ev.Drain()) == [ev.HandedOver()]


def test_a_lease_is_not_longer_for_an_answer_from_the_future() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.step(ev.Received(Appended(2, B, 1, 1, replica.now + 1000)))
    assert not replica.core.may_read(replica.now + OPTIONS.lease_s)


def test_an_office_that_was_handed_over_is_taken_without_waiting_for_leases() -> None:
    replica = Replica(A)
    replica.present(B)
    replica.read(5, state(2, B, A, B))
    replica.append(2, B, (0, 0), [])
    assert only(ev.CompareAndSet, replica.read(6, state(2, NOBODY, A, B, incarnation=0))).state == state(3, A, A, B)


def test_a_failed_disk_ends_all_promises() -> None:
    replica = Replica(A)
    replica.lead(B)
    effects = replica.step(ev.LogFailed("EIO"))
    assert effects == [ev.Deposed(2), ev.CloseSession("EIO")]
    assert replica.appended(B, 1) == []


def _raising(problem: Exception) -> Callable[..., None]:
    def raises(*arguments: object) -> None:
        raise problem

    return raises


def test_a_full_disk_refuses_writes_and_serves_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(A)
    replica.lead()
    with monkeypatch.context() as patched:
        patched.setattr(replica.log, "append", _raising(DiskFull("no space")))
        assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.DISK_FULL)]
        assert replica.core.may_read(replica.now)
    assert ev.Committed(2, 1) in replica.propose(b"x")


def _full(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk has no space, and ZooKeeper has answered just now."""
    monkeypatch.setattr(replica.log, "append", _raising(DiskFull("no space")))
    assert replica.core.leader is not None
    replica.read(6, replica.core.leader.in_sync.state)


def test_a_leader_with_a_full_disk_hands_over_to_a_member_with_space(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(A)
    replica.lead(B)
    _full(replica, monkeypatch)
    replica.appended(B, 1, space=True)
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.DRAINING)]
    effects = replica.wait(0.25)
    release = only(ev.CompareAndSet, effects)
    assert release.state == state(2, NOBODY, B, incarnation=0)
    assert ev.Deposed(2) in effects
    after = replica.step(ev.Swapped(release.token, ev.CompareAndSetOutcome.OK)) + replica.wait(20.0)
    assert replica.core.state is State.FOLLOWING
    assert not kinds(after) & {ev.HandedOver, ev.CompareAndSet}


def test_a_role_that_has_no_space_for_its_state_leaves_the_office_too() -> None:
    replica = Replica(A)
    replica.lead(B)
    replica.read(6, state(2, A, A, B))
    replica.appended(B, 1, space=True)
    replica.step(ev.OutOfSpace())
    assert only(ev.CompareAndSet, replica.wait(0.25)).state.leader == NOBODY


@pytest.mark.parametrize("space", [False, True])
def test_a_leader_with_a_full_disk_stays_where_nobody_else_can_take_more(space: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(A, options=replace(OPTIONS, min_in_sync=2 if space else 1))
    replica.lead(B)
    _full(replica, monkeypatch)
    replica.appended(B, 1, space=space)
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.DISK_FULL)]
    assert ev.CompareAndSet not in kinds(replica.wait(1.0))
    assert replica.core.state is State.LEADING


def test_a_leader_with_a_full_disk_that_nobody_takes_over_from_tries_writes_again() -> None:
    replica = Replica(A)
    replica.lead(B, C)
    replica.read(6, state(2, A, A, B, C))
    replica.propose(b"on its way")
    replica.appended(B, 1, space=True)
    replica.step(ev.OutOfSpace())
    assert replica.propose(b"x") == [ev.Rejected(1, ev.Rejection.DRAINING)]
    for _ in range(20):
        replica.wait(0.25)
        replica.appended(B, 1, space=True)
    assert ev.Accepted in kinds(replica.propose(b"x"))


def test_who_has_no_space_stands_behind_all_other_candidates() -> None:
    replica = Replica(A)
    replica.present(B)
    replica.step(ev.Tick(0, space=False))
    assert ev.CompareAndSet not in kinds(replica.read(5, state(1, NOBODY, A, B, incarnation=0)))
    replica.now += OPTIONS.candidate_step_s
    assert only(ev.CompareAndSet, replica.step(ev.Tick(0, space=False))).state == state(2, A, A, B)


# --- a leader that the registry does not know


def _orphan() -> Replica:
    """A follower that reaches ZooKeeper, and hears a leader whose node has gone."""
    replica = Replica(B)
    replica.present(A)
    replica.read(5, state(1, A, A, B))
    replica.append(1, A, (0, 0), [])
    replica.present()
    return replica


def _hear(replica: Replica, seconds: float, answers: bool = True) -> list[ev.Effect]:
    """Heartbeats for so long; ZooKeeper answers, or not."""
    done: list[ev.Effect] = []
    until = replica.now + seconds
    while replica.now < until:
        done += replica.wait(0.25)
        if answers:
            done += replica.read(5, state(1, A, A, B))
        done += replica.append(1, A, (0, 0), [])
    return done


def test_a_leader_that_is_out_of_the_registry_is_confirmed_for_a_while_and_then_replaced() -> None:
    replica = _orphan()
    effects = _hear(replica, OPTIONS.unregistered_s - 1.0)
    assert len(sent(effects, Appended)) > 100
    assert ev.CompareAndSet not in kinds(effects)
    assert replica.core.hears_leader(replica.now)
    effects = _hear(replica, OPTIONS.confirm_wait_s + 2.0)
    assert only(ev.CompareAndSet, effects).state == state(2, B, B)
    assert not replica.core.hears_leader(replica.now)


def test_a_replica_that_hears_nothing_of_zookeeper_itself_goes_on_confirming() -> None:
    replica = _orphan()
    effects = _hear(replica, 3 * OPTIONS.unregistered_s, answers=False)
    assert ev.CompareAndSet not in kinds(effects)
    assert sent(_hear(replica, 1.0, answers=False), Appended)


def test_a_follower_with_a_full_disk_takes_the_entries_when_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(B)
    replica.append(1, A, (0, 0), [])
    with monkeypatch.context() as patched:
        patched.setattr(replica.log, "append", _raising(DiskFull("no space")))
        answer = sent(replica.append(1, A, (0, 0), entries(1, 1, 2)), Appended)[0]
        assert (answer.matched, answer.full) == (0, True)
        assert sent(replica.append(1, A, (0, 0), [], end=2), Appended)[0].full
    answer = sent(replica.append(1, A, (0, 0), entries(1, 1, 2)), Appended)[0]
    assert (answer.matched, answer.full) == (2, False)


def test_nobody_takes_office_with_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(A)
    replica.read(5, state(1, B, A, B))
    swap = only(ev.CompareAndSet, replica.wait(5.0))
    monkeypatch.setattr(replica.log, "append", _raising(DiskFull("no space")))
    assert ev.CloseSession("the disk is full") in replica.step(ev.Swapped(swap.token, ev.CompareAndSetOutcome.OK))


def test_a_log_that_turns_out_to_be_damaged_ends_all_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(A)
    replica.lead(B)
    monkeypatch.setattr(replica.log, "read", _raising(LogDamaged("entry 1 is broken")))
    assert ev.CloseSession("entry 1 is broken") in replica.propose(b"x")
    assert replica.core.halted_by == "entry 1 is broken"


# --- ZooKeeper's data is lost


def _write_at(replica: Replica, wall_us: int) -> list[ev.Effect]:
    return replica.step(ev.Propose(1, [(int(EntryKind.DATA), b"x")], wall_us))


def test_a_leader_alone_in_sync_asks_who_is_there_for_the_time() -> None:
    replica = Replica(A)
    replica.lead()
    replica.present(B)
    ahead, right = 3_000_000_000, 2_000_000_000
    assert _write_at(replica, ahead) == [ev.Rejected(1, ev.Rejection.NO_TIME)]
    replica.step(ev.Received(Appended(replica.core.epoch, B, 1, 0, replica.now, wall_us=right)))
    only(ev.Accepted, _write_at(replica, ahead))
    assert replica.log.entries[-1].at_us == right


def test_a_leader_alone_in_sync_does_not_wait_for_the_time_of_one_that_is_silent() -> None:
    replica = Replica(A)
    replica.lead()
    replica.present(B)
    replica.wait(OPTIONS.silence_s - 0.5)
    assert _write_at(replica, 3_000_000_000) == [ev.Rejected(1, ev.Rejection.NO_TIME)]
    replica.wait(1.0)
    only(ev.Accepted, _write_at(replica, 3_000_000_000))
    assert replica.log.entries[-1].at_us == 3_000_000_000


def test_an_empty_replica_makes_no_state_beside_one_that_has_data() -> None:
    replica = Replica(A)
    full, empty = Presence(2, B, 7, end=100), Presence(2, B, 7)
    replica.step(ev.PresenceChanged((Presence(1, A, 1), full)))
    assert not [effect for effect in replica.read(-1, None) + replica.wait(10.0) if isinstance(effect, ev.CompareAndSet)]
    assert replica.core.waits_for_data
    said = replica.step(ev.PresenceChanged((Presence(1, A, 1), empty)))
    assert only(ev.CompareAndSet, said).state == state(1, A, A)
    assert not replica.core.waits_for_data


def test_a_replica_with_data_waits_for_an_operator_when_there_is_no_state() -> None:
    replica = Replica(A, entries(2, 1, 5))
    assert not [effect for effect in replica.read(-1, None) + replica.wait(10.0) if isinstance(effect, ev.CompareAndSet)]
    assert replica.core.waits_for_data


def test_who_was_refused_by_a_higher_promise_leads_above_it_and_not_in_it() -> None:
    replica = Replica(A)
    replica.lead()
    replica.step(ev.Received(Refused(7, B)))
    assert replica.core.state is State.FOLLOWING
    said = replica.read(7, state(2, A, A)) + replica.wait(10.0)
    assert only(ev.CompareAndSet, said).state.epoch == 8


# --- the table and the options


def test_every_state_but_the_last_can_be_left() -> None:
    assert {before for before, _ in TABLE} == set(State) - {State.HALTED}
    assert {cause for _, cause in TABLE} == set(Cause)


@pytest.mark.parametrize(
    ("key", "value"), [("lease_s", 0.4), ("confirm_wait_s", 1.2), ("silence_s", 0.5), ("max_uncommitted", 0), ("min_in_sync", 0)]
)
def test_options_that_would_break_a_promise_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=key):
        replace(ReplicationOptions(), **{key: value}).validate()  # type: ignore[arg-type]
