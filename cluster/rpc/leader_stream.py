"""Streams to the leaders of Xiu and Pi: find a leader, open a stream, and open it again elsewhere.

A replica that does not lead reports that, and the leader that it knows, in its answer to an empty request; so any Running one can
be asked first.

Source: docs/links.md, docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import EXCHANGE, STORE
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.duplex import Duplex, Outbox, StreamEnded, ask
from pixiu.wire.v1 import pi_pb2, xiu_pb2

ASK_TIMEOUT_S: Final = 3.0
"""Time-out of the answer to the empty request, seconds."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
NOBODY_S: Final = 0.2
"""Pause before the next search if no replica is running, seconds. That is not a failure: a link to a future partition must open
soon after its replicas run, and before its parent is split."""
MAX_WAITING: Final = 1 << 20
"""Requests waiting on a stream; its owner bounds those under way far below this. Policy: a further one is lost."""
STATES: Final = (NodeState.RUNNING, NodeState.DRAINING)

Request = xiu_pb2.StoreRequest | pi_pb2.PiRequest
Reply = xiu_pb2.StoreReply | pi_pb2.PiReply
PARSE: Final[dict[str, Callable[[bytes], Reply]]] = {"pi": pi_pb2.PiReply.FromString, "xiu": xiu_pb2.StoreReply.FromString}


class LeaderStream:
    """Keeps a stream to the leader of one partition: of Pi (`Exchange`) or of Xiu (`Store`).

    Args:
        role: "pi" or "xiu".
        partition: the partition of that role.
        view: gives the newest view of the cluster.
        framed: opens streams.
        up: called with the leader's epoch when a stream is open.
        reply: called with each reply.
        down: called with the reason when the stream is gone, or could not be opened.
        crash: called with an error that is a bug here, because otherwise nobody would know why a partition does nothing.
    """

    def __init__(
        self,
        role: str,
        partition: int,
        view: Callable[[], View],
        framed: Framed,
        *,
        up: Callable[[int], None],
        reply: Callable[[Reply], None],
        down: Callable[[str], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self.role, self.partition = role, partition
        self._view, self._framed = view, framed
        self._up, self._reply, self._down, self._crash = up, reply, down, crash
        self.open = False
        self._outbox = Outbox[Request](MAX_WAITING)
        self._stream: Duplex[Request, Reply] | None = None
        self._asked = 0
        self._again = False
        """True if the replica of the ending stream is asked again before the others."""
        self._hurry = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-{role}-{partition}")
        self._task.add_done_callback(self._ended)

    def send(self, request: Request) -> None:
        """Send on the open stream; without one the request is lost, as `down` has reported."""
        if self.open:
            self._outbox.put(request)

    def leave(self, *, again: bool = False) -> None:
        """End the stream; the next one is opened automatically. `again`: to the same replica, which leads."""
        if self.open and self._stream is not None:
            self._again = again
            self._stream.end("it was left")
        self.open = False

    def hurry(self) -> None:
        """Try again at once, because somebody waits for a stream that could not be opened so far."""
        self._hurry.set()

    async def close(self) -> None:
        """End the stream, and open no other."""
        self.open = False
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    async def _run(self) -> None:
        backoff, hint, named = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random), "", False
        while True:
            address, reason = hint or self._candidate(), f"no {self.role} of it is running; `pixiu status` shows which are missing"
            hint, served = "", False
            if address:
                try:
                    hint, reason, served = await self._serve(address)
                except StreamEnded as ended:
                    reason = str(ended)
                reason = f"{address}: {reason}"
            self.open = False
            self._down(reason)
            # A leader that a replica names is asked at once. If it names another one there is a pause, as after any failure: two
            # replicas that name each other would be asked without end.
            named = bool(hint) and not named
            if self._again:
                hint, self._again = address, False
            if served:
                backoff.reset()
            elif not named:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s() if address else NOBODY_S):
                        await self._hurry.wait()
                        backoff.reset()
            self._hurry.clear()

    def _candidate(self) -> str:
        """The next replica to ask."""
        nodes = self._view().replicas(self.role, self.partition, STATES)
        self._asked += 1
        return nodes[self._asked % len(nodes)].address if nodes else ""

    async def _serve(self, address: str) -> tuple[str, str, bool]:
        """Run one stream to its end. Returns the leader's address if this replica named one, the reason of the end, and True if the
        replica led."""
        node = next((node for node in self._view().of_role(self.role) if node.address == address), None)
        if node is None:
            raise StreamEnded("the registry does not have it")
        call: FramedCall[Request, Reply] = self._framed.call(node, EXCHANGE if self.role == "pi" else STORE, PARSE[self.role])
        async with call:
            return await self._serve_over(call)

    async def _serve_over(self, call: FramedCall[Request, Reply]) -> tuple[str, str, bool]:
        empty: Request = pi_pb2.PiRequest() if self.role == "pi" else xiu_pb2.StoreRequest()
        reply: Reply = await ask(call, empty, ASK_TIMEOUT_S)
        if not reply.epoch:
            return (reply.server.address if isinstance(reply, pi_pb2.PiReply) else reply.leader), "it does not lead", False
        self._outbox = Outbox(MAX_WAITING)
        self._stream = Duplex(call, self._take, self._outbox.give, work=self._outbox.work)
        self.open = True
        self._up(reply.epoch)
        end = await self._stream.run()
        return "", end.text, True

    def _take(self, reply: Reply) -> None:
        if self.open:
            self._reply(reply)
