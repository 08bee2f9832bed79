"""Watches the cluster during a replay: deaths, the times at which places were filled again, and the counters of links.

The watch holds one gRPC health stream to every process. It breaks the moment its process ends for any reason, seconds before
ZooKeeper or heartbeats can notice. The registry shows whether the process ended in order.

Source: docs/links.md, docs/registry.md; issue "First light", what a replay reports.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
import grpc.aio

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import own, peer_channel
from tools.cli.http import fetch, samples
from tools.load.verdict import Death, Hop

HEALTH_WATCH: Final = "/grpc.health.v1.Health/Watch"
"""Method whose request for the whole server is an empty message, so that no generated code is needed."""
SERVING: Final = b"\x08\x01"
"""Answer of a process that serves; a draining one sends another answer before it ends."""
ORDERLY_WAIT_S: Final = 0.5
"""Time after a stream's end in which the registry may show that the process is draining or gone, seconds."""
MAX_WATCHED: Final = 1_000
CHANNEL_OPTIONS: Final = (*PEER_CHANNEL, ("grpc.enable_retries", 0))
HOP_METRICS: Final = {"peer_records_sent_total": "sent", "peer_records_received_total": "received"}
UNKNOWN: Final = "unknown"
LOSS_METRICS: Final = {"peer_lost_items": "receiver", "peer_queue_drops_total": "sender"}
"""Losses: the receiver counts gaps, the sender counts drops before sending."""


def process_name(node: Node) -> str:
    """Name of a process in reports: `broker 0/3` (partition, replica), `proxy 4`."""
    return f"{node.role} {node.replica}" if node.partition < 0 else f"{node.role} {node.partition}/{node.replica}"


def wanted_replicas(view: View, role: str, partition: int) -> int:
    """Number of Running processes that a role (and partition) should have; 0 if the layout does not give it."""
    found = view.layout.roles.get(role)
    return found.replicas if found else 0


def running_beside(view: View, role: str, partition: int, dead: Iterable[int]) -> int:
    """Number of Running processes of a role and partition, without those known to be dead."""
    gone = set(dead)
    nodes = view.running(role) if partition < 0 else view.replicas(role, partition)
    return sum(1 for node in nodes if node.endpoint not in gone)


class DeathBook:
    """Record of processes that died, and of the times at which their places were filled again. Pure: the caller reports views, ends
    and the time.

    Source: docs/promises.md, "Failure rules".
    """

    def __init__(self) -> None:
        self.view = View()
        self.deaths: list[Death] = []
        self._wanted: dict[tuple[str, int], int] = {}
        self._last: dict[int, Node] = {}
        """Every process as last seen in the registry."""
        self._gone: set[int] = set()
        """Endpoints known to be dead, although the registry may list them for a while."""

    def on_view(self, view: View, now_us: int) -> None:
        """Take a new view of the registry; fills the places of the dead."""
        self.view = view
        self._last.update((node.endpoint, node) for node in view.nodes)
        for death in self.deaths:
            if death.rejoin_us is None and self._full(death.role, death.partition):
                death.rejoin_us = now_us

    def _full(self, role: str, partition: int) -> bool:
        wanted = wanted_replicas(self.view, role, partition) or self._wanted.get((role, partition), 1)
        return running_beside(self.view, role, partition, self._gone) >= wanted

    def is_orderly(self, endpoint: int) -> bool:
        """True if a process announced its end, or removed its node from the registry itself.

        A killed process stays registered until its session ends, or until its successor takes its address.
        """
        last = self._last.get(endpoint)
        if last is None or last.state is NodeState.DRAINING:
            return True
        if self.view.by_endpoint(endpoint) is not None:
            return False
        return all((node.host, node.port) != (last.host, last.port) for node in self.view.of_role(last.role))

    def is_gone(self, endpoint: int) -> bool:
        """True if a process is known to be dead."""
        return endpoint in self._gone

    def died(self, node: Node, at_us: int) -> Death:
        """Note that a process ended unexpectedly, at `at_us`."""
        place = (node.role, node.partition)
        self._wanted[place] = max(self._wanted.get(place, 0), running_beside(self.view, *place, self._gone))
        self._gone.add(node.endpoint)
        death = Death(process_name(node), node.role, node.partition, node.endpoint, at_us)
        self.deaths.append(death)
        return death


class ClusterWatch:
    """The registry's view, deaths and counters of the cluster at a registry address.

    Source: docs/registry.md, docs/operations.md.
    """

    def __init__(self, target: str, now_us: Callable[[], int], on_view: Callable[[View], None] = lambda _view: None) -> None:
        self._target = target
        address = parse_address(target)
        self._now_us = now_us
        self._on_view = on_view
        self._zookeeper = ZooKeeper(address)
        self._discovery = Discovery(self._zookeeper, address.root, self._take_view)
        self.book = DeathBook()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._nodes: dict[int, Node] = {}
        """Every process ever seen, by endpoint."""
        self._before: dict[int, Counter[tuple[str, str]]] = {}

    @property
    def view(self) -> View:
        """The newest view of the registry."""
        return self.book.view

    def living(self, role: str) -> list[Node]:
        """The Running processes of a role that are not known to be dead."""
        return [node for node in self.view.running(role) if not self.book.is_gone(node.endpoint)]

    def seen(self) -> list[Node]:
        """Every process that was ever in the view, the newest first."""
        return list(reversed(self._nodes.values()))

    async def start(self) -> None:
        """Connect and watch. Raises `RegistryUnavailable`."""
        check_reachable(self._target)
        await self._zookeeper.connect()
        try:
            await self._discovery.start()
        except BaseException:
            await self._zookeeper.close()
            raise

    async def close(self) -> None:
        """Stop watching."""
        await self._discovery.close()
        for task in self._streams.values():
            task.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        await self._zookeeper.close()

    async def count_before(self) -> None:
        """Remember the links' counters before the replay."""
        self._before = await self._counters()

    async def hops(self) -> list[Hop]:
        """The increase of the links' counters since `count_before`, by kind of hop; counters of processes that died are lost."""
        after = await self._counters()
        totals: Counter[tuple[str, str, str]] = Counter()
        for endpoint, counts in after.items():
            node = self._nodes[endpoint]
            before = self._before.get(endpoint, Counter())
            for (what, peer_role), value in counts.items():
                change = max(value - before[what, peer_role], 0)
                if what in ("sent", "lost by sender"):
                    totals[node.role, peer_role, what] += change
                else:
                    totals[peer_role, node.role, what] += change
        return [
            Hop(
                sender,
                receiver,
                totals[sender, receiver, "sent"],
                totals[sender, receiver, "received"],
                totals[sender, receiver, "lost by receiver"] + totals[sender, receiver, "lost by sender"],
            )
            for sender, receiver in sorted({(sender, receiver) for sender, receiver, _ in totals})
            if totals[sender, receiver, "sent"] or totals[sender, receiver, "received"]
        ]

    async def _counters(self) -> dict[int, Counter[tuple[str, str]]]:
        nodes = [node for node in self.view.nodes if node.http_port]
        pages = await asyncio.gather(*(self._page(node) for node in nodes))
        return {node.endpoint: link_counts(page, node.role, self._role_of) for node, page in zip(nodes, pages, strict=True) if page}

    def _role_of(self, endpoint: str) -> str:
        """Find the role of a process that its peers no longer know by name."""
        try:
            node = self._nodes.get(int(endpoint, 16))
        except ValueError:
            return UNKNOWN
        return node.role if node is not None else UNKNOWN

    async def _page(self, node: Node) -> bytes:
        try:
            status, body = await fetch(node.host, node.http_port, "/metrics")
        except OSError:
            return b""
        return body if status == 200 else b""

    def _take_view(self, view: View) -> None:
        self.book.on_view(view, self._now_us())
        for node in view.nodes:
            self._nodes[node.endpoint] = node
            if node.endpoint not in self._streams and len(self._streams) < MAX_WATCHED and node.state is NodeState.RUNNING:
                self._streams[node.endpoint] = asyncio.create_task(self._watch(node), name=f"watch {process_name(node)}")
        self._on_view(view)

    async def _watch(self, node: Node) -> None:
        """Hold a stream open until it breaks; then find out if that was a death."""
        async with peer_channel(node.address, node.role, own(), CHANNEL_OPTIONS) as channel:
            method: Any = channel.unary_stream(HEALTH_WATCH)
            call = method(b"")
            status = b""
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    status = message
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return  # it serves no health: rely on heartbeats and the registry
            ended_us = self._now_us()
        if status and status != SERVING:
            return  # it announced its end
        await asyncio.sleep(ORDERLY_WAIT_S)
        if not self.book.is_orderly(node.endpoint):
            self._discovery.mark_dead(node.endpoint)
            self.book.died(node, ended_us)
            self.book.on_view(self.view, self._now_us())


def link_counts(page: bytes, role: str, role_of: Callable[[str], str] = lambda _endpoint: UNKNOWN) -> Counter[tuple[str, str]]:
    """Read (metric, role of the peer) → count from one process's /metrics.

    Labels `peer` are `role:host:port`, or `unknown:endpoint` for a peer that is no longer in the process's view;
    `role_of` then returns its role.
    """
    prefix = f"pixiu_{role}_"
    counts: Counter[tuple[str, str]] = Counter()
    for name, labels, value in samples(page):
        short = name.removeprefix(prefix)
        peer_role, _, rest = labels.get("peer", "").partition(":")
        if not peer_role:
            continue
        if peer_role == UNKNOWN:
            peer_role = role_of(rest)
        if short in HOP_METRICS:
            counts[HOP_METRICS[short], peer_role] += int(value)
        elif short in LOSS_METRICS:
            counts[f"lost by {LOSS_METRICS[short]}", peer_role] += int(value)
    return counts
