"""Drives a gateway's core turn by turn, and makes the `Clients` that connections need."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.core.contract import END_OF_TURN, RecordsReceived, Settle
from cluster.core.turn import Turn
from cluster.links.api import Outcome
from cluster.membership.map.updates import Update
from cluster.mqtt import codec
from cluster.mqtt.packets import Connect, Packet, Side
from gateway import events as ev
from gateway.clients.clients import Clients
from gateway.core import Core
from gateway.mail.run import MailRun, read_runs
from gateway.mqtt.connection import MQTTConnection
from gateway.options import Options
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.envelope import Delivery, encode, split
from pixiu.wire.record import MAX_RECORD_BYTES
from tests.support.effects import of as of

PEER = EndpointID(301)
"""A broker or relay that sends records."""


def turn(core: Core, *events: ev.Event, now: float = 1.0) -> list[ev.Effect]:
    """The effects of these events and of the end of the turn in which they come."""
    return [effect for event in (*events, END_OF_TURN) for effect in core.step(event, now)]


def hand_over(core: Core, data: bytes, count: int = 1, now: float = 2.0) -> Outcome:
    """What becomes of a batch that a link hands over."""
    for effect in core.step(RecordsReceived(PEER, data, 0, len(data), count), now):
        assert isinstance(effect, Settle), "what is delivered waits for the end of the turn"
        return effect.outcome
    return Outcome.TAKEN


def arrive(core: Core, *records: bytes, now: float = 2.0) -> list[ev.Effect]:
    """The effects of a turn in which one batch of these records comes."""
    assert hand_over(core, b"".join(records), len(records), now) is Outcome.TAKEN
    return core.step(END_OF_TURN, now)


def fan_out(core: Core, *records: bytes) -> list[ev.Deliver]:
    """What of such a turn is delivered."""
    return of(ev.Deliver, arrive(core, *records))


def memberships(effects: list[ev.Effect]) -> list[ev.SendMembership]:
    """Without the second times, which nobody waits for."""
    return [effect for effect in of(ev.SendMembership, effects) if effect.token]


def updates(effects: list[ev.Effect]) -> list[Update]:
    """What is reported, the second times included."""
    return [update for effect in of(ev.SendMembership, effects) for update in effect.messages]


def runs_of(items: Iterable[Delivery]) -> list[MailRun]:
    """Deliveries as a relay sends them, read in place."""
    data = [encode(*item) for item in items]
    return read_runs(b"".join(data), len(data))


def mails_of(runs: Iterable[MailRun]) -> list[Delivery]:
    """What is passed on."""
    return [item for run in runs for item in split(run.data, run.count)]


@dataclass
class World:
    """`Clients` without a service: what their connections do is noted."""

    options: Options = field(default_factory=Options)
    now: float | None = None
    """Monotonic seconds; None: the clock's."""
    vrooms: VRooms = field(default_factory=VRooms)
    roles: tuple[str, ...] = ("gateway", "proxy", "router", "broker")

    def __post_init__(self) -> None:
        self.events: list[Any] = []
        """Events of the gateway's core, and of its wills."""
        self.published: list[ev.Confirmable] = []
        self.room = True
        """For messages of QoS 1."""
        self.waiting: dict[Callable[[], None], None] = {}
        self._snowflakes = itertools.count(1)
        self.clients = Clients(
            self.options,
            now=lambda: time.monotonic() if self.now is None else self.now,
            step=self.events.append,
            next_snowflake=lambda: SnowflakeID(next(self._snowflakes)),
            publishers=self,
            roles=lambda: self.roles,
            endpoint=EndpointID(7),
            max_record_bytes=MAX_RECORD_BYTES,
            vrooms=self.vrooms,
            through_relays=False,
        )

        # Of no length, whatever else the machine has to do: tests of turns have a clock of their own.
        self.clients.turn = Turn(lambda: 0.0, asyncio.get_running_loop().call_soon)

    def admit(self, _key: int, _size: int, when_space: Callable[[], None]) -> bool:
        """Admit a message of QoS 1, if there is space."""
        if not self.room:
            self.waiting[when_space] = None
        return self.room

    def publish(self, messages: list[ev.Confirmable]) -> None:
        """Take messages of QoS 1."""
        self.published += messages

    def forget(self, when_space: Callable[[], None]) -> None:
        """A client is gone."""
        self.waiting.pop(when_space, None)

    def let_in(self) -> None:
        """There is room from now on."""
        self.room = True
        waiting, self.waiting = self.waiting, {}
        for when_space in waiting:
            when_space()

    @property
    def closed_for(self) -> list[str]:
        """Reasons for which connections were closed."""
        return list(self.clients.counters.closed.elements())


class Wire(asyncio.Transport):
    """The transport of an MQTT client that notes what is written, and takes it at once unless it is told to be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = socket.socket()
        weakref.finalize(self, self.socket.close)
        self.writes: list[bytes] = []
        self.buffered = 0
        """Bytes that the client has not taken."""
        self.reading = True
        self.closed = False
        self.closed_twice = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.socket if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        if self.closed_twice:
            raise AttributeError("asyncio's TLS transport lets go of its protocol at the second close()")
        return self.buffered

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed_twice = self.closed
        self.abort()

    def abort(self) -> None:
        self.closed = True
        self.socket.close()

    def packets(self) -> list[Packet]:
        """What the client was sent."""
        decoder = codec.Decoder(Side.CLIENT)
        return list(decoder.feed(b"".join(self.writes)))


def mqtt_client(world: World, client_id: str = "phone", keep_alive_s: int = 0) -> tuple[MQTTConnection, Wire]:
    """An MQTT client that is connected."""
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    connection.data_received(codec.encode(Connect(client_id, True, keep_alive_s)))
    return connection, wire
