"""Decides what a process watches and reads in the registry, and when. Pure.

    start ───────────▶ watch roles and layout ─▶ note markers ─▶ list and get everything
    a watch fires ───▶ get that one node; nothing if it was deleted
    poll ────────────▶ compare the layout, the markers and `COMPARED` others by their Stat ─▶ get what differs
    connected again ─▶ watch again; within `RESUME_S` compare the layout and the markers
                             └─ a marker shows more writes than were reported ─▶ compare its role, `PACED_PER_S`

One recursive watch per role reports all changes below it. A *marker* (`ROOT/ROLE/changes`) is written after every change of a node
of the role, so that one read of its version, compared with the changes reported, shows whether any was missed. Polls find what a
marker cannot show (a session that ended, a write of it that failed), a few nodes at a time; heartbeats notice deaths much
earlier.

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
from pixiu.rpc.deadline_timer import NEVER

POLL_JITTER: Final = 0.1
"""Share by which polls come early or late, so that processes that started together do not read together."""
COMPARED: Final = 30
"""Directories and nodes that a poll compares besides layout and markers; the next poll continues after them."""
COMPARED_DIRECTORIES: Final = 20
"""Limit of directories among those while nodes are left to compare."""
RESUME_S: Final = 10.0
"""Time within which processes that lost their connection together compare, each at its own random moment, seconds."""
PACED_PER_S: Final = 20.0
"""Reads per second of a role in which changes were missed."""


class RequestKind(IntEnum):
    """Kind of request for a path, in the order in which they are done."""

    WATCH = 0
    """Watch everything at and below the path."""
    COMPARE = 1
    """Read the node's Stat."""
    LIST = 2
    GET = 3


@dataclass(frozen=True, slots=True)
class Read:
    """One request to the registry."""

    kind: RequestKind
    path: str


@dataclass(slots=True)
class _Entry:
    """A node of a process."""

    node: Node | None = None
    """None: its data was never readable."""
    zxid: int = 0
    """Transaction that wrote the data; 0: not read yet."""


@dataclass(slots=True)
class _Directory:
    """Directory of the nodes of a role or of one of its partitions."""

    role: str
    partition: int
    zxid: int = 0
    """Transaction of the last change of its children that a list showed."""
    entries: dict[str, _Entry] = field(default_factory=dict)


class Reader:
    """Known content of the registry, and the reads that are due. Times are monotonic seconds.

    Args:
        root: path above all nodes.
        roles: the roles to read.
        poll_interval_s: interval between polls, seconds.
        uniform: returns random numbers in [0, 1).

    Source: docs/registry.md.
    """

    def __init__(self, root: str, roles: Iterable[str], poll_interval_s: float, uniform: Callable[[], float]) -> None:
        self._roles = {paths.role_directory(root, role): role for role in roles}
        self._markers: dict[str, int | None] = {paths.changes(root, role): None for role in self._roles.values()}
        """Marker → number of its writes, as far as reported; None: not known yet."""
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
        self._poll_at = NEVER
        self._resume_at = NEVER
        self._turn = 0
        """Number of directories and nodes that polls have compared."""
        self._changed = False
        self.malformed = 0
        """Number of nodes or layouts whose data could not be read; the earlier data stay."""

    def begin(self, now: float) -> None:
        """Request to watch and read everything."""
        self._watch()
        self._ask(RequestKind.COMPARE, *self._markers)
        self._ask(RequestKind.LIST, *self._roles)
        self._ask(RequestKind.GET, self._layout_path)
        self._poll_at = now + self._jittered()

    def connected_again(self, now: float) -> None:
        """Set the watches again, which ended with the connection, and repeat requests that were under way."""
        for read in self._in_flight:
            self._due[read] = None
        self._in_flight.clear()
        self._watch()
        self._resume_at = now + RESUME_S * self._uniform()

    def poll_within(self, seconds: float, now: float) -> None:
        """Poll within this time, because somebody knows more than the view shows."""
        self._poll_at = min(self._poll_at, now + seconds)

    def next_deadline(self) -> float:
        """Time at which `take` may have more than now."""
        if self._due:
            return 0.0
        return min(self._poll_at, self._resume_at, self._paced_at if self._paced else NEVER)

    def take(self, now: float) -> list[Read]:
        """Take the requests to send now: all of one kind, to be settled before the next call."""
        if now >= self._poll_at:
            self._poll_at = now + self._jittered()
            self._ask(RequestKind.COMPARE, self._layout_path, *self._markers, *self._next_compared())
        if now >= self._resume_at:
            self._resume_at = NEVER
            self._ask(RequestKind.COMPARE, self._layout_path, *self._markers)
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
        """The content of the registry, if it has changed since the last call and nothing is left to read; else None."""
        if not self._changed or self._due:
            return None
        return self.snapshot()

    def snapshot(self) -> Scan:
        """The content of the registry, as far as it was read."""
        self._changed = False
        found = (entry.node for directory in self._directories.values() for entry in directory.entries.values())
        return Scan(tuple(node for node in found if node is not None), self._layout)

    # --- answers

    def failed(self, read: Read) -> None:
        """Note that a request got no answer: it is repeated."""
        if read in self._in_flight:
            self._in_flight.remove(read)
            self._due[read] = None

    def watched(self, read: Read) -> None:
        """Note that a watch is set."""
        self._in_flight.discard(read)

    def missing(self, read: Read) -> None:
        """Note that a node does not exist."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        path = read.path
        if path in self._markers:
            self._note_marker(path, 0)
        elif path != self._layout_path:
            self._drop(path)

    def compared(self, read: Read, version: int, modified_zxid: int, children_zxid: int) -> None:
        """Take a node's Stat: the version of its data, the transactions that changed its data and its children."""
        if read not in self._in_flight:
            return
        self._in_flight.remove(read)
        path = read.path
        directory, entry = self._directories.get(path), self._entry(path)
        if path in self._markers:
            self._note_marker(path, version + 1)
        elif path == self._layout_path:
            if modified_zxid != self._layout_zxid:
                self._ask(RequestKind.GET, path)
        elif directory is not None or path in self._partitions:
            if children_zxid != (directory.zxid if directory is not None else self._partitions[path]):
                self._ask(RequestKind.LIST, path)
        elif entry is not None and modified_zxid != entry.zxid:
            self._ask(RequestKind.GET, path)

    def listed(self, read: Read, names: Iterable[str], children_zxid: int) -> None:
        """Take the children of a directory, and the transaction that changed them last."""
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
            self._ask(RequestKind.GET, *(f"{path}/{name}" for name in sorted(there - directory.entries.keys())))

    def got(self, read: Read, data: bytes, modified_zxid: int) -> None:
        """Take the data of the layout or of a node."""
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
        """Note that a node has more data than allowed."""
        self._in_flight.discard(read)
        self.malformed += 1

    # --- watches

    def heard(self, path: str, *, gone: bool) -> None:
        """Take a watch's report that a node was created or changed, or that it is gone."""
        place, _, name = path.rpartition("/")
        if path in self._markers:
            count = self._markers[path]
            self._markers[path] = 0 if gone else count + 1 if count is not None else None
        elif path == self._layout_path:
            if not gone:
                self._ask(RequestKind.GET, path)
        elif path in self._roles or (place in self._partitions and paths.partition_of(name) is not None):
            self._ask(RequestKind.LIST, path if path in self._roles else place)
        elif paths.replica_of(name) is not None and place in self._directories:
            # A list that is under way may be older than this.
            self.failed(Read(RequestKind.LIST, place))
            if gone:
                self._drop(path)
            else:
                self._ask(RequestKind.GET, path)
        elif paths.replica_of(name) is not None and place.rpartition("/")[0] in self._partitions:
            self._ask(RequestKind.LIST, place.rpartition("/")[0])

    # --- inside

    def _ask(self, kind: RequestKind, *wanted: str) -> None:
        for path in wanted:
            self._due[Read(kind, path)] = None

    def _watch(self) -> None:
        self._ask(RequestKind.WATCH, self._layout_path, *self._roles)

    def _jittered(self) -> float:
        return self._poll_interval_s * (1 - POLL_JITTER + 2 * POLL_JITTER * self._uniform())

    def _entry(self, path: str) -> _Entry | None:
        place, _, name = path.rpartition("/")
        directory = self._directories.get(place)
        return directory.entries.get(name) if directory is not None else None

    def _add_partition(self, path: str, role: str, partition: int) -> None:
        self._directories[path] = _Directory(role, partition)
        self._ask(RequestKind.LIST, path)

    def _drop(self, path: str) -> None:
        """Forget a node that does not exist, with everything below it and all reads of it."""
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
        for kind in (RequestKind.COMPARE, RequestKind.GET):
            read = Read(kind, path)
            self._due.pop(read, None)
            self._paced.pop(read, None)
            self._in_flight.discard(read)

    def _note_marker(self, path: str, count: int) -> None:
        """Compare the whole role if more writes happened than were reported."""
        before, self._markers[path] = self._markers[path], count
        if before is None or before == count:
            return
        place = path.rpartition("/")[0]
        below = [one for one in self._directories if one == place or one.startswith(f"{place}/")]
        wanted = ([place] if place in self._partitions else []) + below
        for directory in wanted:
            self._paced[Read(RequestKind.COMPARE, directory)] = None
        entries = [(f"{one}/{name}", entry) for one in below for name, entry in self._directories[one].entries.items()]
        for node, _ in sorted(entries, key=_running_last):
            self._paced[Read(RequestKind.COMPARE, node)] = None

    def _next_compared(self) -> Iterator[str]:
        """The directories and nodes that are next to compare."""
        directories = [*self._partitions, *self._directories]
        nodes = [f"{path}/{name}" for path, directory in self._directories.items() for name in directory.entries]
        share = max(COMPARED_DIRECTORIES, COMPARED - len(nodes))
        turn, self._turn = self._turn, self._turn + 1
        return chain(_in_turn(directories, turn, share), _in_turn(nodes, turn, COMPARED - min(share, len(directories))))


def _in_turn(items: list[str], turn: int, count: int) -> Iterator[str]:
    """Take `count` of the items, from where the previous turn ended."""
    start = turn * count % len(items) if items else 0
    return islice(chain(items[start:], items[:start]), min(count, len(items)))


def _running_last(item: tuple[str, _Entry]) -> bool:
    """Sort key: nodes that were not Running come first, because they are likely to have changed."""
    return item[1].node is not None and item[1].node.state.value == "Running"
