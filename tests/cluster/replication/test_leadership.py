"""Leadership of a partition, sentence by sentence of docs/replication.md: who takes it, loses it, and gives it away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.messages import Appended, Refused
from cluster.replication.core.states import State
from cluster.replication.model import NOBODY, Damage, EntryKind, Position, Presence
from pixiu.errors import DiskFull, LogDamaged
from tests.cluster.replication.replica import OPTIONS, A, B, C, Replica, entries, kinds, sent, state
from tests.support.effects import only

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


# --- a failed or full disk


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
