"""The label of a replica's directory: who it is, what it promised, and up to where it acknowledged.

`member` is written once. `label` is one record within one sector, which a disk writes whole or not at all, so that a
label that cannot be read is damage and not a torn write.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cluster.replication.model import START, MemberID, Position
from pixiu.errors import DiskFailed

_RECORD: Final = struct.Struct("<4sIQIIQIQBxxx")
_MAGIC: Final = b"PXLB"
_VERSION: Final = 1
SECTOR: Final = 512
UNREADABLE: Final = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EREMOTEIO)
"""What systems say of a sector that the disk cannot read: that is worth what a wrong CRC is. Of a write or a sync it is an end."""
SEAL_LAG_S: Final = 0.1
"""For so long a seal that rose may wait for its own sync, in which it covers every group since."""
assert _RECORD.size + 4 <= SECTOR


@dataclass(frozen=True, slots=True)
class Label:
    """What the record holds."""

    incarnation: int
    promised: int = 0
    seal: Position = START
    """The last position that was acknowledged; written before the acknowledgement leaves, synced soon after."""
    resetting: Position = START
    """Not START: the log is being replaced by this position, and an open must end that."""
    unclean: bool = False

    def encode(self) -> bytes:
        """Encode as one disk sector."""
        record = _RECORD.pack(_MAGIC, _VERSION, self.incarnation, self.promised, *self.seal, *self.resetting, self.unclean)
        return (record + zlib.crc32(record).to_bytes(4, "little")).ljust(SECTOR, b"\0")

    @classmethod
    def decode(cls, sector: bytes) -> Label | None:
        """The record of a sector; None when it is broken."""
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
        directory: of the log.
        clock: monotonic seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = directory / "label"
        self._clock = clock
        self.missing = not self._path.exists()
        """It was not there, or it was unreadable."""
        found = None if self.missing else _read(self._path)
        self.missing = found is None
        # Counts from the clock at the directory's making, so that a label that was lost starts above what it had.
        self.now = found if found is not None else Label(incarnation=int(time.time()))
        """What is written."""
        self._lags_since: float | None = None
        """Since when what is written is not what a power cut leaves; None: it is."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self.write(self.now)  # also one that was found: whoever wrote it may have been killed before its sync
        sync_directory(directory)

    @property
    def lags(self) -> bool:
        """Whether a power cut may leave an older seal than what is written."""
        return self._lags_since is not None

    def write(self, label: Label) -> None:
        """Write a label and make it durable, unless its seal alone rose and the oldest such rise waits for less than
        `SEAL_LAG_S`. Raises DiskFailed."""
        rose = label.seal.counter > self.now.seal.counter and label == replace(self.now, seal=label.seal)
        try:
            os.pwrite(self._fd, label.encode(), 0)
        except OSError as problem:
            raise DiskFailed(f"{self._path}: {problem.strerror}") from problem
        now = self._clock()
        if self._lags_since is None:
            self._lags_since = now
        if not rose or now >= self._lags_since + SEAL_LAG_S:
            self.sync()
        self.now = label

    def sync(self) -> None:
        """What is written is durable. Raises DiskFailed."""
        try:
            os.fdatasync(self._fd)
        except OSError as problem:
            raise DiskFailed(f"{self._path}: {problem.strerror}") from problem
        self._lags_since = None

    def close(self) -> None:
        """Nothing is written any more."""
        os.close(self._fd)


def _read(path: Path) -> Label | None:
    """What is written; None where it is broken, or the disk cannot read it."""
    try:
        return Label.decode(path.read_bytes())
    except OSError as problem:
        if problem.errno not in UNREADABLE:
            raise
        return None


def load_member(directory: Path) -> tuple[MemberID, bool]:
    """The directory's MemberID, durable, and whether it was made just now."""
    path, new = directory / "member", False
    try:
        member = MemberID(int(path.read_text("ascii").strip(), 16))
    except (OSError, ValueError):
        member, new = MemberID(secrets.randbits(62) + 1), True
    with open(path, "w" if new else "r+", encoding="ascii") as file:  # whoever made it may have been killed before its sync
        file.write(f"{member:016x}\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)
    return member, new


def make_directory(directory: Path) -> None:
    """Make a directory that is not there; its name, and those of what had to be made above it, are durable, whoever made them."""
    missing = [each for each in directory.parents if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in (directory, *missing):
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Names that were made or removed in a directory are durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
