"""Bounds of a bridge in bytes."""

from __future__ import annotations

from bridge.connector import Record
from bridge.target_run import credit_for
from bridge.unconfirmed import Kept, Unconfirmed


def test_the_credit_follows_the_size_of_the_messages() -> None:
    assert credit_for(1_000, 64 << 20, 10, 1_000) == 1_000
    assert credit_for(1_000, 64 << 20, 2, 2 << 20) == 64
    assert credit_for(1_000, 1 << 20, 1, 4 << 20) == 1


def test_what_a_source_has_read_counts_until_it_is_confirmed() -> None:
    found = Unconfirmed()
    for number in range(3):
        found.add(Record(b"x" * 100, key=b"key" if number else None), Kept())
    assert found.bytes == 306
    found.take(2)
    assert found.bytes == 103
    found.take(2)
    assert found.bytes == 0
