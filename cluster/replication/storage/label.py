"""The label of a replica's directory: its identity, its promise, and the position up to which it acknowledged.

`member` is written once. `label` is one record within one sector, which a disk writes completely or not at all, so a label that
cannot be read is damage and not a torn write.

A seal that only rises may be in the page cache alone for a tenth of a second; everything else is durable when `write` returns.

Source: docs/replication.md; docs/decisions/0282-a-seal-may-lag-a-tenth-of-a-second.md.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from cluster.replication.model import START, MemberID, Position
from pixiu.durable import sync_directory
from pixiu.errors import DiskFailed

_RECORD: Final = struct.Struct("<4sIQIIQIQBxxx")
_MAGIC: Final = b"PXLB"
_VERSION: Final = 1
SECTOR: Final = 512
UNREADABLE: Final = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EREMOTEIO)
"""Errors for a sector that the disk cannot read. On a read they count like a wrong CRC; on a write or a sync they are fatal."""
SEAL_LAG_S: Final = 0.1
"""Longest time that a raised seal waits for its own sync, which then covers all groups since."""
assert _RECORD.size + 4 <= SECTOR


class Label(NamedTuple):
    """Contents of the record."""

    incarnation: int
    promised: int = 0
    seal: Position = START
    """The last acknowledged position; written before the acknowledgement leaves, synced soon after."""
    resetting: Position = START
    """Unless START: the log is being reset to this position, and the next open must finish that."""
    unclean: bool = False

    def encode(self) -> bytes:
        """Encode as one disk sector."""
        record = _RECORD.pack(_MAGIC, _VERSION, self.incarnation, self.promised, *self.seal, *self.resetting, self.unclean)
        return (record + zlib.crc32(record).to_bytes(4, "little")).ljust(SECTOR, b"\0")

    @classmethod
    def decode(cls, sector: bytes) -> Label | None:
        """The record of a sector; None if it is broken."""
        record = sector[: _RECORD.size]
        if len(sector) != SECTOR or zlib.crc32(record).to_bytes(4, "little") != sector[_RECORD.size : _RECORD.size + 4]:
            return None
        magic, version, incarnation, promised, epoch, counter, reset_epoch, reset_counter, unclean = _RECORD.unpack(record)
        if magic != _MAGIC or version != _VERSION:
            return None
        return cls(incarnation, promised, Position(epoch, counter), Position(reset_epoch, reset_counter), bool(unclean))


class LabelFile:
    """The label of one directory, open for writing.

    Args:
        directory: the log's directory.
        clock: returns monotonic seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = directory / "label"
        self._clock = clock
        self.missing = not self.path.exists()
        """True if the label was missing or unreadable."""
        found = None if self.missing else _read(self.path)
        self.missing = found is None
        # Starts from the clock when the directory is made, so that a lost label starts above its former value.
        self.now = found if found is not None else Label(incarnation=int(time.time()))
        """The label as written."""
        self._lags_since: float | None = None
        """Time since when a power cut may leave an older label than the written one; None: it cannot."""
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self.write(self.now)  # also a label that was found: its writer may have been killed before its sync
        sync_directory(directory)

    @property
    def lags(self) -> bool:
        """True if a power cut may leave an older seal than the written one."""
        return self._lags_since is not None

    @property
    def overdue(self) -> bool:
        """True if the oldest unsynced rise of the seal is to be synced now."""
        return self._lags_since is not None and self._clock() >= self._lags_since + SEAL_LAG_S

    def may_lag(self, label: Label) -> bool:
        """True if a label may be written without a sync: only its seal rises."""
        return label.seal.counter > self.now.seal.counter and label == self.now._replace(seal=label.seal)

    def write_page(self, label: Label) -> None:
        """Write a label that may lag; whoever does so calls `sync` when it is overdue. Raises DiskFailed."""
        try:
            os.pwrite(self.fd, label.encode(), 0)
        except OSError as problem:
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem
        if self._lags_since is None:
            self._lags_since = self._clock()
        self.now = label

    def write(self, label: Label) -> None:
        """Write a label and make it durable, unless it may lag and is not overdue. Raises DiskFailed."""
        may_lag = self.may_lag(label)
        self.write_page(label)
        if not may_lag or self.overdue:
            self.sync()

    def sync(self) -> None:
        """Make the written label durable. Raises DiskFailed."""
        try:
            os.fdatasync(self.fd)
        except OSError as problem:
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem
        self.synced(self.now)

    def synced(self, label: Label) -> None:
        """Note that a written label is durable."""
        if label is self.now:
            self._lags_since = None

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def _read(path: Path) -> Label | None:
    """The label on disk; None if it is broken or the disk cannot read it."""
    try:
        return Label.decode(path.read_bytes())
    except OSError as problem:
        if problem.errno not in UNREADABLE:
            raise
        return None


def load_member(directory: Path) -> tuple[MemberID, bool]:
    """The directory's MemberID, durable, and True if it was just made."""
    path, new = directory / "member", False
    try:
        member = MemberID(int(path.read_text("ascii").strip(), 16))
    except (OSError, ValueError):
        member, new = MemberID(secrets.randbits(62) + 1), True
    with open(path, "w" if new else "r+", encoding="ascii") as file:  # its writer may have been killed before its sync
        file.write(f"{member:016x}\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)
    return member, new
