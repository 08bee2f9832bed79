"""`pixiu top`: the whole cluster, live, from any machine that reaches its registry and its processes' HTTP ports.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pixiu.discovery.node import Node
from pixiu.discovery.paths import ROLES
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from tools.cli.http import fetch, samples
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json
from tools.cli.rates import Reading, Row, hottest, reading, rows, wanted
from tools.cli.status import HTTP_AT_ONCE, missing_processes

HOT: Final = {"rooms": "broker", "users": "relay"}
"""Kind of key → the role to ask: each room is at one broker, and each user at one relay."""
LATE_S: Final = 0.25
MAX_HOT: Final = 20


@dataclass(frozen=True, slots=True)
class Screen:
    """The cluster at one moment."""

    target: str
    seconds: float
    """Time between the two readings of the rates."""
    rows: list[Row]
    rooms: list[tuple[int, float]]
    users: list[tuple[int, float]]
    dead: list[str]
    """Processes that are in the registry and do not answer."""
    problems: list[str]
    """Processes that the layout requires and that are missing."""

    def json(self) -> dict[str, object]:
        """Values for JSON: times in seconds, rates per second."""
        return {
            "registry": self.target,
            "seconds": round(self.seconds, 3),
            "roles": [asdict(row) for row in self.rows],
            "hot_rooms": [{"room": key, "per_s": per_s} for key, per_s in self.rooms],
            "hot_users": [{"uin": key, "per_s": per_s} for key, per_s in self.users],
            "dead": self.dead,
            "problems": self.problems,
        }


class Watch:
    """Reads every process of a view repeatedly.

    Args:
        target: the registry's address, to show it.
        hot: number of rooms and users to show.
    """

    def __init__(self, target: str, hot: int) -> None:
        self._target, self._hot = target, hot
        self._before: dict[int, Reading] = {}
        self._at = time.monotonic()
        self._slots = asyncio.Semaphore(HTTP_AT_ONCE)

    @property
    def readings(self) -> dict[int, Reading]:
        """Readings of the processes that answered at the last call of `look`, by endpoint."""
        return self._before

    async def look(self, view: View) -> Screen:
        """Read every process once; rates are those since the previous call."""
        order = {role: number for number, role in enumerate(ROLES)}
        nodes = sorted(view.nodes, key=lambda node: (order.get(node.role, len(order)), node.partition, node.replica))
        asked = await asyncio.gather(*(self._ask(node) for node in nodes))
        now = time.monotonic()
        found = [one for one, _ in asked]
        table = rows(self._before, found)
        silent = [(node, one) for node, one in zip(nodes, found, strict=True) if one.counts is None]
        screen = Screen(
            self._target,
            now - self._at,
            table,
            self._hottest("rooms", asked),
            self._hottest("users", asked),
            [f"{one.name} at {node.address}" for node, one in silent],
            missing_processes(view, frozenset(int(node.endpoint) for node, _ in silent)),
        )
        self._before, self._at = {one.identity: one for one in found if one.counts is not None}, now
        return screen

    def _hottest(self, what: str, asked: Sequence[tuple[Reading, dict[str, object]]]) -> list[tuple[int, float]]:
        return hottest((page for one, page in asked if one.role == HOT[what]), what, self._hot)

    async def _ask(self, node: Node) -> tuple[Reading, dict[str, object]]:
        name = f"{node.role} {node.replica}" if node.partition < 0 else f"{node.role} {node.partition}/{node.replica}"
        page: list[Any] | None = None
        hot: object = {}
        async with self._slots:
            try:
                status, body = await fetch(node.host, node.http_port, "/metrics")
                page = list(samples(body, wanted(node.role))) if status == 200 else None
                if self._hot and node.role in HOT.values():
                    status, body = await fetch(node.host, node.http_port, "/hot")
                    hot = json.loads(body) if status == 200 else {}
            except (OSError, ValueError):
                pass  # dead, or of a version without /hot
        one = reading(name, node.role, node.partition, int(node.endpoint), time.monotonic(), page)
        return one, hot if isinstance(hot, dict) else {}


def render(screen: Screen) -> RenderableType:
    """Show the screen, for people."""
    table = Table(box=None, pad_edge=False)
    table.add_column("role")
    for name in ("partition", "processes", "in/s", "out/s", "p50", "p99", "loop late", "drops/s", "behind"):
        table.add_column(name, justify="right")
    for row in screen.rows:
        dead = f" [red]{row.dead} dead[/]" if row.dead else ""
        behind = "" if row.behind is None else f"{row.behind:,}" + (f" [red]{row.missing} missing[/]" if row.missing else "")
        late = f"[yellow]{_time(row.lag_s)}[/]" if row.lag_s > LATE_S else _time(row.lag_s)
        table.add_row(
            row.role,
            "" if row.partition < 0 else str(row.partition),
            f"{row.alive}{dead}",
            f"{row.in_per_s:,.0f}",
            f"{row.out_per_s:,.0f}",
            _time(row.p50_s),
            _time(row.p99_s),
            late,
            f"[red]{row.drops_per_s:,.0f}[/]" if row.drops_per_s >= 0.5 else "0",
            behind,
        )
    hot = [
        f"hottest {name}: " + ", ".join(f"{key} {per_s:,.0f}/s" for key, per_s in keys)
        for name, keys in (("rooms", screen.rooms), ("users", screen.users))
        if keys
    ]
    wrong = [f"  [red]{escape(text)} does not answer; was it killed, or does it hang?[/]" for text in screen.dead]
    wrong += [f"  [red]{escape(text)}[/]" for text in screen.problems]
    return Group(f"[dim]{escape(screen.target)}, the last {screen.seconds:.1f} s[/]", table, *hot, *wrong)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


async def _run(target: str, interval: float, once: bool, hot: int, as_json: bool, out: Console) -> None:
    check_reachable(target)
    # Imported on use: neither help nor «no cluster» waits for ZooKeeper's client.
    from pixiu.discovery.watcher import Discovery
    from pixiu.discovery.zookeeper import ZooKeeper

    address = parse_address(target)
    zookeeper = ZooKeeper(address, connect_timeout_s=5.0)
    await zookeeper.connect()
    discovery = Discovery(zookeeper, address.root, lambda _view: None)
    live = Live(console=out, auto_refresh=False, screen=True) if out.is_terminal and not as_json and not once else None
    try:
        await discovery.start()
        watch = Watch(str(address), hot)
        await watch.look(discovery.view)
        if live is not None:
            live.start()
        while True:
            await asyncio.sleep(interval)
            screen = await watch.look(discovery.view)
            if as_json:
                print_json(screen.json())
            elif live is not None:
                live.update(render(screen), refresh=True)
            else:
                out.print(render(screen))
            if once:
                return
    finally:
        if live is not None:
            live.stop()
        await discovery.close()
        await zookeeper.close()


@guarded
def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table after two readings, and exit.")] = False,
    hot: Annotated[int, typer.Option(min=0, max=MAX_HOT, help="Number of the hottest rooms and users to show.")] = 5,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Show what flows through a whole cluster, live: rates, latency, lags and drops by role and partition, the hottest rooms."""
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the addresses of the processes are in the registry; give zk://HOST:PORT/ROOT")
    try:
        asyncio.run(_run(target, interval, once, hot, as_json, console()))
    except KeyboardInterrupt:
        return  # Ctrl-C is the usual way to leave it
