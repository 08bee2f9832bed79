"""What a process watches and reads in the registry, and when. Pure.

    start ───────────▶ watch roles and layout ─▶ note markers ─▶ list and get everything
    a watch fires ───▶ get that one node; nothing, where it went
    poll ────────────▶ compare the layout, the markers and `COMPARED` others by their Stat ─▶ get what differs
    connected again ─▶ watch again; within `RESUME_S` compare the layout and the markers
                             └─ a marker was written more often than was heard ─▶ compare its role, `PACED_PER_S`

One recursive watch a role tells of everything below it. A *marker* (`ROOT/ROLE/changes`) is written after every change of a
node of the role, so that its version, against the changes heard of it, says in one read whether any was missed. What a
marker cannot say (a session that ended, a writer of an older version) polls find, a few nodes at a time; heartbeats know of deaths
long before.

Source: docs/registry.md, "What a process watches and reads".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.view import Layout, Scan
from pixiu.errors import MalformedData

POLL_JITTER: Final = 0.1
"""Polls come up to this part early or late, so that processes that started together do not read together."""
COMPARED: Final = 30
"""Directories and nodes that a poll compares beside layout and markers; the next poll goes on behind them."""
COMPARED_DIRECTORIES: Final = 20
"""Of those, at most so many are directories while nodes are left to compare."""
RESUME_S: Final = 10.0
"""Processes that lost their connection together compare within this time, each at a moment of its own."""
PACED_PER_S: Final = 20.0
"""Reads a second of a role in which changes were missed."""


class Kind(IntEnum):
    """What to do with a path, in the order in which it is done."""

    WATCH = 0
    """Have everything at and below it told."""
    COMPARE = 1
    """Read its Stat."""
    LIST = 2
    GET = 3


@dataclass(frozen=True, slots=True)
class Read:
    """One request to the registry."""

    kind: Kind
    path: str


@dataclass(slots=True)
class _Entry:
    """A node of a process."""

    node: Node | None = None
    """None: its data was never readable."""
    zxid: int = 0
    """Of the change that made the data; 0: not read yet."""


@dataclass(slots=True)
class _Directory:
    """What holds the nodes of a role or of one of its partitions."""

    role: str
    partition: int
    zxid: int = 0
    """Of the last change of its children that a list showed."""
    entries: dict[str, _Entry] = field(default_factory=dict)


class Reader:
    """What is known of the registry, and what of it is to be read next. Times are monotonic seconds.

    Args:
        root: below which everything lies.
        roles: which roles to see.
        poll_interval_s: between two polls, seconds.
        uniform: a random number in [0, 1).

    Source: docs/registry.md.
    """

    def __init__(self, root: str, roles: Iterable[str], poll_interval_s: float, uniform: Callable[[], float]) -> None:
        self._root = root
        self._roles = {paths.role_directory(root, role): role for role in roles}
        self._markers: dict[str, int | None] = {paths.changes(root, role): None for role in self._roles.values()}
        """Marker → how often it was written, as far as was heard; None: not known yet."""
        self._layout_path = paths.layout(root)
        self._poll_interval_s, self._uniform = poll_interval_s, uniform
        self._layout: Layout | None = None
        self._layout_zxid = 0
        self._partitions = {path: 0 for path, role in self._roles.items() if role not in paths.UNPARTITIONED_ROLES}
        """Directory of a partitioned role → the last change of its partitions that a list showed."""
        self._directories: dict[str, _Directory] = {
            path: _Directory(role, paths.NO_PARTITION) for path, role in self._roles.items() if path not in self._partitions
        }
        self._due: dict[Read, None] = {}
        self._in_flight: set[Read] = set()
        self._paced: dict[Read, None] = {}
        self._paced_at = 0.0
        self._poll_at = float("inf")
        self._resume_at = float("inf")
        self._turn = 0
        """How many directories and nodes polls have compared."""
        self._changed = False
        self.malformed = 0
        """Data of nodes or of the layout that could not be read; what was known before stays."""

    def begin(self, now: float) -> None:
        """Watch and read everything."""
        self._watch()
        self._ask(Kind.COMPARE, *self._markers)
        self._ask(Kind.LIST, *self._roles)
        self._ask(Kind.GET, self._layout_path)
        self._poll_at = now + self._jittered()

    def connected_again(self, now: float) -> None:
        """Watches went with the connection before; what was under way then is asked for again."""
        for read in self._in_flight:
            self._due[read] = None
        self._in_flight.clear()
        self._watch()
        self._resume_at = now + RESUME_S * self._uniform()

    def poll_within(self, seconds: float, now: float) -> None:
        """Somebody knows more than the view shows."""
        self._poll_at = min(self._poll_at, now + seconds)

    def next_deadline(self) -> float:
        """When `take` may have something that it has not now."""
        if self._due:
            return 0.0
        return min(self._poll_at, self._resume_at, self._paced_at if self._paced else float("inf"))

    def take(self, now: float) -> list[Read]:
        """What to ask now: requests of one kind, to be settled before this is called again."""
        if now >= self._poll_at:
            self._poll_at = now + self._jittered()
            self._ask(Kind.COMPARE, self._layout_path, *self._markers, *self._next_compared())
        if now >= self._resume_at:
            self._resume_at = float("inf")
            self._ask(Kind.COMPARE, self._layout_path, *self._markers)
        if self._paced and now >= self._paced_at:
            self._paced_at = now + 1 / PACED_PER_S
            read = next(iter(self._paced))
            del self._paced[read]
            self._due[read] = None
        if not self._due:
            return []
        kind = min(read.kind for read in self._due)
        taken = [read for read in self._due if read.kind is kind]
        for read in taken:
            del self._due[read]
        self._in_flight.update(taken)
        return taken

    def scan(self) -> Scan | None:
        """What the registry holds, if that is another thing than at the last call and nothing of it is still to be read."""
        if not self._changed or self._due:
            return None
        return self.snapshot()

    def snapshot(self) -> Scan:
        """What the registry holds, as far as it was read."""
        self._changed = False
        found = (entry.node for directory in self._directories.values() for entry in directory.entries.values())
        return Scan(tuple(node for node in found if node is not None), self._layout)

    # --- answers

    def failed(self, read: Read) -> None:
        """No answer came: it is asked again."""
        if read in self._in_flight:
            self._in_flight.remove(read)
            self._due[read] = None

    def watched(self, read: Read) -> None:
        """A watch is set."""
        self._in_flight.discard(read)

    def missing(self, read: Read) -> None:
        """There is no such node."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        path = read.path
        if path in self._markers:
            self._note_marker(path, 0)
        elif path != self._layout_path:
            self._drop(path)

    def compared(self, read: Read, version: int, modified_zxid: int, children_zxid: int) -> None:
        """A node's Stat: the version of its data, the transactions that changed its data and its children."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        path = read.path
        directory, entry = self._directories.get(path), self._entry(path)
        if path in self._markers:
            self._note_marker(path, version + 1)
        elif path == self._layout_path:
            if modified_zxid != self._layout_zxid:
                self._ask(Kind.GET, path)
        elif directory is not None or path in self._partitions:
            if children_zxid != (directory.zxid if directory is not None else self._partitions[path]):
                self._ask(Kind.LIST, path)
        elif entry is not None and modified_zxid != entry.zxid:
            self._ask(Kind.GET, path)

    def listed(self, read: Read, names: Iterable[str], children_zxid: int) -> None:
        """The children of a directory, and the transaction that changed them last."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        path = read.path
        if path in self._partitions:
            self._partitions[path] = children_zxid
            found = {f"{path}/{name}": number for name in names if (number := paths.partition_of(name)) is not None}
            role = self._roles[path]
            for gone in [old for old, known in self._directories.items() if known.role == role and old not in found]:
                self._drop(gone)
            for new in found.keys() - self._directories.keys():
                self._add_partition(new, role, found[new])
        elif path in self._directories:
            directory = self._directories[path]
            directory.zxid = children_zxid
            there = {name for name in names if paths.replica_of(name) is not None}
            for name in directory.entries.keys() - there:
                self._drop(f"{path}/{name}")
            self._ask(Kind.GET, *(f"{path}/{name}" for name in sorted(there - directory.entries.keys())))

    def got(self, read: Read, data: bytes, modified_zxid: int) -> None:
        """The data of the layout or of a node."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        if read.path == self._layout_path:
            self._layout_zxid = modified_zxid
            try:
                self._layout = Layout.from_json(data)
                self._changed = True
            except MalformedData:
                self.malformed += 1
            return
        place, _, name = read.path.rpartition("/")
        directory, replica = self._directories.get(place), paths.replica_of(name)
        if directory is None or replica is None:
            return
        entry = directory.entries.setdefault(name, _Entry())
        entry.zxid = modified_zxid
        try:
            node = Node.from_json(data, replica=replica)
        except MalformedData:
            self.malformed += 1
            return
        if (node.role, node.partition) != (directory.role, directory.partition):
            self.malformed += 1
        elif node != entry.node:
            entry.node = node
            self._changed = True

    def unreadable(self, read: Read) -> None:
        """There is more data than a node may have."""
        self._in_flight.discard(read)
        self.malformed += 1

    # --- watches

    def heard(self, path: str, *, gone: bool) -> None:
        """A watch told that something came or changed, or that it is gone."""
        place, _, name = path.rpartition("/")
        if path in self._markers:
            count = self._markers[path]
            self._markers[path] = 0 if gone else count + 1 if count is not None else None
        elif path == self._layout_path:
            if not gone:
                self._ask(Kind.GET, path)
        elif path in self._roles or (place in self._partitions and paths.partition_of(name) is not None):
            self._ask(Kind.LIST, path if path in self._roles else place)
        elif paths.replica_of(name) is not None and place in self._directories:
            # A list that is under way may be older than this.
            self.failed(Read(Kind.LIST, place))
            if gone:
                self._drop(path)
            else:
                self._ask(Kind.GET, path)
        elif paths.replica_of(name) is not None and place.rpartition("/")[0] in self._partitions:
            self._ask(Kind.LIST, place.rpartition("/")[0])

    # --- inside

    def _ask(self, kind: Kind, *wanted: str) -> None:
        for path in wanted:
            self._due[Read(kind, path)] = None

    def _watch(self) -> None:
        self._ask(Kind.WATCH, self._layout_path, *self._roles)

    def _jittered(self) -> float:
        return self._poll_interval_s * (1 - POLL_JITTER + 2 * POLL_JITTER * self._uniform())

    def _entry(self, path: str) -> _Entry | None:
        place, _, name = path.rpartition("/")
        directory = self._directories.get(place)
        return directory.entries.get(name) if directory is not None else None

    def _add_partition(self, path: str, role: str, partition: int) -> None:
        self._directories[path] = _Directory(role, partition)
        self._ask(Kind.LIST, path)

    def _drop(self, path: str) -> None:
        """It is not there: nor is anything below it, and nothing of it is to be read."""
        place, _, name = path.rpartition("/")
        if path in self._directories:
            directory = self._directories[path]
            self._changed = self._changed or bool(directory.entries)
            if directory.partition == paths.NO_PARTITION:
                directory.entries.clear()
                directory.zxid = 0
            else:
                del self._directories[path]
        elif (parent := self._directories.get(place)) is not None and (entry := parent.entries.pop(name, None)) is not None:
            self._changed = self._changed or entry.node is not None
        for kind in (Kind.COMPARE, Kind.GET):
            read = Read(kind, path)
            self._due.pop(read, None)
            self._paced.pop(read, None)
            self._in_flight.discard(read)

    def _note_marker(self, path: str, count: int) -> None:
        """Compare the whole role where more was written than was heard of."""
        before, self._markers[path] = self._markers[path], count
        if before is None or before == count:
            return
        place = path.rpartition("/")[0]
        below = [one for one in self._directories if one == place or one.startswith(f"{place}/")]
        wanted = ([place] if place in self._partitions else []) + below
        for directory in wanted:
            self._paced[Read(Kind.COMPARE, directory)] = None
        entries = [(f"{one}/{name}", entry) for one in below for name, entry in self._directories[one].entries.items()]
        for node, _ in sorted(entries, key=_running_last):
            self._paced[Read(Kind.COMPARE, node)] = None

    def _next_compared(self) -> Iterator[str]:
        """The directories and nodes whose turn it is."""
        directories = [*self._partitions, *self._directories]
        nodes = [f"{path}/{name}" for path, directory in self._directories.items() for name in directory.entries]
        share = max(COMPARED_DIRECTORIES, COMPARED - len(nodes))
        turn, self._turn = self._turn, self._turn + 1
        return chain(_in_turn(directories, turn, share), _in_turn(nodes, turn, COMPARED - min(share, len(directories))))


def _in_turn(items: list[str], turn: int, count: int) -> Iterator[str]:
    """`count` of the items, from where the turn before ended."""
    start = turn * count % len(items) if items else 0
    return islice(chain(items[start:], items[:start]), min(count, len(items)))


def _running_last(item: tuple[str, _Entry]) -> bool:
    """Those that were not Running are likely to have changed."""
    return item[1].node is not None and item[1].node.state.value == "Running"
