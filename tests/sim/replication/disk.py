"""A log in memory over a page cache over a disk: it can lose what was not synced, be full, and rot.

MemoryLog      what this start wrote and did not sync     gone, or in the cache, after a kill
Disk.cache     what earlier starts wrote                  read by the next start; gone after a power cut
Disk.seals     what groups wrote into the label           the last is read by the next start; any may be there after a power cut
Disk.image     the platter                                what a power cut leaves at least
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.replication.model import START, Damage, Entry, Position
from pixiu.errors import DiskFull, LogDamaged


@dataclass
class Image:
    """What lies on a disk, or in memory: the same fields, behind or ahead of each other."""

    first: Position = START
    entries: list[Entry] = field(default_factory=list)
    promised: int = 0
    unclean: bool = False
    seal: Position = START

    @property
    def last(self) -> Position:
        return self.entries[-1].position if self.entries else self.first

    def apply(self, operation: tuple[Any, ...]) -> None:
        name, value = operation
        if name == "append":
            self.entries.extend(value)
        elif name == "cut":
            del self.entries[value - self.first.counter :]
            if self.seal.counter > value:
                self.seal = self.last
        elif name == "reset":
            self.first, self.entries, self.seal = value, [], value
        elif name == "trim":
            keep = value - self.first.counter
            self.first = self.entries[keep - 1].position
            del self.entries[:keep]
        elif name == "promise":
            self.promised = max(self.promised, value)
        else:
            self.unclean = value


class Disk:
    """One replica's. `memory` is what the core sees through `MemoryLog`; `image` is what a power cut leaves at least."""

    def __init__(self) -> None:
        self.image = Image()
        self.cache: list[tuple[str, Any]] = []
        """What killed processes handed to the system and nobody synced."""
        self.seals: list[Position] = []
        """Seals that are written and not synced, rising, above that of the image."""
        self.trusts_cache = False
        """A fault: a start takes what it reads for synced, and a sync looks only at what this start wrote."""
        self.cuts_at_seal = False
        """A fault: a start takes what stands behind the seal for torn."""
        self.full = False
        """No entry can be written."""
        self.incarnation = 0
        self.flushed = 0
        """The state is durable up to here."""
        self.rotten = False
        """Acknowledged entries were destroyed, and have not been brought back yet: what the simulation knows."""

    def rot(self, rng: random.Random) -> bool:
        """Destroy acknowledged entries: the tail, or one in the middle (with which all behind it is unreadable). Nobody promises to
        notice it beyond the seal that a power cut leaves."""
        image = self.image
        sealed = image.seal.counter - image.first.counter
        if sealed < 1:
            return False
        del image.entries[rng.randrange(sealed) :]
        self.cache.clear()  # what was behind it cannot be read any more
        self.rotten = True
        return True

    def open(self) -> Damage | None:
        """What a start finds. What stands behind the seal, the seal and the mark are durable before anything else happens."""
        image = self.image
        self.sync_seal()
        if not self.trusts_cache:
            self.write_back(len(self.cache))
        if self.cuts_at_seal:
            del image.entries[max(image.seal.counter - image.first.counter, 0) :]
        if image.last.counter >= image.seal.counter:
            return None
        damage = Damage(image.last, image.seal, "entries below the seal are missing")
        image.unclean, image.seal = True, image.last
        return damage

    def write_back(self, count: int) -> None:
        """The oldest changes in the cache reach the platter."""
        for operation in self.cache[:count]:
            self.apply(operation)
        del self.cache[:count]

    def apply(self, operation: tuple[str, Any]) -> None:
        """A change reaches the platter. But for entries that come or go it is a change of the label, which is synced at once."""
        if operation[0] not in ("append", "trim"):
            self.sync_seal()
        self.image.apply(operation)

    def write_seal(self) -> None:
        """A group's entries are on the platter, and its seal is in the label."""
        written = self.seals[-1] if self.seals else self.image.seal
        if self.image.last.counter > written.counter:
            self.seals.append(self.image.last)

    def sync_seal(self) -> None:
        """What is in the label is on the platter."""
        if self.seals:
            self.image.seal = self.seals[-1]
            self.seals.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Of what is in the cache, the platter has some; of the seals any."""
        self.write_back(rng.randint(0, len(self.cache)))
        self.cache.clear()
        del self.seals[rng.randint(0, len(self.seals)) :]
        self.sync_seal()
        assert self.rotten or self.image.seal.counter <= self.image.last.counter, "a seal leads the entries"


class MemoryLog:
    """The log of one start, over a disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        image = disk.image
        self._now = Image(image.first, list(image.entries), image.promised, image.unclean)
        for operation in disk.cache:
            self._now.apply(operation)
        self._operations: list[tuple[str, Any]] = []
        self.issued = 0
        """Operations so far."""
        self.cold_to = 0
        """What lies before this was not read since the start."""
        self.rotten: tuple[int, int] | None = None
        """An old segment that cannot be read any more: the first and the last counter in it."""
        self._durable = 0

    # --- the protocol

    @property
    def first(self) -> Position:
        return self._now.first

    @property
    def last(self) -> Position:
        return self._now.last

    @property
    def promised(self) -> int:
        return self._now.promised

    @property
    def unclean(self) -> bool:
        return self._now.unclean

    @property
    def entries(self) -> list[Entry]:
        return self._now.entries

    def is_ready(self, counter: int) -> bool:
        return counter >= self.cold_to

    def epoch_at(self, counter: int) -> int | None:
        self._look(counter)
        index = counter - self._now.first.counter
        if index == 0:
            return self._now.first.epoch
        return self._now.entries[index - 1].epoch if 0 < index <= len(self._now.entries) else None

    def _look(self, counter: int) -> None:
        """Raises LogDamaged."""
        if self.rotten is not None and self.rotten[0] <= counter <= self.rotten[1]:
            raise LogDamaged("a bit was flipped", self.rotten[1])

    def kept_within(self, max_bytes: int) -> int:
        return self.first.counter

    def start_of_epoch(self, counter: int) -> int:
        epoch = self.epoch_at(counter)
        while counter - 1 > self.first.counter and self.epoch_at(counter - 1) == epoch:
            counter -= 1
        return counter

    def read(self, after: int, max_entries: int, max_bytes: int) -> Sequence[Entry]:
        index = after - self._now.first.counter
        assert index >= 0
        self._look(after + 1)
        end = index + max_entries
        if self.rotten is not None and after < self.rotten[0]:  # no read goes beyond a segment
            end = min(end, self.rotten[0] - 1 - self._now.first.counter)
        return self._now.entries[index:end]

    def _do(self, name: str, value: Any) -> None:
        self._now.apply((name, value))
        self._operations.append((name, value))
        self.issued += 1

    def append(self, entries: Sequence[Entry]) -> None:
        assert entries[0].counter == self.last.counter + 1
        if self.disk.full:
            raise DiskFull("no space left for the log")
        self._do("append", list(entries))

    def cut(self, after: int) -> None:
        assert after >= self.first.counter
        self._do("cut", after)

    def reset(self, position: Position) -> None:
        self._do("reset", position)
        self.sync(self.issued)  # the log's own is durable when it returns, before the state is replaced

    def trim(self, up_to: int) -> None:
        if self.first.counter < up_to <= self.last.counter:
            self._do("trim", up_to)
        if self.rotten is not None and up_to >= self.rotten[1]:
            self.rotten = None

    def promise(self, epoch: int) -> None:
        if epoch > self.promised:
            self._do("promise", epoch)

    def set_unclean(self, unclean: bool) -> None:
        self._do("mark", unclean)

    # --- the disk

    def sync(self, up_to: int) -> None:
        """The operations up to this number are durable, and what they wrote is sealed, in a label that may lag."""
        disk, count = self.disk, up_to - self._durable
        if count <= 0:
            return
        operations = self._operations[:count]
        del self._operations[:count]
        self._durable = up_to
        wrote = any(name in ("append", "cut", "reset") for name, _ in operations)
        if wrote or not disk.trusts_cache:
            disk.write_back(len(disk.cache))
            for operation in operations:
                disk.apply(operation)
            disk.write_seal()
            if any(name in ("promise", "mark") for name, _ in operations):  # it is in the same sector
                disk.sync_seal()
        else:  # no file is dirty: the label alone is written, with the end that this start sees
            for operation in operations:
                if operation[0] == "trim":
                    disk.cache.append(operation)
                else:
                    disk.apply(operation)
            disk.sync_seal()
            disk.image.seal = self._now.last

    @property
    def seal_lags(self) -> bool:
        """Whether a power cut may leave an older seal."""
        return bool(self.disk.seals)

    def sync_seal(self) -> None:
        """The last seal that was written is on the platter."""
        self.disk.sync_seal()

    def crash(self, rng: random.Random, power: bool) -> None:
        """The end of a start. A kill leaves what was handed to the system, whole; a power cut may tear that too."""
        written = self._operations[: rng.randint(0, len(self._operations))]
        self._operations.clear()
        if not power:
            self.disk.cache += written
            return
        self.disk.lose_power(rng)
        for name, value in written:
            torn = name == "append" and rng.random() < 0.5
            self.disk.apply((name, value[: rng.randint(0, len(value))] if torn else value))
            if torn:
                break
