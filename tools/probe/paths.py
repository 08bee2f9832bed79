"""Probes: the paths of a cluster, those that fail, and the process that the failing ones have in common. Pure.

    paths:  proxy ──▶ broker replica ──▶ gateway        proxy ──▶ relay replica ──▶ gateway

A probe is a traced message, published through one proxy: to a reserved room, or to a pseudo-user. The room chooses the
broker replica, by the same rule as any room, and every gateway has a pseudo-user in it: so the probe goes over one path
for every gateway. A pseudo-user's UIN chooses the relay replica; each is at one gateway, so that there is one for every
relay replica and gateway. The failing paths show the place:

                     gateway A   gateway B
    proxy 1, broker 1   ✓           ✓
    proxy 1, broker 2   ✗           ✗          ──▶ broker 2 seems stopped
    proxy 2, broker 1   ✓           ✓
    proxy 2, broker 2   ✗           ✗

Rooms and UINs are chosen so that the proxies' weights (`pixiu.placement.weights`) cannot change their replica. A probe that still
arrives through another one went *around* the intended replica, which happens once heartbeats suspect it. It is counted as arrived
on the path that it took, and as gone around, which is no failure, on the intended one.

Source: PiXiu §3.1; docs/architecture.md, "Probes and traces".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Final, NamedTuple

from pixiu.discovery.lacks import lacks
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, PROBE_BITS, PROBE_ROOM, PROBE_UIN
from pixiu.placement.partition import rendezvous, weighted_rendezvous
from pixiu.placement.weights import STEPS
from pixiu.wire.trace import Hop, Stamp, name_of_hop

MAX_PATHS: Final = 100_000
MAX_TRIES: Final = 20_000
"""Limit of rooms or UINs of a partition that are tried to find one for each of its replicas; a replica without one is not
probed."""
PROBE_UINS: Final = 1 << PROBE_BITS
MAX_SAMPLES: Final = 10_000
"""Limit of times kept of each hop, the newest."""
MAX_PENDING: Final = 200_000
"""Limit of probes under way; beyond it the oldest count as failed."""
MAX_REASON: Final = 160
"""Limit of the reason for a path's failure, characters."""
MAX_FINDINGS: Final = 20
"""Limit of findings in one diagnosis; the rest is counted in the paths."""
ENDS: Final = frozenset({int(Hop.PUBLISHER), int(Hop.SUBSCRIBER)})
TOTAL: Final = "total"
NOT_ARRIVED: Final = "did not arrive"
PROBED: Final = ("proxy", "broker", "relay", "gateway")
REFUSALS: Final = ("refused by the proxy: ", "not sent: UNAUTHENTICATED", "the stream to the proxy ended: UNAUTHENTICATED")
"""Prefixes of reasons that have nothing to do with the network."""
LOGIN_OF_PROBES: Final = "probes need a login with a UIN and a rule that lets it `impersonate` (docs/security.md)"
HOP_OF_ROLE: Final = {"broker": Hop.BROKER, "relay": Hop.RELAY}
"""Role in the middle of a path → its hop."""


class Member(NamedTuple):
    """A process on a path."""

    role: str
    partition: int
    """-1 if the role has no partitions."""
    replica: int
    endpoint: int
    address: str

    @property
    def name(self) -> str:
        """Name of the process in an alarm."""
        where = (
            f"{self.role} {self.replica}"
            if self.partition < 0
            else f"{self.role} partition {self.partition} replica {self.replica}"
        )
        return f"{where} at {self.address}"

    @property
    def place(self) -> str:
        """Role, partition and replica."""
        return f"{self.role} {self.replica}" if self.partition < 0 else f"{self.role} {self.partition}/{self.replica}"


class Path(NamedTuple):
    """A way through the cluster."""

    proxy: Member
    middle: Member
    """A replica of a broker, or of a relay."""
    gateway: Member

    @property
    def name(self) -> str:
        """Name of the path in an alarm."""
        return " -> ".join(member.name for member in self)

    @property
    def place(self) -> str:
        """Name of the path whatever processes run there: it stays when one is started again at another address."""
        return " > ".join(member.place for member in self)


@dataclass(slots=True)
class PathState:
    """Counters of a path."""

    sent: int = 0
    """Probes that were intended for it."""
    arrived: int = 0
    """Probes that arrived this way, including those intended for another path."""
    failed: int = 0
    around: int = 0
    """Probes intended for it that arrived another way."""
    failures: int = 0
    """Failures since the last arrival this way."""
    arounds: int = 0
    """Probes gone around since the last arrival this way."""
    reason: str = ""
    """Reason of the last failure, or the way of the last probe that went around."""
    relay: Member | None = None
    """Relay that the last room message passed, if room messages go through relays."""
    times_us: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES // 10))
    """Times from the publisher to the subscriber."""


class Probe(NamedTuple):
    """A message to send."""

    number: int
    proxy: Member
    key: int
    """The room; a pseudo-user's UIN."""
    to_user: bool


class Finding(NamedTuple):
    """A process, or way, that failing paths have in common."""

    members: tuple[Member, ...]
    """One process; two, if the way between them is cut; three, for a path; none, if everything fails."""
    text: str
    paths: int


class PseudoUser(NamedTuple):
    """A user to be connected at one gateway only."""

    gateway: int
    """The gateway's endpoint."""
    uin: int


@dataclass(frozen=True, slots=True)
class HopTimes:
    """One row of the table; microseconds."""

    hop: str
    count: int
    p50_us: int
    p99_us: int


class _Way(NamedTuple):
    """A hop, as the table orders them."""

    start: int
    is_wire: bool
    end: int
    """Same as `start` for a process's own time."""

    @property
    def name(self) -> str:
        return f"{name_of_hop(self.start)} → {name_of_hop(self.end)}" if self.is_wire else name_of_hop(self.end)


class _Pending(NamedTuple):
    proxy: Member
    middle: Member
    sent_s: float
    gateways: dict[int, Member]
    """Gateways at which it has not arrived, by endpoint."""


def percentile(values: Iterable[int], part: float) -> int:
    """The smallest value that at least `part` (0 to 1) of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(ceil(part * len(ordered)) - 1, 0)] if ordered else 0


def members_of(view: View, role: str) -> tuple[Member, ...]:
    """The Running processes of a role."""
    return tuple(
        Member(role, node.partition, node.replica, int(node.endpoint), node.client_address or node.address)
        for node in view.running(role)
    )


def firm_choice(key: int, endpoints: Sequence[int]) -> int | None:
    """The replica of a key if it is the same for all possible weights of the replicas; else None."""
    chosen = rendezvous(key, endpoints)
    worst = weighted_rendezvous(key, ((endpoint, STEPS[-1] if endpoint == chosen else STEPS[0]) for endpoint in endpoints))
    return chosen if worst == chosen else None


def probe_rooms(brokers: Sequence[Member], partitions: int) -> dict[int, int]:
    """Find a room for every broker replica: endpoint → the lowest reserved RoomID that proxies send to it with any weights."""
    rooms: dict[int, int] = {}
    for partition in range(partitions):
        endpoints = [broker.endpoint for broker in brokers if broker.partition == partition]
        missing = set(endpoints)
        first = PROBE_ROOM + (partition - PROBE_ROOM) % partitions
        for room in range(first, min(first + MAX_TRIES * partitions, MAX_ROOM + 1), partitions):
            if not missing:
                break
            chosen = firm_choice(room, endpoints)
            if chosen in missing:
                missing.discard(chosen)
                rooms[chosen] = room
    return rooms


def probe_users(
    relays: Sequence[Member],
    gateways: Sequence[Member],
    partitions: int,
    first: int,
    known: Mapping[tuple[int, int], int],
) -> dict[tuple[int, int], int]:
    """Find a pseudo-user for every relay replica and gateway: their endpoints → a reserved UIN that proxies send to that replica.

    Args:
        relays: the Running relays.
        gateways: the Running gateways.
        partitions: number of relay partitions.
        first: start in the range of UINs, different for each run, so that two runs do not share UINs.
        known: earlier pseudo-users; those that still lead to their replica stay.
    """
    users: dict[tuple[int, int], int] = {}
    taken = set(known.values())
    for partition in range(partitions):
        endpoints = [relay.endpoint for relay in relays if relay.partition == partition]
        missing: dict[int, deque[int]] = {}
        for endpoint in endpoints:
            missing[endpoint] = deque()
            for gateway in gateways:
                pair = endpoint, gateway.endpoint
                uin = known.get(pair, -1)
                if uin >= 0 and uin % partitions == partition and firm_choice(uin, endpoints) == endpoint:
                    users[pair] = uin
                else:
                    missing[endpoint].append(gateway.endpoint)
        start = first + (partition - first) % partitions
        for number in range(start, start + min(MAX_TRIES * partitions, PROBE_UINS), partitions):
            if not any(missing.values()):
                break
            uin = PROBE_UIN + number % PROBE_UINS
            chosen = firm_choice(uin, endpoints) if uin not in taken else None
            if chosen is not None and missing[chosen]:
                users[chosen, missing[chosen].popleft()] = uin
    return users


class Prober:
    """The state of all paths.

    Args:
        failures: number of failed probes in a row at which a path fails.
        timeout_s: time after which a probe that has not arrived fails, seconds.
        first_user: start of this run's UINs in the reserved range.
    """

    def __init__(self, failures: int, timeout_s: float, first_user: int = 0) -> None:
        self.on_hops: Callable[[Mapping[str, int]], None] = lambda _times: None
        """Called with the times of the hops of each probe that arrived, and the total, microseconds."""
        self.paths: dict[Path, PathState] = {}
        self.rooms: dict[int, int] = {}
        """Room of every broker replica, by endpoint."""
        self.missing: list[str] = []
        """Descriptions of processes that the layout requires and that are not Running: nothing is probed through these."""
        self._users: dict[tuple[int, int], int] = {}
        self._first_user = first_user
        self._failures = failures
        self._timeout_s = timeout_s
        self._proxies: tuple[Member, ...] = ()
        self._brokers: tuple[Member, ...] = ()
        self._relays: tuple[Member, ...] = ()
        self._middles: dict[tuple[int, int, int], Member] = {}
        self._not_taken: set[tuple[Member, str]] = set()
        self._gateways: tuple[Member, ...] = ()
        self._pending: dict[int, _Pending] = {}
        self._next = 1
        self._times: dict[_Way, deque[int]] = {}
        self._totals: deque[int] = deque(maxlen=MAX_SAMPLES)

    def set_view(self, view: View) -> None:
        """Take a new view of the cluster. Paths that it had before keep their state. Raises `InvalidArgument`."""
        self._proxies, self._gateways = members_of(view, "proxy"), members_of(view, "gateway")
        self.missing = [str(lack) for lack in lacks(view, roles=PROBED)]
        brokers = members_of(view, "broker")
        self.rooms = probe_rooms(brokers, view.layout.partitions("broker"))
        self._brokers = tuple(broker for broker in brokers if broker.endpoint in self.rooms)
        self._relays = members_of(view, "relay")
        if len(self._proxies) * (len(self._brokers) + len(self._relays)) * len(self._gateways) > MAX_PATHS:
            raise InvalidArgument(f"this cluster has more than {MAX_PATHS} paths: too many to probe them all")
        self._users = probe_users(self._relays, self._gateways, view.layout.partitions("relay"), self._first_user, self._users)
        self._middles = {(HOP_OF_ROLE[m.role], m.partition, m.replica): m for m in (*self._brokers, *self._relays)}
        self._list_paths()

    def _list_paths(self) -> None:
        wanted = [Path(p, b, g) for p in self._proxies for b in self._brokers for g in self._gateways]
        wanted += [
            Path(p, r, g)
            for p in self._proxies
            for r in self._relays
            for g in self._gateways
            if (r.endpoint, g.endpoint) in self._users
        ]
        wanted = [path for path in wanted if (path.proxy, path.middle.role) not in self._not_taken]
        self.paths = {path: self.paths.get(path) or PathState() for path in wanted}

    @property
    def proxies(self) -> tuple[Member, ...]:
        """The proxies to publish through."""
        return self._proxies

    @property
    def gateways(self) -> tuple[Member, ...]:
        """The gateways to subscribe at."""
        return self._gateways

    @property
    def users(self) -> frozenset[PseudoUser]:
        """The pseudo-users to be connected, taking messages to users."""
        return frozenset(PseudoUser(gateway, uin) for (_, gateway), uin in self._users.items())

    @property
    def left_out(self) -> list[str]:
        """Descriptions of the messages that proxies do not take by their configuration."""
        what = {"broker": "messages to rooms", "relay": "messages to users"}
        return [f"{proxy.name} takes no {what[role]}: not probed" for proxy, role in sorted(self._not_taken)]

    @property
    def pending(self) -> int:
        """Number of probes that have not arrived everywhere."""
        return len(self._pending)

    def begin_round(self, now: float) -> list[Probe]:
        """Make the probes that pass every path once, to be sent now; `now` is monotonic seconds.

        One for every proxy and broker replica, and one for every proxy, relay replica and gateway.
        """
        made: list[Probe] = []
        for proxy in self._proxies:
            if (proxy, "broker") not in self._not_taken:
                made += [self._begin(proxy, broker, self._gateways, self.rooms[broker.endpoint], now) for broker in self._brokers]
            if (proxy, "relay") in self._not_taken:
                continue
            for relay in self._relays:
                for gateway in self._gateways:
                    uin = self._users.get((relay.endpoint, gateway.endpoint))
                    if uin is not None:
                        made.append(self._begin(proxy, relay, (gateway,), uin, now))
        while len(self._pending) > MAX_PENDING:
            self.lost(next(iter(self._pending)), "too many probes are under way")
        return made

    def _begin(self, proxy: Member, middle: Member, gateways: tuple[Member, ...], key: int, now: float) -> Probe:
        number, self._next = self._next, self._next + 1
        self._pending[number] = _Pending(proxy, middle, now, {gateway.endpoint: gateway for gateway in gateways})
        for gateway in gateways:
            self.paths[Path(proxy, middle, gateway)].sent += 1
        return Probe(number, proxy, key, middle.role == "relay")

    def lost(self, number: int, reason: str) -> None:
        """Note that a probe could not be sent, or was refused."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            for gateway in pending.gateways.values():
                self._fail(Path(pending.proxy, pending.middle, gateway), reason)

    def not_taken(self, number: int) -> None:
        """Note that a proxy does not take messages of a probe's kind: it is no part of such paths."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._not_taken.add((pending.proxy, pending.middle.role))
            self._list_paths()

    def arrived(self, number: int, gateway: int, stamps: Sequence[Stamp] | None) -> None:
        """Note that a probe arrived at a gateway (its endpoint), with the subscriber's stamp as the last."""
        pending = self._pending.get(number)
        if pending is None or gateway not in pending.gateways:
            return
        path = Path(pending.proxy, pending.middle, pending.gateways.pop(gateway))
        if not pending.gateways:
            del self._pending[number]
        meant = HOP_OF_ROLE[path.middle.role], path.middle.partition, path.middle.replica
        passed = [(stamp.role, stamp.partition, stamp.replica) for stamp in stamps or () if stamp.role == meant[0]]
        if stamps is None or not passed:
            self._fail(path, f"came without the stamp of a {path.middle.role}")
            return
        if meant not in passed:
            self._go_around(path, *passed[0])
            if passed[0] not in self._middles:
                return
            path = path._replace(middle=self._middles[passed[0]])
        state = self.paths.get(path)
        if state is not None:
            state.arrived += 1
            state.failures = state.arounds = 0
            state.relay = self._relay_of(stamps) if path.middle.role == "broker" else None
            self._note(stamps)
            state.times_us.append(stamps[-1].in_us - stamps[0].out_us)

    def expire(self, now: float) -> None:
        """Fail probes that have been under way for too long. Numbers are in the order of sending."""
        late: list[int] = []
        for number, pending in self._pending.items():
            if pending.sent_s + self._timeout_s > now:
                break
            late.append(number)
        for number in late:
            self.lost(number, NOT_ARRIVED)

    def failing(self) -> list[Path]:
        """Paths that raise an alarm: the last `failures` probes did not arrive that way, but were lost or went around."""
        return [path for path, state in self.paths.items() if state.failures + state.arounds >= self._failures]

    def findings(self) -> list[Finding]:
        """Find the common parts of the failing paths, the most significant first."""
        good = [path for path, state in self.paths.items() if state.arrived and not state.failures and not state.arounds]
        failing = self.failing()
        around = frozenset(path for path in failing if not self.paths[path].failures)
        relays = {path: state.relay for path, state in self.paths.items() if state.relay}
        return diagnose(failing, good, around, relays, Counter(self.paths[path].reason for path in failing))

    def table(self) -> list[HopTimes]:
        """The times of every hop, in the order of the way, and the total."""
        rows = [(way.name, times) for way, times in sorted(self._times.items())]
        return [
            HopTimes(hop, len(times), percentile(times, 0.5), percentile(times, 0.99))
            for hop, times in (*rows, (TOTAL, self._totals))
        ]

    def _fail(self, path: Path, reason: str) -> None:
        state = self.paths.get(path)
        if state is not None:
            state.failed += 1
            state.failures += 1
            state.reason = " ".join(reason.split())[:MAX_REASON]

    def _relay_of(self, stamps: Sequence[Stamp]) -> Member | None:
        found = [(stamp.role, stamp.partition, stamp.replica) for stamp in stamps if stamp.role == Hop.RELAY]
        return self._middles.get(found[-1]) if found else None

    def _go_around(self, path: Path, _: int, partition: int, replica: int) -> None:
        state = self.paths.get(path)
        if state is not None:
            state.around += 1
            state.arounds += 1
            state.reason = f"bypassed it, through {path.middle.role} partition {partition} replica {replica}"

    def _note(self, stamps: Sequence[Stamp]) -> None:
        hops, total_us = hop_times(stamps), stamps[-1].in_us - stamps[0].out_us
        for way, time_us in hops:
            self._times.setdefault(way, deque(maxlen=MAX_SAMPLES)).append(time_us)
        self._totals.append(total_us)
        self.on_hops({**{way.name: time_us for way, time_us in hops}, TOTAL: total_us})


def hop_times(stamps: Sequence[Stamp]) -> list[tuple[_Way, int]]:
    """Compute the times of the hops of one trace, in order; microseconds.

    A process's own time is out minus in; that of a wire is the next process's in minus its out, which between machines is only as
    exact as their clocks.
    """
    found: list[tuple[_Way, int]] = []
    for before, stamp in pairwise(stamps):
        found.append((_Way(before.role, True, stamp.role), stamp.in_us - before.out_us))
        if stamp.role not in ENDS:
            found.append((_Way(stamp.role, False, stamp.role), stamp.out_us - stamp.in_us))
    return found


def diagnose(
    failing: Sequence[Path],
    good: Sequence[Path],
    around: Set[Path] = frozenset(),
    relays: Mapping[Path, Member] | None = None,
    reasons: Counter[str] | None = None,
) -> list[Finding]:
    """Find the fewest processes, else ways between two of them, else paths, that explain all failures and include no good path.

    Args:
        failing: the paths that raise an alarm.
        good: the paths that work.
        around: failing paths on which nothing was lost, because all probes went around them.
        relays: the relay on a broker's path, if room messages go through relays.
        reasons: reasons of failures, with their numbers of paths.
    """
    if not failing:
        return []
    if not good:
        if reasons and (refused := reasons.most_common(1)[0][0]).startswith(REFUSALS):
            return [Finding((), f"all {len(failing)} paths fail: {refused}; {LOGIN_OF_PROBES}", len(failing))]
        return [Finding((), f"all {len(failing)} paths fail: is the network cut, or this prober? see `pixiu status`", len(failing))]
    left = set(failing)
    also = relays or {}
    findings = _explain(left, good, around, lambda path: [(m,) for m in (*path, *((also[path],) if path in also else ()))])
    findings += _explain(left, good, around, lambda path: [(path.proxy, path.middle), (path.middle, path.gateway)])
    findings += _explain(left, good, around, lambda path: [tuple(path)])
    return findings[:MAX_FINDINGS]


def _explain(
    left: set[Path], good: Sequence[Path], around: Set[Path], parts: Callable[[Path], Iterable[tuple[Member, ...]]]
) -> list[Finding]:
    """Name the parts that no good path has, the one with most failing paths first; the paths they explain are removed from
    `left`."""
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
        findings.append(Finding(part, _text(part, len(explained), len(good), explained <= around), len(explained)))
        left -= explained
        through = {other: paths - explained for other, paths in through.items() if paths - explained}
    return findings


def _text(part: tuple[Member, ...], failing: int, good: int, is_around: bool) -> str:
    """Describe a finding. `is_around`: nothing is lost, because proxies avoid the part."""
    paths = f"{failing} probed paths"
    if len(part) == 1:
        what = f"proxies bypass it on all {paths} through it" if is_around else f"all {paths} through it fail"
        return f"{part[0].name} seems stopped: {what}, {good} others do not"
    if len(part) == 2:
        what = f"proxies bypass it on {paths}" if is_around else f"{paths} fail"
        return f"the way from {part[0].name} to {part[1].name} seems cut: {what}, while each of the two works otherwise"
    what = "is bypassed" if is_around else "fails"
    return f"the path {' -> '.join(member.name for member in part)} {what}, each part of it works otherwise"
