"""Does a message that an NSQ client was told to be stored ever get lost, whatever is killed (SIGKILL)?

Two listeners in front of a topic group of two replicas. Stock clients, pynsq and nsqjs where `python -m tests.clients.nsq.matrix
--prepare` installed them, publish with a window and consume. In turn a listener, a consumer, the group's leader, a producer and its
follower are killed and started again; the next kill comes once messages were stored and got after the last one. Whoever is started
again may be killed before it is in sync.

Estimate: nothing that was confirmed is missing; some messages come twice, as what a consumer has not finished, or what of that was
not committed, comes again. Three to five seconds a kill.

    python -m benchmarks.clusters.nsq_kills [--kills 1000] [--minutes 20] [--seed 1] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.clusters.growth import say
from comparison.processes import free_port
from onebox.embedded import EmbeddedZooKeeper
from tests.clients.nsq.matrix import BUILT, HERE, PYTHON
from tests.support.roles import Roles
from tests.support.zookeeper import connected

GROUP: Final = ("topic-a", "topic-b")
LISTENERS: Final = ("nsq-a", "nsq-b")
TURNS: Final = ("listener", "consumer", "leader", "producer", "follower", "consumer")
TOPIC: Final = "kills"
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "pynsq": (PYTHON, str(HERE / "pynsq_worker.py")),
    "nsqjs": ("node", str(HERE / "nsqjs/worker.js")),
}
PROGRESS: Final = 20
"""Messages that are stored, and got, between two kills."""
PATIENT_S: Final = 240.0
REST_S: Final = 0.05


class Workers:
    """Processes of client libraries; one that ended is started again, under another name.

    Args:
        folder: of what they say.
        tcp: addresses of the listeners.
        lookup: of their HTTP.
    """

    def __init__(self, folder: Path, tcp: str, lookup: str) -> None:
        self._folder, self._tcp, self._lookup = folder, tcp, lookup
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.ended = Counter[str]()
        """Those that ended by themselves, by their last words."""
        self.said: dict[str, Counter[str]] = {"produce": Counter(), "consume": Counter()}
        self._read: dict[Path, int] = {}
        self._work: dict[Path, str] = {}

    def start(self, library: str, work: str) -> None:
        """Start one."""
        self._starts += 1
        path = self._folder / f"{library}-{work}-{self._starts}.txt"
        self._work[path] = work
        command = (*LIBRARIES[library], work, self._tcp, self._lookup, TOPIC, f"{library}-{self._starts}")
        environment = {**os.environ, "NODE_PATH": str(BUILT / "nsqjs/node_modules")}
        environment.pop("PYTHONPATH", None)
        with path.open("wb") as out, (self._folder / f"{library}-{work}.err").open("wb") as errors:
            self._running[library, work] = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)

    def kill(self, work: str, rolls: random.Random) -> None:
        """Kill one of those that do this work, and start another one."""
        library, _ = rolls.choice(sorted(key for key in self._running if key[1] == work))
        process = self._running[library, work]
        process.kill()
        process.wait()
        self.start(library, work)

    def look(self) -> None:
        """Read what they said, and start those again that ended by themselves."""
        for path, work in self._work.items():
            with path.open("rb") as found:
                found.seek(self._read.get(path, 0))
                data = found.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.said[work].update(whole.decode().split())
        for (library, work), process in list(self._running.items()):
            if process.poll() is not None:
                last = (self._folder / f"{library}-{work}.err").read_text(errors="replace").splitlines()[-1:]
                self.ended[f"{library} {work}: {' '.join(last)[:100] or process.returncode}"] += 1
                self.start(library, work)

    def end(self, work: str) -> None:
        """End those that do this work."""
        for key in [key for key in self._running if key[1] == work]:
            process = self._running.pop(key)
            process.kill()
            process.wait()

    @property
    def missing(self) -> set[str]:
        """Messages that were confirmed and did not come."""
        return self.said["produce"].keys() - self.said["consume"].keys()


class Run:
    """One run.

    Args:
        roles: the cluster.
        rolls: choices.
    """

    def __init__(self, roles: Roles, rolls: random.Random) -> None:
        self._roles, self._rolls = roles, rolls
        self._ports = {name: (free_port(), free_port()) for name in LISTENERS}
        addresses = [",".join(f"127.0.0.1:{ports[at]}" for ports in self._ports.values()) for at in (0, 1)]
        folder = roles.folder / "said"
        folder.mkdir()
        self.workers = Workers(folder, *addresses)
        self.kills = Counter[str]()
        self.longest_s = 0.0
        """Longest time without a new message stored and got, after a kill."""

    def _listener(self, name: str) -> None:
        tcp, http = self._ports[name]
        command = ["--target", self._roles.target(), "--tcp-port", str(tcp), "--http-port", str(http), "--log-format", "json"]
        command += ["--max-attempts", "10000"]  # a kill is one, and nothing is to end among the dead letters
        self._roles.start_program(name, "nsqdoor", command)

    async def start(self) -> None:
        """Start everything."""
        await self._roles.layout(topic=1)
        for name in GROUP:
            self._roles.start(name, partition=0)
        self._roles.start("admin-a")
        self._roles.start("proxy-a")
        await self._roles.running(*GROUP, "admin-a", "proxy-a")
        for name in LISTENERS:
            self._listener(name)
        for library in [each for each, command in LIBRARIES.items() if Path(BUILT, "venv" if each == "pynsq" else each).exists()]:
            for work in ("produce", "consume"):
                self.workers.start(library, work)
        await self._progress()

    async def _progress(self) -> None:
        """Wait until messages are stored and got."""
        self.workers.look()
        began, before = time.monotonic(), {work: len(found) for work, found in self.workers.said.items()}
        while any(len(found) < before[work] + PROGRESS for work, found in self.workers.said.items()):
            assert time.monotonic() < began + PATIENT_S, f"nothing is stored, or nothing comes, after {self.kills.total()} kills"
            await asyncio.sleep(REST_S)
            self.workers.look()
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    async def _leader(self) -> str | None:
        """Who leads the group."""
        for name in GROUP:
            node = await self._roles.node(name)
            if node is not None and await self._roles.metric(node, "leads"):
                return name
        return None

    async def kill(self, what: str) -> None:
        """Kill one, and start it again."""
        if what in ("producer", "consumer"):
            self.workers.kill(what.removesuffix("r"), self._rolls)
        elif what == "listener":
            name = self._rolls.choice(LISTENERS)
            await self._roles.kill(name)
            self._listener(name)
        else:
            leader = await self._leader()
            if leader is None:
                return
            name = leader if what == "leader" else next(each for each in GROUP if each != leader)
            await self._roles.kill(name)
            self._roles.start(name, partition=0)
        self.kills[what] += 1
        await self._progress()

    async def judge(self) -> set[str]:
        """End the producers, and wait for what is missing."""
        self.workers.end("produce")
        until = time.monotonic() + PATIENT_S
        self.workers.look()
        while self.workers.missing and time.monotonic() < until:
            await asyncio.sleep(REST_S)
            self.workers.look()
        self.workers.end("consume")
        return self.workers.missing


async def play(kills: int, minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Kill, and judge."""
    until = time.monotonic() + 60 * minutes
    with EmbeddedZooKeeper(folder / "zookeeper") as server:
        zookeeper = await connected(server)
        roles = Roles(folder, server, zookeeper)
        run = Run(roles, random.Random(seed))
        try:
            await run.start()
            while run.kills.total() < kills and time.monotonic() < until:
                for what in TURNS:
                    await run.kill(what)
                stored, missing = len(run.workers.said["produce"]), len(run.workers.missing)
                say(f"{run.kills.total()} kills, {stored:,} stored, {missing} on their way")
            lost = await run.judge()
        finally:
            for work in ("produce", "consume"):
                run.workers.end(work)
            await asyncio.to_thread(roles.stop)
            await zookeeper.close()
    got = run.workers.said["consume"]
    return {
        "kills": dict(run.kills), "stored": len(run.workers.said["produce"]), "lost": sorted(lost),
        "repeated": got.total() - len(got), "longest_s": round(run.longest_s, 1), "ended": dict(run.workers.ended),
    }  # fmt: skip


def main() -> int:
    """Run it; exit code 1 if something is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(play(wanted.kills, wanted.minutes, wanted.seed, Path(folder)))
    if wanted.json:
        print(json.dumps(found))
    kinds = ", ".join(f"{count} of a {what}" for what, count in found["kills"].items())
    say(f"{sum(found['kills'].values())} kills ({kinds})")
    say(f"{found['stored']:,} stored, {len(found['lost'])} lost {found['lost'][:5]}")
    say(f"{found['repeated']:,} came again; longest pause {found['longest_s']} s")
    say(f"clients that ended by themselves, and were started again: {found['ended']}")
    return int(bool(found["lost"]))


if __name__ == "__main__":
    sys.exit(main())
