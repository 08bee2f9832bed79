"""Logs on real files, for tests: entries, and files to break."""

from __future__ import annotations

from pathlib import Path

from cluster.replication.model import Entry, Log


def entries(epoch: int, first: int, last: int, size: int = 10) -> list[Entry]:
    return [Entry(epoch, counter, 2, counter * 1000, bytes([counter % 251]) * size) for counter in range(first, last + 1)]


def everything(log: Log) -> list[Entry]:
    found: list[Entry] = []
    while more := log.read(log.first.counter + len(found), 7, 1000):
        found += more
    return found


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def flip(path: Path, offset: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
