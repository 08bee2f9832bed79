"""A core whose partition is split, and one that came from a split: what they refuse, and what the child asks first."""

from __future__ import annotations

import pytest

from cluster.replication.model import Entry
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step, fence_body
from cluster.store.events import Propose
from pixiu.ids import msg_id
from pixiu.wire.levels import Level
from pixiu.wire.record import Flag
from tests.xiu.parts import NOW_MS, NOW_US, MemoryStore, mail, store
from tests.xiu.world import Xiu, codes, only, results
from xiu import events as ev
from xiu.state.doubling import Record, opening
from xiu.state.state import Head, State, Verdict

ID = 0xA1
TWO, EIGHT = Doubling(ID, 2, 1), Doubling(ID, 8, 5)
SPLIT = Command(Step.SPLIT, EIGHT, fence_body(0))
LEARNING, OPEN = Command(Step.BEGIN, TWO), Command(Step.OPEN, TWO, opening(77, NOW_US))


def append(xiu: Xiu, command: Command, at_us: int = NOW_US) -> None:
    """As the service does."""
    xiu.log.entries.append(Entry(xiu.epoch, len(xiu.log.entries) + 1, DOUBLING_KIND, at_us, command.encode()))


def child() -> Xiu:
    """Partition 1 of 2, which came from partition 0, open and asked nothing so far."""
    xiu = Xiu(lead=False)
    xiu.step(ev.LayoutChanged(9, 1, ("a:1", "b:1")))
    xiu.lead(3)
    for command in (LEARNING, OPEN):
        append(xiu, command)
    xiu.commit()
    return xiu


def old(number: int, key: int = 1, at_ms: int = NOW_MS - 1000, **fields: int) -> bytes:
    return mail(number, b"body", key=key, at_ms=at_ms, **fields)


def test_moved_users_are_refused_from_the_moment_the_split_is_appended() -> None:
    xiu = Xiu()
    append(xiu, SPLIT)
    effects = xiu.send(mail(1, key=5), mail(2, key=1), mail(3, key=9))
    answer = only(xiu.accept(effects) + xiu.commit(), ev.Answer)
    assert [(result.position, result.code, result.partitions) for result in answer.results] == [
        (1, "WRONG_PARTITION", 8),
        (2, "", 0),
    ]
    assert "partition 5 of 8" in answer.results[0].text
    assert xiu.core.counters.moved == 1


def test_a_split_that_did_not_commit_is_forgotten_with_its_leader() -> None:
    xiu = Xiu()
    append(xiu, SPLIT)
    assert codes(xiu.send(mail(1, key=5))) == ["WRONG_PARTITION"]
    xiu.log.entries.pop()
    xiu.deposed()
    xiu.lead(4)
    assert codes(xiu.accept(xiu.send(mail(1, key=5))) + xiu.commit()) == [""]


def test_a_new_leader_refuses_by_its_log_before_anything_commits() -> None:
    xiu = Xiu()
    append(xiu, SPLIT)
    xiu.deposed()
    xiu.elected(4)
    assert codes(xiu.send(mail(1, key=5))) == ["WRONG_PARTITION"]


def test_what_was_proposed_before_the_split_is_decided_in_the_order_of_the_log() -> None:
    state = State(1, MemoryStore(), Head())
    state.decide(Entry(1, 1, DOUBLING_KIND, NOW_US, SPLIT.encode()))
    rulings = state.decide(store(2, mail(1, key=1), mail(2, key=5), mail(3, key=9))).rulings
    assert [(ruling.index, ruling.count, ruling.verdict) for ruling in rulings] == [
        (0, 1, Verdict.STORED),
        (1, 1, Verdict.MOVED),
        (2, 1, Verdict.STORED),
    ]


def test_the_split_stays_through_a_restart() -> None:
    xiu = Xiu()
    append(xiu, SPLIT)
    xiu.commit()
    xiu.store.flush()
    xiu.store.crash()
    assert xiu.store.head.doubling == Record(Phase.SPLIT, EIGHT, 2, split_us=NOW_US)
    for below in (0, 9):
        head = Head(below=below, doubling=xiu.store.head.doubling)
        assert Head.decode(head.encode()) == head


def test_a_child_refuses_everybody_before_it_is_open_and_names_its_parent() -> None:
    xiu = Xiu(lead=False)
    xiu.step(ev.LayoutChanged(9, 1, ("a:1", "b:1")))
    xiu.lead(3)
    for _ in range(2):
        (refused,) = results(xiu.send(old(1), old(2)))
        assert (refused.count, refused.code, refused.partitions) == (2, "WRONG_PARTITION", 1)
        assert "partition 0 of 1, served by a:1" in refused.text
        append(xiu, LEARNING)
        xiu.step(ev.LayoutChanged(10, 2, ("a:1", "b:1")))
    append(xiu, OPEN)
    assert only(xiu.send(old(1)), ev.AskParent).wanted


def test_a_child_asks_before_it_proposes_and_answers_a_repeat_with_the_parents_msgid() -> None:
    xiu = child()
    known, unknown, reused = old(1), old(2), old(3)
    asked = xiu.send(known, unknown, reused, position=11)
    question = only(asked, ev.AskParent)
    assert len(question.wanted) == 3
    assert not [effect for effect in asked if isinstance(effect, Propose)]
    parents = msg_id(0, 64, 1 << 32 | 9)
    answered = xiu.step(
        ev.ParentAnswered(question.number, [(parents, int.from_bytes(known[12:16], "little")), None, (parents + 1, 7)], 2)
    )
    answer = only(xiu.accept(answered) + xiu.commit(), ev.Answer)
    assert [(result.position, result.code, result.msg_id) for result in answer.results] == [
        (11, "", parents),
        (13, "ID_REUSED", 0),
        (12, "", 0),
    ]
    assert [block.records for block in xiu.store.blocks()] == [unknown]


@pytest.mark.parametrize(
    ("parents_copies", "level", "fresh", "told"),
    [
        (1, Level.REPLICATED, False, [("", 1)]),
        (1, Level.REPLICATED, True, [("", 1), ("", 1)]),
        (3, Level.REPLICATED, True, [("", 2), ("", 2)]),
        (0, Level.REPLICATED, False, [("UNAVAILABLE", 0)]),
        (0, Level.PERSISTED, False, [("", 0)]),
    ],
)
def test_what_the_parent_has_is_on_its_disks(parents_copies: int, level: Level, fresh: bool, told: list[tuple[str, int]]) -> None:
    xiu = child()
    assert xiu.core.copies == 2
    records = [old(1), *([old(2)] if fresh else [])]
    received = ev.StoreReceived(7, 1, level, 0, b"".join(records), len(records))
    question = only(xiu.step(received), ev.AskParent)
    known = [(msg_id(0, 64, 1 << 32 | 9), int.from_bytes(records[0][12:16], "little")), *([None] if fresh else [])]
    answered = xiu.step(ev.ParentAnswered(question.number, known, parents_copies))
    answer = only(xiu.accept(answered) + xiu.commit() if fresh else answered, ev.Answer)
    assert [(result.code, answer.copies if not result.code else 0) for result in answer.results] == told


def test_while_the_parent_does_not_answer_a_child_refuses_what_it_may_have_and_takes_the_rest() -> None:
    xiu = child()
    fresh = old(2, at_ms=NOW_MS + 30_000, key=3)
    xiu.accept(xiu.step(ev.ParentAnswered(only(xiu.send(fresh), ev.AskParent).number, [None], 0)))
    xiu.commit()
    asked = only(xiu.send(old(1), fresh), ev.AskParent)
    assert len(asked.wanted) == 1, "what is known here is not asked for"
    answer = only(xiu.accept(xiu.step(ev.ParentAnswered(asked.number, None, 0))) + xiu.commit(), ev.Answer)
    assert [(result.position, result.code, bool(result.msg_id)) for result in answer.results] == [
        (1, "UNAVAILABLE", False),
        (2, "", True),
    ]


def test_derived_ids_are_asked_for_and_late_ids_are_not() -> None:
    xiu = child()
    question = only(xiu.send(old(1, flags=Flag.DERIVED_ID), old(2)), ev.AskParent)
    assert [derived for _, derived in question.wanted] == [True, False]
    later = xiu.step(ev.StoreReceived(8, 1, Level.REPLICATED, 0, old(3, at_ms=NOW_MS + 121_000), 1))
    assert only(later, Propose)


def test_batches_of_a_stream_stay_in_order_while_one_waits_and_others_do_not_wait() -> None:
    xiu = child()
    late = old(4, at_ms=NOW_MS + 121_000)
    first = only(xiu.send(old(1)), ev.AskParent)
    assert xiu.send(late, position=2) == []
    other = xiu.step(ev.StoreReceived(8, 1, Level.REPLICATED, 0, old(5, at_ms=NOW_MS + 122_000), 1))
    assert only(other, Propose)
    released = [each for each in xiu.step(ev.ParentAnswered(first.number, [None], 0)) if isinstance(each, Propose)]
    assert [old(1) in released[0].payloads[0][1], late in released[1].payloads[0][1]] == [True, True]


def test_what_waits_for_the_parent_is_refused_when_its_leader_is_deposed() -> None:
    xiu = child()
    question = only(xiu.send(old(1)), ev.AskParent)
    assert codes(xiu.deposed()) == ["NOT_LEADER"]
    assert xiu.step(ev.ParentAnswered(question.number, [None], 0)) == []


def test_a_child_with_a_full_disk_does_not_say_of_what_its_parent_may_have_that_it_is_not_stored() -> None:
    xiu = child()
    xiu.space(enough=False)
    assert codes(xiu.send(old(1), old(2, at_ms=NOW_MS + 121_000))) == ["UNAVAILABLE", "DISK_FULL"]


def test_a_parent_with_a_full_disk_still_says_who_has_moved() -> None:
    xiu = Xiu()
    append(xiu, SPLIT)
    xiu.commit()
    xiu.space(enough=False)
    assert sorted((result.code, result.partitions) for result in results(xiu.send(mail(1, key=5), mail(2, key=1)))) == [
        ("DISK_FULL", 0),
        ("WRONG_PARTITION", 8),
    ]
