"""How far a doubling is: replicas, keys and bytes that moved, and the time that is left."""

from __future__ import annotations

from cluster.wire.v1 import doubling_pb2 as pb
from ops.doubling.doubling import Phase, Seen
from ops.doubling.progress import Moved, Pace, Step, moved
from pixiu.discovery.view import RoleLayout

ID = "00000000000000aa"
BEGUN, DONE = RoleLayout(1, 2, 2, (ID,)), RoleLayout(2, 2, 2, (ID,))


def status(phase: pb.DoublingPhase.ValueType, **fields: int) -> pb.DoublingStatus:
    return pb.DoublingStatus(doubling=0xAA, phase=phase, **fields)


def test_replicas_keys_and_entries_are_counted() -> None:
    assert moved(Seen("broker", BEGUN, ID, {0: 2, 1: 1}), Phase.START) == Moved(1, 2, "replicas")
    assert moved(Seen("broker", BEGUN, ID, {0: 2, 1: 2}), Phase.COMMIT) is None
    parent = pb.DoublingStatus(committed=900, keys=1000, bytes=5 << 20)
    child = status(pb.DOUBLING_LEARNING, keys=200, bytes=1 << 20)
    assert moved(Seen("pi", BEGUN, ID, {}, {0: parent, 1: child}), Phase.LEARN) == Moved(200, 500, "keys", 1 << 20, 0)
    child.learned = 850
    assert moved(Seen("pi", BEGUN, ID, {}, {0: parent, 1: child}), Phase.LEARN) == Moved(200, 500, "keys", 1 << 20, 50)
    cleaning = status(pb.DOUBLING_CLEANING, keys=300)
    assert moved(Seen("pi", DONE, ID, {}, {0: cleaning, 1: status(pb.DOUBLING_NONE)}), Phase.CLEAN) == Moved(0, 300, "keys")
    assert moved(Seen("xiu", BEGUN, ID, {}, {0: parent, 1: child}), Phase.LEARN) is None, "a child of Xiu copies nothing"
    assert moved(Seen("pi", BEGUN, ID, {}, {1: child}), Phase.LEARN) == Moved(0, 0, "keys"), "a parent without a leader"


def test_the_time_that_is_left_follows_from_the_pace_of_the_phase() -> None:
    pace = Pace()
    assert pace.step(Phase.LEARN, (), Moved(100, 1000, "keys"), 5.0).left_s is None
    assert pace.step(Phase.LEARN, (), Moved(110, 1000, "keys"), 6.0).left_s is None, "too little to go by"
    assert pace.step(Phase.LEARN, (), Moved(400, 1000, "keys"), 8.0).left_s == 6.0
    assert pace.step(Phase.COMMIT, (), None, 9.0).moved is None
    assert pace.step(Phase.CLEAN, (), Moved(0, 600, "keys"), 10.0).moved == Moved(0, 600, "keys")
    step = pace.step(Phase.CLEAN, ("waits",), Moved(0, 200, "keys"), 12.0)
    assert (step.moved, step.left_s) == (Moved(400, 600, "keys"), 1.0)
    assert step.json() == {
        "phase": "clean", "missing": ["waits"], "done": 400, "total": 600, "unit": "keys", "bytes": 0, "behind": 0, "left_s": 1.0,
    }  # fmt: skip
    assert step.text() == "400 of 600 keys, about 1 s left"


def test_a_line_for_people_says_what_is_an_estimate() -> None:
    step = Step(Phase.LEARN, (), Moved(2000, 4000, "keys", 3 << 20, 70), 4.0)
    assert step.text() == "2,000 of about 4,000 keys, 3.0 MiB, 70 entries behind, about 4 s left"
    assert Step(Phase.COMMIT, ()).text() == ""
    assert Step(Phase.COMMIT, ()).json() == {"phase": "commit", "missing": []}
