"""One replay from the file to the verdict.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from pixiu.discovery.target import names_registry
from pixiu.errors import InvalidArgument, Unavailable
from tools.load.ledger import Missing
from tools.load.payload import monotonic_us
from tools.load.verdict import MAX_EXAMPLES, Death, Verdict, judge
from tools.replay.cluster import ClusterConnector, TokenOf
from tools.replay.driver import Driver
from tools.replay.inbox import Mention, load_mentions, user_of
from tools.replay.log import align_rooms, load_log
from tools.replay.options import ReplayOptions
from tools.replay.plan import IDLE_MS, Plan, make_plan
from tools.replay.users import Break
from tools.replay.watch import ClusterWatch, process_name

SAMPLE: Final = "sample"
"""The file name that stands for the log included in the project."""
SAMPLE_SPEED: Final = 200.0
"""Speed that plays the sample's 40 minutes in a few seconds."""
STARTED_BY: Final = {
    "relay": "no relay, no messages to users: `pixiu up --relays 2`",
    "xiu": "no Xiu, no mail: `pixiu up --xius 1 --pis 1`",
    "pi": "no Pi, no mail: `pixiu up --xius 1 --pis 1`",
}
"""Hints for starting the roles that a cluster may lack."""
REJOIN_WAIT_S: Final = 30.0
"""Time limit, at the end, for the places of the dead to be filled, so that the report can include the times, seconds."""


@dataclass(frozen=True, kw_only=True)
class LogChoice:
    """Choice of a log, and of a part of it."""

    path: str
    rooms: int = 0
    """Number of rooms to play, the first ones; 0: all."""
    limit: int = 0
    """Limit of their lines; 0: none."""
    align: str = ""
    """`rooms`: every room starts at 0."""
    idle_ms: int = IDLE_MS
    mentions: str = ""
    """A CSV file of messages to users, for the log's time and rooms; empty: none."""


@dataclass(slots=True, kw_only=True)
class Result:
    """Result of a replay."""

    title: str
    verdict: Verdict
    started_us: int
    """Start by the process's monotonic clock."""
    seconds: float
    logins: int
    breaks: int = 0
    """Number of connections that broke."""
    why_broken: tuple[str, ...] = ()
    """Reasons of the first few breaks."""
    interrupted: bool
    notes: dict[str, str]
    """Texts of the report beside some of its rows, by name."""
    played: dict[str, object]
    """Totals of the plan and the connections, for the JSON."""


class Played(Protocol):
    """A driver of a replay."""

    async def run(self) -> None:
        """Play everything."""

    def interrupt(self) -> None:
        """Send nothing more."""


def sample_path() -> Path:
    """Path of the log included in the project."""
    return Path(__file__).resolve().parent / "data" / "sample_chat.jsonl.gz"


def load_plan(choice: LogChoice) -> Plan:
    """Read a log and make its schedule. Raises `InvalidArgument` with the file, line and field at fault."""
    if choice.align not in ("", "rooms"):
        raise InvalidArgument(f"--align {choice.align}: only `rooms` is known: every room starts at 0")
    path = sample_path() if choice.path == SAMPLE else Path(choice.path)
    events = load_log(path, rooms=choice.rooms, limit=choice.limit)
    if not events:
        raise InvalidArgument(f"{path}: the log is empty")
    mentions: list[Mention] = []
    if choice.mentions:
        if choice.align:
            raise InvalidArgument("--mentions keeps the log's time: leave out --align")
        rooms = {event.room for event in events}
        mentions = load_mentions(Path(choice.mentions), events[0].ts_ms, events[-1].ts_ms, rooms)
    return make_plan(align_rooms(events) if choice.align else events, idle_ms=choice.idle_ms, mentions=mentions)


async def replay(
    target: str,
    plan: Plan,
    options: ReplayOptions,
    on_progress: Callable[[Driver, ClusterWatch], None] = lambda _driver, _watch: None,
    *,
    token_of: TokenOf | None = None,
    outages: Sequence[Death] = (),
) -> Result:
    """Play a plan against the cluster at `zk://HOST:PORT/ROOT`.

    Args:
        target: the cluster's registry.
        plan: the schedule.
        options: options of the replay.
        on_progress: called at intervals.
        token_of: returns the token of a user (0: the back end).
        outages: outages that explain losses besides the deaths in the registry, such as links that were cut; read at the end.

    Raises `PixiuError` when the cluster cannot be reached, or has no gateway or proxy that is Running.
    """
    options.validate()
    inboxes = frozenset(user for room in plan.rooms if (user := user_of(room)) is not None)
    async with watching(target, ("gateway", "proxy", *(["relay"] if inboxes else []))) as watch:
        connector = ClusterConnector(target, watch, options, inboxes, token_of)
        try:
            await connector.start()
            await watch.count_before()
            driver = Driver(plan, options, connector, on_progress=lambda: on_progress(driver, watch))
            started_us, seconds = await play(driver)
            await _wait_for_rejoins(watch)
            verdict = await _judge(plan, driver, watch, outages)
        finally:
            await connector.close()
    users = driver.users
    return Result(
        title="Replay",
        verdict=verdict,
        started_us=started_us,
        seconds=seconds,
        logins=users.logins,
        breaks=len(users.breaks),
        why_broken=tuple(f"{found.uin}: {found.reason}" for found in users.breaks[:MAX_EXAMPLES]),
        interrupted=driver.interrupted,
        notes={
            "sent": f"in {len(plan.rooms)} rooms by {plan.users} users, {seconds:.1f} s",
            "expected": "deliveries to those who were members at the time",
            "delivered": f"{verdict.delivered / max(seconds, 1e-9):,.0f} a second",
            "latency": "from the sender's call to the subscriber's callback",
        },
        played={
            "rooms": len(plan.rooms),
            "users": plan.users,
            "connections": users.connections,
            "broken_connections": len(users.breaks),
            "sent_by_sdk": driver.sent_by_sdk,
            "planned": {"messages": plan.messages, "chats": plan.chats, "deliveries": plan.expected},
        },
    )


@contextlib.asynccontextmanager
async def watching(target: str, roles: Sequence[str]) -> AsyncIterator[ClusterWatch]:
    """Watch the cluster during a replay. Raises `PixiuError` if it cannot be reached, or nothing is Running of one of the roles."""
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: a replay needs the registry, zk://HOST:PORT/ROOT, to see the cluster")
    watch = ClusterWatch(target, monotonic_us)
    await watch.start()
    try:
        for role in roles:
            if not watch.view.running(role):
                hint = STARTED_BY.get(role, "start one with `pixiu up`")
                raise Unavailable(f"no {role} is Running in the cluster at {target}; {hint}")
        yield watch
    finally:
        await watch.close()


async def play(driver: Played) -> tuple[int, float]:
    """Run a driver, which Ctrl-C interrupts. Returns when it began, by the monotonic clock, and the seconds it took."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.interrupt)
    started_us = monotonic_us()
    try:
        await driver.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return started_us, (monotonic_us() - started_us) / 1e6


async def _wait_for_rejoins(watch: ClusterWatch) -> None:
    until = time.monotonic() + REJOIN_WAIT_S
    while any(death.rejoin_us is None for death in watch.book.deaths) and time.monotonic() < until:
        await asyncio.sleep(0.1)


async def _judge(plan: Plan, driver: Driver, watch: ClusterWatch, outages: Sequence[Death]) -> Verdict:
    deaths = [*deaths_with_users(watch.book.deaths, driver.users.breaks), *outages]
    processes = {int(node.endpoint): process_name(node) for node in watch.seen()}

    def describe(missing: Missing) -> str:
        gateway = processes.get(driver.users.gateway_of(missing.uin), "no gateway")
        user, room = plan.names.user_names.get(missing.uin, "?"), plan.names.room_names.get(missing.room, "?")
        whole = ", nobody got it" if missing.whole else ""
        return f"message {missing.number} in {room} to {user} at {gateway}{whole}"

    return judge(
        driver.ledger,
        deaths,
        await watch.hops(),
        failed_logins=driver.users.failed_logins,
        gateway_of=driver.users.gateway_of,
        names=describe,
    )


def deaths_with_users(deaths: list[Death], breaks: list[Break]) -> list[Death]:
    """Add to each dead gateway its users whose connections broke with it; its window ends when the last of them is back. Pure."""
    for death in deaths:
        if death.role != "gateway":
            continue
        concerned = [found for found in breaks if found.gateway == death.endpoint]
        # A gateway's death affects only its users: -1 is no UIN.
        death.users = frozenset(found.uin for found in concerned) or frozenset([-1])  # type: ignore[list-item]
        if death.rejoin_us is not None:
            death.rejoin_us = max([death.rejoin_us, *(found.resumed_us or death.rejoin_us for found in concerned)])
        if any(found.resumed_us is None for found in concerned):
            death.rejoin_us = None
    return deaths
