"""A disk as it is seen, and what a power cut leaves of it. Pure.

                     now          what the process sees, and what a kill leaves
    write ──▶ pending ──▶ durable     what was synced: of a file its bytes, of a folder its names
                     │
                     └── after a power cut: durable, and of what is pending nothing, all, or some

What may be lost is what POSIX allows, not what one file system does: a synced file has its name only when its folder was synced,
and sectors of what was written reach the disk in any order. Names of a folder do so in the order in which they were changed, and
often those of all folders together, as a journal keeps them; a rename is whole or not there.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.sim.power_cut.recorder import Kind, Operation

SECTOR_BYTES: Final = 512
SHARES: Final = (0.1, 0.5, 0.9)
"""Of the sectors that are pending, so many are lost."""


class Left(enum.Enum):
    """What becomes of what is pending."""

    NOTHING = "only what was synced"
    SOME = "what was synced, and some of the rest"
    ENDS = "what was synced, and of each write the last sector"
    ALL = "everything, as after a kill"


class File:
    """The bytes of a file, under any number of names."""

    def __init__(self) -> None:
        self.now, self.durable = bytearray(), bytearray()
        self.pending: list[tuple[int, bytes] | int] = []
        """What was written at an offset, or the size that was set."""

    def do(self, change: tuple[int, bytes] | int) -> None:
        """Write, or set the size."""
        _apply(self.now, change)
        self.pending.append(change)

    def sync(self) -> None:
        """What is pending is durable."""
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def left(self, what: Left, rng: random.Random) -> bytes:
        """Its bytes after the power came back."""
        if what in (Left.NOTHING, Left.ALL) or not self.pending:
            return bytes(self.now if what is Left.ALL else self.durable)
        found, lost = bytearray(self.durable), rng.choice(SHARES)
        for change in self.pending:
            if what is Left.ENDS:
                _apply(found, change if isinstance(change, int) else list(_sectors(*change))[-1])
                continue
            if isinstance(change, int):
                if rng.random() < lost and change < len(found):
                    break  # the rest came into blocks that the file does not have
                _apply(found, change)
                continue
            for offset, part in _sectors(*change):
                if rng.random() >= lost:
                    _apply(found, (offset, part))
        return bytes(found)


def _apply(data: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        del data[change:]
        data.extend(bytes(change - len(data)))
        return
    offset, new = change
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(new)] = new


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        size = SECTOR_BYTES - (offset + at) % SECTOR_BYTES
        yield offset + at, data[at : at + size]
        at += size


class Folder:
    """Names."""

    def __init__(self) -> None:
        self.now: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}


Change = tuple[Folder, str, "File | Folder | None"]
"""A name in a folder, and what it names from now on."""


class Disk:
    """What lies below one folder, which itself is there."""

    def __init__(self) -> None:
        self.root = Folder()
        self._files: dict[int, File] = {}
        """By their inodes' numbers in the file system that the process runs on."""
        self._renames: list[list[Change]] = []
        """Changes of names that are pending, in order; those of one list are made together."""
        self.syncs = 0

    # --- what happens

    def do(self, operation: Operation) -> None:
        """Take one operation."""
        kind, file = operation.kind, self._files.get(operation.inode)
        match kind:
            case Kind.OPENED:
                self._open(operation)
            case Kind.WRITTEN if file is not None:
                file.do((operation.value, operation.data))
            case Kind.RESIZED if file is not None:
                file.do(operation.value)
            case Kind.GROWN if file is not None and operation.value > len(file.now):
                file.do(operation.value)
            case Kind.SYNCED if file is not None:
                self.syncs += 1
                file.sync()
            case Kind.NAMES_SYNCED:
                self.syncs += 1
                folder = self.find(operation.path)
                assert isinstance(folder, Folder)
                self._sync_names(folder)
            case Kind.MADE:
                self._name((operation.path, Folder()))
            case Kind.UNLINKED | Kind.REMOVED:
                self._name((operation.path, None))
            case Kind.RENAMED:
                self._name((operation.path, None), (operation.other, self.find(operation.path)))
            case Kind.LINKED:
                self._name((operation.other, self.find(operation.path)))

    def _open(self, operation: Operation) -> None:
        if operation.value & 1:
            file = self._files[operation.inode] = File()
            self._name((operation.path, file))
        elif operation.value & 2:
            self._files[operation.inode].do(0)

    def _name(self, *changes: tuple[str, File | Folder | None]) -> None:
        group = [(self._folder_of(path), path.rpartition("/")[2], what) for path, what in changes]
        for change in group:
            _set(change, durable=False)
        self._renames.append(group)

    def _sync_names(self, folder: Folder) -> None:
        """What changed in this folder is durable, and in those that took part in a rename with it."""
        folders, taken = {id(folder)}, 0
        while taken != len(folders):
            taken = len(folders)
            for group in self._renames:
                if any(id(each) in folders for each, _, _ in group):
                    folders |= {id(each) for each, _, _ in group}
        rest = []
        for group in self._renames:
            if any(id(each) in folders for each, _, _ in group):
                for change in group:
                    _set(change, durable=True)
            else:
                rest.append(group)
        self._renames = rest

    def find(self, path: str) -> File | Folder:
        """What a path names now."""
        found: File | Folder = self.root
        for name in filter(None, path.split("/")):
            assert isinstance(found, Folder)
            found = found.now[name]
        return found

    def _folder_of(self, path: str) -> Folder:
        found = self.find(path.rpartition("/")[0])
        assert isinstance(found, Folder)
        return found

    def forget(self, inode: int) -> None:
        """This number is of another file now."""
        self._files.pop(inode, None)

    # --- what is left

    def now(self, path: str) -> bytes:
        """The bytes of a file as its process sees them; none: there is none."""
        try:
            found = self.find(path)
        except KeyError:
            return b""
        return bytes(found.now) if isinstance(found, File) else b""

    def durable(self, path: str) -> dict[str, bytes]:
        """The files of a folder that a power cut leaves in any case, with their durable bytes."""
        folder: File | Folder | None = self.root
        for name in path.split("/"):
            folder = folder.durable.get(name) if isinstance(folder, Folder) else None
        if not isinstance(folder, Folder):
            return {}
        return {name: bytes(file.durable) for name, file in sorted(folder.durable.items()) if isinstance(file, File)}

    def cut(self, what: Left, rng: random.Random) -> Disk:
        """The disk after its machine lost its power, or after a kill: what was pending then still is."""
        made, names = Disk(), len(self._renames)
        if what is Left.NOTHING:
            names = 0
        elif what is Left.SOME:
            names = rng.choice((0, names, rng.randint(0, names)))
        view: dict[int, dict[str, File | Folder]] = {}
        for change in self._left(names, what, rng):
            folder, name, new = change
            entries = view.setdefault(id(folder), dict(folder.durable))
            if new is None:
                entries.pop(name, None)
            else:
                entries[name] = new
        copies: dict[int, File | Folder] = {}

        def copied(each: File | Folder) -> File | Folder:
            if id(each) in copies:
                return copies[id(each)]
            if isinstance(each, File):
                copy = copies[id(each)] = File()
                copy.now = bytearray(each.left(what, rng))
                copy.durable = bytearray(each.durable if what is Left.ALL else copy.now)
                copy.pending = list(each.pending) if what is Left.ALL else []
                return copy
            folder = copies[id(each)] = Folder()
            for name, below in sorted(view.get(id(each), each.durable).items()):
                folder.now[name] = copied(below)
            folder.durable = dict(folder.now)
            return folder

        root = copied(self.root)
        assert isinstance(root, Folder)
        made.root = root
        if what is Left.ALL:
            made._keep_pending(self, copied)
        return made

    def _left(self, names: int, what: Left, rng: random.Random) -> list[Change]:
        """The first changes of names; of some all folders go by themselves: each has its own first changes, in order."""
        own = random.Random()
        own.setstate(rng.getstate())
        if what is not Left.SOME or own.random() < 0.5:
            return [change for group in self._renames[:names] for change in group]
        lost, found, ended = own.choice(SHARES), list[Change](), set[int]()
        for group in self._renames[:names]:
            folders = {id(folder) for folder, _, _ in group}
            if folders & ended or own.random() < lost:
                ended |= folders
            else:
                found += group
        return found

    def _keep_pending(self, other: Disk, copied: object) -> None:
        """After a kill names that no sync reached are still not durable."""
        assert callable(copied)
        for group in other._renames:
            self._renames.append([(copied(folder), name, None if new is None else copied(new)) for folder, name, new in group])
        seen: set[int] = set()

        def go(folder: Folder) -> None:
            if id(folder) in seen:
                return
            seen.add(id(folder))
            made = copied(folder)
            made.durable = {name: copied(each) for name, each in folder.durable.items()}
            for each in [*folder.durable.values(), *folder.now.values()]:
                if isinstance(each, Folder):
                    go(each)

        go(other.root)

    def write(self, folder: Path) -> None:
        """Make its files in an empty folder; what happens to them there is taken from then on."""
        self._files.clear()
        self._write(self.root, folder, {})

    def _write(self, names: Folder, folder: Path, written: dict[int, Path]) -> None:
        for name, each in names.now.items():
            path = folder / name
            if isinstance(each, Folder):
                path.mkdir()
                self._write(each, path, written)
            elif id(each) in written:
                path.hardlink_to(written[id(each)])
            else:
                path.write_bytes(each.now)
                written[id(each)] = path
                self._files[path.stat().st_ino] = each


def _set(change: Change, *, durable: bool) -> None:
    folder, name, what = change
    names = folder.durable if durable else folder.now
    if what is None:
        names.pop(name, None)
    else:
        names[name] = what
