"""A relay's mail service with a Pi (its production state), a Xiu and a gateway, each behind gRPC in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc.aio

from cluster.membership.map.devices import connected, device_key
from cluster.membership.map.updates import Update
from cluster.rpc.framed import FramedCall, FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import DELIVER, EXCHANGE, NOTIFY
from cluster.wire.v1 import delivery_pb2
from pi.state import ReadRefusal
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID, gateway_msg_id, msg_id
from pixiu.rpc.duplex import Served, StreamEnded
from pixiu.wire.envelope import Delivery, split
from pixiu.wire.inbox_operations import decode
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import pi_pb2, xiu_pb2, xiu_pb2_grpc
from relay.mail.devices import TrackedDevices
from relay.mail.service import MailService
from relay.options import Options
from tests.pi.memory import Replica
from tests.support.framed import framed_of
from tests.support.pi import appends

RELAY, GATEWAY, INSTANCE = EndpointID(900), EndpointID(101), 1
UIN, LANE = 7, 1
_CODES = {3: "UNKNOWN_DEVICE", 4: "OLD_SESSION"}


class Pi:
    """Leads as long as `leads` says so."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.leads = True
        self.mute = False
        self.streams = 0

    async def exchange(self, handler: FramedHandler[pi_pb2.PiReply, pi_pb2.PiRequest]) -> None:
        """Answers at once."""
        self.streams += 1
        while (request := await handler.read()) is not None:
            if self.mute:
                continue
            reply = pi_pb2.PiReply(request=request.request, epoch=1 if self.leads else 0, code="" if self.leads else "NOT_LEADER")
            if self.leads and request.operations:
                reply.results.extend(number for found in self.replica.apply(*decode(request.operations)) for number in found)
            for read in request.reads if self.leads else ():
                start = read.start if read.HasField("start") else None
                try:
                    found = self.replica.state.read(read.uin, read.device, read.lane, read.session, start, read.num)
                except ReadRefusal as refusal:
                    reply.reads.add(code=_CODES[refusal.code])
                    continue
                reply.reads.add(
                    seqs=[seq for seq, _ in found.entries], msg_ids=[each for _, each in found.entries], floor=found.floor,
                    gap=found.gap, last=found.last, up_to=found.up_to,
                )  # fmt: skip
            await handler.write(reply)


class Xiu(xiu_pb2_grpc.XiuServicer):
    """Has what the test stores."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.most = 1000
        self.fetches = 0

    async def Position(self, request: xiu_pb2.PositionRequest, context: Any) -> xiu_pb2.PositionReply:
        """Leads."""
        return xiu_pb2.PositionReply(epoch=1)

    async def Fetch(self, request: xiu_pb2.FetchRequest, context: Any) -> xiu_pb2.FetchReply:
        """At most `most` answers."""
        self.fetches += 1
        wanted = list(request.msg_ids)[: self.most]
        return xiu_pb2.FetchReply(
            batch=b"".join(self.records.get(each, b"") for each in wanted),
            codes=["" if each in self.records else "NOT_YET" for each in wanted],
            partial=len(wanted) < len(request.msg_ids),
        )


class Gateway:
    """Keeps what it gets, and acknowledges it while `acknowledges`."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self.devices: list[tuple[int, int, int, int]] = []
        self.relays: list[int] = []
        self.acknowledges = True
        self.reads = asyncio.Event()
        self.reads.set()
        self._end = asyncio.Event()

    def end_streams(self) -> None:
        """Break them."""
        self._end.set()
        self._end = asyncio.Event()

    async def deliver(self, handler: Served[delivery_pb2.DeliveryReply, delivery_pb2.DeliveryBatch]) -> None:
        """One relay's stream."""
        end = asyncio.create_task(self._end.wait())
        with contextlib.suppress(StreamEnded):
            await handler.write(delivery_pb2.DeliveryReply(ready=True))
            while True:
                await self.reads.wait()
                following = asyncio.ensure_future(handler.read())
                # The connection may be cut, and this task with it: then nobody waits for what was read.
                following.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    following.cancel()
                    return
                batch = following.result()
                if batch is None:
                    return
                reply = self._take(batch)
                if reply is not None:
                    await handler.write(reply)

    def _take(self, batch: delivery_pb2.DeliveryBatch) -> delivery_pb2.DeliveryReply | None:
        if batch.relay:
            self.relays.append(batch.relay)
        self.devices += [(each.uin, each.key, each.connect_time, each.device) for each in batch.devices]
        deliveries = split(batch.deliveries, batch.count)
        self.got += deliveries
        if not deliveries or not self.acknowledges:
            return None
        last = deliveries[-1]
        reply = delivery_pb2.DeliveryReply()
        reply.acknowledgements.add(uin=last.uin, device=last.device, session=last.session, lane=last.lane, up_to=last.seq)
        return reply

    @property
    def seqs(self) -> list[int]:
        """InboxSeqs, as they came."""
        return [delivery.seq for delivery in self.got]


class World:
    """Everything around one `MailService`, at one port of gRPC and one of streams."""

    def __init__(self, **options: Any) -> None:
        new_xiu: Any = Xiu  # what this relay does not call it does not serve
        self.pi = Pi()
        self.xiu: Xiu = new_xiu()
        self.gateway = Gateway()
        self.server = grpc.aio.server()
        self.listener, self.stream_port = FramedListener(), 0
        self.listener.serve(EXCHANGE, pi_pb2.PiRequest.FromString, self.pi.exchange)
        self.listener.serve(DELIVER, delivery_pb2.DeliveryBatch.FromString, self.gateway.deliver)
        self.options = Options(partition=0, **options)
        self.crashes: list[BaseException] = []
        self.owners: tuple[int, ...] = (RELAY,)
        self._count = 0

    async def start(self) -> World:
        """Serve."""
        xiu_pb2_grpc.add_XiuServicer_to_server(self.xiu, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.view = self.view_of(port)
        self.port = port
        core: Any = SimpleNamespace(
            partitions=1, mail_owners=lambda: self.owners, reachable_gateways=lambda: [GATEWAY],
            gateway_at={INSTANCE: GATEWAY}.get,
        )  # fmt: skip
        world = self

        class Context(SimpleNamespace):
            view = property(lambda _: world.view)

        context: Any = Context(
            options=self.options,
            endpoint_id=RELAY,
            now=time.monotonic,
            crash=self.crashes.append,
            server=self.server,
            framed=framed_of("relay", RELAY),
            tls=None,
            streams=self.listener,
        )
        self.devices = TrackedDevices(self._changed)
        self.service = MailService(context, core, self.devices)
        await self.server.start()
        self.stream_port = await self.listener.bind("127.0.0.1", 0, fallback=True)
        await self.listener.start()
        self.view = self.view_of(port)
        self.service.look_around()
        return self

    def _changed(self) -> None:
        self.service.changed()

    def view_of(self, port: int, pis: int = 1) -> View:
        """Everybody at one address."""
        layout = Layout(1, {role: RoleLayout(pis if role == "pi" else 1) for role in ("relay", "pi", "xiu", "gateway")})
        places = [("relay", 0, RELAY), ("xiu", 0, 201), ("gateway", -1, GATEWAY)]
        places += [("pi", partition, 210 + partition) for partition in range(pis)]
        nodes = [
            Node(role, partition, 0, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(endpoint), 1, "", "", 0, instance=INSTANCE)
            for role, partition, endpoint in places
        ]
        return View(layout, tuple(replace(node, stream_port=self.stream_port) for node in nodes))

    async def stop(self) -> None:
        """End; nothing failed."""
        await self.service.stop()
        await self.listener.close()
        await self.server.stop(None)
        assert self.crashes == []

    def login(self, at: int = 5, device: int = 70) -> None:
        """A device takes mail."""
        self._count += 1
        id_ = gateway_msg_id(INSTANCE, 1, self._count)
        self.devices.apply([connected(id_, UIN, device_key(device, 0), at, chat=True, mail=True)], 0.0)

    def logout(self, device: int = 70) -> None:
        """It goes."""
        self._count += 1
        self.devices.apply([Update(gateway_msg_id(INSTANCE, 1, self._count), UIN, device_key(device, 0), False)], 0.0)

    def store(self, size: int = 10) -> tuple[int, int, bytes]:
        """A mail, in Xiu and Pi: InboxSeq, MsgID, record."""
        self._count += 1
        number = msg_id(0, LANE << 6, self._count)
        record = encode(Kind.MAIL, UIN, b"m" * size, self._count, type=LANE << 6)
        self.xiu.records[number] = record
        ((seq,),) = self.pi.replica.apply(appends(1, (number, UIN)))
        return seq, number, record

    def cursor(self) -> int:
        """UpTo of the device, as Pi has it."""
        state = self.pi.replica.state
        devices = state.inboxes.user(UIN).devices
        return max((state.inboxes.cursor(UIN, number, devices[number], LANE).up_to for number in devices), default=0)

    def notices(self) -> FramedCall[delivery_pb2.NoticeBatch, delivery_pb2.NoticesTaken]:
        """A stream of a proxy."""
        return framed_of("proxy").call(self.view.of_role("relay")[0], NOTIFY, delivery_pb2.NoticesTaken.FromString)
