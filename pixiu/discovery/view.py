"""A process's view of the cluster, and the one reducer that keeps it. Pure.

Watch and poll both end in a `Scan`: all nodes that are registered now. The reducer turns scans, reports of heartbeats and the
passing of time into views. It is *statically stable*: no failure of ZooKeeper changes a view.

                     in a scan                        not in the scan
    (unknown) ──────────────────────▶ REGISTERED ─────────────────────▶ HELD: in the view as it was
                                          ▲  │                           │  │
                                          │  │ not in the scan, and      │  │ another process at its address,
                 its endpoint in a scan   │  │ Draining, seen dead, or   │  │ seen dead, or 60 s over with a
                          └───────────────┼──┼─ another at its address   │  │ live connection (no time limit when
                                          │  ▼                           │  │ most nodes vanished at once)
                                          │ (dropped) ◀──────────────────┼──┘
                                          └──────────────────────────────┘

Source: docs/registry.md, "Static stability"; PiXiu §2.2 step 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pixiu.discovery.node import Node, NodeState, integer, json_object
from pixiu.discovery.paths import GROUPED_ROLES, ROLES
from pixiu.errors import MalformedData
from pixiu.ids import MAX_ID, EndpointID
from pixiu.placement.partition import MAX_PARTITIONS, is_partition_count
from pixiu.rpc.deadline_timer import NEVER

MAX_LAYOUT_BYTES: Final = 65_536
MAX_REPLICAS: Final = 65_536
MAX_NODES: Final = 65_536
"""Limit of nodes in one view; the rest of a larger scan is cut off (the oldest replicas stay) and counted."""
HOLD_S: Final = 60.0
"""Time for which a node that vanished stays in the view while ZooKeeper can be reached, seconds."""
MIN_MASS: Final = 3
"""Minimum number of nodes that must vanish for a mass disappearance."""
_SIXTEEN_DIGITS: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
MASS_WINDOW_S: Final = 10.0
"""Nodes that vanish within this time vanish together, seconds: sessions that end together are removed over some seconds."""


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """Layout of one role."""

    n: int = 1
    """Partitions, a power of two up to 128, or of a role with groups any number up to that; 1 if the role has none."""
    next: int = 1
    """Same as n, or 2n while a doubling is under way."""
    replicas: int = 0
    """Replicas per partition that the operator wants, or in all if the role has no partitions; 0: unknown."""
    doublings: tuple[str, ...] = ()
    """IDs of the doublings that led to n, oldest first (16 hex digits each), and of the one under way if next is 2n."""

    def grew(self, before: RoleLayout) -> bool:
        """True if only doublings lead from an earlier layout of the role to this one. A layout written by hand has no record of
        them; a process that trusted it would delete its data. Source: docs/doubling.md."""
        ended = self.ended
        return ended[: len(before.ended)] == before.ended and self.n == before.n << len(ended) - len(before.ended)

    @property
    def ended(self) -> tuple[str, ...]:
        """IDs of the finished doublings, oldest first."""
        return self.doublings[: len(self.doublings) - (self.next > self.n)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Partitions of every role, with a version that grows at every change. Source: docs/registry.md."""

    version: int = 0
    """0: there is no layout yet."""
    roles: Mapping[str, RoleLayout] = field(default_factory=dict)
    cluster: str = ""
    """Unique ID of this cluster: 16 hex digits, made when the layout is first written; empty: there is no layout yet."""

    def partitions(self, role: str) -> int:
        """The number of partitions of a role, at least 1."""
        found = self.roles.get(role)
        return found.n if found else 1

    def to_json(self) -> bytes:
        """Encode as {"version": 3, "cluster": "0123456789abcdef", "router": {"n": 2, "next": 2, "replicas": 1}, …}"""
        fields: dict[str, object] = {"version": self.version, "cluster": self.cluster}
        for role, wanted in sorted(self.roles.items()):
            doubled = {"doublings": list(wanted.doublings)} if wanted.doublings else {}
            fields[role] = {"n": wanted.n, "next": wanted.next, "replicas": wanted.replicas, **doubled}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """Decode a layout; unknown keys are ignored. Raises `MalformedData`."""
        fields = json_object(data, MAX_LAYOUT_BYTES, "the layout")
        version = integer(fields, "version", 1, MAX_ID)
        cluster = fields.get("cluster")
        if not _is_id(cluster):
            raise MalformedData("the cluster's ID in the layout is not 16 hex digits")
        roles = {}
        for role in ROLES:
            value = fields.get(role)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise MalformedData(f"the layout of {role} is not a JSON object")
            n = integer(value, "n", 1, MAX_PARTITIONS)
            following = integer(value, "next", 1, 2 * MAX_PARTITIONS, n)
            if role in GROUPED_ROLES:
                if following != n:
                    raise MalformedData(f"the layout of {role} has n {n} and next {following}; a role with groups has next n")
            elif not is_partition_count(n) or following not in (n, 2 * n):
                raise MalformedData(f"the layout of {role} has n {n} and next {following}; n is a power of two, next is n or 2n")
            doublings = value.get("doublings", [])
            if not isinstance(doublings, list) or not all(map(_is_id, doublings)):
                raise MalformedData(f"the doublings of {role} in the layout are not a list of IDs of 16 hex digits")
            roles[role] = RoleLayout(n, following, integer(value, "replicas", 0, MAX_REPLICAS, 0), tuple(doublings))
        return cls(version, roles, str(cluster))


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _SIXTEEN_DIGITS.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class View:
    """The cluster at one moment. Views never change; a new one replaces the old one."""

    layout: Layout = field(default_factory=Layout)
    nodes: tuple[Node, ...] = ()
    """Ordered by role, partition and replica."""
    _endpoints: dict[EndpointID, Node] = field(init=False, repr=False, compare=False)
    _roles: dict[str, tuple[Node, ...]] = field(init=False, repr=False, compare=False)
    _running: dict[str, tuple[Node, ...]] = field(init=False, repr=False, compare=False)
    _partitions: dict[tuple[str, int], tuple[Node, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the indexes for the queries below."""
        ordered = sorted(self.nodes, key=lambda node: (node.replica, node.endpoint))
        roles: dict[str, list[Node]] = {}
        partitions: dict[tuple[str, int], list[Node]] = {}
        for node in ordered:
            roles.setdefault(node.role, []).append(node)
            partitions.setdefault((node.role, node.partition), []).append(node)
        object.__setattr__(self, "_endpoints", {node.endpoint: node for node in ordered})
        object.__setattr__(self, "_roles", {role: tuple(nodes) for role, nodes in roles.items()})
        running = {role: tuple(node for node in nodes if node.state is NodeState.RUNNING) for role, nodes in roles.items()}
        object.__setattr__(self, "_running", running)
        object.__setattr__(self, "_partitions", {key: tuple(nodes) for key, nodes in partitions.items()})

    def running(self, role: str) -> tuple[Node, ...]:
        """The Running nodes of a role, by replica."""
        return self._running.get(role, ())

    def of_role(self, role: str) -> tuple[Node, ...]:
        """All nodes of a role, by replica."""
        return self._roles.get(role, ())

    def replicas(self, role: str, partition: int, states: tuple[NodeState, ...] = (NodeState.RUNNING,)) -> tuple[Node, ...]:
        """The nodes of a partition that are in one of the states, by replica."""
        return tuple(node for node in self._partitions.get((role, partition), ()) if node.state in states)

    def by_endpoint(self, endpoint: int) -> Node | None:
        """The node of a run of a process; None when it is not in the view."""
        return self._endpoints.get(EndpointID(endpoint))


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything that the registry holds now. `layout` None: there is none, or it cannot be read."""

    nodes: tuple[Node, ...]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """ZooKeeper can be reached from now on."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """ZooKeeper cannot be reached from now on."""


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Heartbeats report a process as dead."""

    endpoint: EndpointID


@dataclass(frozen=True, slots=True)
class PeerAlive:
    """Heartbeats report a process as alive after all."""

    endpoint: EndpointID


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: forget nodes that stayed away for too long."""


Event = Scan | Connected | Disconnected | PeerDead | PeerAlive | Tick


@dataclass(slots=True)
class _Known:
    """A node of the view, and its state in the registry."""

    node: Node
    first_seen: float
    vanished: float | None = None
    """Time at which it vanished; None while it is registered."""
    mass: bool = False
    """True if it vanished together with most others: it is then held without a time limit."""
    dead: bool = False
    """True if heartbeats reported it as dead, and nothing contradicted since."""


class ViewReducer:
    """Turns events of the registry into views. `now` is monotonic seconds.

    Args:
        hold_s: time for which a node that vanished is held while ZooKeeper can be reached, seconds.
        mass_window_s: time within which disappearances count as one, seconds.

    Source: docs/registry.md.
    """

    def __init__(self, hold_s: float = HOLD_S, mass_window_s: float = MASS_WINDOW_S) -> None:
        self._hold_s = hold_s
        self._mass_window_s = mass_window_s
        self._known: dict[EndpointID, _Known] = {}
        self._layout = Layout()
        self._connected_since: float | None = None
        self._view = View()
        self.cut_off = 0
        """Number of nodes left out because a scan had more than `MAX_NODES`."""
        self.refused: dict[str, str] = {}
        """Role → reason why its layout is not taken, and what to do; the role's previous layout stays."""

    @property
    def view(self) -> View:
        """The newest view of the registry."""
        return self._view

    @property
    def held(self) -> int:
        """Number of nodes of the view that are not registered now."""
        return sum(known.vanished is not None for known in self._known.values())

    def step(self, event: Event, now: float) -> View | None:
        """Take an event; returns the new view, or None when nothing changed."""
        match event:
            case Scan():
                self._scan(event, now)
            case Connected():
                if self._connected_since is None:
                    self._connected_since = now
            case Disconnected():
                self._connected_since = None
            case PeerDead():
                self._peer_dead(event.endpoint)
            case PeerAlive():
                if known := self._known.get(event.endpoint):
                    known.dead = False
            case Tick():
                pass
        self._expire(now)
        return self._emit()

    def next_deadline(self) -> float:
        """Time at which a `Tick` can change something, monotonic seconds; `NEVER` if nothing waits."""
        ends = (self._end_of_hold(known) for known in self._known.values())
        return min((end for end in ends if end is not None), default=NEVER)

    def _scan(self, scan: Scan, now: float) -> None:
        if scan.layout is not None and scan.layout.version >= self._layout.version:
            self._take_layout(scan.layout)
        if len(scan.nodes) > MAX_NODES:
            self.cut_off += len(scan.nodes) - MAX_NODES
        present, addresses = _newest(sorted(scan.nodes, key=lambda node: node.replica)[:MAX_NODES])
        for endpoint, known in list(self._known.items()):
            holder = addresses.get((known.node.host, known.node.port), endpoint)
            if endpoint in present or (known.vanished is not None and holder == endpoint):
                continue
            if holder != endpoint or known.node.state is NodeState.DRAINING or known.dead:
                del self._known[endpoint]
            else:
                known.vanished = now
        for endpoint, node in present.items():
            before = self._known.get(endpoint)
            if before is None:
                self._known[endpoint] = _Known(node, now)
                continue
            # A process that writes its node is alive, whatever heartbeats reported before.
            before.dead = before.dead and before.node == node
            before.node, before.vanished, before.mass = node, None, False
        self._note_mass(now)

    def _take_layout(self, layout: Layout) -> None:
        """Take a newer layout. A role whose number of partitions changed without recorded doublings keeps its old layout: the new
        one was written by hand, and a process that trusted it would delete its data. Source: docs/doubling.md."""
        self.refused.clear()
        roles = dict(layout.roles)
        for role, before in self._layout.roles.items():
            after = roles.get(role)
            if after is not None and (after.n == before.n or after.grew(before)):
                continue
            said = "is no longer in it" if after is None else f"has {after.n} partition(s), but no doublings that led there"
            adds = f"only `pixiu double {role}` adds partitions"
            if role in GROUPED_ROLES:
                if after is not None and after.n > before.n:
                    continue
                adds = "groups are added, never taken away"
                said = said if after is None else f"has {after.n} group(s)"
            self.refused[role] = (
                f"layout version {layout.version} was edited by hand: {role} {said}; this process keeps to {before.n} and "
                f"deletes nothing. Write {before.n} back; {adds}"
            )
            roles[role] = before
        self._layout = replace(layout, roles=roles)

    def _note_mass(self, now: float) -> None:
        """Hold nodes without a time limit that vanished together with most of the nodes known until then."""
        moments = {
            endpoint: known.vanished
            for endpoint, known in self._known.items()
            if known.vanished is not None and now - known.vanished <= self._mass_window_s
        }
        if len(moments) < MIN_MASS:
            return
        start = min(moments.values())
        stayed = sum(known.vanished is None and known.first_seen < start for known in self._known.values())
        if len(moments) > stayed:
            for endpoint in moments:
                self._known[endpoint].mass = True

    def _peer_dead(self, endpoint: EndpointID) -> None:
        known = self._known.get(endpoint)
        if known is None:
            return
        if known.vanished is not None:
            del self._known[endpoint]
        else:
            # The node is still registered: roles leave it out by the state of its link, and it is dropped as soon as it vanishes.
            known.dead = True

    def _end_of_hold(self, known: _Known) -> float | None:
        if known.vanished is None or known.mass or self._connected_since is None:
            return None
        # After an outage a node gets the whole time again, because it may need it to register again.
        return max(known.vanished, self._connected_since) + self._hold_s

    def _expire(self, now: float) -> None:
        for endpoint, known in list(self._known.items()):
            end = self._end_of_hold(known)
            if end is not None and now >= end:
                del self._known[endpoint]

    def _emit(self) -> View | None:
        nodes = tuple(sorted((known.node for known in self._known.values()), key=_order))
        if nodes == self._view.nodes and self._layout == self._view.layout:
            return None
        self._view = View(self._layout, nodes)
        return self._view


def _order(node: Node) -> tuple[str, int, int, int]:
    return node.role, node.partition, node.replica, node.endpoint


def _supersedes(node: Node, other: Node) -> bool:
    """True if, of two processes at one address, `node` is the later one."""
    if (node.role, node.partition) == (other.role, other.partition):
        return node.replica > other.replica
    return (node.started_ms, node.endpoint) > (other.started_ms, other.endpoint)


def _newest(nodes: Iterable[Node]) -> tuple[dict[EndpointID, Node], dict[tuple[str, int], EndpointID]]:
    """Index the nodes by endpoint, and the owner of each address: of two at one address (or of one endpoint) the later one.

    There are two when a process was restarted at its port and the session of the old one has not ended yet.
    """
    present: dict[EndpointID, Node] = {}
    addresses: dict[tuple[str, int], EndpointID] = {}
    for node in nodes:
        before = present.get(node.endpoint)
        if before is None or node.replica > before.replica:
            present[node.endpoint] = node
    for node in list(present.values()):
        if node.port == 0:
            continue
        rival = addresses.get((node.host, node.port))
        if rival is None:
            addresses[node.host, node.port] = node.endpoint
        elif _supersedes(node, present[rival]):
            del present[rival]
            addresses[node.host, node.port] = node.endpoint
        else:
            del present[node.endpoint]
    return present, addresses
