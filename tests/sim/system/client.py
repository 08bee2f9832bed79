"""Clients of mail: writers with the SDK's core of sending, devices with the SDK's core of receiving, and the users before them.

A device's connection is the twin of `pixiu.client.receive.gateway_connection`: it chooses a gateway, comes again when it is lost,
and moves. Its application takes mail at its own pace, acknowledges a little out of order, dies and starts anew with an empty core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import proxy.mail_events as me
from cluster.core.contract import NEVER
from pixiu.client.inbox.core import Held, MailIntake
from pixiu.client.mail.policy import MailTicket, mail_policy
from pixiu.client.options import ClientOptions
from pixiu.client.send.events import CloseStream, Effect, Failure, OpenStream, Outcome, Writable
from pixiu.client.send.sender import Sender
from pixiu.ids import snowflake
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2
from tests.sim.cluster.clients import Clients
from tests.sim.cluster.edges import GatewayProcess
from tests.sim.system.gateway import SystemGateway
from tests.sim.system.proxy import DRAINING, SystemProxy
from tests.sim.system.streams import Stream

if TYPE_CHECKING:
    from tests.sim.system.world import SystemWorld

RECONNECT_S: Final = (0.05, 0.4)
WRITER_TICK_S: Final = 0.1
JOIN_TIMEOUT_S: Final = 5.0


class SystemClients(Clients):
    """The clients of rooms, signals and chat, beside whom inboxes have connections at the same gateways."""

    _world: SystemWorld

    def new_connection(self) -> int:
        """A number for a connection."""
        return next(self._numbers)

    def answered(self, process: GatewayProcess, number: int, request: int, known: bool) -> None:
        """See `Clients`."""
        assert isinstance(process, SystemGateway)
        if not process.answered(number, known):
            super().answered(process, number, request, known)

    def replaced(self, process: GatewayProcess, number: int, reason: int) -> None:
        """See `Clients`."""
        assert isinstance(process, SystemGateway)
        if not process.replaced(number, reason):
            super().replaced(process, number, reason)


@dataclass(eq=False)
class Letter:
    """A mail that was offered."""

    ticket: MailTicket
    writer: int
    number: int
    """Ascending, of the writer."""
    receivers: tuple[int, ...]
    lane: int


class Writer:
    """A client that sends mail."""

    def __init__(self, world: SystemWorld, number: int) -> None:
        self._world, self.number = world, number
        self.worker = number + 1
        self.letters: list[Letter] = []
        options = ClientOptions(batch_records=10, window_records=60, mail_timeout_s=1000.0)
        policy = mail_policy(options, lambda: self.worker, lambda: world.unix_us() / 1e6)
        self.core = Sender(policy, _addresses(world.alive(SystemProxy)), world.rng.random, number)
        self._stream: Stream | None = None
        self._number = 0
        self._waiting: list[Letter] = []
        world.wire.after(0.3 + 0.1 * number, self._tick)

    def send(self, receivers: tuple[int, ...], lane: int, level: Level, size: int) -> None:
        """Offer a mail."""
        made = len(self.letters) + 1
        identity = snowflake(self._world.unix_us() // 1000, self.worker, made & 1023)
        record = encode(Kind.MAIL, receivers[0], b"%d of %d " % (made, self.number) + bytes(size), identity, type=lane << 6)
        ticket = MailTicket(record, identity, level, receivers[1:])
        letter = Letter(ticket, self.number, made, receivers, lane)
        self.letters.append(letter)
        self._waiting.append(letter)
        self._world.mail.offered(letter)
        self._apply(self.core.offer(ticket, self._world.now))

    def _tick(self) -> None:
        world, now = self._world, self._world.now
        self._apply(self.core.set_proxies(_addresses(world.running(SystemProxy)), now))
        due = self.core.next_deadline()
        if due <= now:
            self._apply(self.core.tick(now))
        world.wire.after(WRITER_TICK_S, self._tick)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenStream():
                    self._open(effect)
                case CloseStream(stream):
                    if stream == self._number and self._stream is not None:
                        self._stream.leave()
                        self._stream = None
                case Writable(stream):
                    self._write(stream)
        self._look()

    def _open(self, effect: OpenStream) -> None:
        world, number = self._world, effect.stream
        self._number, self._stream = number, None
        host, _, port = effect.address.rpartition(":")
        world.counts["writers' streams"] += 1

        def opened(stream: Stream) -> None:
            if number != self._number:
                stream.leave()
                return
            self._stream = stream
            stream.take_reply = lambda message: self._heard(number, message)
            stream.lost = failed
            stream.send((effect.worker, effect.generation))
            self._write(number)

        def failed() -> None:
            self._apply(self.core.stream_died(number, world.now, "the proxy is gone"))

        world.streams.call(None, (host, int(port)), "Send", opened, failed)

    def _write(self, number: int) -> None:
        while self._stream is not None and number == self._number:
            batch = self.core.next_batch(number, self._world.now)
            if batch is None:
                return
            assert batch.level is not None
            more = dict(batch.receivers)
            self._stream.send(me.MailReceived(0, batch.data, batch.count, batch.position, batch.level, more))

    def _heard(self, number: int, message: object) -> None:
        now = self._world.now
        if isinstance(message, me.Answer):
            outcomes = [
                Outcome(r.position, r.count, Failure(r.code, r.text) if r.code else None, r.copies, r.msg_ids, r.open)
                for r in message.results
            ]
            self._apply(self.core.reply(number, now, outcomes=outcomes))
        elif message == DRAINING:
            self._apply(self.core.reply(number, now, draining=True))
        elif isinstance(message, me.EndWriter):
            self._apply(self.core.ended(number, now, Failure(*message.why)))

    def _look(self) -> None:
        """What was resolved just now."""
        resolved = [letter for letter in self._waiting if letter.ticket.resolved]
        if resolved:
            self._waiting = [letter for letter in self._waiting if not letter.ticket.resolved]
            for letter in resolved:
                self._world.mail.resolved(letter)


def _addresses(proxies: list[SystemProxy]) -> list[str]:
    return ["{}:{}".format(*proxy.address) for proxy in proxies]


@dataclass(eq=False)
class Application:
    """One run of the application on a device."""

    number: int
    intake: MailIntake
    seen: dict[int, None]
    """MsgIDs that it got."""
    last: dict[int, int]
    """Lane → the InboxSeq that it got last."""


@dataclass(eq=False)
class _Prepared:
    """A gateway that is to take over, and what it sent since."""

    stream: Stream
    held: list[wire_pb2.SubscribeReply]


class Device:
    """One device of a user, with its connection and its application."""

    def __init__(self, world: SystemWorld, uin: int, number: int) -> None:
        self.world, self.uin, self.number = world, uin, number
        self.stream: Stream | None = None
        self._prepared: _Prepared | None = None
        self._attempt = 0
        self.away = True
        self.joined = False
        self.runs = 0
        self.application = self._start()
        self.slow_until = 0.0
        self._armed = False

    def __repr__(self) -> str:
        return f"device {self.number} of {self.uin}"

    def _start(self) -> Application:
        self.runs += 1
        return Application(self.runs, MailIntake(self.uin), {}, {})

    # --- what its user does

    def come(self) -> None:
        """Connect, and stay."""
        if self.away:
            self.away = False
            self._connect()

    def go(self) -> None:
        """Leave for a while."""
        self.away = True
        self._drop()

    def move(self) -> None:
        """Leave the gateway, and come to another, or the same, at once."""
        if not self.away:
            self._drop()
            self._connect()

    def restart(self) -> None:
        """The application dies: what it had and did not acknowledge comes again."""
        self._drop()
        self.application = self._start()
        self.world.counts["applications restarted"] += 1
        if not self.away:
            self._later(self._connect)

    # --- the connection

    def _drop(self) -> None:
        self._attempt += 1
        self.joined = False
        self._end(self.stream)
        self.stream = None
        self._discard()

    def _end(self, stream: Stream | None) -> None:
        if stream is not None:
            self.application.intake.closed(stream)
            stream.leave()

    def _discard(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self._end(prepared.stream)

    def _later(self, action: Callable[[], None]) -> None:
        attempt = self._attempt
        self.world.wire.after(self.world.rng.uniform(*RECONNECT_S), lambda: action() if attempt == self._attempt else None)

    def _open(self, address: tuple[str, int], opened: Callable[[Stream], None], failed: Callable[[], None]) -> None:
        """A stream that has asked for mail; neither is called when the connection is another by then."""
        attempt, world = self._attempt, self.world

        def greet(stream: Stream) -> None:
            if attempt != self._attempt:
                stream.leave()
                return
            self.application.intake.opened(stream)
            opened(stream)
            hello = wire_pb2.SubscribeHello(uin=self.uin, device=self.number, mail=True)
            stream.send(wire_pb2.SubscribeRequest(hello=hello, request=1))
            world.counts["inboxes opened"] += 1
            world.mail.connected(self)

        world.streams.call(None, address, "Subscribe", greet, lambda: failed() if attempt == self._attempt else None)

    def _connect(self) -> None:
        self._attempt += 1
        attempt, running = self._attempt, self.world.running(SystemGateway)
        if self.away:
            return
        if not running:
            self._later(self._connect)
            return

        def opened(stream: Stream) -> None:
            self._serve(stream)
            self.world.wire.after(JOIN_TIMEOUT_S, lambda: self._unanswered(attempt))

        self._open(self.world.rng.choice(running).address, opened, lambda: self._later(self._connect))

    def _serve(self, stream: Stream) -> None:
        self.stream = stream
        stream.take_reply = lambda reply: self._replied(stream, reply)
        stream.lost = lambda: self._lost(stream)

    def _unanswered(self, attempt: int) -> None:
        if attempt == self._attempt and not self.joined:
            self.world.counts["joins unanswered"] += 1
            self.move()

    def _lost(self, stream: Stream) -> None:
        if stream is not self.stream:
            return
        if self._prepared is not None:
            self.stream = None
            self.application.intake.closed(stream)
        else:
            self._drop()
            self._later(self._connect)

    def follow(self) -> None:
        """Join at another gateway, while the old one still delivers; then go on there, without a gap."""
        old = self.stream
        others = [g for g in self.world.running(SystemGateway) if old is not None and g is not old.callee]
        if self._prepared is not None or not others or not self.joined:
            return

        def opened(stream: Stream) -> None:
            if self._prepared is not None:
                self._end(stream)
                return
            self._prepared = prepared = _Prepared(stream, [])
            stream.take_reply = lambda reply: self._held(prepared, reply)
            stream.lost = lambda: self._not_prepared(prepared)
            self.world.wire.after(JOIN_TIMEOUT_S, lambda: self._not_prepared(prepared))

        self._open(self.world.rng.choice(others).address, opened, lambda: None)

    def _held(self, prepared: _Prepared, reply: wire_pb2.SubscribeReply) -> None:
        if reply.draining:
            self._not_prepared(prepared)
            return
        prepared.held.append(reply)
        if reply.request and prepared is self._prepared:
            self.world.counts["moves without a gap"] += 1
            self._prepared = None
            self._end(self.stream)
            self._serve(prepared.stream)
            for each in prepared.held:
                self._replied(prepared.stream, each)

    def _not_prepared(self, prepared: _Prepared) -> None:
        if prepared is self._prepared:
            self._discard()
            if self.stream is None:
                self._drop()
                self._later(self._connect)

    def _replied(self, stream: Stream, reply: wire_pb2.SubscribeReply) -> None:
        if stream is not self.stream:
            return
        self.joined = self.joined or bool(reply.request)
        if reply.mail_count:
            sound = self.application.intake.arrived(stream, reply.mail, reply.mail_count, self.world.now)
            assert sound, "a gateway sent damaged mail"
            self._take()
            self._arm()
        if reply.draining:
            self.world.wire.after(self.world.rng.uniform(0.0, 0.5), self.follow)

    # --- the application

    def _take(self) -> None:
        """The application takes what there is, and acknowledges each after a while of its own."""
        application, world = self.application, self.world
        while (held := application.intake.take(world.unix_us() // 1000)) is not None:
            world.mail.got(self, application, held)
            slow = max(0.0, self.slow_until - world.now)
            world.wire.after(slow + world.rng.uniform(0.001, 0.15), lambda held=held: self._acknowledge(application, held))

    def _acknowledge(self, application: Application, held: Held) -> None:
        if application is self.application:
            seqs = held.seqs
            if application.intake.acknowledge(held, self.world.now):
                self.world.mail.acknowledged(self, held.lane, seqs)
            self._arm()

    def _arm(self) -> None:
        now = self.world.now
        due = self.application.intake.next_deadline()
        if due < NEVER and not self._armed:
            self._armed = True
            self.world.wire.after(max(due - now, 0.0), self._send)

    def _send(self) -> None:
        self._armed = False
        for stream, ranges in self.application.intake.acknowledgements():
            assert isinstance(stream, Stream)
            said = [wire_pb2.MailAcknowledgement(lane=lane, first=first, last=last) for lane, first, last in ranges]
            stream.send(wire_pb2.SubscribeRequest(mail_acknowledgements=said))
