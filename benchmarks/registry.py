"""What do processes cost ZooKeeper: watches, reads at rest, reads when its server goes and comes?

Estimate: with a data watch for each node and a poll that reads everything, watches are processes × nodes (200 × 310 = 62,000), and
each poll and each reconnect is as many reads at once. With one recursive watch for each role that a process sees: at most 8
watches a process; a poll compares at most 38 nodes; a reconnect costs 8 reads, within ten seconds.

    python -m benchmarks.registry --sessions 200 --gateways 200

Real ZooKeeper, real sessions, all of one process; `tests/discovery/test_reader.py` simulates a cluster of 1,300.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from cluster.runtime.interests import SEES
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import Create, ZooKeeper
from registry.embedded import EmbeddedZooKeeper, four_letter_word
from tests.support.zookeeper import make_node

ROOT: Final = "/bench"
OTHERS: Final = 110
"""Processes that are no gateways."""
CONNECT_AT_ONCE: Final = 20
PATIENCE_S: Final = 60.0


class Counted(ZooKeeper):
    """A session that notes when it read."""

    def __init__(self, hosts: str) -> None:
        super().__init__(hosts, session_timeout_s=30.0, connect_timeout_s=30.0, operation_timeout_s=30.0)
        self.reads: list[float] = []
        for name in ("get", "exists", "children", "listing"):
            if hasattr(self, name):
                setattr(self, name, self._noting(getattr(self, name)))

    def _noting(self, read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(*arguments: Any) -> Any:
            self.reads.append(time.monotonic())
            return await read(*arguments)

        return noted


async def _register(zookeeper: ZooKeeper, gateways: int) -> None:
    counts = {"gateway": gateways, "proxy": 10} | dict.fromkeys(paths.PARTITIONED_ROLES, 20)
    for role, count in counts.items():
        for number in range(count):
            node = make_node(role, number % 4, port=1024 + number, state=NodeState.RUNNING)
            await zookeeper.ensure_path(paths.node_directory(ROOT, role, node.partition))
            await zookeeper.transaction([Create(paths.node_prefix(ROOT, role, node.partition), node.to_json(), True, True)])


def _watches(port: int) -> int:
    said = four_letter_word(port, "mntr", 5.0)
    return int(next(line.split()[1] for line in said.splitlines() if line.startswith("zk_watch_count")))


def _show(what: str, sessions: list[Counted], since: float) -> None:
    each = sorted(len(one.reads) for one in sessions)
    moments = sorted(itertools.chain.from_iterable(one.reads for one in sessions))
    tenth = moments[len(moments) * 9 // 10] - moments[len(moments) // 10] if moments else 0.0
    print(
        f"{what:<28}{sum(each):>9,} reads; a process: median {each[len(each) // 2]:,}, most {each[-1]:,}; the middle 80 % within "
        f"{tenth:.1f} s; first after {moments[0] - since if moments else 0:.1f} s"
    )
    for one in sessions:
        one.reads.clear()


async def run(sessions: int, gateways: int, poll_s: float) -> None:
    """Start a ZooKeeper and the sessions; show what they ask."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedZooKeeper(folder)
        await asyncio.to_thread(server.start)
        try:
            writer = ZooKeeper(server.address, session_timeout_s=30.0)
            await writer.connect()
            await _register(writer, gateways)
            nodes = gateways + OTHERS
            roles = list(
                itertools.islice(
                    itertools.chain(list(SEES) * (sessions * OTHERS // nodes // 7 + 1), itertools.repeat("gateway")), sessions
                )
            )
            counted = [Counted(server.address) for _ in roles]
            found = [
                Discovery(one, ROOT, lambda _view: None, poll_s, roles=SEES[role]) for one, role in zip(counted, roles, strict=True)
            ]
            began = time.monotonic()
            for start in range(0, sessions, CONNECT_AT_ONCE):
                await asyncio.gather(*(one.connect() for one in counted[start : start + CONNECT_AT_ONCE]))
                await asyncio.gather(*(view.start() for view in found[start : start + CONNECT_AT_ONCE]))
            print(f"{sessions} sessions, {nodes} nodes of processes")
            _show(f"start ({time.monotonic() - began:.0f} s)", counted, began)
            count = _watches(server.port)
            print(f"{'watches':<28}{count:>9,}, {count / sessions:.1f} a process")
            began = time.monotonic()
            await asyncio.sleep(2 * poll_s)
            reads = sum(len(one.reads) for one in counted)
            _show(f"at rest, {2 * poll_s:.0f} s", counted, began)
            print(
                f"{'':<28}{reads / sessions / 2:>9.1f} a process and poll, {reads / sessions / 120:.2f} a second with one a minute"
            )
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(server.start)
            began = time.monotonic()
            while not all(one.connected for one in counted) and time.monotonic() < began + PATIENCE_S:
                await asyncio.sleep(0.1)
            await asyncio.sleep(12.0)
            _show("another server", counted, began)
            await asyncio.gather(*(view.close() for view in found))
            await asyncio.gather(*(one.close() for one in counted), writer.close())
        finally:
            await asyncio.to_thread(server.stop)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--gateways", type=int, default=200)
    parser.add_argument("--poll-s", type=float, default=15.0)
    options = parser.parse_args()
    asyncio.run(run(options.sessions, options.gateways, options.poll_s))


if __name__ == "__main__":
    main()
