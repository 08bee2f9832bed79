"""Retention waits for named readers, and not for ever: what they need is in the log, and so in every replica."""

from __future__ import annotations

import pytest

from cluster.replication.model import Entry
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step
from pixiu.errors import InvalidArgument, Overloaded
from tests.xiu.parts import NOW_US, MemoryStore
from tests.xiu.world import Xiu
from xiu.events import LayoutChanged
from xiu.state.doubling import opening
from xiu.state.keys import HOLDS
from xiu.state.readers import EVERYTHING, MAX_READERS, Held, alive, decode, encode, hold, inherited, keep_from, of_row
from xiu.state.retention import trim_to
from xiu.state.state import Head, XiuKind

HOUR = 3_600_000_000


def stored(store: MemoryStore) -> dict[str, Held]:
    return dict(of_row(key, value) for key, value in store.rows.items() if key[:1] == HOLDS)


def note(xiu: Xiu, name: str, position: int, at_us: int) -> None:
    """As the service does."""
    payload = encode(hold(stored(xiu.store), name, position, at_us, HOUR))
    xiu.log.entries.append(Entry(xiu.epoch, len(xiu.log.entries) + 1, int(XiuKind.HOLD), at_us, payload))
    xiu.commit()


def needed(xiu: Xiu, at_us: int) -> int:
    return keep_from(alive(stored(xiu.store), at_us, HOUR))


def test_the_slowest_reader_counts_on_every_replica_and_over_a_snapshot() -> None:
    xiu, other = Xiu(), Xiu(lead=False)
    assert needed(xiu, NOW_US) == EVERYTHING
    note(xiu, "archive", 100, NOW_US)
    note(xiu, "audit", 50, NOW_US + 1)
    assert needed(xiu, NOW_US + 2) == 50
    other.store.rows = dict(xiu.store.rows)
    other.store.head = xiu.store.head
    other.core.replaced()
    note(xiu, "audit", 120, NOW_US + 2)
    other.log.entries = list(xiu.log.entries)
    other.commit()
    for replica in (xiu, other):
        assert needed(replica, NOW_US + 3) == 100
        assert needed(replica, NOW_US + HOUR + 1) == 120
        assert needed(replica, NOW_US + HOUR + 2) == EVERYTHING, "a reader that says nothing is given up"
    note(xiu, "archive", EVERYTHING, NOW_US + 3)
    assert needed(xiu, NOW_US + 4) == 120


def test_whom_retention_waits_for_counts_by_the_time_of_the_log() -> None:
    """No clock of a host moves it, and an entry that is late in the log's time does not set it back."""
    xiu = Xiu()
    note(xiu, "archive", 100, NOW_US)
    note(xiu, "audit", 50, NOW_US - HOUR)
    assert stored(xiu.store) == {"archive": Held(100, NOW_US), "audit": Held(50, NOW_US)}


def test_readers_and_their_names_are_bounded() -> None:
    xiu = Xiu()
    for number in range(MAX_READERS):
        note(xiu, str(number), 1, NOW_US)
    with pytest.raises(Overloaded):
        note(xiu, "more", 1, NOW_US)
    note(xiu, "more", EVERYTHING, NOW_US)
    note(xiu, "7", 9, NOW_US + 1)
    note(xiu, "ende – fin", 1, NOW_US + HOUR)
    assert stored(xiu.store) == {"7": Held(9, NOW_US + 1), "ende – fin": Held(1, NOW_US + HOUR)}
    for name, position in (("", 1), ("x" * 129, 1), ("x", EVERYTHING + 1)):
        with pytest.raises(InvalidArgument):
            note(xiu, name, position, NOW_US)


def test_a_child_inherits_its_parents_readers_which_have_read_nothing_of_it() -> None:
    parent, child = Xiu(), Xiu()
    note(parent, "archive", 100, NOW_US - 5)
    note(parent, "audit", 50, NOW_US)
    holds = inherited(stored(parent.store))
    child.step(LayoutChanged(9, 1, ("a:1", "b:1")))
    two = Doubling(7, 2, 1)

    def append(command: Command) -> None:
        entry = Entry(child.epoch, len(child.log.entries) + 1, DOUBLING_KIND, NOW_US + 9, command.encode())
        child.log.entries.append(entry)
        child.commit()

    for command in (Command(Step.BEGIN, two), Command(Step.OPEN, two, opening(77, NOW_US, holds))):
        append(command)
    assert child.store.head.doubling.phase is Phase.OPEN
    assert stored(child.store) == {"archive": Held(0, NOW_US - 5), "audit": Held(0, NOW_US)}
    append(Command(Step.OPEN, two, opening(77, NOW_US, encode({"late": Held(1, 1)}))))
    assert "late" not in stored(child.store)


def test_what_is_written_is_read_again() -> None:
    readers = {"archive": Held(7, 0), "größe": Held(EVERYTHING, NOW_US)}
    assert {name.decode(): held for name, held in decode(encode(readers))} == readers


def test_what_is_needed_is_not_trimmed() -> None:
    marks = [(10, 0, 0), (20, 0, 100), (30, 0, 200)]
    assert trim_to(marks, Head(), NOW_US, 1, 0) == (30, 200)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=29) == (20, 100)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=30) == (30, 200)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=9) is None
