"""Directory of the cluster's proxies and gateways, learned from a proxy or read from ZooKeeper."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from pixiu.client.login import raise_for_login
from pixiu.client.options import ClientOptions
from pixiu.discovery.target import RegistryAddress
from pixiu.errors import RegistryUnavailable, Unreachable
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import WRONG_ROLE, Channels, reason_of, reply_of
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

if TYPE_CHECKING:
    from pixiu.discovery.view import View

FETCH_TIMEOUT_S: Final = 2.0
WANTS_TLS: Final = "this cluster requires TLS of its clients: set ca, or PIXIU_CA, to the PEM file of its authority"
MAX_TRIES: Final = 16
"""Limit of proxies asked in one round."""
MIN_REFRESH_S: Final = 0.5
"""Minimum interval between rounds that failures cause, seconds; the moment within it is random, because all clients of a proxy that
died ask the other proxies."""
MAX_MEMBERS: Final = 100_000
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 1.0
"""Longest wait between attempts to read a registry whose connection broke, seconds."""


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """Addresses (`host:port`, gRPC) in the order of their registration."""

    proxies: tuple[str, ...] = ()
    """The last list that was not empty: once known, it is never empty."""
    gateways: tuple[str, ...] = ()
    id: str = ""
    """Unique ID of this cluster, 16 hex digits; empty: not known yet, or the cluster has no layout."""


class Directory(Protocol):
    """Knows the addresses of the cluster's processes."""

    @property
    def map(self) -> ClusterMap:
        """The current map."""

    async def start(self) -> None:
        """Learn the first map. Raises `Unreachable` with each address that was tried."""

    def refresh(self) -> None:
        """Look again soon, because something failed."""

    async def close(self) -> None:
        """Stop watching the cluster."""


class ZooKeeperDirectory:
    """Reads the registry, by watch and by poll. It writes nothing.

    Source: docs/registry.md, docs/operations.md.
    """

    def __init__(
        self, target: RegistryAddress, options: ClientOptions, on_change: Callable[[ClusterMap], None], *, tls: bool = False
    ) -> None:
        # Imported here because kazoo takes a tenth of a second to load, which users of proxies should not pay.
        from pixiu.discovery.watcher import Discovery
        from pixiu.discovery.zookeeper import ZooKeeper

        self._target, self._tls = target, tls
        self._options = options
        self._on_change = on_change
        self._map = ClusterMap()
        self._complete = asyncio.Event()
        self._zookeeper = ZooKeeper(target, connect_timeout_s=options.connect_timeout_s)
        self._discovery = Discovery(
            self._zookeeper, target.root, self._learn, options.refresh_interval_s, roles=("proxy", "gateway")
        )

    @property
    def map(self) -> ClusterMap:
        """The current map."""
        return self._map

    async def start(self) -> None:
        """Read the registry until a proxy is registered. Raises `RegistryUnavailable`, or `Unreachable` when there is no proxy or
        all of them require TLS and the client has none configured."""
        await self._zookeeper.connect()
        deadline = asyncio.get_running_loop().time() + self._options.connect_timeout_s
        await self._first_view(deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await self._complete.wait()
        except TimeoutError:
            raise Unreachable(
                f"ZooKeeper at {self._target.hosts} answers, but no Running proxy is registered below {self._target.root}; "
                "start one, or check the root in the target"
            ) from None
        if not self._tls and all(node.client_tls for node in self._discovery.view.running("proxy")):
            raise Unreachable(WANTS_TLS)

    async def _first_view(self, deadline: float) -> None:
        """Read the registry, again if its connection breaks meanwhile. Raises `RegistryUnavailable` after the deadline."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            try:
                await self._discovery.start()
                return
            except RegistryUnavailable:
                wait_s = backoff.next_s()
                if asyncio.get_running_loop().time() + wait_s >= deadline:
                    raise
            await asyncio.sleep(wait_s)

    def refresh(self) -> None:
        """Do nothing: watches and polls report changes already."""

    async def close(self) -> None:
        """Stop reading and end the session."""
        await self._discovery.close()
        await self._zookeeper.close()

    def _learn(self, view: View) -> None:
        proxies = tuple(dict.fromkeys(node.client_address for node in view.running("proxy")))
        if proxies:
            self._complete.set()
        found = ClusterMap(
            proxies or self._map.proxies,  # all proxies are gone for a moment: keep the last ones to try
            tuple(dict.fromkeys(node.client_address for node in view.running("gateway"))),
            view.layout.cluster,
        )
        if found != self._map:
            self._map = found
            self._on_change(found)


class ProxyDirectory:
    """Asks proxies: those given, and those that they named. Keeps the last answer when none answers.

    Source: docs/operations.md; docs/registry.md.
    """

    def __init__(
        self, seeds: tuple[str, ...], options: ClientOptions, channels: Channels, on_change: Callable[[ClusterMap], None]
    ) -> None:
        self._seeds = seeds
        self._options = options
        self._channels = channels
        self._on_change = on_change
        self._map = ClusterMap(seeds)
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def map(self) -> ClusterMap:
        """The current map."""
        return self._map

    async def start(self) -> None:
        """Ask until a proxy answers. Raises `NotAuthenticated` at once, `Unreachable` after `connect_timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.connect_timeout_s
        known: dict[str, str] = {}
        while True:
            failures = await self._ask(deadline, known)
            if failures is None:
                break
            known = failures
            raise_for_login(failures.values())
            hopeless = all(reason == WRONG_ROLE for reason in failures.values())  # a process does not change its role
            if hopeless or loop.time() + self._options.backoff_s >= deadline:
                tried = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
                raise Unreachable(
                    f"no proxy answered{'' if hopeless else f' within {self._options.connect_timeout_s:g} s'} ({tried}). "
                    "Start a cluster (`pixiu up`), or give the gRPC addresses of its proxies"
                )
            await asyncio.sleep(self._options.backoff_s)
        self._task = asyncio.create_task(self._keep(), name="pixiu-cluster-map")

    def refresh(self) -> None:
        """Ask again soon, because something failed."""
        self._wanted.set()

    async def close(self) -> None:
        """Stop asking the proxies."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._options.refresh_interval_s):
                    await self._wanted.wait()
                await asyncio.sleep(random.random() * MIN_REFRESH_S)
            except TimeoutError:
                pass
            self._wanted.clear()
            failures = await self._ask(asyncio.get_running_loop().time() + FETCH_TIMEOUT_S * MAX_TRIES, {})
            await asyncio.sleep(MIN_REFRESH_S)
            if failures is not None:
                self._wanted.set()

    async def _ask(self, deadline: float, known: Mapping[str, str]) -> dict[str, str] | None:
        """Ask in one round; None when a proxy answered, else the reason for each that did not. `known`: the reasons of an earlier
        round."""
        failures: dict[str, str] = {}
        addresses = list(dict.fromkeys((*self._map.proxies[: MAX_TRIES // 2], *self._seeds)))[:MAX_TRIES]
        for address in addresses:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                failures[address] = known.get(address, "not tried, the time was over")
                continue
            channel = self._channels.acquire(address)
            try:
                request, timeout_s = wire_pb2.ClusterRequest(), min(left, FETCH_TIMEOUT_S)
                stub = wire_pb2_grpc.PublisherStub(channel)
                reply = await reply_of(stub.Cluster(request, timeout=timeout_s, metadata=self._channels.metadata()))
            except grpc.aio.AioRpcError as error:
                reason = reason_of(error)
                cut_short = left < FETCH_TIMEOUT_S and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                failures[address] = known.get(address, reason) if cut_short else reason
                continue
            except StreamEnded as error:
                failures[address] = str(error)
                continue
            finally:
                await self._channels.release(channel)
            self._learn(reply)
            return None
        return failures

    def _learn(self, reply: wire_pb2.ClusterReply) -> None:
        members = reply.members[:MAX_MEMBERS]
        proxies = tuple(dict.fromkeys(member.grpc_address for member in members if member.role == "proxy" and member.grpc_address))
        gateways = tuple(
            dict.fromkeys(member.grpc_address for member in members if member.role == "gateway" and member.grpc_address)
        )
        # A proxy that has just registered may not see itself yet; keep the last proxies then.
        found = ClusterMap(proxies or self._map.proxies, gateways, reply.cluster or self._map.id)
        if found != self._map:
            self._map = found
            self._on_change(found)
