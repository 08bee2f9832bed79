"""Cut the torn tail of RocksDB's MANIFEST: what a power cut left of an edit that was not synced.

RocksDB syncs each edit of its MANIFEST before it counts. A disk that writes some sectors of an edit and not others leaves a hole in
it, and RocksDB refuses to open the database for that. Nothing has relied on that edit: the replicated log is trimmed after the sync
alone, so the entries are applied again.

Source: https://github.com/facebook/rocksdb/wiki/Write-Ahead-Log-File-Format; docs/stores.md, "Xiu".
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Final

from pixiu.durable import sync_directory

BLOCK: Final = 32_768
HEADER: Final = struct.Struct("<IHB")
"""Masked CRC32C of the type and the payload, length of the payload, type."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MAX_TAIL_BYTES: Final = 4096
"""A longer rest is no edit that was under way, and is left to the repair from another replica."""
_POLYNOMIAL: Final = 0x82F63B78
_MASK_DELTA: Final = 0xA282EAD8


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        rows.append(crc)
    return tuple(rows)


_TABLE: Final = _table()


def masked_crc(data: bytes) -> int:
    """Return the CRC32C of some bytes as RocksDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def whole_edits(data: bytes) -> int:
    """Return the size of the longest prefix that consists of whole edits."""
    at = whole = 0
    while True:
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        if at + HEADER.size > len(data):
            return whole
        crc, size, kind = HEADER.unpack_from(data, at)
        end = at + HEADER.size + size
        if not FULL <= kind <= LAST or end > len(data) or HEADER.size + size > left or masked_crc(data[at + 6 : end]) != crc:
            return whole
        at = end
        if kind in (FULL, LAST):
            whole = at


def cut_torn_tail(folder: Path) -> Path | None:
    """Cut the tail of a store's MANIFEST that is no whole edit. Returns where the store as it was is kept; None: nothing was cut.
    Raises OSError."""
    try:
        manifest = folder / (folder / "CURRENT").read_text("ascii").strip()
        data = manifest.read_bytes()
    except (OSError, ValueError):
        return None
    whole = whole_edits(data)
    if not 0 < whole < len(data) <= whole + MAX_TAIL_BYTES:
        return None
    aside = folder.with_suffix(".torn")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder, aside, copy_function=os.link)
    fresh = folder / "MANIFEST.new"
    with open(fresh, "wb") as file:
        file.write(data[:whole])
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(manifest)
    sync_directory(folder)
    return aside
