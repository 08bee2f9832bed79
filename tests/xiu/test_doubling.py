"""The record of a Xiu's doubling: whose mail is taken, and what a parent is asked and answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from cluster.store.doubling.phases import Command, Doubling, Phase, Step, fence_body
from cluster.wire.v1.xiu_partitions_pb2 import AskReply, AskRequest
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import snowflake
from xiu.doubling.answering import Answers, Known, Look, Wanted, check_question
from xiu.state.doubling import ASK_US, NO_RECORD, Record, after, holds_of, is_asked, opening, parent_of, takes
from xiu.state.state import Head

ID, OTHER = 0xA1, 0xB2
AT_US = 1_750_000_000_000_000
FOUR = Doubling(ID, 4, 3)


def taken(*steps: Command) -> Record:
    now = NO_RECORD
    for at, step in enumerate(steps):
        before, now = now, after(now, step, 10 + at, AT_US + at)
        assert now is not before
        assert after(now, step, 99, AT_US + 99) is now, "a step is taken once"
    return now


SPLIT, NEXT = Command(Step.SPLIT, FOUR, fence_body(0)), Command(Step.SPLIT, Doubling(OTHER, 8, 7), fence_body(0))
LEARNING, CLEANING, END = (Command(step, FOUR) for step in (Step.BEGIN, Step.CLEAN, Step.END))
OPEN = Command(Step.OPEN, FOUR, opening(77, AT_US))


def test_a_parent_takes_what_stays() -> None:
    split = taken(SPLIT)
    assert split == Record(Phase.SPLIT, FOUR, 10, split_us=AT_US)
    assert [takes(split, 1, key) for key in (1, 3, 5)] == [True, False, True]
    over = taken(SPLIT, CLEANING)
    assert (over.phase, over.split_at) == (Phase.NONE, 10)
    assert after(over, Command(Step.SPLIT, Doubling(OTHER, 8, 5), fence_body(0)), 12, AT_US).partitions == 8


def test_a_child_takes_nothing_before_it_is_open_and_remembers_the_cut() -> None:
    assert not takes(taken(LEARNING), 3, 7)
    opened = taken(LEARNING, OPEN)
    assert (opened.cut_us, opened.split_at, takes(opened, 3, 7)) == (AT_US, 77, True)
    assert taken(LEARNING, OPEN, NEXT).cut_us == taken(LEARNING, OPEN, END, NEXT).cut_us == AT_US


class Knows(NamedTuple):
    """Who has stored some SnowflakeIDs."""

    ids: dict[int, tuple[int, int]]

    def known(self, wanted: Wanted) -> Known:
        return [self.ids.get(one) for one, _ in wanted]

    @property
    def copies(self) -> int:
        return 2


def test_a_parent_answers_what_it_is_sure_of() -> None:
    request, two = AskRequest(child=3, snowflakes=[1 << 62, 5], derived=[0]), RoleLayout(2, 4, 1, (f"{ID:016x}",))
    ids, split = Knows({5: (77, 1)}), Head(doubling=taken(SPLIT))
    with pytest.raises(Unavailable):
        Answers().look(request, split, ids, two, lease=False)
    said = Answers().look(request, split, ids, two, lease=True).reply([])
    assert (said.doubling, list(said.msg_ids), said.copies) == (ID, [0, 77], 2)
    asked = [((None, (77, 1)), None, 2), ((None, (77, 1)), (76, 1), 1), ((None, None), (76, 1), 1), ((None, None), None, 0)]
    for here, above, copies in asked:
        assert Look(ID, 0, 0, list(here), [0], (), 2).reply([above], 1).copies == copies, "only of those that have something"
    assert Answers().look(request, Head(), ids, two, lease=True).reply([]) == AskReply(), "it is not split"
    with pytest.raises(InvalidArgument):
        check_question(0, request)


def test_a_parent_that_lost_its_disks_knows_what_it_does_not_have() -> None:
    request, four = AskRequest(child=3, snowflakes=[1 << 62], derived=[0]), RoleLayout(4, 4, 1, (f"{OTHER:016x}", f"{ID:016x}"))
    said = Answers().look(request, Head(), Knows({}), four, lease=True).reply([])
    assert (said.doubling, said.split_at, list(said.msg_ids)) == (ID, 0, [0])
    assert Answers().look(request, Head(below=9), Knows({}), four, lease=True).doubling == 0, "it is being restored"


def test_the_parent_is_asked_for_what_it_may_have() -> None:
    child = taken(LEARNING, OPEN)
    ms = AT_US // 1000
    asked = [is_asked(child, AT_US, snowflake(ms + ahead, 1, 1), False) for ahead in (-1000, 119_000, 121_000)]
    assert asked == [True, True, False]
    assert is_asked(child, AT_US, 1 << 62, True)
    assert not is_asked(child, AT_US + ASK_US, 1 << 62, True)
    assert not is_asked(NO_RECORD, AT_US, snowflake(ms, 1, 1), False)


def test_a_partition_came_from_the_one_half_the_number_below() -> None:
    assert [parent_of(partition) for partition in range(1, 9)] == [0, 0, 1, 0, 1, 2, 3, 0]


def test_what_is_written_is_read_again() -> None:
    for now in (NO_RECORD, Record(fence=20), taken(SPLIT), taken(LEARNING, OPEN, END)):
        assert Record.decode(now.encode()) == now
    with_readers = Command(Step.OPEN, FOUR, opening(77, AT_US, b"readers"))
    assert [holds_of(each) for each in (SPLIT, OPEN, with_readers)] == [b"", b"", b"readers"]
