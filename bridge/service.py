"""The shell of a bridge process: which bridges it runs, as the file, the registry and the operator say.

    file of bridges ──▶ runs ◀── owners: of bridges that one process alone runs (registry)
                         ▲
                         └────── bridge.paused: the setting that `pixiu bridge pause` and `resume` change

Source: docs/bridges.md.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from bridge.catalog import Bridge, bridges_of, digest_of, read_bridges
from bridge.connectors.secrets import secret_of
from bridge.options import Options, SourceOptions, TargetOptions
from bridge.owners import owner_of
from bridge.source_run import SourceRun
from bridge.surroundings import others_text, own_gateways, with_other_bridges
from bridge.target_run import TargetRun
from cluster.core.role import RoleShell
from cluster.links.api import Peer
from cluster.metrics.metrics import Sample
from cluster.process.context import Context
from cluster.routes.live_file import RoutesFile
from cluster.routes.routes import Routes
from cluster.settings.options import ClusterOptions
from pixiu.client.client import Client, connect
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import PixiuError
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
STOP_S: Final = 5.0
"""Time for the end of a bridge that is no longer this process's, or was paused, before it is cut off, seconds."""
LOOK_S: Final = 5.0
"""Time between two looks at the surroundings, seconds: longer than processes take to read a changed file of routes."""
NOT_CONNECTED: Final = "bridge_not_connected"
OWN_GATEWAY: Final = "bridge_to_own_gateway"
OTHER_BRIDGES: Final = "bridge_process_with_other_bridges"
BEGINS: Final = "bridge_begins"
ENDS: Final = "bridge_ends"
Run = TargetRun | SourceRun


class Service(RoleShell):
    """Runs the bridges of a process, each with a core of its own."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.crash)
        self._context = context
        self._described = read_bridges(context.options.bridges) if context.options.bridges else []
        self._bridges = self._described
        path = context.options.routes
        self._routes = RoutesFile(path, self._routes_changed, context.log) if path else None
        if self._routes is not None:
            self._bridges = [*self._described, *bridges_of(self._routes.routes)]
        self._paused = frozenset(context.options.paused)
        self._owned = frozenset[str]()
        self._client: Client | None = None
        self._runs: dict[str, Run] = {}
        self._changed = asyncio.Event()
        self._problem = "it does not know the cluster yet"
        self._own_gateways: dict[str, str] = {}
        """Bridge → warning: its broker is a gateway of this cluster."""
        self._others: list[Node] = []
        """Processes with other bridges, at the last look."""
        self._told: set[EndpointID] = set()
        """Those that were logged."""
        self._draining = False
        context.metrics.collect_from(self._samples)

    # --- what the runtime calls

    def on_view(self, view: View) -> None:
        """Note which processes run bridges. Heartbeats between them show one that died before the registry's view forgets it."""
        others = [node for node in view.nodes if node.role == "bridge" and node.endpoint != self._context.endpoint_id]
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in others)
        running = [node.endpoint for node in view.running("bridge")]
        own = self._context.membership.node
        if own is not None and own.state is NodeState.RUNNING and own.endpoint not in running:
            running.append(own.endpoint)
        owned = {each.name for each in self._bridges if owner_of(each.name, running) == self._context.endpoint_id}
        self._owned = frozenset(owned)
        self._changed.set()

    def on_settings(self, cluster: ClusterOptions, options: Options) -> None:
        """See `cluster.settings.live_settings.Reconfigurable`."""
        self._paused = frozenset(options.paused)
        self._changed.set()

    async def prepare(self, node: Node) -> Node:
        """See `cluster.process.context.Preparing`."""
        return replace(node, files_digest=digest_of(self._bridges))

    async def start(self) -> None:
        """Start without waiting: bridges begin when the cluster is found."""
        self.spawn(self._connect())
        if self._routes is not None:
            self.spawn(self._routes.look())
        self.spawn(self._follow())
        self.spawn(self._look_around())

    async def drain(self) -> None:
        """Finish what is being written, and leave the channels."""
        self._draining = True
        self._changed.set()
        await asyncio.gather(*(run.end() for run in self._runs.values()))

    async def stop(self) -> None:
        """Stop everything."""
        self.stop_runners()
        await self.cancel_tasks()
        await asyncio.gather(*(run.stop() for run in self._runs.values()))
        if self._client is not None:
            await self._client.close()

    def health(self) -> dict[str, object]:
        """Report each bridge, and what an operator has to look at."""
        bridges = [self._status(each) for each in self._bridges]
        faults = [f"bridge {each['name']}: {each['why']}" for each in bridges if each["why"]]
        faults += [self._routes.problem] if self._routes is not None and self._routes.problem else []
        degraded = "; ".join([self._problem, *faults] if self._problem else faults) or None
        return {"bridges": bridges, "warnings": self._warnings(), "degraded": degraded}

    def _warnings(self) -> list[str]:
        """Sentences for an operator to look at; nothing of it keeps bridges from running."""
        own = self._context.membership.node
        others = [others_text(own, self._others)] if own is not None and self._others else []
        return [*others, *(f"bridge {name}: {text}" for name, text in self._own_gateways.items())]

    def _status(self, bridge: Bridge) -> dict[str, object]:
        run = self._runs.get(bridge.name)
        if run is not None and run.running:
            return run.status()
        paused = bridge.name in self._paused
        options = bridge.options
        state = "paused" if paused else "another process runs it" if bridge.alone else "not begun"
        before = run.status() if run is not None else {"messages": 0, "bytes": 0, "rejected": 0, "retries": 0, "waiting": 0}
        own = {"name": bridge.name, "kind": options.kind, "topic": options.topic, "channel": bridge.channel}
        return {**before, **own, "state": state, "why": ""}

    # --- running

    def _routes_changed(self, routes: Routes) -> None:
        self._bridges = [*self._described, *bridges_of(routes)]
        self._changed.set()

    async def _look_around(self) -> None:
        """Register which bridges these are, and look for what to warn of. A process with others is logged at the second look."""
        while True:
            own, view = self._context.membership.node, self._context.view
            digest = digest_of(self._bridges)
            if own is not None and not self._draining:
                if own.files_digest != digest:
                    await self._context.membership.update(replace(own, files_digest=digest))
                before, self._others = self._others, with_other_bridges(view.running("bridge"), own.endpoint, digest)
                for node in self._others:
                    if node in before and node.endpoint not in self._told:
                        self._told.add(node.endpoint)
                        self._context.log.warning(OTHER_BRIDGES, text=others_text(own, [node]))
            known, self._own_gateways = self._own_gateways, await own_gateways(self._bridges, view.running("gateway"))
            for name in self._own_gateways.keys() - known.keys():
                self._context.log.warning(OWN_GATEWAY, bridge=name, text=self._own_gateways[name])
            await asyncio.sleep(LOOK_S)

    async def _connect(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.Random().random)
        options = self._context.options
        while self._client is None:
            try:
                token = secret_of(options.token_file, "token_file") or None
                name = f"bridge-{socket.gethostname()[:64]}-{os.getpid()}"
                self._client = await connect(options.target or options.registry, client=name, token=token).open()
            except PixiuError as error:
                self._problem = f"the cluster cannot be reached: {error}"
                self._context.log.warning(NOT_CONNECTED, text=str(error))
                await asyncio.sleep(backoff.next_s())
        self._problem = ""
        self._changed.set()

    async def _follow(self) -> None:
        """Begin and end bridges, as it changes what is wanted."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._client is None or self._draining:
                continue
            now = {each.name: each.options for each in self._bridges}
            for name, run in list(self._runs.items()):
                if now.get(name) != run.options:  # the routes have changed
                    self._context.log.info(ENDS, bridge=name)
                    await self._end(name, run)
                    self._runs.pop(name, None)
            for bridge in self._bridges:
                await self._adjust(bridge, self._client)

    async def _adjust(self, bridge: Bridge, client: Client) -> None:
        wanted = bridge.name not in self._paused and (not bridge.alone or bridge.name in self._owned)
        run = self._runs.get(bridge.name)
        if wanted and run is None:
            run = self._runs[bridge.name] = self._make(bridge, client)
        if run is None or run.running == wanted:
            return
        self._context.log.info(BEGINS if wanted else ENDS, bridge=bridge.name)
        if wanted:
            run.begin()
            return
        await self._end(bridge.name, run)

    async def _end(self, name: str, run: Run) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await run.end()
        except TimeoutError:
            await run.stop()
            del self._runs[name]

    def _make(self, bridge: Bridge, client: Client) -> Run:
        options, context = bridge.options, self._context
        make = partial(bridge.kind.make, bridge.name, options, *([client] if bridge.kind.asks else []))
        if isinstance(options, TargetOptions):
            return TargetRun(bridge.name, options, make, client, context.now, context.log)
        assert isinstance(options, SourceOptions)
        return SourceRun(bridge.name, options, make, client, context.log)

    def _samples(self) -> Iterator[Sample]:
        for name, run in self._runs.items():
            labels = {"bridge": name}
            status = run.status()
            for field in ("messages", "bytes", "rejected", "retries"):
                yield Sample(f"{field}_total", float(str(status[field])), labels)
            yield Sample("waiting", float(str(status["waiting"])), labels)
            yield Sample("up", float(run.running and not status["why"]), labels)
