"""What a gateway keeps of a session comes back as it was, and nothing else is read."""

from __future__ import annotations

import random

import pytest

from gateway.sessions.states import (
    MAX_FILTERS,
    MAX_INBOUND,
    MAX_RELEASED,
    NEVER_EXPIRES,
    InboundTable,
    Released,
    SessionFilter,
    SessionNote,
)
from pixiu.errors import LimitError, MalformedData
from pixiu.wire.inbox_operations import MAX_NOTE_BYTES

NOTE = SessionNote(
    "clïent", 7, 3600, connected=False, ended_at_ms=5_000,
    filters=[SessionFilter("a/+/#", 2, 0x2D, 268_435_455), SessionFilter("room/42", 1), SessionFilter("Ω", 0)],
)  # fmt: skip


def inbound(*items: tuple[int, int]) -> InboundTable:
    table = InboundTable()
    table.messages.update(items)
    return table


def released(*packet_ids: int) -> Released:
    table = Released()
    table.packet_ids.update(packet_ids)
    return table


VALUES = [NOTE.encode(), SessionNote("", 1, 0).encode(), inbound((1, 1 << 62), (65_535, 9)).encode(), released(2, 65_535).encode()]


def read(value: bytes, which: int) -> object:
    return (SessionNote.decode, SessionNote.decode, InboundTable.decode, Released.decode)[which](value)


def test_each_form_comes_back_as_it_was() -> None:
    assert SessionNote.decode(NOTE.encode()) == NOTE
    assert SessionNote.decode(SessionNote("x", 1, NEVER_EXPIRES).encode()) == SessionNote("x", 1, NEVER_EXPIRES)
    assert InboundTable.decode(VALUES[2]).messages == {1: 1 << 62, 65_535: 9}
    assert Released.decode(VALUES[3]).packet_ids == {2, 65_535}


def test_empty_tables_remove_their_notes() -> None:
    assert InboundTable().encode() == Released().encode() == b""
    assert InboundTable.decode(b"").messages == {}
    assert Released.decode(b"").packet_ids == set()


def test_equal_tables_have_equal_bytes() -> None:
    assert released(3, 1, 2).encode() == released(2, 3, 1).encode()


def test_what_is_too_much_is_refused_before_it_is_stored() -> None:
    with pytest.raises(LimitError, match="1000 filters"):
        SessionNote("x", 1, 1, filters=[SessionFilter("a", 1)] * (MAX_FILTERS + 1)).encode()
    with pytest.raises(LimitError, match="64 KiB"):
        SessionNote("x", 1, 1, filters=[SessionFilter("a" * 1000, 1)] * 70).encode()
    with pytest.raises(LimitError):
        inbound(*((packet_id, 1) for packet_id in range(1, MAX_INBOUND + 2))).encode()
    with pytest.raises(LimitError):
        released(*range(1, MAX_RELEASED + 2)).encode()
    for fits in (inbound(*((each, 1) for each in range(1, MAX_INBOUND + 1))), released(*range(1, MAX_RELEASED + 1))):
        assert len(fits.encode()) <= MAX_NOTE_BYTES


@pytest.mark.parametrize("which", range(len(VALUES)))
def test_nothing_cut_lengthened_or_of_another_version_is_read(which: int) -> None:
    value = VALUES[which]
    for wrong in (b"\2" + value[1:], value + b"\0", *(value[:size] for size in range(1, len(value)))):
        if which >= 2 and wrong[:1] == b"\1" and len(wrong) < len(value) and (len(wrong) - 1) % (10, 2)[which - 2] == 0:
            continue  # a table with fewer items
        with pytest.raises(MalformedData):
            read(wrong, which)


def test_any_bytes_are_read_or_malformed() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        which = chance.randrange(len(VALUES))
        value = bytearray(VALUES[which])
        for _ in range(chance.randrange(1, 4)):
            value[chance.randrange(len(value))] = chance.randrange(256)
        try:
            found = read(bytes(value), which)
        except MalformedData:
            continue
        assert type(found).decode(found.encode()).encode() == found.encode()  # type: ignore[attr-defined]
