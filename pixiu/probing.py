"""Probes: which paths a cluster has, which of them fail, and which process the failing ones have in common. Pure.

    a path: proxy ──▶ broker replica ──▶ gateway

A probe is a traced message to a reserved room, published through one proxy; the room chooses the broker replica, by the
same rule as any room; every gateway has a pseudo-user in it. So each probe goes over one path for every gateway, and
what fails shows where:

                     gateway A   gateway B
    proxy 1, broker 1   ✓           ✓
    proxy 1, broker 2   ✗           ✗          ──▶ broker 2 seems stopped
    proxy 2, broker 1   ✓           ✓
    proxy 2, broker 2   ✗           ✗

Source: seed 004 §3.1; DESIGN section 9, "Probes".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, PROBE_ROOM
from pixiu.partition import rendezvous
from pixiu.trace import Hop, Stamp, name_of_hop

MAX_PATHS: Final = 100_000
MAX_TRIES: Final = 20_000
"""Rooms of a partition that are tried until each of its replicas has one; a replica without a room is not probed."""
MAX_SAMPLES: Final = 10_000
"""Times that are kept of each hop, the newest."""
MAX_PENDING: Final = 200_000
"""Probes under way; the oldest beyond it count as failed."""
MAX_REASON: Final = 160
"""Characters of why a path failed."""
MAX_FINDINGS: Final = 20
"""What one diagnosis names; the rest is counted in the paths."""
ENDS: Final = frozenset({int(Hop.PUBLISHER), int(Hop.SUBSCRIBER)})
TOTAL: Final = "total"
NOT_ARRIVED: Final = "did not arrive"


class Member(NamedTuple):
    """A process on a path."""

    role: str
    partition: int
    """-1 where the role has no partitions."""
    replica: int
    endpoint: int
    address: str

    @property
    def name(self) -> str:
        """As an alarm says it."""
        where = (
            f"{self.role} {self.replica}"
            if self.partition < 0
            else f"{self.role} partition {self.partition} replica {self.replica}"
        )
        return f"{where} at {self.address}"


class Path(NamedTuple):
    """A way through the cluster."""

    proxy: Member
    broker: Member
    gateway: Member

    @property
    def name(self) -> str:
        """As an alarm says it."""
        return " -> ".join(member.name for member in self)


@dataclass(slots=True)
class PathState:
    """What is known of a path."""

    sent: int = 0
    arrived: int = 0
    failed: int = 0
    failures: int = 0
    """In a row, up to now."""
    reason: str = ""
    """Of the last failure."""
    times_us: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES // 10))
    """From the publisher to the subscriber."""


class Probe(NamedTuple):
    """A message to send."""

    number: int
    proxy: Member
    room: int


class Finding(NamedTuple):
    """What failing paths have in common."""

    members: tuple[Member, ...]
    """One process; two with the way between them cut; three of a path; none: everything fails."""
    text: str
    paths: int


@dataclass(frozen=True, slots=True)
class HopTimes:
    """One row of the table; microseconds."""

    hop: str
    count: int
    p50_us: int
    p99_us: int


class _Pending(NamedTuple):
    proxy: Member
    broker: Member
    sent_s: float
    gateways: dict[int, Member]
    """By endpoint; those at which it has not arrived."""


def percentile(values: Iterable[int], part: float) -> int:
    """The smallest value that at least `part` (0 to 1) of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(ceil(part * len(ordered)) - 1, 0)] if ordered else 0


def members_of(view: View, role: str) -> tuple[Member, ...]:
    """The Running processes of a role."""
    return tuple(Member(role, node.partition, node.replica, int(node.endpoint), node.address) for node in view.running(role))


def probe_rooms(brokers: Sequence[Member], partitions: int) -> dict[int, int]:
    """A room for every broker replica: endpoint → the lowest reserved RoomID that proxies send to it."""
    rooms: dict[int, int] = {}
    for partition in range(partitions):
        endpoints = [broker.endpoint for broker in brokers if broker.partition == partition]
        missing = set(endpoints)
        first = PROBE_ROOM + (partition - PROBE_ROOM) % partitions
        for room in range(first, min(first + MAX_TRIES * partitions, MAX_ROOM + 1), partitions):
            if not missing:
                break
            chosen = rendezvous(room, endpoints)
            if chosen in missing:
                missing.discard(chosen)
                rooms[chosen] = room
    return rooms


class Prober:
    """The state of all paths.

    Args:
        failures: a path fails when so many probes in a row fail on it.
        timeout_s: a probe fails when it has not arrived after so long, seconds.
    """

    def __init__(self, failures: int, timeout_s: float) -> None:
        self.paths: dict[Path, PathState] = {}
        self.rooms: dict[int, int] = {}
        self._failures = failures
        self._timeout_s = timeout_s
        self._proxies: tuple[Member, ...] = ()
        self._brokers: tuple[Member, ...] = ()
        self._gateways: tuple[Member, ...] = ()
        self._pending: dict[int, _Pending] = {}
        self._next = 1
        self._times: dict[str, deque[int]] = {}

    def set_view(self, view: View) -> None:
        """The cluster is this now. Paths that it had before keep what is known of them. Raises `InvalidArgument`."""
        self._proxies, self._gateways = members_of(view, "proxy"), members_of(view, "gateway")
        brokers = members_of(view, "broker")
        self.rooms = probe_rooms(brokers, view.layout.partitions("broker"))
        self._brokers = tuple(broker for broker in brokers if broker.endpoint in self.rooms)
        if len(self._proxies) * len(self._brokers) * len(self._gateways) > MAX_PATHS:
            raise InvalidArgument(f"this cluster has more than {MAX_PATHS} paths: too many to probe them all")
        wanted = [Path(p, b, g) for p in self._proxies for b in self._brokers for g in self._gateways]
        self.paths = {path: self.paths.get(path) or PathState() for path in wanted}

    @property
    def proxies(self) -> tuple[Member, ...]:
        """Those to publish through."""
        return self._proxies

    @property
    def gateways(self) -> tuple[Member, ...]:
        """Those to subscribe at."""
        return self._gateways

    @property
    def pending(self) -> int:
        """Probes that have not arrived everywhere."""
        return len(self._pending)

    def begin_round(self, now: float) -> list[Probe]:
        """One probe for every proxy and broker replica, to be sent now; `now` is monotonic seconds."""
        made: list[Probe] = []
        for proxy in self._proxies:
            for broker in self._brokers:
                gateways = {gateway.endpoint: gateway for gateway in self._gateways}
                self._pending[self._next] = _Pending(proxy, broker, now, gateways)
                made.append(Probe(self._next, proxy, self.rooms[broker.endpoint]))
                self._next += 1
                for gateway in self._gateways:
                    self.paths[Path(proxy, broker, gateway)].sent += 1
        while len(self._pending) > MAX_PENDING:
            self.lost(next(iter(self._pending)), "too many probes are under way")
        return made

    def lost(self, number: int, reason: str) -> None:
        """A probe could not be sent, or was refused."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            for gateway in pending.gateways.values():
                self._fail(Path(pending.proxy, pending.broker, gateway), reason)

    def arrived(self, number: int, gateway: int, stamps: Sequence[Stamp] | None) -> None:
        """A probe came out of a gateway (its endpoint), with the subscriber's stamp as the last."""
        pending = self._pending.get(number)
        if pending is None or gateway not in pending.gateways:
            return
        path = Path(pending.proxy, pending.broker, pending.gateways.pop(gateway))
        if not pending.gateways:
            del self._pending[number]
        state = self.paths.get(path)
        if state is None:
            return
        passed = next((stamp for stamp in stamps or () if stamp.role == Hop.BROKER), None)
        if stamps is None or passed is None:
            self._fail(path, "came without the stamp of a broker")
        elif (passed.partition, passed.replica) != (path.broker.partition, path.broker.replica):
            self._fail(path, f"went through broker partition {passed.partition} replica {passed.replica} instead")
        else:
            state.arrived += 1
            state.failures = 0
            self._note(stamps)
            state.times_us.append(stamps[-1].in_us - stamps[0].out_us)

    def expire(self, now: float) -> None:
        """What has been under way for too long has failed. Numbers are in the order of their sending."""
        late: list[int] = []
        for number, pending in self._pending.items():
            if pending.sent_s + self._timeout_s > now:
                break
            late.append(number)
        for number in late:
            self.lost(number, NOT_ARRIVED)

    def failing(self) -> list[Path]:
        """The paths that raise an alarm."""
        return [path for path, state in self.paths.items() if state.failures >= self._failures]

    def findings(self) -> list[Finding]:
        """What the failing paths have in common, the most telling first."""
        good = [path for path, state in self.paths.items() if state.arrived and not state.failures]
        return diagnose(self.failing(), good)

    def table(self) -> list[HopTimes]:
        """The times of every hop, in the order of the way, and the total."""
        rows = [
            HopTimes(hop, len(times), percentile(times, 0.5), percentile(times, 0.99))
            for hop, times in self._times.items()
            if hop != TOTAL
        ]
        total = self._times.get(TOTAL, deque())
        return [*rows, HopTimes(TOTAL, len(total), percentile(total, 0.5), percentile(total, 0.99))]

    def _fail(self, path: Path, reason: str) -> None:
        state = self.paths.get(path)
        if state is not None:
            state.failed += 1
            state.failures += 1
            state.reason = " ".join(reason.split())[:MAX_REASON]

    def _note(self, stamps: Sequence[Stamp]) -> None:
        for hop, time_us in hop_times(stamps):
            self._times.setdefault(hop, deque(maxlen=MAX_SAMPLES)).append(time_us)


def hop_times(stamps: Sequence[Stamp]) -> list[tuple[str, int]]:
    """The hops of one trace, in order, and the total; microseconds.

    A process's own time is out minus in, that of a wire the next one's in minus its out: between machines as true as their
    clocks are equal.
    """
    found: list[tuple[str, int]] = []
    for before, stamp in pairwise(stamps):
        found.append((f"{name_of_hop(before.role)} → {name_of_hop(stamp.role)}", stamp.in_us - before.out_us))
        if stamp.role not in ENDS:
            found.append((name_of_hop(stamp.role), stamp.out_us - stamp.in_us))
    if len(stamps) > 1:
        found.append((TOTAL, stamps[-1].in_us - stamps[0].out_us))
    return found


def diagnose(failing: Sequence[Path], good: Sequence[Path]) -> list[Finding]:
    """The fewest processes, else ways between two of them, else paths, that explain all that fails and nothing that does not."""
    if not failing:
        return []
    if not good:
        return [Finding((), f"all {len(failing)} paths fail: is the network cut, or what probes? see `pixiu status`", len(failing))]
    left = set(failing)
    findings = _explain(left, good, lambda path: [(member,) for member in path])
    findings += _explain(left, good, lambda path: [(path.proxy, path.broker), (path.broker, path.gateway)])
    findings += _explain(left, good, lambda path: [tuple(path)])
    return findings[:MAX_FINDINGS]


def _explain(left: set[Path], good: Sequence[Path], parts: Callable[[Path], Iterable[tuple[Member, ...]]]) -> list[Finding]:
    """Name the parts that no good path has, the one with most failing paths first; what they explain is taken out of `left`."""
    innocent = {part for path in good for part in parts(path)}
    through: dict[tuple[Member, ...], set[Path]] = {}
    for path in left:
        for part in parts(path):
            if part not in innocent:
                through.setdefault(part, set()).add(path)
    findings: list[Finding] = []
    while through:
        part = min(through, key=lambda part: (-len(through[part]), part))
        explained = through.pop(part)
        findings.append(Finding(part, _text(part, len(explained), len(good)), len(explained)))
        left -= explained
        through = {other: paths - explained for other, paths in through.items() if paths - explained}
    return findings


def _text(part: tuple[Member, ...], failing: int, good: int) -> str:
    if len(part) == 1:
        return f"{part[0].name} seems stopped: all {failing} probed paths through it fail, {good} others do not"
    if len(part) == 2:
        return (
            f"the way from {part[0].name} to {part[1].name} seems cut: {failing} probed paths fail, each of the two works otherwise"
        )
    return f"the path {' -> '.join(member.name for member in part)} fails, each part of it works otherwise"
