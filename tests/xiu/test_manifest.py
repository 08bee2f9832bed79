"""A store whose MANIFEST a power cut left torn opens again with what it had flushed; anything else is damage, as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from pixiu.errors import StoreDamaged
from xiu.store.manifest import HEADER, cut_torn_tail, masked_crc, whole_edits
from xiu.store.store import Store

HOLE = 6
"""Bytes of an edit in the sector before, which was not written."""


def manifest_of(folder: Path) -> Path:
    return folder / (folder / "CURRENT").read_text().strip()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store with one flushed value."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    db = Rdict(str(tmp_path / "store"), options)
    db[b"key"] = b"value"
    db.flush()
    db.close()
    return tmp_path / "store"


def an_edit(payload: bytes) -> bytes:
    """A whole edit as RocksDB would write it."""
    return HEADER.pack(masked_crc(b"\1" + payload), len(payload), 1) + payload


def value_of(store: Store) -> bytes | None:
    return store.get_many([b"key"])[0]


def test_edits_of_rocksdb_are_whole_by_its_own_checksum(store: Path) -> None:
    data = manifest_of(store).read_bytes()
    assert whole_edits(data) == len(data)
    assert whole_edits(data[:-1]) < len(data)


@pytest.mark.parametrize(
    ("torn", "cut"),
    [(bytes(HOLE) + an_edit(b"x" * 100)[HOLE:], True), (bytes(110) + an_edit(b"y" * 9), False), (an_edit(b"z" * 99)[:50], False)],
)
def test_a_torn_tail_is_cut_and_everything_flushed_is_there(store: Path, torn: bytes, cut: bool) -> None:
    """RocksDB itself takes an edit of zeros, and one that is cut off, for the end."""
    manifest = manifest_of(store)
    before = manifest.read_bytes()
    manifest.write_bytes(before + torn)
    opened = Store(store)
    try:
        assert value_of(opened) == b"value"
    finally:
        opened.close()
    kept = store.with_suffix(".torn")
    assert kept.exists() == cut
    assert (str(kept) in opened.notice) == cut
    if cut:
        assert (kept / manifest.name).read_bytes() == before + torn


def test_what_is_no_torn_tail_is_left_as_it_is(store: Path) -> None:
    manifest = manifest_of(store)
    whole = manifest.read_bytes()
    assert cut_torn_tail(store) is None, "nothing is torn"
    for damaged in (bytes([whole[0] ^ 0xFF]) + whole[1:], whole + bytes(5000)):
        manifest.write_bytes(damaged)
        assert cut_torn_tail(store) is None
        assert manifest.read_bytes() == damaged
    manifest.write_bytes(bytes([whole[0] ^ 0xFF]) + whole[1:])
    with pytest.raises(StoreDamaged):
        Store(store)
