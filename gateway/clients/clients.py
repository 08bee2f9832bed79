"""The clients of a gateway, whatever their protocol: what both protocols see of the gateway, and how effects reach a client.

arrived ──▶ pending ── admit ──▶ opened ── `step`: Opened, Join, Publish, … ──▶ core
               │ evicted           │ ◀── Deliver, WriteMail, Answer, Disconnect ──┘
               └── closed ◀────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.core.pacing import pacer_of
from cluster.core.reading_gate import Hold, ReadingGate
from cluster.core.role import totals
from cluster.core.turn import Newcomers, PacedLine, Turn
from cluster.mqtt.events import CloseReason
from cluster.mqtt.outbound import OutboundCounters
from cluster.mqtt.packets import Will
from cluster.mqtt.terms import SessionLimits
from cluster.trust.identity import Credentials, Identity
from cluster.wills.will import MAX_DELAY_MS, WillMessage
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.clients.admission import Admission
from gateway.clients.backlog import Backlog, Grade
from gateway.clients.client_ids import ClientIDs
from gateway.clients.deliveries import Deliveries
from gateway.clients.join_share import JoinRate, JoinShare
from gateway.clients.join_steps import JoinSteps
from gateway.clients.memory_budget import MemoryBudget
from gateway.clients.rates import PublishRates, Rates
from gateway.clients.slow_consumers import SlowConsumers
from gateway.mail.queue import MailQueue
from gateway.mail.run import MailRun
from gateway.options import Options
from pixiu.errors import Draining, NotServed, Overloaded, PixiuError
from pixiu.ids import EndpointID, SnowflakeID, device_of_name
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms

MOVES_WITHIN_S: Final = 10.0
"""Time that a client asked to move may take, seconds: the SDK waits up to 1 s, joins elsewhere, reads on for 1 s, asks twice."""
MAX_SHOWN: Final = 1000
"""Connections at /connections."""
NO_MEMORY: Final = "clients hold more than gateway.memory_bytes or address_memory_bytes allow, and this one the most"
SLOW: Final = "the client does not read its messages fast enough"
MOVE: Final = "the gateway is draining; connect to another one"
RETRY_SPREAD_S: Final = 1.0
"""Clients that are refused are asked to retry after half to one and a half times this, at least."""


class TicketSource(Protocol):
    """Gets login tickets; see `gateway.tickets.client.TicketClient`."""

    async def admit(self, credentials: Credentials, identity: Identity, session_client: str = "") -> Identity:
        """Get a ticket for a login, and for a client's session that outlives its connection; returns its identity, which ends
        before they do. Raises `PixiuError`."""


class Pending(Protocol):
    """A connection that may not be identified yet."""

    id: int

    def evict(self) -> None:
        """End it: too many connections are not identified."""


class ClientSession(ABC):
    """One connection of one user, whatever its protocol: the gate before its input, and what waits to be written to it.

    A protocol derives from it; what has no meaning there stays without effect.
    """

    __slots__ = ("_backlog", "_clients", "_mail", "access", "gate", "id", "joins", "steps", "uin")

    packets = False
    """True if it gets PUBLISH packets of MQTT; otherwise it gets records."""
    dialect = 0
    """As in `gateway.events.Opened`."""

    def __init__(self, clients: Clients) -> None:
        self.id = 0
        self.uin = 0
        """The user; 0 before it is identified."""
        self.access: LoginSession | None = None
        """Session of a client that has logged in; None: nobody has to."""
        self.gate = ReadingGate(self._turned)
        self.joins = clients.join_rate()
        self._clients = clients
        self._backlog = Backlog(clients.options.connection_buffer_bytes, clients.options.slow_consumer_timeout_s)
        self._mail = MailQueue()
        self.steps = JoinSteps()

    @abstractmethod
    def deliver(self, data: bytes, count: int) -> None:
        """Take `count` messages to write; they leave at `flush`, or wait in the connection's own buffer."""

    def deliver_each(self, messages: Sequence[ev.Delivery]) -> None:
        """Take messages for this connection alone to write, in order; they leave at `flush`. Only connections of MQTT get them."""

    def takes_more(self) -> bool:
        """True if nothing waits to be written: more of what can wait elsewhere may come."""
        return not self._backlog

    def flush(self) -> None:
        """Write what was delivered in this turn."""

    @abstractmethod
    def deliver_mail(self, runs: Sequence[MailRun], anew: bool) -> None:
        """Write mail, at once or as soon as the client takes it. `anew`: drop what still waits of an older session."""

    def deliver_inbox(self, runs: Sequence[MailRun], anew: bool) -> None:
        """Write messages of its session's inbox, in the same way. Only connections of MQTT have one."""

    @abstractmethod
    def answer(self, answer: ev.Answer) -> None:
        """Report the result of a join: in effect, except for the refused part. `known` is False if it was not confirmed in time."""

    def passed(self, size: int) -> None:
        """Note that `size` bytes of QoS 0 that it published are no longer in flight."""

    def announce(self) -> bool:
        """Notify the client that the gateway is going away. Returns False if its protocol has no message for that."""
        return False

    @abstractmethod
    def end(self, reason: CloseReason, text: str) -> None:
        """End the connection to the client."""

    @abstractmethod
    def replaced(self, moved: bool) -> None:
        """End the connection and, if the protocol can, notify the client that a newer login took its place: of the same device
        (`moved`) or of another one."""

    def shown(self) -> dict[str, Any]:
        """Values for the page /sessions. Sizes in bytes."""
        now = self._clients.now()
        return {
            "id": self.id, "user": self.uin, "client": "", "address": "", "protocol": "grpc",
            "backlog": self._backlog.waiting_bytes, "inflight": 0, "dropped": self._backlog.dropped,
            "held_s": {reason.value: round(now - since, 3) for reason, since in self.gate.reasons.items()},
        }  # fmt: skip

    def catch_up(self) -> None:
        """Write what waits, as far as the client takes it."""

    def check(self, now: float) -> Grade:
        """Grade of the client's lag; ends the connection if it has lasted too long."""
        if not self._backlog.patient(now):
            self.end(CloseReason.SLOW_CONSUMER, SLOW)
        return self._backlog.grade(now)

    def _turned(self, reads: bool) -> None:
        self._clients.note_held(self, not reads)

    def _wait(self, data: bytes, count: int) -> bool:
        """Have messages wait in the backlog. False when the client has been late for too long."""
        before = self._backlog.dropped
        patient = self._backlog.put(data, count, self._clients.slow_consumers.now())
        self._clients.counters.slow_consumer_dropped += self._backlog.dropped - before
        return patient


class Retainer(Protocol):
    """Retains messages; see `gateway.retained.client.RetainedClient`."""

    def retain(self, record: bytes, topic: str, done: Callable[[PixiuError | None], None]) -> None:
        """Retain a published record, or clear its topic if its payload is empty; `done` is called once."""


class NoRetainer:
    """Refuses retained messages, where nothing keeps them."""

    def retain(self, record: bytes, topic: str, done: Callable[[PixiuError | None], None]) -> None:
        """Refuse."""
        done(NotServed("this gateway keeps no retained messages"))


class WithWill(Protocol):
    """A connection that may have a will."""

    id: int
    uin: int
    client_id: str | None
    access: LoginSession | None


class Publishers(Protocol):
    """Sends messages of QoS 1; see `gateway.clients.publishing.ConfirmedPublishers`."""

    def admit(self, key: int, size: int, when_space: Callable[[], None]) -> bool:
        """Take space for a record of `size` bytes that is published at once. False: there is none; `when_space` is called when
        there may be some."""

    def publish(self, messages: list[ev.Confirmable]) -> None:
        """Send messages; `resolved` of each is called once."""

    def forget(self, when_space: Callable[[], None]) -> None:
        """Forget a client that waits for capacity."""


@dataclass(slots=True)
class ClientCounters(OutboundCounters):
    """Counts of what clients lost, were refused, or could not do."""

    slow_consumer_dropped: int = 0
    """Messages dropped for slow clients."""
    unroutable: int = 0
    """Published messages that could not be passed on."""
    subscriptions_unconfirmed: int = 0
    """Subscriptions answered although no router or relay had confirmed them in time."""
    subscriptions_refused: int = 0
    """Subscriptions for which a router or relay had no capacity."""
    denied: int = 0
    """Published messages of QoS 0 that their clients may not publish."""
    tls_failures: int = 0
    """Connections that ended in their TLS handshake."""
    retained_refused: int = 0
    """Published messages with RETAIN that could not be kept."""
    chat_offline: int = 0
    """Messages of QoS 1 to users who are not connected."""
    closed: Counter[str] = field(default_factory=Counter)
    """Reason → connections that ended for it."""
    malformed: Counter[str] = field(default_factory=Counter)
    """Error of a packet → connections of MQTT that ended for it."""


def _rates(options: Options) -> Rates:
    return Rates(
        client_messages_per_s=options.client_messages_per_s,
        client_bytes_per_s=options.client_bytes_per_s,
        room_messages_per_s=options.room_messages_per_s,
        room_bytes_per_s=options.room_bytes_per_s,
        burst_s=options.limit_burst_s,
    )


class Clients:
    """All clients of the gateway, whatever their protocol.

    Args:
        now: monotonic seconds.
        step: gives an event to the gateway's core, or to that of its wills, and performs the effects.
        next_snowflake: a new message's ID. Raises `LeaseExpired`.
        publishers: send messages of QoS 1.
        roles: those of the cluster's layout.
        through_relays: room messages come through relays, which are informed of every connection.
        guard: authenticates clients; None: nobody has to log in.
        tickets: gets login tickets; None: none are needed.
        turn: of the process; None: one of its own.
        retainer: retains messages; None: they are refused.
    """

    def __init__(
        self,
        options: Options,
        *,
        now: Callable[[], float],
        step: Callable[[ev.Event | ev.SetWill | ev.EndWill], None],
        next_snowflake: Callable[[], SnowflakeID],
        publishers: Publishers,
        roles: Callable[[], Collection[str]],
        endpoint: EndpointID,
        max_record_bytes: int,
        vrooms: VRooms,
        through_relays: bool,
        topics: TopicRooms = BY_FIRST_LEVEL,
        guard: LoginGuard | None = None,
        tickets: TicketSource | None = None,
        turn: Turn | None = None,
        retainer: Retainer | None = None,
    ) -> None:
        self._retainer: Retainer = retainer if retainer is not None else NoRetainer()
        self.options, self.guard, self.tickets = options, guard, tickets
        self.now, self.step = now, step
        self.next_snowflake, self.publishers = next_snowflake, publishers
        self.endpoint, self.max_record_bytes, self.vrooms, self.topics = endpoint, max_record_bytes, vrooms, topics
        self.limits = SessionLimits(
            max_subscriptions=options.max_subscriptions,
            puback_timeout_s=options.puback_timeout_s,
            max_keep_alive_s=options.max_keep_alive_s,
            max_inflight=options.receive_maximum,
            max_outbound=options.max_unacknowledged,
            max_outbound_bytes=options.connection_buffer_bytes,
            max_topic_aliases=options.topic_aliases,
        )
        self.slow_consumers = SlowConsumers(now)
        self.rates = PublishRates(_rates(options))
        self.counters = ClientCounters()
        self._roles, self._through_relays = roles, through_relays
        self._admission: Admission[Pending] = Admission(
            rate_per_s=options.connect_rate_per_s,
            burst=options.connect_burst,
            max_pending=options.max_pending_connections,
            max_connections=options.max_connections,
            now=now(),
            address_percent=options.address_connections_percent,
        )
        self.pacer = pacer_of(asyncio.get_running_loop())
        self.join_share = JoinShare(options.joins_per_s, options.max_all_subscriptions, now())
        self.turn = turn if turn is not None else Turn(now, asyncio.get_running_loop().call_soon)
        self.paced = PacedLine(now, asyncio.get_running_loop().call_later)
        self.newcomers = Newcomers(now)
        self.memory: MemoryBudget[ClientSession] = MemoryBudget(options.address_memory_bytes, options.memory_bytes)
        self._numbers = itertools.count(1)
        self._connections: dict[int, ClientSession] = {}
        self.deliveries = Deliveries(self._connections, self._dropped)
        self._held: dict[int, ClientSession] = {}
        """Connections that are not read from, those included that are not identified yet."""
        self.client_ids = ClientIDs(now)
        self._draining = False

    def set_options(self, options: Options) -> None:
        """Use the rates and connection limits of new options."""
        before, self.options = self.options, options
        self.rates.set_rates(_rates(options))
        if options.joins_per_s != before.joins_per_s:
            self.join_share.set_rate(options.joins_per_s, self.now())
        self.join_share.max_subscriptions = options.max_all_subscriptions
        self._admission.set_limits(
            rate_per_s=options.connect_rate_per_s,
            burst=options.connect_burst,
            max_connections=options.max_connections,
            now=self.now(),
        )

    def __len__(self) -> int:
        """Number of identified connections."""
        return len(self._connections)

    # --- what the protocols call

    @property
    def serves_users(self) -> bool:
        """True if the cluster has relays, so that messages to users can arrive."""
        return "relay" in self._roles()

    @property
    def serves_mail(self) -> bool:
        """True if the cluster keeps inboxes as well, so that mail can arrive."""
        return self.serves_users and "pi" in self._roles()

    def join_rate(self) -> JoinRate:
        """Join and leave rate of a new connection."""
        options = self.options
        return JoinRate(
            self.join_share, options.client_joins_per_s, options.client_joins_burst, options.client_joins_free, self.now()
        )

    def arrived(self, connection: Pending, address: str) -> int:
        """Number a new, pending connection; an older one may be evicted. `address`: of its machine, empty if unknown."""
        oldest = self._admission.arrived(connection, address)
        if oldest is not None:
            oldest.evict()
        return next(self._numbers)

    def retain(self, record: bytes, topic: str, done: Callable[[PixiuError | None], None]) -> None:
        """Retain a published record, or clear its topic if its payload is empty. `done` is called once: every router replica that
        keeps it has it, or the error is the reason why not."""
        self._retainer.retain(record, topic, done)

    def takes_more(self, connection: int) -> bool | None:
        """True if a connection takes more of what can wait, None if it is gone."""
        found = self._connections.get(connection)
        return found.takes_more() if found is not None else None

    def admit(self, connection: Pending) -> None:
        """Admit a client that identified itself. Raises `Overloaded` or `Draining`."""
        if self._draining:
            raise Draining(MOVE)
        wait_s = self._admission.connect(connection, self.now())
        if wait_s:
            # Clients that are refused together must not come back together.
            retry_ms = int(random.uniform(0.5, 1.5) * max(wait_s, RETRY_SPREAD_S) * 1000)
            text = (
                "too many clients connect or are connected, in all or from one address (gateway.connect_rate_per_s, "
                "max_connections)"
            )
            raise Overloaded(f"{text}; use another one, or retry in {retry_ms} ms", retry_ms)

    def opened(
        self,
        connection: ClientSession,
        uin: int,
        device: int,
        device_class: int,
        login: bool = True,
        *,
        name: str = "",
        exact: bool = False,
        credit: int = 65_535,
        session: int = 0,
        inside: ev.Inside | None = None,
    ) -> None:
        """Register an identified client. `login`: it counts as a login of the user. `name`: of the device. `exact`, `credit`,
        `session`, `inside`: as in `gateway.events.Opened`."""
        if not login and not self._through_relays:
            device = 0
        self._connections[connection.id] = connection
        wall_ms = time.time_ns() // 1_000_000
        self.step(
            ev.Opened(
                connection.id, uin, connection.dialect, device, device_class, wall_ms, login, name, exact, credit, session, inside
            )
        )  # fmt: skip

    def set_will(self, connection: WithWill, will: Will | None, delay_s: float, extension: bytes = b"") -> None:
        """Keep the will of an identified client, in place of what it had; `gateway.clients.access.check_will` has approved it.
        `delay_s`: from the end of the connection on. `extension`: of its record."""
        if will is None:
            self.step(ev.EndWill(connection.id, False))
            return
        # Where there are logins the client's name among the gateway's clients begins with its user.
        name = connection.client_id or ""
        device = device_of_name(name if connection.access is None else name.removeprefix(f"{connection.uin} "))
        message = WillMessage(will.topic, will.payload, will.qos, will.retain, extension)
        delay_ms = min(round(delay_s * 1000), MAX_DELAY_MS)
        self.step(ev.SetWill(connection.id, connection.uin, device, message, delay_ms))

    def end_will(self, connection: WithWill, publish: bool) -> None:
        """Handle the end of a client with its will. `publish`: it did not take the will back."""
        self.step(ev.EndWill(connection.id, publish))

    def closed(self, connection: Pending, reason: int) -> None:
        """Remove a connection that ended. `reason`: of control.proto."""
        self._admission.gone(connection)
        self._held.pop(connection.id, None)
        if self._connections.pop(connection.id, None) is not None:
            self.step(ev.Closed(connection.id, reason))

    def hold_memory(self, connection: ClientSession, address: str, held: int) -> None:
        """Note the untaken bytes of a connection. If the total is too high, the connections that hold the most are ended."""
        for largest in self.memory.hold(connection, address, held):
            largest.end(CloseReason.MEMORY, NO_MEMORY)

    def note_held(self, connection: ClientSession, held: bool) -> None:
        """Note that a connection is not read from any more, or again."""
        if held:
            self._held[connection.id] = connection
        else:
            self._held.pop(connection.id, None)

    def hurry(self) -> None:
        """Keep a paced loop from resting now: a client waits for an answer, or got it and may go on."""
        if self.pacer is not None:
            self.pacer.hurry(self.now())

    # --- effects of the core

    def write_mail(self, effect: ev.WriteMail) -> None:
        """Write mail to a connection, of its user or of its session."""
        connection = self._connections.get(abs(effect.connection))
        if connection is None:
            return
        if effect.connection < 0:
            connection.deliver_inbox(effect.runs, effect.anew)
        else:
            connection.deliver_mail(effect.runs, effect.anew)

    def answer(self, effect: ev.Answer) -> None:
        """Report the result of a subscription to its client."""
        self.counters.subscriptions_unconfirmed += not effect.known
        self.counters.subscriptions_refused += len(effect.refused) + effect.user_refused
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.answer(effect)

    def passed(self, effect: ev.Passed) -> None:
        """Report that published bytes of a client are no longer in flight."""
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.passed(effect.size)

    def replace(self, effect: ev.Disconnect) -> None:
        """End a connection that a newer login replaces."""
        moved = effect.reason == control_pb2.REASON_MOVED
        connection = self._connections.get(effect.connection)
        # A client that leaves a draining gateway is connected twice for a moment.
        if connection is not None and not (moved and self._draining):
            connection.replaced(moved)

    # --- the end

    def drain(self, spread_s: float, last_s: float) -> None:
        """Admit no more clients, and move the connected ones elsewhere, spread over `spread_s` seconds.

        Clients that can be notified are notified in the first half, and leave when they have found another gateway; they are closed
        after `MOVES_WITHIN_S`, and by `last_s` seconds from now. The others are closed in the second half.
        """
        self._draining = True
        loop = asyncio.get_running_loop()
        leaving = list(self._connections.values())
        random.shuffle(leaving)

        def tell(connection: ClientSession, after_s: float) -> None:
            told_s = min(MOVES_WITHIN_S, last_s - after_s) if connection.announce() else 0.0
            loop.call_later(max(told_s, spread_s / 2), connection.end, CloseReason.DRAINING, MOVE)

        for number, connection in enumerate(leaving):
            after_s = spread_s / 2 * number / len(leaving)
            loop.call_later(after_s, tell, connection, after_s)

    @property
    def draining(self) -> bool:
        """True after `drain` was called."""
        return self._draining

    def stop(self) -> None:
        """Close the remaining connections."""
        self.slow_consumers.close()
        for connection in list(self._connections.values()):
            connection.end(CloseReason.DRAINING, "the gateway has stopped")

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        slow = self.slow_consumers
        return {
            **{name: total for name, total in totals(self.counters).items() if isinstance(total, int)},
            "connections": len(self._connections),
            "connections_pending": self._admission.pending,
            "connections_evicted_total": self._admission.evicted,
            "connections_refused_total": self._admission.refused,
            "joins_over_share_total": self.join_share.refused,
            "subscriptions": self.join_share.subscriptions,
            "connections_waiting_for_a_turn": self.turn.waiting + self.paced.waiting,
            "connections_held{reason}": self._held_by_reason(),
            "memory_held_bytes": self.memory.bytes,
            "memory_evicted_total": self.memory.evicted,
            "connections_behind{grade}": slow.counts(),
            "connections_behind_total{grade}": {grade.value: count for grade, count in slow.entered.items()},
            "connections_closed_total{reason}": dict(self.counters.closed),
            "packets_malformed_total{error}": dict(self.counters.malformed),
            "publish_over_rate_dropped_total": self.rates.dropped,
            "publish_over_rate_held_total": self.rates.held,
        }

    def page(self) -> dict[str, object]:
        """The JSON of /connections: those that are not read from come first."""
        now, shown = self.now(), {**self._held, **dict(itertools.islice(self._connections.items(), MAX_SHOWN))}
        clients = [
            {
                "id": connection.id,
                "user": connection.uin,
                "protocol": "mqtt" if connection.packets else "grpc",
                "held_s": {reason.value: round(now - since, 3) for reason, since in connection.gate.reasons.items()},
            }
            for connection in itertools.islice(shown.values(), MAX_SHOWN)
        ]
        return {
            "connections": len(self._connections), "pending": self._admission.pending, "held": len(self._held),
            "held_by_reason": self._held_by_reason(), "clients": clients,
        }  # fmt: skip

    def everybody(self) -> list[ClientSession]:
        """All identified clients."""
        return list(self._connections.values())

    def _held_by_reason(self) -> dict[str, int]:
        found = dict.fromkeys((reason.value for reason in Hold), 0)
        for connection in self._held.values():
            for reason in connection.gate.reasons:
                found[reason.value] += 1
        return found

    def _dropped(self, messages: int) -> None:
        self.counters.slow_consumer_dropped += messages
