"""A gateway with its mail: the production core, and the twin of `gateway.grpc.mail_streams` and of a client's Subscribe stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import gateway.events as ge
from cluster.wire.v1 import delivery_pb2
from gateway.delivery.mail import read_batch
from gateway.grpc.mail_streams import MAX_ACKNOWLEDGEMENTS
from gateway.mail.queue import MailQueue, acknowledged_ranges
from pixiu.ids import EndpointID
from pixiu.wire.v1 import wire_pb2
from tests.sim.cluster.edges import GatewayProcess
from tests.sim.system.base import Served
from tests.sim.system.streams import Stream

MAX_BATCH_BYTES: Final = 1 << 20
LEFT: Final = 1
DRAIN_S: Final = 2.0
JOINED: Final = 1
"""The request that an inbox's stream begins with."""


@dataclass(eq=False)
class _Client:
    """One stream of an inbox."""

    stream: Stream
    queue: MailQueue


class SystemGateway(Served, GatewayProcess):
    """See the module."""

    def start_core(self) -> None:
        """See `Process`."""
        super().start_core()
        self._number = 0
        self._relays: dict[int, Stream] = {}
        self.inboxes: dict[int, _Client] = {}
        """Connection → who takes mail there."""

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """See `Served`."""
        return {"Deliver": self._deliver, "Subscribe": self._subscribe}

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`: clients are told, and have a while to go elsewhere."""
        for client in self.inboxes.values():
            client.stream.reply(wire_pb2.SubscribeReply(draining=True))
        self.after(DRAIN_S, done)

    # --- relays

    def _deliver(self, stream: Stream) -> None:
        self._number += 1
        number = self._number

        def take(batch: delivery_pb2.DeliveryBatch) -> None:
            if number not in self._relays:
                self._relays[number] = stream
                self.step(ge.MailStreamOpened(number, EndpointID(batch.relay)))
                stream.reply(delivery_pb2.DeliveryReply(ready=True))
                return
            devices, runs = read_batch(batch)
            self.step(ge.MailArrived(number, devices, runs, batch.asked))

        def left() -> None:
            if self._relays.pop(number, None) is not None:
                self.step(ge.MailStreamClosed(number))

        stream.take, stream.left = take, left

    def other(self, effect: Any) -> None:
        """Mail's effects."""
        match effect:
            case ge.WriteMail(connection, runs, anew):
                self.world.mail.written(self, effect)
                client = self.inboxes[connection]
                client.queue.put([(run.data, run.count) for run in runs], anew=anew)
            case ge.AcknowledgementsDue(stream):
                found = self._relays.get(stream)
                if found is not None:
                    self._tell(stream, found)
            case ge.EndMailStream(stream):
                assert not effect.at_fault, effect.text
                found = self._relays.pop(stream, None)
                if found is not None:
                    found.end()
                    self.step(ge.MailStreamClosed(stream))

    def _tell(self, number: int, stream: Stream) -> None:
        while items := self.core.mail.take_acknowledgements(number, MAX_ACKNOWLEDGEMENTS):
            found = [delivery_pb2.DeviceAcknowledgement(**item._asdict()) for item in items]
            stream.reply(delivery_pb2.DeliveryReply(acknowledgements=found))

    def end_of_turn(self) -> None:
        """See `Process`: what waits for clients is written."""
        super().end_of_turn()
        for client in self.inboxes.values():
            while client.queue:
                mail, count = client.queue.take(MAX_BATCH_BYTES)
                client.stream.reply(wire_pb2.SubscribeReply(mail=mail, mail_count=count))

    # --- clients

    def _subscribe(self, stream: Stream) -> None:
        number = self.world.clients.new_connection()

        def take(request: wire_pb2.SubscribeRequest) -> None:
            if request.HasField("hello"):
                self.inboxes[number] = _Client(stream, MailQueue())
                wall_ms = self.world.unix_us() // 1000 + 300 * self.place.number
                opened = ge.Opened(number, request.hello.uin, 0, request.hello.device, 0, wall_ms)
                self.step(opened)
                self.step(ge.Join(number, JOINED, [], False, True))
            ranges = acknowledged_ranges(request.mail_acknowledgements)
            if ranges and number in self.inboxes:
                self.step(ge.MailAcknowledged(number, ranges))

        def left() -> None:
            if self.inboxes.pop(number, None) is not None:
                self.step(ge.Closed(number, LEFT))

        stream.take, stream.left = take, left

    def answered(self, number: int, known: bool) -> bool:
        """A join of an inbox took effect. Whether it was one."""
        client = self.inboxes.get(number)
        if client is not None:
            client.stream.reply(wire_pb2.SubscribeReply(request=JOINED))
        return client is not None

    def replaced(self, number: int, reason: int) -> bool:
        """A newer connection of the device is elsewhere. Whether it was an inbox's."""
        client = self.inboxes.pop(number, None)
        if client is not None:
            self.world.counts["inboxes replaced"] += 1
            client.stream.end()
            self.step(ge.Closed(number, reason))
        return client is not None
