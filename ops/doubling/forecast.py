"""Predicts the result of doubling a role from its processes' counters: load before and after, capacity of machines, the pause.
Pure.

    partition p, of n:   key % 2n == p       stays
                         key % 2n == p + n   goes to the child

The target of every hot key is known; the rest is assumed to divide evenly. One key is never divided: a partition whose load comes
from one user or one room gets no lighter.

Source: docs/doubling.md, "What the plan says".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

KEYS: Final[Mapping[str, str]] = {"broker": "rooms", "router": "rooms", "relay": "users", "xiu": "users", "pi": "users"}
STORED: Final = ("xiu", "pi")
SHARING: Final = ("broker", "relay")
"""Roles whose replicas share a partition's keys: each holds all of its memberships, and handles the messages of its own keys."""
HEAVY: Final = 0.75
"""A partition that keeps more than this share of its load did not get notably lighter."""
MIN_PER_S: Final = 1.0
"""Loads below this are too small to report."""
DISK_LEAST_BYTES: Final = 256 << 20
"""Least disk space for a new replica; Xiu refuses writes below it."""
MEMORY_LEAST_BYTES: Final = 128 << 20
RETRY_S: Final[Mapping[str, float]] = {"xiu": 0.02, "pi": 0.0}
"""Maximum delay until the next try after a child of Xiu that is not open refused; a child of Pi holds requests instead."""
LOOK_S: Final[Mapping[str, float]] = {"xiu": 0.02, "pi": 0.02}
"""Maximum delay until a child learns that its parent was split."""
APPLIED_PER_S: Final = 10_000
"""Lowest rate at which a child of Pi takes over entries."""
SPLIT_POLL_S: Final = 0.2
"""Maximum age of the tool's knowledge of a child when it splits the parent."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one partition, all of its replicas together."""

    per_s: float
    """Messages, operations or reports a second, over the last complete ten seconds."""
    hot: Sequence[tuple[int, float]] = ()
    """(RoomID or UIN, rate a second) of the hottest known keys."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Load of one partition before and after."""

    partition: int
    child: int
    per_s: float
    stays_per_s: float
    goes_per_s: float
    hottest: int = 0
    """Its hottest key; 0: none is known."""
    hottest_per_s: float = 0.0

    @property
    def lighter(self) -> bool:
        """True if the busier of the two partitions has notably less load than the parent has now."""
        return self.per_s < MIN_PER_S or max(self.stays_per_s, self.goes_per_s) <= HEAVY * self.per_s

    def json(self) -> dict[str, object]:
        """Return values for JSON; rates a second."""
        return {
            **{key: round(value, 1) if isinstance(value, float) else value for key, value in asdict(self).items()},
            "lighter": self.lighter,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """Free resources of a machine, as the role's processes there report them."""

    host: str
    memory_free_bytes: int | None
    disk_free_bytes: int | None
    """Free space of the fullest disk that holds data of one of them; None: no process keeps data there, or none reports it."""
    memory_wanted_bytes: int
    """Memory for the new replicas, if each runs on the machine of its parent's replica."""
    disk_wanted_bytes: int
    replicas: int
    """New replicas on this machine, if each runs on the machine of its parent's replica."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Resources that one process of the role reports; None: not reported."""

    host: str
    partition: int
    memory_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    resident_bytes: int | None = None
    store_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted result of a doubling."""

    role: str
    forecasts: tuple[Forecast, ...] = ()
    machines: tuple[Machine, ...] = ()
    pause_s: float = 0.0
    """Expected time for which a key that moves is not served; 0: no pause."""
    move_bytes: int = 0
    """Stored bytes of all parents together, about half of which is copied to the children; 0: nothing is copied."""
    unknown: tuple[str, ...] = ()
    """Processes that did not answer, so that nothing is known of them."""
    problems: tuple[str, ...] = ()
    """Problems to fix first, in words."""
    warnings: tuple[str, ...] = field(default=())
    """Warnings for the operator, in words."""

    def json(self) -> dict[str, object]:
        """Return values for JSON."""
        return {
            "load": [one.json() for one in self.forecasts],
            "machines": [asdict(one) for one in self.machines],
            "pause_s": round(self.pause_s, 3),
            "move_bytes": self.move_bytes,
            "unknown": list(self.unknown),
            "warnings": list(self.warnings),
        }


def forecast(count: int, loads: Mapping[int, Load]) -> tuple[Forecast, ...]:
    """Forecast each of `count` partitions; unknown loads are left out."""
    found = []
    for partition in range(count):
        load = loads.get(partition)
        if load is None:
            continue
        hot = [(key, per_s) for key, per_s in load.hot if key % count == partition]
        total = max(load.per_s, sum(per_s for _, per_s in hot))
        stays = sum(per_s for key, per_s in hot if key % (2 * count) == partition)
        goes = sum(per_s for key, per_s in hot) - stays
        rest = (total - stays - goes) / 2
        hottest, hottest_per_s = max(hot, key=lambda one: one[1], default=(0, 0.0))
        found.append(Forecast(partition, partition + count, total, stays + rest, goes + rest, hottest, hottest_per_s))
    return tuple(found)


def load_warnings(role: str, forecasts: Sequence[Forecast]) -> list[str]:
    """List, in words, the partitions whose load doubling will not divide."""
    said = []
    what = KEYS[role].removesuffix("s")
    for one in forecasts:
        if one.lighter:
            continue
        share = f"{max(one.stays_per_s, one.goes_per_s) / one.per_s:.0%} of its load stays in one partition"
        if one.hottest_per_s >= one.per_s / 2:
            hot = f"{what} {one.hottest} alone is {one.hottest_per_s / one.per_s:.0%} of it, and one {what} is never divided"
            said.append(f"partition {one.partition} will not get lighter: {hot}; {share}")
        else:
            said.append(f"partition {one.partition} will hardly get lighter: its hot {KEYS[role]} stay together; {share}")
    if forecasts:
        now = max(one.per_s for one in forecasts)
        then = max(max(one.stays_per_s, one.goes_per_s) for one in forecasts)
        if now >= MIN_PER_S and then > HEAVY * now:
            said.append(f"the busiest partition of {role} has {now:,.0f}/s now and would have {then:,.0f}/s")
        if now < MIN_PER_S:
            said.append(f"{role} had no load to speak of in the last ten seconds: nothing is known of what would get lighter")
    return said


def replica_warnings(role: str, forecasts: Sequence[Forecast], members: int, changes_per_s: float) -> list[str]:
    """Suggest, in words, one more replica where it helps as much as a doubling and moves nothing.

    members: memberships of all partitions (of relays: devices). changes_per_s: their changes a second.
    """
    busiest = max(forecasts, key=lambda one: one.per_s, default=None)
    per_s = sum(one.per_s for one in forecasts)
    if role not in SHARING or busiest is None or busiest.per_s < MIN_PER_S or per_s <= changes_per_s:
        return []
    if busiest.hottest_per_s >= busiest.per_s / 2:  # one key is one replica's
        return []
    what = "memberships" if role == "broker" else "devices"
    return [
        f"messages are the load, {per_s:,.0f}/s, and not {what}, {members:,} with {changes_per_s:,.0f} changes/s: add replicas "
        f"instead (`pixiu add-replica {role}`), which share the messages and move nothing. Double where {what} fill their memory"
    ]


def machines(count: int, there: Iterable[Replica], running: Mapping[int, int]) -> tuple[Machine, ...]:
    """Compare the free resources of the parents' machines with the demand of their children.

    count: partitions now. there: the role's processes. running: replicas of each new partition that already run.
    """
    found: dict[str, list[Replica]] = {}
    started = dict(running)
    for replica in there:
        found.setdefault(replica.host, []).append(replica)
    made = []
    for host, here in sorted(found.items()):
        memory, disk, replicas = 0, 0, 0
        for replica in here:
            if replica.partition >= count:
                continue
            child = replica.partition + count
            if started.get(child, 0) > 0:
                started[child] -= 1
                continue
            replicas += 1
            memory += max(replica.resident_bytes or 0, MEMORY_LEAST_BYTES)
            if replica.disk_free_bytes is not None:
                # Half of the stored bytes, once in the log and once in the state.
                disk += max(replica.store_bytes, DISK_LEAST_BYTES)
        free_memory = [one.memory_free_bytes for one in here if one.memory_free_bytes is not None]
        free_disk = [one.disk_free_bytes for one in here if one.disk_free_bytes is not None]
        made.append(Machine(host, min(free_memory, default=None), min(free_disk, default=None), memory, disk, replicas))
    return tuple(made)


def room_problems(found: Iterable[Machine]) -> list[str]:
    """List, in words, the resources of which machines have too little."""
    said = []
    for one in found:
        for what, free, wanted in (
            ("memory", one.memory_free_bytes, one.memory_wanted_bytes),
            ("disk", one.disk_free_bytes, one.disk_wanted_bytes),
        ):
            if free is not None and free < wanted:
                said.append(
                    f"{one.host} has {mib(free)} of {what} left, and {one.replicas} new replica(s) there want {mib(wanted)}: "
                    f"free some, or have them started on another machine (`pixiu doctor` there)"
                )
    return said


def pause(role: str, commit_s: float | None, entries_per_s: float) -> float:
    """Return the seconds for which a key that moves is expected to wait: two commits (SPLIT in the parent, OPEN in the child),
    the rest that the child still takes over, and the time until a refused client tries again. 0 where no key waits.

    commit_s: p99 of a commit, as measured; None: not known. entries_per_s: of one partition's log.
    """
    if role not in STORED:
        return 0.0
    behind = SPLIT_POLL_S * entries_per_s / APPLIED_PER_S if role == "pi" else 0.0
    return 2 * (commit_s if commit_s is not None else 0.02) + LOOK_S[role] + behind + RETRY_S[role]


def mib(size: int) -> str:
    """Format bytes for people."""
    return f"{size / (1 << 30):,.1f} GiB" if size >= 10 << 30 else f"{size / (1 << 20):,.0f} MiB"
