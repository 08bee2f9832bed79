"""The log of a simulated replica on real files, beside its twin in memory; every read is compared."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.replication.log import SegmentedLog
from cluster.replication.model import Damage, Entry
from tests.sim.replication.disk import Disk, Image, MemoryLog

SEGMENT_BYTES = 400


class FileDisk(Disk):
    """A directory. `image` is what the files hold."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.synced = directory.with_suffix(".synced")
        """A copy, as of the last moment when everything was durable."""
        self.opened: SegmentedLog | None = None

    def open(self) -> Damage | None:
        log = SegmentedLog(self.directory, segment_bytes=SEGMENT_BYTES)
        self.opened = log
        entries: list[Entry] = []
        while more := log.read(log.first.counter + len(entries), 1000, 1 << 20):
            entries += more
        self.image = Image(log.first, entries, log.promised, log.unclean, log.seal)
        self.rotten = log.damage is not None  # a bit beyond the seal does no harm
        self.remember()
        return log.damage

    def remember(self) -> None:
        shutil.rmtree(self.synced, ignore_errors=True)
        shutil.copytree(self.directory, self.synced)

    def rot(self, rng: random.Random) -> bool:
        """One bit of one file."""
        path = rng.choice(sorted(self.directory.glob("*.log")))
        data = bytearray(path.read_bytes())
        if not data:
            return False
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        self.rotten = True
        return True


class FileLog(MemoryLog):
    """The log of one start."""

    def __init__(self, disk: FileDisk) -> None:
        super().__init__(disk)
        assert disk.opened is not None
        self.files = disk.opened
        self.at = disk

    def _do(self, name: str, value: Any) -> None:
        super()._do(name, value)
        getattr(self.files, {"mark": "set_unclean"}.get(name, name))(value)
        if name in ("cut", "reset"):  # durable at once
            self.at.remember()
        assert (self.files.first, self.files.last) == (self.first, self.last)

    def trim(self, up_to: int) -> None:
        self.files.trim(up_to)
        super().trim(self.files.first.counter)

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        found = self.files.read(after, max_entries, max_bytes)
        assert list(found) == list(super().read(after, len(found), max_bytes))
        return found

    def start_of_epoch(self, counter: int) -> int:
        start = self.files.start_of_epoch(counter)
        assert super().start_of_epoch(counter) <= start <= counter
        return start

    def sync(self, up_to: int) -> None:
        super().sync(self.issued)
        self.files.sync()
        self.at.remember()

    def crash(self, rng: random.Random, power: bool) -> None:
        """After a power cut the end of the newest file is as it was when it was synced, or torn beyond that."""
        self.files.close()
        self.at.opened = None
        self._operations.clear()
        if not power:
            return
        if rng.random() < 0.5:
            shutil.rmtree(self.at.directory)
            shutil.copytree(self.at.synced, self.at.directory)
            return
        newest = max(self.at.directory.glob("*.log"))
        before = self.at.synced / newest.name
        kept = before.stat().st_size if before.exists() else 0
        data = newest.read_bytes()
        if len(data) > kept:
            newest.write_bytes(data[: rng.randint(kept, len(data))])
