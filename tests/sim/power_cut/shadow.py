"""What is durable at each moment of a life, and what may be said of it: claims are checked against the disks when they are made."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cluster.replication.model import START, Position
from cluster.replication.storage.entry import HEAD_BYTES, decode_one
from cluster.replication.storage.label import SEAL_LAG_S, Label
from cluster.replication.storage.segment import SUFFIX, base_of
from pi.state import State
from pi.store.store import StateStore
from pixiu.errors import MalformedData, PixiuError
from pixiu.wire.levels import Level
from tests.sim.power_cut.callers import Confirmed
from tests.sim.power_cut.disk import Disk, Left
from tests.sim.power_cut.recorder import Kind, Operation
from tests.sim.power_cut.threads import DELAY_S
from tests.sim.power_cut.world import WATCH_S, Noted
from xiu.store.machine import settle
from xiu.store.store import Store

LATE_S: Final = SEAL_LAG_S + 20 * max(DELAY_S) + 2 * WATCH_S
"""A seal is durable so long after it was seen, at the latest."""


class Disks:
    """The disks of all machines, as a trace goes on."""

    def __init__(self, disks: Sequence[Disk]) -> None:
        self.disks = list(disks)

    def do(self, operation: Operation) -> None:
        """Take one operation."""
        if not operation.path:
            for disk in self.disks:
                disk.do(operation)
            return
        number, _, path = operation.path.partition("/")
        if operation.kind is Kind.OPENED and operation.value & 1:
            for disk in self.disks:
                disk.forget(operation.inode)
        self.disks[int(number)].do(operation._replace(path=path, other=operation.other.partition("/")[2]))


def end_of(files: dict[str, bytes]) -> Position:
    """The last position of the log in these files."""
    found = ((base, name) for name in files if (base := base_of(name)) is not None)
    bases = sorted(found, key=lambda each: each[0].counter)
    if not bases:
        return START
    last = bases[0][0]
    for base, name in bases:
        if base.counter != last.counter:
            break
        data, at = files[name], 0
        try:
            while at + HEAD_BYTES <= len(data):
                entry, at = decode_one(data, at, len(data))
                if entry.counter != last.counter + 1:
                    break
                last = entry.position
        except MalformedData:
            break
    return last


class Claims:
    """Looks at each note.

    Args:
        role: of the replicas.
        disks: as they are at that note.
        folder: for stores that are opened.
    """

    def __init__(self, role: str, disks: Disks, folder: Path) -> None:
        self._role, self._disks, self._folder = role, disks, folder
        self._seals: dict[int, list[tuple[float, int]]] = {}
        self._logs: dict[int, tuple[int, dict[str, bytes], int]] = {}
        """By machine, after so many syncs: only they change what is durable."""
        self._shorter: set[int] = set()
        """Files that were cut."""
        self.checked: dict[str, int] = {}

    def done(self, operation: Operation) -> Iterator[str]:
        """Look at a log that is shorter on its disk after this operation than before."""
        machine, _, path = operation.path.partition("/")
        if operation.kind is Kind.RESIZED:
            self._shorter.add(operation.inode)
        shorter = operation.kind is Kind.SYNCED and operation.inode in self._shorter and path.endswith(SUFFIX)
        if shorter or (operation.kind is Kind.NAMES_SYNCED and path == "replica/log"):
            self._shorter.discard(operation.inode)
            yield from self._sealed(int(machine))

    def problems(self, note: Noted) -> Iterator[str]:
        """What is claimed and is not so."""
        self.checked[note.what] = self.checked.get(note.what, 0) + 1
        match note.what:
            case "confirmed":
                yield from self._confirmed(note.value, note.machine)
            case "matched":
                epoch, matched = note.value
                if (end := self._end(note.machine)) < matched:
                    yield f"machine {note.machine} acknowledged entry {matched} to its leader, and its disk has {end}"
                yield from self._promise(note.machine, epoch, "acknowledged something")
                yield from self._sealed(note.machine)
            case "flushed":
                if (has := self._state(note.machine)) < note.value:
                    yield f"machine {note.machine} says its state is durable up to {note.value}, and its disk has it up to {has}"
            case "opened":
                label = self._label(note.machine)
                if label is not None and not label.unclean and label.seal.counter < note.value:
                    yield (
                        f"machine {note.machine} has opened its log, of which {note.value} entries may have been acknowledged, "
                        f"with a seal of {label.seal.counter} on its disk"
                    )
            case "seal":
                self._seals.setdefault(note.machine, []).append((note.at_s, note.value))
                yield from self._sealed(note.machine)

    def _label(self, machine: int) -> Label | None:
        return Label.decode(self._durable(machine)[0].get("label", b""))

    def _end(self, machine: int) -> int:
        return self._durable(machine)[1]

    def _durable(self, machine: int) -> tuple[dict[str, bytes], int]:
        """The files of a log that a power cut leaves in any case, and the counter of its last entry."""
        disk = self._disks.disks[machine]
        syncs, files, end = self._logs.get(machine, (-1, {}, 0))
        if syncs != disk.syncs:
            files = disk.durable("replica/log")
            end = end_of(files).counter
            self._logs[machine] = disk.syncs, files, end
        return files, end

    def _promise(self, machine: int, epoch: int, did: str) -> Iterator[str]:
        label = self._label(machine)
        if label is None or label.promised < epoch:
            has = label.promised if label is not None else "none"
            yield f"machine {machine} {did} in epoch {epoch}, and the promise on its disk is {has}"

    def _sealed(self, machine: int) -> Iterator[str]:
        """Nothing is sealed that is not there: after a power cut that would be damage. Also not in a label that is only written."""
        written = self._disks.disks[machine].now("replica/log/label")
        for label in (self._label(machine), Label.decode(written)):
            if label is None or label.unclean or label.resetting != START:
                continue
            if (end := self._end(machine)) < label.seal.counter:
                yield f"the seal on the disk of machine {machine} is {label.seal.counter}, and its log ends at {end}"
                return

    def _confirmed(self, told: Confirmed, leader: int) -> Iterator[str]:
        if told.counter:
            having = [number for number in range(len(self._disks.disks)) if self._end(number) >= told.counter]
            if told.level is Level.REPLICATED and len(having) < max(told.copies, 1):
                yield f"{told.copies} copies of entry {told.counter} are told of, and {len(having)} disks have it"
            if leader not in having:
                yield f"entry {told.counter} is confirmed {told.level.name}, and its leader's disk does not have it"
        yield from self._promise(leader, told.epoch, "confirmed something")
        yield from self._sealed(leader)

    def _state(self, machine: int) -> int:
        """Up to where the state is durable."""
        where = self._folder / "state"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        try:
            self._disks.disks[machine].cut(Left.NOTHING, random.Random(0)).write(where)
            if self._role == "pi":
                store = StateStore(where / "inboxes", 64 << 20)
                try:
                    return State(store, max_heads=2).applied.counter
                finally:
                    store.close()
            settle(where / "store")
            opened = Store(where / "store", memtable_bytes=1 << 20, cache_bytes=1 << 20)
            try:
                return opened.flushed
            finally:
                opened.close()
        except PixiuError:
            return -1
        finally:
            shutil.rmtree(where, ignore_errors=True)

    def late_seals(self, machine: int, now_s: float) -> Iterator[str]:
        """Of a power cut now: the seal that is left is not older than it may be."""
        label = self._label(machine)
        if label is None:
            return
        seen = self._seals.get(machine, [])
        late = [index for index, (at_s, _) in enumerate(seen) if at_s < now_s - LATE_S]
        if late and label.seal.counter < (least := min(seal for _, seal in seen[late[-1] :])):
            yield f"machine {machine} has sealed {least} for long, and the seal on its disk is {label.seal.counter}"
