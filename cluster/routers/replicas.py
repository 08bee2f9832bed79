"""The routers that a process asks about rooms: which partitions serve a room, and which replica everybody asks.

    room ─▶ its partition, and during a doubling the one that takes it over ─▶ the rendezvous choice of the Running replicas

Source: docs/routing.md, "Partitions"; docs/subscriptions.md, "Retained messages" and "Kept filters".
"""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from cluster.links.api import PeerState
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.placement.partition import rendezvous_order
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import Tls, peer_channel


class RouterReplicas:
    """Chooses router replicas, and holds the channels to them.

    Args:
        view: gives the view of the cluster.
        state: gives the state of a router by its heartbeats.
        tls: this process's certificates; None: it has none.
    """

    def __init__(self, view: Callable[[], View], state: Callable[[EndpointID], PeerState], tls: Tls | None = None) -> None:
        self._view, self._state, self._tls = view, state, tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def partitions(self) -> int:
        """Number of partitions by the present layout."""
        return self._view().layout.partitions("router")

    def serving(self, room: int) -> list[int]:
        """Partitions that serve a room: two during a doubling, so that nothing is missing when the layout changes."""
        view = self._view()
        partitions = view.layout.partitions("router")
        known = {node.partition for node in view.of_role("router") if _keeps(node.partition, room, partitions)}
        return sorted({room % partitions, *known})

    def replica(self, partition: int, attempt: int = 0) -> Node | None:
        """The replica that all processes ask: the rendezvous choice of the Running ones that are not dead. A further attempt may
        ask the next one."""
        nodes = [node for node in self._view().running("router") if node.partition == partition]
        alive = {node.endpoint: node for node in nodes if self._state(node.endpoint) is not PeerState.DEAD}
        order = rendezvous_order(partition, list(alive))
        return alive[EndpointID(order[attempt % len(order)])] if order else None

    def channel(self, node: Node) -> grpc.aio.Channel:
        """The channel to a replica."""
        channel = self._channels.get(node.address)
        if channel is None:
            channel = self._channels[node.address] = peer_channel(node.address, node.role, self._tls, PEER_CHANNEL)
        return channel

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()


def _keeps(partition: int, room: int, partitions: int) -> bool:
    """True if a partition keeps what belongs to a room; one that a doubling makes keeps its half already."""
    while partition >= partitions:
        partitions *= 2
    return room % partitions == partition
