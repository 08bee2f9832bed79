"""Retention waits for named readers, and not for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from pixiu.errors import InvalidArgument, Overloaded
from tests.xiu.parts import NOW_US
from xiu.readers import EVERYTHING, MAX_READERS, Readers
from xiu.retention import trim_to
from xiu.state import Head

HOUR = 3_600_000_000


def test_the_slowest_reader_counts_over_a_restart(tmp_path: Path) -> None:
    readers = Readers(tmp_path / "readers.json", HOUR)
    assert readers.keep_from(NOW_US) == EVERYTHING
    readers.hold("archive", 100, NOW_US)
    readers.hold("audit", 50, NOW_US + 1)
    assert Readers(tmp_path / "readers.json", HOUR).keep_from(NOW_US + 2) == 50
    readers.hold("audit", 120, NOW_US + 2)
    assert readers.keep_from(NOW_US + 3) == 100
    readers.release("archive", NOW_US + 3)
    assert readers.keep_from(NOW_US + 4) == 120
    assert readers.keep_from(NOW_US + HOUR + 2) == EVERYTHING, "a reader that says nothing is given up"


def test_names_are_bounded(tmp_path: Path) -> None:
    readers = Readers(tmp_path / "readers.json", HOUR)
    for number in range(MAX_READERS):
        readers.hold(str(number), 1, NOW_US)
    with pytest.raises(Overloaded):
        readers.hold("more", 1, NOW_US)
    readers.hold("more", 1, NOW_US + HOUR)
    for wrong in ("", "x" * 129):
        with pytest.raises(InvalidArgument):
            readers.hold(wrong, 1, NOW_US)
    (tmp_path / "readers.json").write_text('{"a": 3}')
    assert Readers(tmp_path / "readers.json", HOUR).keep_from(NOW_US) == EVERYTHING


def test_what_is_needed_is_not_trimmed() -> None:
    marks = [(10, 0, 0), (20, 0, 100), (30, 0, 200)]
    assert trim_to(marks, Head(), NOW_US, 1, 0) == (30, 200)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=29) == (20, 100)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=30) == (30, 200)
    assert trim_to(marks, Head(), NOW_US, 1, 0, keep_from=9) is None
