"""The data folder of a replica. Blocking, except `finish_install`.

    ├── lock              held while a process has the folder
    ├── log/              the segmented log
    ├── outgoing/MEMBER/  snapshots that are being sent
    ├── incoming/         a snapshot that is being received
    ├── received/         one that is whole and durable, until the state machine has loaded it
    ├── received.json     its position; written last, removed first
    └── audit.log         what operators have done (`cluster.trust.audit`)

Source: docs/replication.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cluster.replication.machine import StateMachine
from cluster.replication.model import START, Damage, MemberID, PartitionState, Position
from cluster.replication.storage.log import DAMAGED_SUFFIX, SegmentedLog
from cluster.replication.storage.segment import SUFFIX
from cluster.trust.audit import Audit
from pixiu.durable import make_directory, sync_directory
from pixiu.errors import ConfigurationError, DiskFailed, StorageError
from pixiu.ids import hex_id

RESERVE_BYTES: Final = 64 << 20
"""Disk space that a snapshot leaves free."""


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder. Raises DiskFailed if the disk or the folder is gone."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise DiskFailed(f"the disk of {folder} does not answer: {error.strerror}; is it still mounted?") from error


class DataFolder:
    """The folder of one replica.

    Args:
        path: created if missing.
        segment_bytes: size of a log segment.
    """

    def __init__(self, path: Path, segment_bytes: int) -> None:
        self.path = path
        self._segment_bytes = segment_bytes
        self._lock: int | None = None
        self._manifest = path / "received.json"
        self.received = path / "received"
        self.incoming = path / "incoming"

    def open(self, verify_from: int) -> SegmentedLog:
        """Take the folder and open its log. Raises StorageError."""
        try:
            make_directory(self.path)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"{self.path}: another process has this folder open; stop it, or use another folder") from None
        except OSError as problem:
            raise DiskFailed(f"{self.path}: {problem.strerror}") from problem
        for leftover in (self.path / "outgoing", self.incoming):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            return SegmentedLog(self.path / "log", segment_bytes=self._segment_bytes, verify_from=verify_from)
        except OSError as problem:
            raise DiskFailed(f"{self.path / 'log'}: {problem.strerror}") from problem

    async def finish_install(self, log: SegmentedLog, machine: StateMachine) -> None:
        """Load a snapshot whose installation was interrupted; report damage if the state ends before the beginning of the log."""
        position = self.received_position()
        if position is not None and position == log.first and machine.applied < position.counter:
            await machine.load(self.received)
        self.discard_received()
        if machine.applied >= log.first.counter:
            return
        # The entries before the log's first are missing here: only a leader's snapshot, or its whole log, has them.
        reason = f"the state ends at {machine.applied}, the log begins after {log.first.counter}"
        log.damage = Damage(Position(0, machine.applied), log.seal, reason)
        log.set_unclean(True)
        log.sync()
        for segment in log.directory.glob(f"*{SUFFIX}"):
            aside = segment.with_name(segment.name + DAMAGED_SUFFIX)
            aside.unlink(missing_ok=True)
            os.link(segment, aside)
        log.reset(START)

    def close(self) -> None:
        """Release the folder for another process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- snapshots

    def outgoing(self, member: MemberID) -> Path:
        """Create an empty folder for a snapshot to a member."""
        folder = self.path / "outgoing" / hex_id(member)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def begin_incoming(self, size: int) -> Path:
        """Create an empty folder for a snapshot of this size. Raises StorageError if there is not enough space."""
        shutil.rmtree(self.incoming, ignore_errors=True)
        free = free_bytes(self.path)
        if size + RESERVE_BYTES > free:
            raise StorageError(f"{self.path}: a snapshot of {size} bytes does not fit into {free} free bytes")
        self.incoming.mkdir()
        return self.incoming

    def discard_incoming(self) -> None:
        """Delete a partly received snapshot."""
        shutil.rmtree(self.incoming, ignore_errors=True)

    def accept_incoming(self, position: Position) -> None:
        """Accept a snapshot that was received completely: make it durable under its position."""
        self.discard_received()
        for folder, _, names in os.walk(self.incoming):
            for name in names:
                fd = os.open(Path(folder) / name, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            sync_directory(Path(folder))
        self.incoming.rename(self.received)
        fresh = self._manifest.with_suffix(".new")
        with open(fresh, "w", encoding="ascii") as file:
            json.dump({"epoch": position.epoch, "counter": position.counter}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._manifest)
        sync_directory(self.path)

    def received_position(self) -> Position | None:
        """Position of a complete received snapshot; None if there is none."""
        try:
            found = json.loads(self._manifest.read_text("ascii"))
            return Position(int(found["epoch"]), int(found["counter"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def discard_received(self) -> None:
        """Delete the received snapshot."""
        with contextlib.suppress(FileNotFoundError):
            self._manifest.unlink()
        shutil.rmtree(self.received, ignore_errors=True)

    # --- the audit

    def audit(self, operator: str, reason: str, member: MemberID, last: Position, before: PartitionState | None) -> None:
        """Record a forced promotion durably. Raises DiskFailed."""
        line = {
            "last": list(last),
            "epoch_before": before.epoch if before is not None else 0,
            "leader_before": hex_id(before.leader) if before is not None else "",
            "in_sync_before": [hex_id(other) for other in sorted(before.in_sync)] if before is not None else [],
        }
        self.audit_line(operator, reason, member, line)

    def audit_line(self, operator: str, reason: str, member: MemberID, what: Mapping[str, object]) -> None:
        """Record an operator's action durably. Raises DiskFailed."""
        try:
            audit = Audit(self.path)
        except ConfigurationError as problem:
            raise DiskFailed(str(problem)) from problem
        try:
            audit.write_now("operator", operator=operator, reason=reason, member=hex_id(member), **what)
            sync_directory(self.path)
        finally:
            audit.close()
