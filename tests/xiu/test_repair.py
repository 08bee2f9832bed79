"""Checking a store and building it anew from another replica's rows: every kind of damage, at every row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from pixiu.errors import StoreDamaged
from pixiu.ids import MAX_MSG_SEQUENCE
from tests.xiu.parts import EMPTY, MemoryStore, mail, store
from xiu.state.keys import BLOCKS, HEAD_KEY
from xiu.state.state import Head, State, XiuKind
from xiu.state.state import trim_entry as trim
from xiu.store.repair import Row, rebuild, verify

PAGE = 3
"""Rows that one damaged page holds."""


class Pages:
    """Rows as RocksDB gives them out: pages that are damaged as a whole."""

    def __init__(self, rows: dict[bytes, bytes], damaged: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.rows = sorted(rows.items())
        self.damaged = damaged
        self._at = 0

    def seek(self, key: bytes) -> Row | None:
        self._at = next((index for index, (there, _) in enumerate(self.rows) if there >= key), len(self.rows))
        before = self._at - 1
        if before >= 0 and before // PAGE in self.damaged and before // PAGE == self._at // PAGE and self.rows[before][0] < key:
            raise StoreDamaged("page")
        return self._row()

    def next(self) -> Row | None:
        self._at += 1
        return self._row()

    def _row(self) -> Row | None:
        if self._at >= len(self.rows):
            return None
        if self._at // PAGE in self.damaged:
            raise StoreDamaged("page")
        return self.rows[self._at]


RESTORED = Head(runs_from=1 << 62)
"""Of a partition in which a restore has made rows of single IDs, so far ahead that more are made."""
FORMS = pytest.mark.parametrize("form", [EMPTY, RESTORED], ids=["runs", "rows"])


def filled(entries: int, form: Head = EMPTY) -> MemoryStore:
    """A store after some entries of two epochs, two records each."""
    found = MemoryStore(form)
    state = State(0, found, form)
    for counter in range(1, entries + 1):
        entry = store(counter, mail(2 * counter), mail(2 * counter + 1), epoch=1 if counter <= 6 else 2)
        decision = state.decide(entry)
        found.write([decision])
        state.written(decision)
    return found


def peer(rows: dict[bytes, bytes]) -> object:
    def rows_from(begin: bytes) -> Iterator[Row]:
        return iter([row for row in sorted(rows.items()) if row[0] >= begin])

    return rows_from


def rebuilt(pages: Pages, here: MemoryStore, there: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], int]:
    put: list[Row] = []
    taken = rebuild(pages, here.head, put.append, peer(there))  # type: ignore[arg-type]
    assert [key for key, _ in put] == sorted(key for key, _ in put)
    return dict(put), taken


def without_head(rows: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {key: value for key, value in rows.items() if key != HEAD_KEY}


@FORMS
def test_a_whole_store_is_copied_and_nothing_is_taken_from_elsewhere(form: Head) -> None:
    here = filled(12, form)
    rows, taken = rebuilt(Pages(here.rows), here, {})
    assert rows == without_head(here.rows)
    assert taken == 0
    checked = verify(Pages(here.rows), MAX_MSG_SEQUENCE)
    assert (checked.blocks, checked.records, checked.damaged) == (12, 24, 0)
    assert len(checked.ranges) == 2


@FORMS
@pytest.mark.parametrize("ahead", [0, 5])
def test_every_damaged_page_is_filled_also_from_a_replica_that_is_ahead(ahead: int, form: Head) -> None:
    here, there = filled(12, form), filled(12 + ahead, form)
    pages = -(-len(here.rows) // PAGE)
    for page in range(pages):
        for damaged in ({page}, {page, page + 1}, set(range(page, pages))):
            rows, taken = rebuilt(Pages(here.rows, damaged), here, there.rows)
            assert rows == without_head(here.rows)
            assert taken > 0
            assert verify(Pages(here.rows, damaged)).damaged > 0


def test_broken_and_missing_blocks_are_filled() -> None:
    whole = filled(12)
    keys = [key for key in sorted(whole.rows) if key[:1] == BLOCKS]
    for key in keys:
        broken = whole.rows | {key: whole.rows[key][:-1] + b"?"}
        assert verify(Pages(broken)).damaged >= 1
        assert rebuilt(Pages(broken), whole, whole.rows) == (without_head(whole.rows), 1)
    inner = [key for index, key in enumerate(keys) if index not in (0, 5, 6, 11)]  # not at an epoch's ends
    for key in inner:
        holed = {there: value for there, value in whole.rows.items() if there != key}
        assert verify(Pages(holed)).damaged == 1
        assert rebuilt(Pages(holed), whole, whole.rows) == (without_head(whole.rows), 1)


def test_what_the_other_replica_lacks_or_has_broken_too_is_refused() -> None:
    whole = filled(12)
    keys = [key for key in sorted(whole.rows) if key[:1] == BLOCKS]
    for key in keys:
        broken = whole.rows | {key: whole.rows[key][:-1] + b"?"}
        lacking = {there: value for there, value in whole.rows.items() if there != key}
        place = sorted(whole.rows).index(key) // PAGE
        for bad in (broken, lacking):
            with pytest.raises(StoreDamaged, match="lacks"):
                rebuilt(Pages(broken), whole, bad)
            if key not in (keys[0], keys[5], keys[6]):
                with pytest.raises(StoreDamaged, match="lacks"):
                    rebuilt(Pages(whole.rows, {place}), whole, bad)
    with pytest.raises(StoreDamaged):
        rebuilt(Pages(whole.rows, {0}), whole, {})


def test_a_replica_with_other_damage_helps_too() -> None:
    whole = filled(12)
    keys = [key for key in sorted(whole.rows) if key[:1] == BLOCKS]
    for here, there in itertools.permutations(keys, 2):
        broken, other = ({**whole.rows, key: whole.rows[key][:-1] + b"?"} for key in (here, there))
        assert rebuilt(Pages(broken), whole, other) == (without_head(whole.rows), 1)


def test_trimmed_stores_are_built_too() -> None:
    here = filled(12)
    keys = [key for key in sorted(here.rows) if key[:1] == BLOCKS]
    state = State(0, here, here.head)
    floor = int.from_bytes(keys[4][1:], "big")
    for counter, kind in ((13, XiuKind.TRIM),):
        entry = store(counter, epoch=2)
        decision = state.decide(type(entry)(2, counter, int(kind), entry.at_us, trim(floor, 100)))
        there = dict(here.rows)
        here.write([decision])
    page = sorted(here.rows).index(keys[4]) // PAGE
    rows, _ = rebuilt(Pages(here.rows, {page}), here, there)
    assert rows == without_head(here.rows)


def test_digests_are_equal_where_the_blocks_are_and_differ_where_they_do_not() -> None:
    one, other = filled(12), filled(14)
    end = one.head.last
    assert verify(Pages(one.rows), end).ranges == verify(Pages(other.rows), end).ranges
    assert verify(Pages(one.rows), MAX_MSG_SEQUENCE).ranges != verify(Pages(other.rows), MAX_MSG_SEQUENCE).ranges
