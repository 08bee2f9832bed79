"""The shell of a gateway's wills: takes them from clients' connections, publishes those that are due, and sends to relays.

Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.links.api import Links
from cluster.mqtt.properties_in_records import origin_of
from cluster.wills.will import WillMessage, decode
from cluster.wire.v1 import control_pb2
from gateway.clients.access import will_key
from gateway.clients.clients import Retainer
from gateway.clients.publishing import ConfirmedPublishers
from gateway.events import Confirmable
from gateway.wills import events as ev
from gateway.wills.core import Core
from pixiu.errors import LocalError, MalformedData, Offline, Overloaded, PixiuError, Unavailable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX
from pixiu.wire.record import Flag, Kind, encode, with_topic


class WillPublisher:
    """The wills of a gateway's clients.

    Args:
        now: monotonic seconds.
        publishers: send messages of QoS 1, as a will is sent whatever its QoS.
        topics, vrooms: rooms of topics, and the cluster's big rooms.
        max_record_bytes: of the cluster.
        retainer: keeps wills that are to be retained; None: they are published only.
    """

    def __init__(
        self,
        now: Callable[[], float],
        publishers: ConfirmedPublishers,
        topics: TopicRooms,
        vrooms: VRooms,
        max_record_bytes: int,
        retainer: Retainer | None = None,
    ) -> None:
        self._retainer = retainer
        self._publishers, self._topics, self._vrooms, self._max_record_bytes = publishers, topics, vrooms, max_record_bytes
        self.runner: Runner[ev.Event, ev.Effect] = Runner(None, now, tick=TICK, end_of_turn=END_OF_TURN)
        self._core: Core | None = None
        self._waiting: dict[int, Callable[[], None]] = {}
        """Wills that wait for capacity → what is called when there is some."""

    def start(self, instance: int, generation: int, links: Links) -> None:
        """Serve wills: the gateway has its numbers."""
        unix_ms = lambda: time.time_ns() // 1_000_000  # noqa: E731
        self._core = self.runner.core = Core(instance=instance, generation=generation, unix_ms=unix_ms)
        self.runner.send_by(links)
        self.runner.effects.on(ev.PublishWill, self._publish)

    @property
    def unfinished(self) -> int:
        """Number of wills that would be lost with this process."""
        return self._core.unfinished if self._core is not None else 0

    def on_control(self, peer: EndpointID, control: control_pb2.Control) -> None:
        """Take a relay's message. Raises `MalformedData`."""
        if control.HasField("will_published"):
            self.runner.step(ev.WillOver(control.will_published.id))
            return
        state = decode(control.publish_will)
        if state.will is None:
            raise MalformedData("a will to publish has a message")
        self.runner.step(ev.WillAsked(peer, state.will, state.message_id))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        core = self._core
        return {} if core is None else {"wills": len(core), "wills_bytes": core.bytes, **totals(core.counters)}

    # --- publishing

    def _publish(self, effect: ev.PublishWill) -> None:
        will, message = effect.will, effect.will.message
        try:
            key = will_key(message.topic, self._topics, self._vrooms)
            record = self._encode(key, will.uin, message, SnowflakeID(effect.message_id))
        except PixiuError:
            self.runner.step(ev.WillDone(will.id))  # by another limit or rule than the client's gateway has: nobody can publish it
            return
        confirmable = Confirmable(self._resolved, will.id, key, record, SnowflakeID(effect.message_id))
        if message.retain and self._retainer is not None and not message.topic.startswith(USER_PREFIX):
            self._retainer.retain(record, message.topic, partial(self._retained, confirmable))
        else:
            self._send(confirmable)

    def _retained(self, message: Confirmable, error: PixiuError | None) -> None:
        """Publish a will whose retained copy is kept, or cannot be; one whose routers are away is tried again."""
        if isinstance(error, Overloaded | Unavailable):
            self.runner.step(ev.WillDone(message.packet_id, again=True))
        else:
            self._send(message)

    def _send(self, message: Confirmable) -> None:
        when_space = self._waiting.setdefault(message.packet_id, lambda: self._send(message))
        if self._publishers.admit(message.key, len(message.record), when_space):
            del self._waiting[message.packet_id]
            self._publishers.publish([message])

    def _resolved(self, message: Confirmable, error: PixiuError | None) -> None:
        lasting = error is None or isinstance(error, LocalError | Offline)
        self.runner.step(ev.WillDone(message.packet_id, again=not lasting))

    def _encode(self, key: int, sender: int, message: WillMessage, snowflake: SnowflakeID) -> bytes:
        limit, extension, origin = self._max_record_bytes, message.extension, origin_of(message.qos, retain=message.retain)
        if message.topic.startswith(USER_PREFIX):
            return encode(
                Kind.CHAT, key, message.payload, snowflake, sender=sender, extension=extension, limit=limit, origin=origin
            )  # fmt: skip
        free = not message.topic.startswith(ROOM_PREFIX)
        body = with_topic(message.topic, message.payload) if free else message.payload
        flags = Flag.TO_ROOM | Flag.TOPIC if free else Flag.TO_ROOM
        return encode(
            Kind.ROOM, key, body, snowflake, sender=sender, flags=flags, extension=extension, limit=limit, origin=origin
        )  # fmt: skip
