"""Count the calls of Python that one message costs a node, by function: exact on a busy machine, where times are noise.

Estimate, stated before the first run: QoS 1 one at a time 450 calls and 2 looks for events, with 64 on their way 100, QoS 0 60, and
one mail at a time 2,000 calls and 25 looks.

Measured first: 416 and 1.0, 42, 21, and 1,320 and 15 of a mail that a proxy, a Xiu and a Pi of one node store. What runs beside the
messages, timers above all, adds to these figures on a slow machine.

The node of `pixiu up --small` without topics runs in this process, the load of `pixiu bench --peers` in another one. A second node
with the followers of Xiu and Pi runs where `--replicas 2` asks for one; its calls are not counted.

    python -m benchmarks.cores.node_calls [--case pair-qos1-1 …] [--seconds 1] [--top 40] [--replicas 2]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import pixiu
from comparison.cases import CASES
from comparison.load import WARM_S, step
from comparison.suite import Target, load_command
from node.__main__ import main as run_node
from onebox.embedded import EmbeddedZooKeeper
from onebox.grouping import Grouping
from onebox.up import UpOptions
from pixiu.discovery.node import Node
from pixiu.discovery.target import parse_address
from pixiu.discovery.zookeeper import ZooKeeper
from registry.credentials import read_credentials
from registry.guarding import guard
from registry.layout import ensure_layout
from tools.cli.status import read_registry, read_status

SOFT: Final = ("gateway", "proxy", "broker-0", "router-0", "relay-0")
STORES: Final = ("xiu-0", "pi-0")
MAIL: Final = "mail"
"""Mail without receivers; `mail-1` has receivers that get it by MQTT."""
REST: Final = "rest"
"""No messages: calls a second."""
CASE_NAMES: Final = ("pair-qos1-1", "pair-qos1-64", "pair-qos0", MAIL, "mail-1", REST)
START_LIMIT_S: Final = 120.0


async def make_layout(server: EmbeddedZooKeeper, target: str, replicas: int) -> None:
    """Write the layout of the cluster."""
    address = parse_address(target)
    session = ZooKeeper(address)
    await session.connect()
    try:
        await guard(session, address.root, read_credentials(server.credentials), force=True, whole=True)
        options = UpOptions(
            grouping=Grouping.SMALL, proxies=1, gateways=1, brokers=1, broker_replicas=1, routers=1, router_replicas=1, relays=1,
            relay_replicas=1, xiu_replicas=replicas, pi_replicas=replicas, topics=0,
        )  # fmt: skip
        await ensure_layout(session, address.root, options.layout())
    finally:
        await session.close()


def arguments_of(roles: Sequence[str], folder: Path, target: str, credentials: Path) -> list[str]:
    """Return the arguments of a node."""
    values = {
        "node.roles": ",".join(roles), "node.registry": target, "node.data_dir": folder, "node.log_level": "error",
        "cluster.registry_credentials_file": credentials, "node.drain_timeout_s": 1,
    }  # fmt: skip
    if "gateway" in roles:
        values["gateway.mqtt_port"] = 0
    if "xiu-0" in roles:
        values |= {"xiu.table_dir": folder, "xiu.table_mb": 64}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def wait_healthy(target: str) -> list[Node]:
    """Wait until the cluster is healthy. Returns its roles."""
    until = time.monotonic() + START_LIMIT_S
    while problems := asyncio.run(read_status(target)).problems:
        if time.monotonic() > until:
            raise TimeoutError(f"the node does not start: {problems}")
        time.sleep(0.2)
    return list(asyncio.run(read_registry(target))[1].nodes)


class Counter:
    """Counts the calls of the main thread, from one signal to the next."""

    def __init__(self, builtins: bool) -> None:
        self._profile, self._builtins, self._counts = cProfile.Profile(builtins=builtins), builtins, False
        signal.signal(signal.SIGUSR1, self._switch)
        self._switched = threading.Event()

    def _switch(self, _number: int, _frame: object) -> None:
        self._counts = not self._counts
        if self._counts:
            self._profile.enable()
        else:
            self._profile.disable()
        self._switched.set()

    def switch(self) -> None:
        """Begin to count, or end it. Called by another thread."""
        self._switched.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        self._switched.wait()

    def take(self) -> dict[str, int]:
        """Return the calls of each function since the last time."""
        found: dict[str, int] = {}
        for entry in self._profile.getstats():
            code = entry.code
            where = code if isinstance(code, str) else f"{'/'.join(Path(code.co_filename).parts[-3:])} {code.co_qualname}"
            if not isinstance(code, str) and code.co_filename == "<string>":  # a dataclass's, told from others by its fields
                where += f"({', '.join(code.co_varnames[: code.co_argcount])})"
            found[where] = found.get(where, 0) + entry.callcount
        self._profile = cProfile.Profile(builtins=self._builtins)
        return found


async def send_mail(proxies: str, seconds: float) -> None:
    """The load of `mail`: one at a time to 100 users who are away."""
    async with pixiu.connect(proxies, client="node-calls") as px, px.mail_writer() as writer:
        sent = 0
        for limit_s in (WARM_S, seconds):
            if sent:
                step({})
            began, sent = time.monotonic(), 0
            while time.monotonic() < began + limit_s:
                writer.send(1 + sent % 100, bytes(100))
                await writer.wait_finished()
                sent += 1
        step({"published": sent})


def count(name: str, target: Target, seconds: float, counter: Counter) -> tuple[int, dict[str, int]]:
    """Run a case. Returns the number of its messages, at rest of its seconds, and the calls of each function."""
    if name == REST:
        counter.switch()
        time.sleep(seconds)
        counter.switch()
        return max(round(seconds), 1), counter.take()
    if name == MAIL:
        command = [sys.executable, "-m", "benchmarks.cores.node_calls", "--mail-to", target.proxies, "--seconds", str(seconds)]
    else:
        command = load_command(CASES[name], target, seconds)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None
        assert load.stdout is not None
        load.stdout.readline()
        counter.switch()
        load.stdin.write("\n")
        load.stdin.flush()
        results = json.loads(load.stdout.readline())
        counter.switch()
        load.communicate("\n")
    return int(results["published"]), counter.take()


def show(name: str, messages: int, calls: dict[str, int], top: int) -> None:
    """Print the calls of a case, for each message."""
    looks = sum(number for where, number in calls.items() if where.endswith("Selector.select"))
    total = sum(calls.values())
    unit = "seconds" if name == REST else "messages"
    print(f"{name}: {messages:,} {unit}, {total / messages:.1f} calls and {looks / messages:.2f} looks for events each")
    for where, number in sorted(calls.items(), key=lambda item: -item[1])[:top]:
        if number / messages >= 0.05:
            print(f"  {number / messages:8.2f}  {where}")


@contextmanager
def followers(arguments: Sequence[str]) -> Iterator[None]:
    """Run a second node."""
    process = subprocess.Popen([sys.executable, "-m", "node", *arguments])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def measure(given: argparse.Namespace, target: str, second: Sequence[str], counter: Counter) -> None:
    """Count every case, while the node runs in the main thread; then end that."""
    try:
        nodes = wait_healthy(target) if not second else []
        with followers(second) if second else nullcontext():
            nodes = nodes or wait_healthy(target)
            gateway = next(node for node in nodes if node.role == "gateway")
            proxy = next(node for node in nodes if node.role == "proxy")
            for name in given.case:
                place = Target("pixiu", gateway.mqtt_port, dict, proxies=proxy.client_address if name.startswith(MAIL) else "")
                messages, calls = count(name, place, given.seconds, counter)
                show(name, messages, calls, given.top)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Count, and print. Returns the node's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASE_NAMES, default=CASE_NAMES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument("--top", type=int, default=40, help="functions to print")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1, help="of Xiu and Pi")
    parser.add_argument("--builtins", action="store_true", help="count functions of C, too")
    parser.add_argument("--mail-to", default="", help="be the load of mail: the address of a proxy")
    given = parser.parse_args()
    if given.mail_to:
        asyncio.run(send_mail(given.mail_to, given.seconds))
        return 0
    with tempfile.TemporaryDirectory() as folder, EmbeddedZooKeeper(Path(folder) / "zookeeper") as server:
        target = f"zk://{server.address}/pubsub"
        asyncio.run(make_layout(server, target, given.replicas))
        data, credentials = Path(folder), server.credentials
        second = arguments_of(STORES, data / "second", target, credentials) if given.replicas == 2 else []
        counter = Counter(given.builtins)
        threading.Thread(target=measure, args=(given, target, second, counter), daemon=True).start()
        return run_node(arguments_of((*SOFT, *STORES), data / "first", target, credentials))


if __name__ == "__main__":
    sys.exit(main())
