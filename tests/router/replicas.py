"""Replicas of one router partition, each with a service at a port of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio

from pixiu.discovery.node import Node, NodeState
from pixiu.ids import EndpointID


class ServedReplica(ABC):
    """A replica and its node, as the others see it.

    Args:
        folder: of all replicas.
    """

    service: Any

    def __init__(self, folder: Path, number: int) -> None:
        self.endpoint, self.folder = EndpointID(100 + number), folder / str(number)
        self.node: Node | None = None
        self.rule = (0, 1)

    @abstractmethod
    def all(self) -> Sequence[ServedReplica]:
        """All replicas, this one included."""

    @abstractmethod
    def make(self, server: grpc.aio.Server) -> None:
        """Make the service, and add it to a server."""

    async def start(self, state: NodeState = NodeState.RUNNING) -> None:
        """Start in a state, catch up, and be Running."""
        self.server = grpc.aio.server()
        self.make(self.server)
        await self.service.load()
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.node = Node("router", self.rule[0], 0, state, "127.0.0.1", port, 0, self.endpoint, 0, "test", "", 0)
        await self.caught_up()
        self.node = replace(self.node, state=NodeState.RUNNING)

    async def caught_up(self) -> None:
        """Take what the others have."""
        await self.service.catch_up()

    def peers(self) -> list[Node]:
        """Nodes of the same partition."""
        return [each.node for each in self.all() if each is not self and each.rule == self.rule and each.node is not None]

    def running_sources(self) -> list[Node]:
        """Running peers; a child has its parent."""
        found = self.peers() or [each.node for each in self.all() if each is not self and each.node is not None]
        return [node for node in found if node.state is NodeState.RUNNING]

    async def stop(self, *, forget: bool = True) -> None:
        """End it. `forget`: the others note that it is gone."""
        if forget:
            self.node = None
        await self.server.stop(None)
        await self.service.close()
