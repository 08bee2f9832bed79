"""Routers and gateways below another root of the registry, for the brokers of a cluster that has none of its own.

    /pubsub   routers, gateways ─┐
              brokers, proxies ◀─┤ each broker keeps the same memberships, of its own cluster's partitions
    /pubsub2  brokers, proxies ◀─┘

Source: PiXiu §5; docs/memberships.md, "Joins and leaves"; docs/routing.md, "Several clusters on one router cluster".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from broker.options import Options
from cluster.process.context import Context
from pixiu.discovery.agreement import disagreement
from pixiu.discovery.node import Node
from pixiu.discovery.view import Layout, View
from pixiu.discovery.watcher import Discovery
from pixiu.errors import ConfigurationError
from pixiu.ids import EndpointID

ROLES: Final = ("router", "relay", "gateway")
"""Roles seen below the other root."""


def merged(own: View, other: View) -> View:
    """Join brokers and proxies of one cluster with routers and gateways of another. The layout's version is that of `own`."""
    roles = {role: layout for role, layout in own.layout.roles.items() if role not in ROLES}
    roles |= {role: layout for role, layout in other.layout.roles.items() if role in ROLES}
    nodes = [node for node in own.nodes if node.role not in ROLES]
    nodes += [node for node in other.nodes if node.role in ROLES]
    return View(Layout(own.layout.version, roles), tuple(nodes))


class RouterRoot:
    """The view of a broker whose routers are elsewhere.

    Args:
        context: the broker's.
        on_view: called with every new merged view once `set_own` was called.
    """

    def __init__(self, context: Context[Options], on_view: Callable[[View], None]) -> None:
        self._context = context
        self._on_view = on_view
        self._own: View | None = None
        self._node: Node | None = None
        """The broker's node, as it would be in the other cluster."""
        self._discovery = Discovery(
            context.zookeeper, context.router_root, self._changed, context.options.poll_interval_s, roles=ROLES
        )

    async def start(self, node: Node) -> None:
        """Read the other root. `node`: the broker's future registration.

        Raises `ConfigurationError` if its processes have other settings, `RegistryUnavailable`.
        """
        there = replace(self._context.cluster, router_root="")
        self._node = replace(node, wire_hash=there.wire_hash())
        await self._discovery.start()
        self._check()

    def _check(self) -> None:
        """Raises `ConfigurationError` if settings differ, also those of processes that come later."""
        assert self._node is not None
        for node in self._discovery.view.nodes:
            if node.role in ROLES and (problem := disagreement(self._node, node)):
                raise ConfigurationError(
                    f"{problem}; {node.role} is registered at {self._context.router_root}: clusters that share routers have the "
                    "same [cluster] table, but for router_root, which the one with the routers leaves empty"
                )

    async def close(self) -> None:
        """Stop reading the other root."""
        await self._discovery.close()

    def set_own(self, view: View) -> None:
        """Take a new view of the broker's own root."""
        self._own = view
        self._changed(self._discovery.view)

    def view(self) -> View:
        """The view merged from both roots."""
        return merged(self._own or View(), self._discovery.view)

    def mark(self, peer: EndpointID, *, dead: bool) -> None:
        """Mark a peer dead or alive, by its heartbeats: if it vanished from the registry, it is dropped from the view, or kept."""
        (self._discovery.mark_dead if dead else self._discovery.mark_alive)(peer)

    def _changed(self, _view: View) -> None:
        if self._own is None:
            return
        try:
            self._check()
        except ConfigurationError as error:
            self._context.crash(error)
        else:
            self._on_view(self.view())
