"""Does a cluster grow while it is used: does anything get lost, repeated or out of order, and how long does a moved key pause?

A whole cluster as `pixiu up` runs it, two partitions of each role (one replica each; two of Xiu and Pi). While rooms, signals,
chat, joins and mail flow, `pixiu double` takes a role to 4 and to 8 partitions; each role in a cluster of its own. What happens to
mail is recorded, and judged by the checker of `tests/history`, all of whose rules can fire: ends of acknowledgements, copies on the
wire, mail that is refused, lists, bodies of 15 bytes to 8 KiB.

With --fault one thing is broken in each phase of each doubling, at the moment at which the tool, which is killed there by its
hook, has taken its first step in the phase; another run of the tool goes on at once. `--phase` names one phase alone.

    tool         nothing more than the tool is killed
    child        the leader of a new partition is killed; of the soft roles its only replica
    parent       the same of a partition that is split
    zookeeper    ZooKeeper is killed and started again
    stop-child   the leader of a new partition is stopped (SIGSTOP) for 10 s
    stop-parent  the same of a partition that is split

Estimate: nothing is lost, repeated or out of order. A moved key of Pi and Xiu waits 50 to 100 ms at the median on two cores
(two commits, a question to the child, what the child lacks); of the other roles no longer than in any other second.

    python -m benchmarks.clusters.growth [--roles pi,xiu] [--to 8] [--fault child] [--phase split] [--seed 1] [--keep DIR] [--json]
        [--layout nodes]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onebox.embedded import EmbeddedZooKeeper
from ops.doubling.double_command import STOP_VARIABLE
from ops.doubling.doubling import STORED, Phase, phases
from tests.history.checker import check, counts, report
from tests.history.record import Fault, History
from tests.history.violation import Limits, Rule
from tests.support.cluster import LAYOUT, LAYOUTS, PIXIU, running_cluster, wait_for
from tests.support.live_traffic import LiveTraffic
from tests.support.mail_history import REFUSED_BYTES, Traffic
from tests.support.shared_zookeeper import end_shared_server
from tools.cli.http import fetch, samples

ROLES = ("router", "broker", "relay", "xiu", "pi")
FAULTS = ("none", "tool", "child", "parent", "zookeeper", "stop-child", "stop-parent")
WITHOUT_VICTIM = ("none", "tool", "zookeeper")
PRECISE = (Phase.LEARN, Phase.SPLIT, Phase.OPEN)
"""Phases in which the victim is known before the tool gets there, so that it is struck within the same milliseconds."""
STOP_S = 10.0
TOOL_S = 120.0
CUT_S = 0.3
"""Margin around the cut."""
KINDS = {"router": ("join",), "broker": ("room", "signal"), "relay": ("chat",)}
"""Messages whose waits are measured for a soft role's keys; mail's waits are those of Xiu and Pi."""


@dataclass
class Row:
    """Result of one doubling."""

    role: str
    n: int
    fault: str
    broken: list[str] = field(default_factory=list)
    """Phases in which something was broken."""
    took_s: float = 0.0
    before_ms: tuple[float, float] = (0.0, 0.0)
    """Longest wait of a key in the seconds before: median over the keys that move, and maximum."""
    moved_ms: tuple[float, float] = (0.0, 0.0)
    """The same from the first step of the doubling until its end, during which new processes start on the same machine."""
    stayed_ms: tuple[float, float] = (0.0, 0.0)
    """The same for keys that stay."""
    cut_moved_ms: tuple[float, float] = (0.0, 0.0)
    """The same from a little before the cut (soft roles: the flip) until the new partitions serve."""
    cut_stayed_ms: tuple[float, float] = (0.0, 0.0)
    pauses_ms: tuple[float, ...] = ()
    """Xiu, Pi: for each proxy the time from a split parent's refusal to its child's first answer, for the partition that paused
    longest. This is the cut alone, without the waits of mail on a busy machine at any time."""

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """All measured waits."""
        return self.before_ms, self.moved_ms, self.stayed_ms, self.cut_moved_ms, self.cut_stayed_ms


@dataclass
class Findings:
    """Results of all runs."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Growth:
    """One cluster, in which one role or several double.

    Args:
        arguments: the command line's.
        roles: the roles that double, one after the other.
        folder: for all files.
        findings: receives the results.
    """

    def __init__(self, arguments: argparse.Namespace, roles: tuple[str, ...], folder: Path, findings: Findings) -> None:
        self._arguments, self._roles, self._folder = arguments, roles, folder
        self._history = History(path=folder / "history.jsonl")
        self.rows, self.problems, self.notes = findings.rows, findings.problems, findings.notes
        self._stopped: list[asyncio.Task[None]] = []
        self._phases: list[tuple[float, str]] = []
        """Times at which a tool entered a phase, monotonic seconds."""

    async def run(self) -> None:
        """Run all doublings, and judge the results."""
        arguments, folder = self._arguments, self._folder
        grown = dict.fromkeys(self._roles, arguments.partitions)
        shape = [f"--{role}s={grown.get(role, arguments.others)}" for role in ROLES] + [
            f"--{role}-replicas={2 if role in STORED else 1}" for role in ROLES
        ]
        shape += ["--proxies=2", "--gateways=1", "--set", f"cluster.max_record_bytes={REFUSED_BYTES}", "--set", "xiu.table_mb=8"]
        with EmbeddedZooKeeper(folder / "zookeeper") as server:
            self._server = server
            registry = f"zk://{server.address}/pubsub"
            shape += ["--registry", registry, "--set", f"xiu.table_dir={folder}"]
            with running_cluster(folder, *shape, layout=arguments.layout) as cluster:
                self._cluster = cluster
                await asyncio.to_thread(cluster.wait_healthy)
                say("the cluster runs")
                mail = Traffic(registry, self._history, arguments.seed, users=8, pace_s=0.03, everything=True)
                async with LiveTraffic(registry) as live, mail:
                    self._live, self._mail = live, mail
                    await mail.more(300)
                    for role in self._roles:
                        count = arguments.partitions
                        while count < arguments.to:
                            await self._double(role, count)
                            count *= 2
                    await mail.more(200)
                    live.check()
                    await live.settle()
                    await mail.settle()
                await asyncio.to_thread(cluster.wait_healthy)
                links = [process["links"] for process in cluster.status()["processes"]]
        self._judge(sum(each["lost"] + each["queue_drops"] for each in links))

    def _judge(self, counted: int) -> None:
        """Judge the histories. `counted`: items that links counted as lost or dropped. Real-time messages are at most once, so
        every lost one must be counted, or its receiver notified of a gap. Only rooms promise order; a process that was stopped
        sends late what was reported to its senders as lost."""
        self._history.close()
        limits = Limits(sends=300, deliveries=300, acknowledgements=300, faults=0)
        found = check(self._history, limits)
        if "relay" in self._roles:
            unmarked = [violation for violation in found if violation.rule is Rule.DUP]
            found = [violation for violation in found if violation not in unmarked]
            # A relay that takes over does not know what its predecessor sent (docs/delivery.md).
            self.notes.append(f"{self._roles}: {len(unmarked)} mails came again to a device's next application unmarked")
        if found:
            self.problems.append(report(self._history, found))
        for kind, losses in self._live.losses(BEGAN).items():
            self.notes.append(f"{self._roles}: {kind}: {asdict(losses)}")
            ordered = kind == "room" and not self._arguments.fault.startswith("stop")
            if losses.lost - losses.notified > counted or losses.repeated or (losses.disordered and ordered):
                self.problems.append(f"{kind}: {asdict(losses)}")
        self.notes += self._live.where
        self.notes.append(f"{self._roles}: links counted {counted} items as lost or dropped")
        self.notes += [f"{self._roles}: {dict(self._live.counts)}", f"mail: {dict(self._mail.counts)}; {counts(self._history)}"]

    # --- one doubling

    async def _double(self, role: str, count: int) -> None:
        fault = self._arguments.fault
        row = Row(role, count, fault)
        quiet = time.monotonic()
        await asyncio.sleep(self._arguments.before)
        began = time.monotonic()
        self._history.fault(Fault("double", f"layout/{role}"))
        if fault != "none":
            await self._break_in_phases(role, count, row)
        code, said = await self._tool(role, 2 * count)
        if code or not said or said[-1].get("event") != "done":
            self.problems.append(f"{role} {count}: the tool ended with {code}: {said[-1:]}")
        self._history.fault(Fault("double", f"layout/{role}", heals=True))
        ended = time.monotonic()
        row.took_s = ended - began
        await self._mail.more(100)
        self._live.check()
        row.before_ms = self._longest(role, count, quiet, began, moved=True)
        row.moved_ms = self._longest(role, count, began, ended, moved=True)
        row.stayed_ms = self._longest(role, count, began, ended, moved=False)
        first = Phase.SPLIT if role in STORED else Phase.COMMIT
        cut = [at for at, phase in self._phases if at >= began and phase == first.value]
        over = [at for at, phase in self._phases if at >= began and phase in (Phase.FOLLOW.value, Phase.DONE.value)]
        if cut and over:
            span = cut[0] - CUT_S, over[0] + CUT_S
            row.cut_moved_ms = self._longest(role, count, *span, moved=True)
            row.cut_stayed_ms = self._longest(role, count, *span, moved=False)
        if role in STORED:
            row.pauses_ms = await self._pauses(role)
        self.rows.append(row)
        say(f"{row}")

    async def _pauses(self, role: str) -> tuple[float, ...]:
        """Return the pauses that proxies report; a proxy without a request for a moved key reports none."""
        found = []
        for process in await asyncio.to_thread(self._cluster.processes, "proxy"):
            address, _, port = process["http"].removeprefix("http://").rpartition(":")
            _, page = await fetch(address, int(port), "/metrics")
            found += [
                round(1000 * value, 1)
                for name, labels, value in samples(page)
                if name == "pixiu_proxy_mail_cut_pause_seconds" and labels.get("role") == role
            ]
        return tuple(sorted(found))

    def _longest(self, role: str, count: int, since: float, until: float, *, moved: bool) -> tuple[float, float]:
        if role in STORED:
            longest: dict[int, float] = {}
            for at, uin, seconds in self._mail.waits:
                if since <= at <= until:
                    longest[uin] = max(longest.get(uin, 0.0), seconds)
        else:
            longest = self._live.waits(KINDS[role], since, until)
        found = [1000 * wait for key, wait in longest.items() if (key % (2 * count) >= count) == moved]
        return (round(statistics.median(found), 1), round(max(found), 1)) if found else (0.0, 0.0)

    async def _tool(self, role: str, to: int, killed_in: Sequence[Phase] = ()) -> tuple[int, list[dict[str, Any]]]:
        environment = {**os.environ, STOP_VARIABLE: ",".join(phase.value for phase in killed_in)}
        command = [PIXIU, "double", role, "--to", str(to), "--yes", "--json", "--timeout", str(TOOL_S)]
        process = await asyncio.create_subprocess_exec(
            *command, "--target", self._cluster.target, env=environment, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        lines = []
        async for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1].get("event") == "phase":
                self._phases.append((time.monotonic(), lines[-1]["phase"]))
        errors = await process.stderr.read()
        await process.wait()
        if process.returncode not in (0, -signal.SIGKILL):
            lines.append({"event": "error", "text": errors.decode()[-600:]})
        return process.returncode or 0, lines

    # --- faults

    async def _break_in_phases(self, role: str, count: int, row: Row) -> None:
        """Take the tool from phase to phase, and break something in each."""
        fault = self._arguments.fault
        left = [phase for phase in phases(role)[:-1] if self._arguments.phase in ("", phase.value)]
        while left:
            victim: list[dict[str, Any]] = []
            if left[0] in PRECISE and fault not in WITHOUT_VICTIM:
                victim = await asyncio.to_thread(self._victim, role, count)
            code, said = await self._tool(role, 2 * count, left)
            if code != -signal.SIGKILL:
                return
            phase = Phase(next(line["phase"] for line in reversed(said) if line["event"] == "phase"))
            left = left[left.index(phase) + 1 :]
            row.broken.append(phase.value)
            if not victim and fault not in WITHOUT_VICTIM:
                victim = await asyncio.to_thread(self._victim, role, count, at_once=phase is Phase.BEGIN)
            say(f"{role} {count}: {fault} in {phase.value}")
            if fault == "zookeeper":
                self._history.fault(Fault("kill", "zookeeper"))
                await asyncio.to_thread(self._server.kill)
                await asyncio.to_thread(self._server.start)
                self._history.fault(Fault("kill", "zookeeper", heals=True))
            elif victim:
                self._strike(victim)
        if self._stopped:
            await asyncio.wait(self._stopped)

    def _strike(self, victim: list[dict[str, Any]]) -> None:
        """Kill a process, which `pixiu up` restarts, or stop it for a while. victim: its roles."""
        names, pid = [f"{each['role']}/{each['address']}" for each in victim], int(victim[0]["pid"])
        for name in names:
            self._history.fault(Fault("kill", name))
        if not self._arguments.fault.startswith("stop"):
            os.kill(pid, signal.SIGKILL)
            return

        async def go_on() -> None:
            await asyncio.sleep(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            for name in names:
                self._history.fault(Fault("kill", name, heals=True))

        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(asyncio.create_task(go_on()))

    def _victim(self, role: str, count: int, *, at_once: bool = False) -> list[dict[str, Any]]:
        """Return the roles of the process that leads the last parent or child, once its replicas are in sync; `at_once`: of any
        process there."""
        child = self._arguments.fault.endswith("child")
        partition = 2 * count - 1 if child else count - 1

        def find() -> dict[str, Any] | None:
            processes = self._cluster.status()["processes"] if at_once else self._cluster.processes(role)
            found = [process for process in processes if (process["role"], process["partition"]) == (role, partition)]
            if role not in STORED or at_once:
                return found[0] if found else None
            states = [(process, process.get("replication") or {}) for process in found]
            leads = [(process, said) for process, said in states if said.get("state") == "Leading"]
            return leads[0][0] if len(leads) == 1 and len(leads[0][1]["in_sync"]) == 2 else None

        process = wait_for(find, f"a leader of {role} partition {partition}")
        assert process is not None
        return self._cluster.together(process) or [process]


BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print progress to standard error."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def folder_of(keep: str) -> Iterator[Path]:
    """Yield the cluster's folder, removed afterwards or kept."""
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(dir=keep))
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


Run = Callable[[argparse.Namespace, Path], Coroutine[Any, Any, tuple[dict[str, Any], list[str]]]]


def play(run: Run, arguments: argparse.Namespace) -> int:
    """Run a benchmark in a folder of its own, and print what it found. Returns its exit code.

    Args:
        run: gives figures by name, and broken promises.
        arguments: has `keep` and `json`.
    """
    with folder_of(arguments.keep) as folder:
        try:
            figures, problems = asyncio.run(run(arguments, folder))
        finally:
            end_shared_server()
    return tell(figures, problems, as_json=arguments.json)


def tell(figures: Mapping[str, Any], problems: Sequence[str], *, as_json: bool) -> int:
    """Print figures and broken promises. Returns the exit code: 1 if there are any of these."""
    if as_json:
        print(json.dumps({"figures": figures, "problems": problems}, ensure_ascii=False))
    else:
        print(*(f"{name}: {value}" for name, value in figures.items()), *problems, sep="\n")
    return 1 if problems else 0


def main() -> int:
    """Grow, and print the results. Returns 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roles", default=ROLES, type=lambda text: tuple(text.split(",")))
    parser.add_argument("--together", action="store_true", help="all roles in one cluster; it needs a core for ten processes")
    parser.add_argument("--partitions", type=int, default=2, help="of a role that doubles, at first")
    parser.add_argument("--others", type=int, default=2, help="partitions of each other role")
    parser.add_argument("--to", type=int, default=8)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--phase", default="", choices=["", *(phase.value for phase in Phase)])
    parser.add_argument("--before", type=float, default=5.0, help="seconds before each doubling")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUT, help="processes that the cluster starts with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="keep logs and history in this folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    growth = Findings()
    for roles in [arguments.roles] if arguments.together else [(role,) for role in arguments.roles]:
        with folder_of(arguments.keep) as folder:
            try:
                asyncio.run(Growth(arguments, roles, folder, growth).run())
            except AssertionError as error:
                growth.problems.append(f"{roles}: {error}")
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in growth.rows], "problems": growth.problems, "notes": growth.notes}))
        return 1 if growth.problems else 0
    waited = ("before ms", "moved ms", "stayed ms", "moved, cut", "stayed, cut", "pause at proxies")
    shown = Table("role", "from", "fault in", "s", *waited)
    for row in growth.rows:
        pauses = ", ".join(f"{each:.0f}" for each in row.pauses_ms)
        waits = ("{:.0f}, {:.0f}".format(*pair) for pair in row.waits)
        shown.add_row(row.role, str(row.n), f"{row.fault}: {' '.join(row.broken)}", f"{row.took_s:.1f}", *waits, pauses)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(shown)
    for text in (*growth.notes, *growth.problems):
        console.print(text, markup=False, highlight=False)
    return 1 if growth.problems else 0


if __name__ == "__main__":
    sys.exit(main())
