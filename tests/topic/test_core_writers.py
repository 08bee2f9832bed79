"""The core of a topic replica and its writers: blocks that wait for a part that opens, and names that are opened again."""

from __future__ import annotations

import pytest

from cluster.core.contract import TICK
from cluster.store.events import LeaderChanged, Refused
from cluster.topics import entries as en
from pixiu.errors import Refusal
from pixiu.placement.slots import SLOTS
from tests.topic.builders import TOPIC, written
from tests.topic.leader import Leader
from topic import events as ev
from topic import parked
from topic.state.parts import Verdict


def opening(number: int, *, more: bool = False) -> ev.Requested:
    part = en.part_id(TOPIC, number)
    return ev.Requested(9, en.OPEN, en.Opening(part, 0, SLOTS, more=more).encode())


def verdicts(effects: list[ev.Effect]) -> list[Verdict | None]:
    return [each.verdict for each in effects if isinstance(each, ev.WriteReply)]


def test_blocks_of_a_part_that_is_about_to_open_wait_for_it_in_order() -> None:
    leader = Leader()
    leader.lead()
    blocks = [written(1, first=number, part=2) for number in (1, 2)]
    assert leader.step(*(ev.WriteRequested(3, number, 42, block) for number, block in enumerate(blocks, 1))) == []
    leader.step(opening(2, more=True))
    assert len(leader.commit()) == 1
    leader.step(opening(2))
    stored = [each for each in leader.commit() if isinstance(each, ev.WriteReply)]
    assert [(each.request, each.verdict, each.base) for each in stored] == [(1, Verdict.STORED, 0), (2, Verdict.STORED, 1)]


def test_blocks_of_a_part_that_does_not_open_are_refused_after_a_moment() -> None:
    leader = Leader()
    leader.lead()
    assert leader.step(ev.WriteRequested(3, 1, 42, written(1, part=2))) == []
    leader.now = leader.core.next_deadline()
    assert verdicts(leader.step(TICK)) == [Verdict.NOT_HERE]
    assert leader.core.next_deadline() > leader.now
    leader.step(ev.WriteRequested(3, 2, 42, written(1, part=2)))
    (refused,) = leader.step(LeaderChanged(0, "other:1"))
    assert isinstance(refused, ev.WriteReply)
    assert refused.refusal is not None
    assert refused.refusal.code == "NOT_LEADER"


def test_only_so_much_waits_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "MAX_PARKED_BYTES", 100)
    leader = Leader()
    leader.lead()
    assert leader.step(ev.WriteRequested(3, 1, 42, written(1, part=2))) == []
    assert verdicts(leader.step(ev.WriteRequested(3, 2, 42, written(1, part=3)))) == [Verdict.NOT_HERE]


def test_a_writer_whose_name_was_opened_again_is_shut_out_at_once() -> None:
    """What it had in the log before the fence counts; nothing does that comes after it, though the fence is not applied yet."""
    leader = Leader()
    leader.lead()

    def write(epoch: int, first: int) -> ev.WriteRequested:
        return ev.WriteRequested(3, first, 42, written(1, first=first), epoch=epoch)

    def codes(effects: list[ev.Effect]) -> list[str]:
        writes = [each for each in effects if isinstance(each, ev.WriteReply)]
        return [each.refusal.code if each.verdict is None and each.refusal else "STORED" for each in writes]

    leader.step(write(10, 1))
    fence = ev.Requested(7, en.FENCE, en.encode_fence(TOPIC, 5, 20))
    assert codes(leader.step(fence, write(10, 2))) == ["STALE_WRITER"]
    assert codes(leader.commit()) == ["STORED"]
    assert leader.log.store.state.fences == {(TOPIC, 5): 20}
    assert codes(leader.step(write(10, 2))) == codes(leader.step(write(0, 2))) == ["STALE_WRITER"]
    leader.step(write(20, 2))
    assert codes(leader.commit()) == ["STORED"]


def test_a_fence_that_did_not_come_into_the_log_shuts_nobody_out() -> None:
    leader = Leader()
    leader.lead()
    leader.step(ev.Requested(7, en.FENCE, en.encode_fence(TOPIC, 5, 20)))
    (proposal,) = leader.proposed
    leader.proposed.clear()
    leader.step(Refused(proposal.token, Refusal("DISK_FULL", "no space", 0)))
    leader.step(ev.WriteRequested(3, 1, 42, written(1), epoch=10))
    assert verdicts(leader.commit()) == [Verdict.STORED]


def test_a_group_learns_the_epoch_of_a_writer_that_it_did_not_know() -> None:
    leader = Leader()
    leader.lead()
    leader.step(*(ev.WriteRequested(3, number, 42, written(1, first=number), epoch=20) for number in (1, 2)))
    assert [kind for kind, _ in leader.proposed[0].payloads] == [en.FENCE, en.BLOCK, en.BLOCK]
    leader.commit()
    assert leader.log.store.state.fences == {(TOPIC, 5): 20}
