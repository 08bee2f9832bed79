"""Attack every gRPC method that an ordinary token can reach, and measure what an innocent client notices.

It starts a cluster with `pixiu up --secure`. The methods come from the service descriptors, so a new method is attacked without a
change here. Each method that a proxy or a gateway offers to clients is attacked for `--seconds`, a third of them each with the
largest legal requests on 50 streams or calls, with malformed requests, and with 50 clients that never read. Methods for processes
alone are tried at every listener, and must refuse. An innocent pair sends 40 messages to a room and 20 mails a second. Its p99 is
measured before each method, for as long as one kind of attack, and during each attack.

Bounds: p99 within twice (below 10 ms it counts as 10 ms, because of the scheduler of two cores); a role's own memory (RssAnon)
within its budget; no turn of an event loop above 50 ms of CPU time. No process leaves the registry, none of the innocent's messages
is lost, and its connection stays.

Estimate: by its quota (2,000 messages a second of a login) an attacker takes a tenth of a core of the servers: p99 rises from 5 to
10 ms where the machine has two cores. Memory: windows of 4 MiB a stream, 200 MiB of a proxy. Turns: 2 ms and one piece, 10 ms.

    python -m benchmarks.attacks.attackers [--seconds 60] [--method Subscribe ...] [--stacks]     # exit code 1: a bound is broken

The attackers run at nice 19. On a machine that is busy with other work they get no CPU at all then: look at the load that is
printed, and use `--nice 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import pixiu
from benchmarks.attacks.attack_requests import methods
from cluster.access.minting import key_of, make_demo, token
from onebox.children import DieWithParent
from onebox.grouping import Grouping
from onebox.up import LocalCluster, UpOptions
from pixiu.client.connection_events import ConnectionEvent
from pixiu.discovery.view import View
from pixiu.errors import PixiuError
from pixiu.rpc import tls

KINDS: Final = ("largest", "malformed", "deaf")
ROOM, INNOCENT, SENDER, ATTACKER = 42, 7, 8, 666
ROOM_EACH_S: Final = 0.025
MAIL_EACH_S: Final = 0.05
TOLD_S: Final = 0.5
DRAIN_S: Final = 2.0
"""Time after an attack within which all messages sent meanwhile must arrive."""
NOISE_S: Final = 0.010
RATIO: Final = 2.0
TURN_S: Final = 0.050
NOTED_TURN_S: Final = 0.010
SHOWN_TURN_S: Final = 0.025
"""CPU time after which `--stacks` shows the stack of a turn."""
BUDGET_MIB: Final = {"gateway": 256, "proxy": 256}
"""Allowed growth of a role: `gateway.memory_bytes`, the windows of a proxy's writers; and for all others ..."""
BUDGET_OF_OTHERS_MIB: Final = 128
MIB: Final = 1 << 20
TURNS: Final = """
import asyncio.base_events as base, os, sys, threading, time, traceback
folder, stacks = os.environ.get("PIXIU_TURNS"), os.environ.get("PIXIU_STACKS")
if folder:
    once = base.BaseEventLoop._run_once
    began = [0.0]

    def note(text):
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(text)

    def watch(thread):
        shown, clock = 0.0, time.pthread_getcpuclockid(thread)
        while True:
            time.sleep(0.005)
            since = began[0]
            if since != shown and time.clock_gettime(clock) - since > SHOWN:
                frame = sys._current_frames().get(thread)
                if frame is not None and frame.f_code.co_name != "select":
                    shown = since
                    note("# " + "".join(traceback.format_stack(frame)[-8:]).replace("\\n", "\\n# ") + "\\n")

    def measured(loop):
        if stacks and not began[0]:
            threading.Thread(target=watch, args=(threading.get_ident(),), daemon=True).start()
        began[0] = before = time.thread_time()
        try:
            once(loop)
        finally:
            took = time.thread_time() - before
            if took > NOTED:
                note(f"{time.monotonic()} {took}\\n")

    base.BaseEventLoop._run_once = measured
""".replace("NOTED", str(NOTED_TURN_S)).replace("SHOWN", str(SHOWN_TURN_S))
"""A `sitecustomize` of the cluster's processes, which notes turns of the event loop that took long, in CPU time."""


class Watched(LocalCluster):
    """A cluster that notes the processes that leave the registry."""

    def __init__(self, options: UpOptions) -> None:
        super().__init__(options)
        self.registered: dict[int, str] = {}
        self.gone: list[str] = []

    def _on_view(self, view: View) -> None:
        now: dict[int, str] = {node.endpoint: node.role for node in view.nodes}
        self.gone += [role for endpoint, role in self.registered.items() if endpoint not in now]
        self.registered = dict(now)
        super()._on_view(view)


@dataclass
class Innocent:
    """Reports of the innocent pair's process: the time and latency of each message."""

    sent: list[tuple[float, str]] = field(default_factory=list)
    took: list[tuple[float, float, str]] = field(default_factory=list)
    wrong: list[tuple[float, str]] = field(default_factory=list)

    async def follow(self, process: Process) -> None:
        """Read the process's reports."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            self.sent += [(at, kind) for at, kind in said["sent"]]
            self.took += [(at, took, kind) for at, took, kind in said["took"]]
            self.wrong += [(at, what) for at, what in said["wrong"]]

    def p99(self, kind: str, begin: float, end: float) -> float:
        """Return p99 of the messages sent in this time, seconds; a missing one counts as infinite."""
        found = sorted(took for at, took, one in self.took if one == kind and begin <= at < end)
        sent = sum(1 for at, one in self.sent if one == kind and begin <= at < end)
        found += [float("inf")] * (sent - len(found))
        return found[min(len(found) * 99 // 100, len(found) - 1)] if found else float("nan")

    def lost(self, begin: float, end: float) -> int:
        """Return the number of messages sent in this time that did not arrive."""
        return sum(begin <= at < end for at, _ in self.sent) - sum(begin <= at < end for at, _, _ in self.took)

    def said(self, begin: float, end: float) -> list[str]:
        """Return the problems of this time."""
        return [what for at, what in self.wrong if begin <= at < end]


@dataclass
class Row:
    """Results of one kind of attack at one method."""

    method: str
    kind: str
    requests: int = 0
    refused: int = 0
    room: tuple[float, float] = (0.0, 0.0)
    """p99 before and during the attack."""
    mail: tuple[float, float] = (0.0, 0.0)
    lost: int = 0
    growth: dict[str, float] = field(default_factory=dict)
    turn: tuple[str, float] = ("", 0.0)
    gone: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    load: float = 0.0
    span: tuple[float, float] = (0.0, 0.0)

    def broken(self) -> list[str]:
        """Describe the broken bounds."""
        found = [
            f"{name} p99 {during / before:.1f} times"
            for name, (before, during) in (("room", self.room), ("mail", self.mail))
            if not during <= max(RATIO * before, NOISE_S)
        ]
        found += [f"{role} +{mib:.0f} MiB" for role, mib in self.growth.items() if mib > BUDGET_MIB.get(role, BUDGET_OF_OTHERS_MIB)]
        if self.turn[1] > TURN_S:
            found.append(f"turn of {self.turn[0]} {self.turn[1] * 1000:.0f} ms")
        if self.lost:
            found.append(f"{self.lost} lost")
        return found + [f"{role} left" for role in self.gone] + self.said + self.wrong

    def cells(self) -> list[str]:
        """Format for the table."""
        role, mib = max(self.growth.items(), key=lambda item: item[1] / BUDGET_MIB.get(item[0], BUDGET_OF_OTHERS_MIB))
        return [
            self.method, self.kind, f"{self.requests:,}", f"{self.refused:,}",
            *(f"{before * 1000:.1f}/{during * 1000:.1f} {during / before:.1f}x" for before, during in (self.room, self.mail)),
            f"{role} {mib:+.0f}/{BUDGET_MIB.get(role, BUDGET_OF_OTHERS_MIB)}",
            f"{self.turn[0]} {self.turn[1] * 1000:.0f}" if self.turn[0] else "<10", str(len(self.gone)), f"{self.load:.1f}",
            "; ".join(self.broken()) or "held",
        ]  # fmt: skip


# --- the innocent


async def innocent(target: str, ca: str, receives: str, sends: str) -> None:
    """Run the pair until the input ends: print sent and received messages twice a second."""
    told: dict[str, list[Any]] = {"sent": [], "took": [], "wrong": []}

    def failed(what: str) -> None:
        told["wrong"].append((time.monotonic(), what))

    def changed(event: ConnectionEvent) -> None:
        if event.state.name not in ("CONNECTED", "CLOSED"):
            failed(f"{event.state.name}")

    async def say(kind: str, each_s: float, send: Any) -> None:
        sending: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while True:
            due = max(due + each_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

            async def one() -> None:
                now = time.monotonic()
                told["sent"].append((now, kind))
                try:
                    await send(repr(now).encode())
                except PixiuError as error:
                    failed(f"{kind}: {error.code}")

            task = asyncio.create_task(one())
            sending.add(task)
            task.add_done_callback(sending.discard)

    async def hear(kind: str, messages: Any) -> None:
        async for message in messages:
            at = float(message.payload)
            told["took"].append((at, time.monotonic() - at, kind))
            if kind == "mail":
                message.acknowledge()

    async with (
        pixiu.connect(target, token=receives, ca=ca, on_connection=changed) as reader,
        pixiu.connect(target, token=sends, ca=ca) as writer,
        reader.subscribe(room=ROOM) as messages,
        reader.inbox(uin=INNOCENT, device="phone") as inbox,
        asyncio.TaskGroup() as tasks,
    ):
        jobs = [
            say("room", ROOM_EACH_S, writer.room(ROOM).send), say("mail", MAIL_EACH_S, writer.user(INNOCENT).mail),
            hear("room", messages), hear("mail", inbox),
        ]  # fmt: skip
        running = [tasks.create_task(job) for job in jobs]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            await asyncio.wait({ended}, timeout=TOLD_S)
            print(json.dumps(told), flush=True)
            for found in told.values():
                found.clear()
        for task in running:
            task.cancel()


# --- the cluster and the table


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Process]:
    """Run a Python process with this one's environment, killed afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE, limit=1 << 26, start_new_session=True,
        preexec_fn=DieWithParent(signal.SIGKILL),
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Run:
    """One cluster under attack."""

    def __init__(self, cluster: Watched, folder: Path, turns: Path, seconds: float, nice: int) -> None:
        self.cluster, self._folder, self._turns, self._seconds, self._nice = cluster, folder, turns, seconds, nice
        self.innocent = Innocent()
        self._attacker: Process | None = None
        self.rows: list[Row] = []

    def _anonymous_mib(self) -> dict[str, float]:
        """Return RssAnon of the largest process of each role, MiB."""
        found: dict[str, float] = {}
        for node in self.cluster.nodes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{node.pid}/status").read_text()
                kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
                found[node.role] = max(found.get(node.role, 0.0), kb / 1024)
        return found

    def longest_turn(self, begin: float, end: float) -> tuple[str, float]:
        """Return the role and CPU seconds of the longest turn that ended in this time."""
        roles = {node.pid: node.role for node in self.cluster.nodes()}
        found = ("", 0.0)
        for pid, role in roles.items():
            path = self._turns / str(pid)
            for line in path.read_text().splitlines() if path.exists() else ():
                if line[:1] == "#" or not line:
                    continue
                at, took = map(float, line.split())
                if begin <= at < end and took > found[1]:
                    found = (role, took)
        return found

    async def _ask(self, path: str, kind: str, seconds: float, addresses: list[str]) -> dict[str, Any]:
        assert self._attacker is not None
        assert self._attacker.stdin is not None
        assert self._attacker.stdout is not None
        command = {"path": path, "kind": kind, "seconds": seconds, "addresses": addresses}
        self._attacker.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self._attacker.stdout.readline()
        if not line:
            raise RuntimeError("the attacker has ended: what is above says why")
        found: dict[str, Any] = json.loads(line)
        return found

    async def attack(self, path: str, kind: str, seconds: float, addresses: list[str], quiet: tuple[float, float]) -> Row:
        """Run one kind of attack. quiet: p99 of room and mail before it."""
        many = path.count(",") + 1
        name = path.removeprefix("/pixiu.v1.").removeprefix("/grpc.") if many == 1 else f"{many} methods of processes"
        row = Row(name, kind)
        before, gone = self._anonymous_mib(), len(self.cluster.gone)
        most: dict[str, float] = {}
        begin = time.monotonic()
        asking = asyncio.create_task(self._ask(path, kind, seconds, addresses))
        while not asking.done():
            for role, mib in self._anonymous_mib().items():
                most[role] = max(most.get(role, 0.0), mib)
            await asyncio.wait({asking}, timeout=0.25)
        end = time.monotonic()
        row.load = os.getloadavg()[0]
        await asyncio.sleep(DRAIN_S)
        found = asking.result()
        row.requests, row.refused, row.codes = found["requests"], found["refused"], found["codes"]
        row.wrong = [f"answered: {one}" for one in found.get("wrong", ())]
        row.span, row.room, row.mail = (begin, end), (quiet[0], 0.0), (quiet[1], 0.0)
        self._compare(row)
        row.growth = {role: mib - before[role] for role, mib in most.items() if role in before}
        row.turn, row.gone = self.longest_turn(begin, end), self.cluster.gone[gone:]
        self.rows.append(row)
        print(" | ".join(row.cells()), row.codes, file=sys.stderr, flush=True)
        return row

    def _compare(self, row: Row) -> None:
        """Update the row with the innocent messages of its time that have arrived by now."""
        row.room = row.room[0], self.innocent.p99("room", *row.span)
        row.mail = row.mail[0], self.innocent.p99("mail", *row.span)
        row.lost, row.said = self.innocent.lost(*row.span), sorted(set(self.innocent.said(*row.span)))

    async def quiet(self) -> tuple[float, float]:
        """Measure p99 of room and mail while nobody attacks."""
        begin = time.monotonic()
        await asyncio.sleep(self._seconds / len(KINDS))
        end = time.monotonic()
        await asyncio.sleep(DRAIN_S)
        return self.innocent.p99("room", begin, end), self.innocent.p99("mail", begin, end)

    async def all(self, wanted: list[str]) -> None:
        """Attack every method in turn, then those of processes."""
        listeners = self.cluster.addresses()
        clients = [listeners["proxies"][0], listeners["gateways"][0]]
        folder = self._folder
        authority = str(folder / "listeners/ca.pem")
        arguments = [str(self._nice), str(folder / "attacker"), authority, str(folder / "tls"), listeners["proxies"][0]]
        mine = ["-m", "benchmarks.attacks.attackers", "--innocent", listeners["proxies"][0], authority]
        async with (
            child("-m", "benchmarks.attacks.attack_load", *arguments) as self._attacker,
            child(*mine, str(folder / "secure/token"), str(folder / "sender")) as pair,
        ):
            following = asyncio.create_task(self.innocent.follow(pair))
            assert self._attacker.stdout is not None
            await self._attacker.stdout.readline()
            while not {"room", "mail"} <= {kind for _, _, kind in self.innocent.took}:
                if following.done():
                    raise RuntimeError("the innocent pair has ended: what is above says why")
                await asyncio.sleep(TOLD_S)
            there = {listener: (await self._ask("", "find", 0, [listener]))["found"] for listener in clients}
            paths = [one.path for one in methods() if any(one.path in found for found in there.values())]
            for path in paths:
                if wanted and not any(word in path for word in wanted):
                    continue
                quiet = await self.quiet()
                for kind in KINDS:
                    await self.attack(path, kind, self._seconds / len(KINDS), [d for d in clients if path in there[d]], quiet)
            peers = [one.path for one in methods() if one.path not in paths]
            if not wanted or any(word == "peers" for word in wanted):
                every = [*clients, *(f"{node.role}@{node.host}:{node.port}" for node in self.cluster.nodes())]
                await self.attack(",".join(peers), "peers", self._seconds, every, await self.quiet())
            await asyncio.sleep(DRAIN_S)
            for row in self.rows:  # late messages have arrived meanwhile
                self._compare(row)
            following.cancel()


def table(rows: list[Row]) -> Table:
    """Make the table of all attacks."""
    made = Table(
        "method", "attack", "requests", "refused", "room p99 ms", "mail p99 ms", "memory MiB", "turn ms", "gone", "load", "bounds"
    )
    for row in rows:
        made.add_row(*row.cells())
    return made


async def measure(seconds: float, wanted: list[str], nice: int) -> bool:
    """Start a cluster, attack it, print. Returns True if every bound held."""
    with tempfile.TemporaryDirectory() as name:
        folder, turns = Path(name) / "run", Path(name) / "turns"
        (Path(name) / "site").mkdir()
        turns.mkdir()
        (Path(name) / "site/sitecustomize.py").write_text(textwrap.dedent(TURNS))
        os.environ["PIXIU_TURNS"] = str(turns)
        os.environ["PYTHONPATH"] = f"{name}/site"
        settings = make_demo(folder / "secure", ("gateway", "proxy"))
        key = key_of(folder / "secure/jwt.pem")
        for user, uin in (("attacker", ATTACKER), ("sender", SENDER)):
            (folder / user).write_text(token(key, user, uin, ("demo",), lasts_s=24 * 3600))
        options = UpOptions(
            grouping=Grouping.SEPARATE,
            proxies=1, gateways=1, brokers=1, broker_replicas=1, routers=1, router_replicas=1, relays=1, relay_replicas=1,
            xius=1, xiu_replicas=1, pis=1, pi_replicas=1, topics=0, mqtt_port=0, zookeeper_port=0, data=folder, secure=True,
            settings=settings,
        )  # fmt: skip
        cluster = Watched(options)
        print("starts", flush=True)
        run = Run(cluster, folder, turns, seconds, nice)
        try:
            await cluster.start()
            await run.all(wanted)
        finally:
            cluster.gone.clear()
            await cluster.stop()
            tls.use(None)
            show(run.rows, folder, turns)
        return not any(row.broken() for row in run.rows)


def show(rows: list[Row], folder: Path, turns: Path) -> None:
    """Print the table, and the tracebacks in the processes' logs."""
    Console(width=220).print(table(rows))
    for path in sorted((folder / "logs").glob("*.log")):
        _, found, rest = path.read_text(errors="replace").partition("Traceback")
        if found:
            print(f"{path.name}: {found}{rest[:2000]}")
    if "PIXIU_STACKS" in os.environ:
        for path in sorted(turns.iterdir()):
            lines = [line for line in path.read_text().splitlines() if line[:1] == "#"]
            print(f"{path.name}:", *lines[:600], sep="\n")


def main() -> int:
    """Parse the command line and run. Exit code 1 when a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each method")
    parser.add_argument("--method", action="append", default=[], help="a part of its path, or peers; may be given again")
    parser.add_argument("--nice", type=int, default=19, help="of the attackers; less where others use the machine")
    parser.add_argument("--stacks", action="store_true", help="show what took long in turns")
    parser.add_argument("--innocent", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.innocent:
        target, ca, receives, sends = args.innocent
        asyncio.run(innocent(target, ca, Path(receives).read_text(), Path(sends).read_text()))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if args.stacks:
        os.environ["PIXIU_STACKS"] = "1"
    return int(not asyncio.run(measure(args.seconds, args.method, args.nice)))


if __name__ == "__main__":
    sys.exit(main())
