"""A relay's streams to gateways: deliveries out, acknowledgements in. All waiting data is bounded.

    wanted ─▶ call, the relay's name ─▶ `ready` ─▶ deliveries ─▶ broken ─▶ pause, and again while sessions need it

Source: docs/delivery.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import DELIVER
from cluster.wire.v1 import delivery_pb2
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.duplex import Duplex, StreamEnded, ask
from relay.delivery.events import Chunk, DeviceLane
from relay.mail.devices import Place

READY_S: Final = 5.0
"""Time limit of the gateway's first message, seconds."""
STALL_S: Final = 10.0
"""Time for which a message may be unsent before the stream is broken, seconds."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
MAX_MESSAGE_BYTES: Final = 512 << 10
"""Size limit of one message, except for a single larger record."""
MAX_SAID: Final = 200_000
"""Limit of devices that a stream has named. Policy: all are forgotten, and named again."""
Deliveries = Duplex[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]


class Owner(Protocol):
    """Receiver of the streams' events."""

    def stream_ready(self, gateway: int) -> None:
        """Called when the gateway's stream takes deliveries."""

    def stream_broken(self, gateway: int) -> None:
        """Called when deliveries on the way may be lost."""

    def acknowledged(self, gateway: int, reply: delivery_pb2.DeliveryReply) -> None:
        """Called with acknowledgements of a gateway's clients."""

    def place(self, uin: int, number: int) -> Place | None:
        """Return a device's place, by Pi's number."""


@dataclass(slots=True)
class Batch:
    """Content of one message."""

    devices: list[delivery_pb2.MailDevice] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    count: int = 0
    """Number of envelopes in them."""
    asked: list[delivery_pb2.DeviceLane] = field(default_factory=list)
    size: int = 0


class Outbox:
    """Deliveries that wait for one stream, and the devices that it has named.

    Args:
        place: returns a device's place, by UIN and Pi's number.
        gateway: the endpoint of the stream's gateway.
    """

    def __init__(self, place: Callable[[int, int], Place | None], gateway: int) -> None:
        self._place, self._gateway = place, gateway
        self._batches: deque[Batch] = deque()
        self._said: dict[tuple[int, int], tuple[int, int]] = {}
        """(UIN, number) → (key, connect time)."""
        self.bytes = 0
        """Size of deliveries that wait, or are being sent."""

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Add mails. A device is named before its first one, and again when its connection has changed."""
        for uin, number, count, chunk in chunks:
            place = self._place(uin, number)
            named: delivery_pb2.MailDevice | None = None
            if place is not None and place.gateway == self._gateway:
                meant = place.key, place.connection
                if self._said.get((uin, number)) != meant:
                    if len(self._said) >= MAX_SAID:
                        self._said.clear()
                    self._said[uin, number] = meant
                    named = delivery_pb2.MailDevice(uin=uin, key=place.key, connect_time=place.connection, device=number)
            last = self._batches[-1] if self._batches else None
            # Mail for a device's former connection leaves before the new one is named.
            if last is None or last.asked or (named is not None and last.chunks) or last.size + len(chunk) > MAX_MESSAGE_BYTES:
                last = Batch()
                self._batches.append(last)
            if named is not None:
                last.devices.append(named)
            last.chunks.append(chunk)
            last.count += count
            last.size += len(chunk)
            self.bytes += len(chunk)

    def ask(self, lanes: Sequence[DeviceLane]) -> None:
        """Ask up to where these lanes were written, after all waiting deliveries."""
        if not self._batches:
            self._batches.append(Batch())
        self._batches[-1].asked.extend(delivery_pb2.DeviceLane(**lane._asdict()) for lane in lanes)

    def take(self) -> Batch:
        """Return the next message; call `sent` when it has left."""
        return self._batches.popleft()

    def sent(self, batch: Batch) -> None:
        """Count a batch that has left."""
        self.bytes -= batch.size


class _Stream:
    """The stream to one gateway."""

    def __init__(self, gateway: int, streams: GatewayStreams) -> None:
        self.gateway, self._streams = gateway, streams
        self.outbox = Outbox(streams.owner.place, gateway)
        self._duplex: Deliveries | None = None
        """Set while the gateway accepts deliveries."""
        self._leaving: Batch | None = None
        """The batch being written."""
        self._stalled: asyncio.TimerHandle | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-deliver-{gateway:016x}")
        self.task.add_done_callback(streams.ended)

    @property
    def ready(self) -> bool:
        return self._duplex is not None

    def send(self, chunks: Sequence[Chunk]) -> None:
        self.outbox.add(chunks)
        if self._duplex is not None:
            self._duplex.wake()

    def ask(self, lanes: Sequence[DeviceLane]) -> None:
        if self._duplex is not None:
            self.outbox.ask(lanes)
            self._duplex.wake()

    def give_up(self) -> None:
        """End the stream: it does not accept deliveries."""
        duplex, self._duplex = self._duplex, None
        if duplex is not None:
            duplex.end("the gateway does not take what is sent")

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            node = self._streams.view().by_endpoint(self.gateway)
            if node is not None and await self._serve(node):
                self._streams.broke(self.gateway)
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _serve(self, node: Node) -> bool:
        """Run one stream to its end. Returns True if it was ready."""
        call: FramedCall[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]
        call = self._streams.framed.call(node, DELIVER, delivery_pb2.DeliveryReply.FromString)
        try:
            async with call:
                reply = await ask(call, delivery_pb2.DeliveryBatch(relay=self._streams.endpoint), READY_S)
                if not reply.ready:
                    return False
                self.outbox = Outbox(self._streams.owner.place, self.gateway)
                duplex = self._duplex = Duplex(call, self._take, self._give, over=self._over)
                self._streams.owner.stream_ready(self.gateway)
                await duplex.run()
        except StreamEnded:
            return False  # it was not opened; the pause suffices
        return True

    def _take(self, reply: delivery_pb2.DeliveryReply) -> None:
        if self.ready:
            self._streams.owner.acknowledged(self.gateway, reply)

    def _give(self) -> delivery_pb2.DeliveryBatch | None:
        """Return the next batch. The one before has left."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._leaving is not None:
            self.outbox.sent(self._leaving)
            self._leaving = None
        if not self.outbox:
            return None
        self._leaving = batch = self.outbox.take()
        self._stalled = asyncio.get_running_loop().call_later(STALL_S, self.give_up)
        return delivery_pb2.DeliveryBatch(
            devices=batch.devices, deliveries=b"".join(batch.chunks), count=batch.count, asked=batch.asked
        )

    def _over(self) -> None:
        self._duplex = None
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._leaving = None


class GatewayStreams:
    """A stream to each gateway with a device that takes mail.

    Args:
        owner: receives events.
        endpoint: of this relay.
        view: returns the newest view of the cluster.
        max_bytes: limit of deliveries that wait for one gateway. Policy: its stream is broken, and unacknowledged mail is sent
            again.
        crash: called with an error that is a bug here.
        framed: opens streams.
    """

    def __init__(
        self,
        owner: Owner,
        endpoint: EndpointID,
        view: Callable[[], View],
        max_bytes: int,
        crash: Callable[[BaseException], None],
        framed: Framed,
    ) -> None:
        self.owner, self.endpoint, self.view, self.framed = owner, endpoint, view, framed
        self.broken = 0
        """Streams that broke."""
        self._max_bytes, self._crash = max_bytes, crash
        self._streams: dict[int, _Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of streams that deliver."""
        return sum(stream.ready for stream in self._streams.values())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of deliveries that wait, for all gateways."""
        return sum(stream.outbox.bytes for stream in self._streams.values() if stream.ready)

    def want(self, gateway: int) -> bool:
        """Open a stream if there is none. Returns True if it delivers already."""
        stream = self._streams.get(gateway)
        if stream is None:
            stream = self._streams[gateway] = _Stream(gateway, self)
        return stream.ready

    def deliver(self, gateway: int, chunks: Sequence[Chunk]) -> bool:
        """Send, in order. Returns False if no stream accepts it."""
        if not self.want(gateway):
            return False
        stream = self._streams[gateway]
        if stream.outbox.bytes > self._max_bytes:
            stream.give_up()
            return False
        stream.send(chunks)
        return True

    def ask_written(self, gateway: int, lanes: Sequence[DeviceLane]) -> None:
        """Ask up to where lanes were written. Without a stream there is no answer; its deliveries are sent again later."""
        stream = self._streams.get(gateway)
        if stream is not None:
            stream.ask(lanes)

    def keep(self, gateways: Collection[int]) -> None:
        """End the streams to all other gateways."""
        for gateway in [gateway for gateway in self._streams if gateway not in gateways]:
            task = self._streams.pop(gateway).task
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all streams."""
        self.keep(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def broke(self, gateway: int) -> None:
        """Report that a stream that delivered has broken."""
        self.broken += 1
        self.owner.stream_broken(gateway)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a stream's task."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)
