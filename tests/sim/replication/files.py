"""The log of a simulated replica on real files, beside its twin in memory; every read is compared.

A power cut leaves what the log itself synced, file by file, and perhaps more of the newest one, or the label as it was written.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.replication.model import Damage, Entry
from cluster.replication.storage.log import SegmentedLog
from tests.sim.replication.disk import Disk, Image, MemoryLog
from tests.support.platter import Platter
from tests.support.unreadable import Unreadable

SEGMENT_BYTES = 400


class FileDisk(Disk):
    """A directory. `image` is what the files hold."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.directory = directory
        self.platter = Platter(directory, directory.with_suffix(".synced"), monkeypatch)
        self.unreadable = Unreadable(monkeypatch)
        self.opened: SegmentedLog | None = None

    def open(self) -> Damage | None:
        log = SegmentedLog(self.directory, segment_bytes=SEGMENT_BYTES, clock=lambda: 0.0)  # only the world lets time pass
        self.unreadable.clear()
        self.opened = log
        entries: list[Entry] = []
        while more := log.read(log.first.counter + len(entries), 1000, 1 << 20):
            entries += more
        self.image = Image(log.first, entries, log.promised, log.unclean, log.seal)
        self.rotten = log.damage is not None  # a bit beyond the seal does no harm
        return log.damage

    def lose_power(self, rng: random.Random) -> None:
        """What was synced is left, at times with more of the newest file, torn, or with the newest label."""
        newest = max(self.directory.glob("*.log"))
        data, label = newest.read_bytes(), (self.directory / "label").read_bytes()
        shutil.rmtree(self.directory)
        shutil.copytree(self.platter.shadow, self.directory)
        kept = self.directory / newest.name
        if rng.random() < 0.5 and kept.exists() and data.startswith(kept.read_bytes()):
            kept.write_bytes(data[: rng.randint(kept.stat().st_size, len(data))])
        if rng.random() < 0.5:
            (self.directory / "label").write_bytes(label)

    def rot(self, rng: random.Random) -> bool:
        """One bit of one file, or a byte that cannot be read. Nobody promises to notice it beyond the seal that a power cut leaves:
        that is the newest here."""
        path = rng.choice(sorted(self.directory.glob("*.log")))
        data = bytearray(path.read_bytes())
        if not data:
            return False
        place, bit = rng.randrange(len(data)), rng.randrange(16)
        if bit >= 8:
            self.unreadable.spoil(path, place)
            self.rotten = True
            return True
        data[place] ^= 1 << bit
        path.write_bytes(data)
        for each in (path, self.directory / "label"):
            shutil.copyfile(each, self.platter.shadow / each.name)
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

    @property
    def seal_lags(self) -> bool:
        assert self.files.seal_lags or not super().seal_lags
        return self.files.seal_lags

    def sync_seal(self) -> None:
        super().sync_seal()
        self.files.sync_seal()

    def crash(self, rng: random.Random, power: bool) -> None:
        """After a kill the files are as they are; after a power cut as they were synced."""
        self.files.close()
        self.at.opened = None
        self._operations.clear()
        if power:
            self.at.lose_power(rng)
