"""A replica's core, sentence by sentence of docs/replication.md: what is written, committed and kept in sync."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.core import TABLE
from cluster.replication.core.messages import Append, Appended, Mismatch, Refused
from cluster.replication.core.states import Cause, State
from cluster.replication.model import NOBODY, Entry, Forced, Position
from cluster.replication.options import ReplicationOptions
from pixiu.errors import ConfigurationError
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
