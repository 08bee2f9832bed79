"""A role that does nothing but say, on standard output, what the runtime asks of it. Started by test_process_lifecycle.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, replace

from cluster.links.api import Outcome, Peer, PeerState
from cluster.process.context import Context
from cluster.process.host import run_role
from cluster.settings.fields import bounded, choice
from cluster.settings.options import PartitionedOptions
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import Unavailable
from pixiu.ids import EndpointID
from registry.membership import Membership


@dataclass(frozen=True, kw_only=True)
class Options(PartitionedOptions):
    drain_s: float = bounded(0.0, 0.0, 600.0)
    """Seconds that draining takes."""
    start_s: float = bounded(0.0, 0.0, 600.0)
    """Seconds that starting takes."""
    hang_s: float = bounded(0.0, 0.0, 600.0)
    """Seconds for which the loop hangs at SIGUSR1."""
    fail: str = choice("no", "no", "bug", "error", "crash", "asked", "view")
    """What goes wrong; `asked`: it crashes at SIGUSR2."""


def say(text: str) -> None:
    print(text, flush=True)


class Idle:
    def __init__(self, context: Context[Options]) -> None:
        self._context = context

    async def prepare(self, node: Node) -> Node:
        say("prepare")
        return replace(node, mqtt_host="prepared")

    def on_view(self, view: View) -> None:
        say("view")
        if self._context.options.fail == "view":
            raise ValueError("a bug in on_view")
        nodes = (node for node in view.nodes if node.endpoint != self._context.endpoint_id)
        self._context.links.set_peers(Peer(node.endpoint, node.role, node.host, node.port, node.stream_port) for node in nodes)

    async def start(self) -> None:
        say("start")
        options = self._context.options
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, time.sleep, options.hang_s)
        await asyncio.sleep(options.start_s)
        match options.fail:
            case "bug":
                raise RuntimeError("a bug in start")
            case "error":
                raise Unavailable("nobody gave a snapshot")
            case "crash":
                asyncio.get_running_loop().call_later(0.01, self._context.crash, RuntimeError("a bug in a task"))
            case "asked":
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._context.crash, RuntimeError("a bug in a task"))

    async def drain(self) -> None:
        say("drain")
        await asyncio.sleep(self._context.options.drain_s)
        say("drained")

    async def stop(self) -> None:
        say("stop")

    def health(self) -> dict[str, object]:
        return {"pid": os.getpid()}

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        pass

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        say(f"peer {state.value}")

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""


if __name__ == "__main__":
    sys.exit(run_role("router", Options, Idle, sys.argv[1:], membership=Membership))
