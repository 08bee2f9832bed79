"""What doubling a role would bring, by what its processes count now: load before and after, room on machines, the pause. Pure.

    partition p, of n:   key % 2n == p       stays
                         key % 2n == p + n   goes to the child

Where a hot key goes is known; what is not hot is taken to divide evenly. One key is never divided: a partition whose load is one
user's or one room's gets no lighter.

Source: docs/doubling.md, "What the plan says".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

KEYS: Final[Mapping[str, str]] = {"broker": "rooms", "router": "rooms", "relay": "users", "xiu": "users", "pi": "users"}
STORED: Final = ("xiu", "pi")
SHARING: Final = ("broker", "relay")
"""Roles whose replicas share a partition's keys among them: each holds all of its memberships, and handles its keys' messages."""
HEAVY: Final = 0.75
"""A partition that keeps more than this of its load did not get lighter to speak of."""
MIN_PER_S: Final = 1.0
"""Of less than this nothing is said: it is nobody's load."""
DISK_LEAST_BYTES: Final = 256 << 20
"""A new replica wants at least so much; Xiu refuses writes below it."""
MEMORY_LEAST_BYTES: Final = 128 << 20
RETRY_S: Final[Mapping[str, float]] = {"xiu": 0.02, "pi": 0.0}
"""Who is refused by a child of Xiu that is not open asks again after at most so long; one of Pi holds what it is asked."""
LOOK_S: Final[Mapping[str, float]] = {"xiu": 0.02, "pi": 0.02}
"""A child hears so long after its parent's cut of it."""
APPLIED_PER_S: Final = 10_000
"""Entries that a child of Pi takes over in a second, at the least."""
SPLIT_POLL_S: Final = 0.2
"""So old is what the tool knows of a child when it has its parent split."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one partition has to do, all of its replicas together."""

    per_s: float
    """Messages, operations or reports a second, of the last whole ten seconds."""
    hot: Sequence[tuple[int, float]] = ()
    """(RoomID or UIN, a second) of the hottest keys that are known."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One partition, before and after."""

    partition: int
    child: int
    per_s: float
    stays_per_s: float
    goes_per_s: float
    hottest: int = 0
    """Of its keys; 0: none is known."""
    hottest_per_s: float = 0.0

    @property
    def lighter(self) -> bool:
        """Whether the busier of the two has notably less to do than the one has now."""
        return self.per_s < MIN_PER_S or max(self.stays_per_s, self.goes_per_s) <= HEAVY * self.per_s

    def json(self) -> dict[str, object]:
        """Return values for JSON; rates a second."""
        return {
            **{key: round(value, 1) if isinstance(value, float) else value for key, value in asdict(self).items()},
            "lighter": self.lighter,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has left, by what the role's processes there say."""

    host: str
    memory_free_bytes: int | None
    disk_free_bytes: int | None
    """Of the fullest disk on which one of them keeps its data; None: none has any, or says."""
    memory_wanted_bytes: int
    """Of the new replicas, if each runs where its parent's does."""
    disk_wanted_bytes: int
    replicas: int
    """New ones that are to run there, if each runs where its parent's does."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What one process of the role says of itself; None: it does not say it."""

    host: str
    partition: int
    memory_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    resident_bytes: int | None = None
    store_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a doubling would bring."""

    role: str
    forecasts: tuple[Forecast, ...] = ()
    machines: tuple[Machine, ...] = ()
    pause_s: float = 0.0
    """For which a key that moves is not served, as expected; 0: none is."""
    move_bytes: int = 0
    """Stored in all parents together, about half of which is copied to the children; 0: nothing is copied."""
    unknown: tuple[str, ...] = ()
    """Processes that did not answer, and of which nothing is known."""
    problems: tuple[str, ...] = ()
    """What must be put right first, in words."""
    warnings: tuple[str, ...] = field(default=())
    """What an operator should know, in words."""

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
    """Each partition of `count`, before and after; those of which nothing is known are left out."""
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
    """What doubling will not help, in words."""
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
    """Where one more replica helps as a doubling does, and moves nothing, in words.

    members: memberships of all partitions (of relays: devices). changes_per_s: of these.
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
    """What the machines of the parents have left, and what their children would want there.

    count: partitions now. there: the role's processes. running: replicas of each new partition that run already.
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
                # Half of what is stored, once in the log and once in the state.
                disk += max(replica.store_bytes, DISK_LEAST_BYTES)
        free_memory = [one.memory_free_bytes for one in here if one.memory_free_bytes is not None]
        free_disk = [one.disk_free_bytes for one in here if one.disk_free_bytes is not None]
        made.append(Machine(host, min(free_memory, default=None), min(free_disk, default=None), memory, disk, replicas))
    return tuple(made)


def room_problems(found: Iterable[Machine]) -> list[str]:
    """What machines have too little of, in words."""
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
    """Seconds for which a key that moves is expected to wait: two commits (SPLIT in the parent, OPEN in the child), what the child
    has still to take over, and the time to the next try of who was refused. 0 where no key waits.

    commit_s: p99 of a commit, as measured; None: not known. entries_per_s: of one partition's log.
    """
    if role not in STORED:
        return 0.0
    behind = SPLIT_POLL_S * entries_per_s / APPLIED_PER_S if role == "pi" else 0.0
    return 2 * (commit_s if commit_s is not None else 0.02) + LOOK_S[role] + behind + RETRY_S[role]


def mib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / (1 << 30):,.1f} GiB" if size >= 10 << 30 else f"{size / (1 << 20):,.0f} MiB"
