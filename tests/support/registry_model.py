"""ZooKeeper as readers of the registry meet it: a tree with transactions, and watches that end with the connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.reader import Read, Reader, RequestKind
from pixiu.discovery.view import Scan


@dataclass
class Entry:
    data: bytes
    version: int
    modified: int
    children: int


@dataclass
class RegistryModel:
    """All znodes. `write` and `delete` tell the processes that watch."""

    tree: dict[str, Entry] = field(default_factory=dict)
    below: dict[str, set[str]] = field(default_factory=dict)
    zxid: int = 0
    processes: list[SimulatedProcess] = field(default_factory=list)

    def write(self, path: str, data: bytes = b"") -> None:
        """Create the znode and its parents, or replace its data."""
        place, _, name = path.rpartition("/")
        known = self.tree.get(path)
        if known is None and place and place not in self.tree:
            self.write(place)
        self.zxid += 1
        if known is None:
            self.tree[path] = Entry(data, 0, self.zxid, self.zxid)
            self.below.setdefault(place, set()).add(name)
            if place in self.tree:
                self.tree[place].children = self.zxid
        else:
            known.data, known.version, known.modified = data, known.version + 1, self.zxid
        self._tell(path, gone=False)

    def delete(self, path: str) -> None:
        """Remove a znode without children."""
        place, _, name = path.rpartition("/")
        self.zxid += 1
        del self.tree[path]
        self.below[place].remove(name)
        self.tree[place].children = self.zxid
        self._tell(path, gone=True)

    def _tell(self, path: str, *, gone: bool) -> None:
        for process in self.processes:
            if any(path == watched or path.startswith(f"{watched}/") for watched in process.watches):
                process.reader.heard(path, gone=gone)


class SimulatedProcess:
    """A process's reader, and what it asks of the registry."""

    def __init__(
        self, model: RegistryModel, root: str, roles: tuple[str, ...], random: Random, poll_interval_s: float = 60.0
    ) -> None:
        self.model, self.reader = model, Reader(root, roles, poll_interval_s, random.random)
        self.watches: set[str] = set()
        self.reads: list[float] = []
        self.found = Scan(())
        model.processes.append(self)

    def run(self, now: float) -> None:
        """Ask all that is due now."""
        while reads := self.reader.take(now):
            for read in reads:
                self.answer(read, now)
        self.found = self.reader.scan() or self.found

    def answer(self, read: Read, now: float) -> None:
        """Do one request."""
        self.ask(read, now)()

    def ask(self, read: Read, now: float) -> Callable[[], None]:
        """Have the registry do one request. What is returned hands on its answer."""
        reader = self.reader
        if read.kind is RequestKind.WATCH:
            self.watches.add(read.path)
            return partial(reader.watched, read)
        self.reads.append(now)
        entry = self.model.tree.get(read.path)
        if entry is None:
            return partial(reader.missing, read)
        if read.kind is RequestKind.COMPARE:
            return partial(reader.compared, read, entry.version, entry.modified, entry.children)
        if read.kind is RequestKind.LIST:
            return partial(reader.listed, read, sorted(self.model.below.get(read.path, ())), entry.children)
        return partial(reader.got, read, entry.data, entry.modified)

    def run_until(self, now: float, end: float) -> float:
        """Let time pass, from deadline to deadline."""
        while (due := max(self.reader.next_deadline(), now)) <= end:
            now = due
            self.run(now)
        return end

    def lose_connection(self) -> None:
        """Its watches are gone."""
        self.watches.clear()

    def connect(self, now: float) -> None:
        """The connection is there again."""
        self.reader.connected_again(now)


class Registrar:
    """Registers processes as `registry.membership` does."""

    def __init__(self, model: RegistryModel, root: str) -> None:
        self.model, self.root, self.sequence = model, root, 0
        self.paths: dict[str, Node] = {}

    def register(self, node: Node) -> str:
        """Its path."""
        path = f"{paths.node_prefix(self.root, node.role, node.partition)}{self.sequence:010}"
        self.sequence += 1
        self.set(path, node)
        return path

    def set(self, path: str, node: Node) -> None:
        """Other data; the marker is written behind it."""
        self.paths[path] = node
        self.model.write(path, node.to_json())
        self.announce(node.role)

    def expire(self, path: str) -> Node:
        """Its session ends: nobody writes a marker."""
        self.model.delete(path)
        return self.paths.pop(path)

    def announce(self, role: str) -> None:
        """Write the marker."""
        self.model.write(paths.changes(self.root, role))
