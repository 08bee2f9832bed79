"""The workload: users' devices on gateways, publishers and signal senders on proxies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import gateway.events as ge
import proxy.events as pe
from cluster.core.contract import NEVER
from pixiu.client.send.events import Failure
from pixiu.client.send.signals import SendCopies, Signal, SignalCore
from pixiu.errors import Offline, PixiuError, Unavailable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.wire.record import TYPE_NORMAL, Flag, Kind, encode
from tests.sim.cluster.edges import GatewayProcess, ProxyProcess
from tests.sim.cluster.logins import Logins
from tests.sim.cluster.process import Place
from tests.support.filters import names, wants

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

ROOMS, USERS = 6, 5
BIG_ROOM = 40
"""The one big room; its VRooms are 2560 to 2623."""
MAX_BIG_SIGNALS = 8
"""In a run: each takes 192 copies."""
LEFT, GONE = 1, 2
CONFIRMED = 1 << 40
"""What a connection sends at QoS 1 has an order of its own, and a session so far below."""
FIRST_LANE = 0
NO_PROXY = Failure("UNAVAILABLE", "no proxy")


@dataclass(frozen=True)
class Message:
    """What somebody sent."""

    id: int
    kind: Kind
    room: int
    """Or, of chat, the user."""
    session: int
    number: int
    """Ascending in a session."""
    sent_at: float
    body: bytes
    to_user: bool = False


@dataclass(eq=False)
class Connection:
    """A user's connection to a gateway."""

    number: int
    user: User
    gateway: GatewayProcess
    session: int
    opened: int = 0
    """In the order in which gateways took connections; 0: not yet."""
    online_since: int = 0
    """How many connections gateways had taken when the cluster was known to know that the user's own messages go here; 0: never."""
    rooms: dict[int, int] = field(default_factory=dict)
    """Room → the request that joined it."""
    pending: dict[int, tuple[list[int], bool]] = field(default_factory=dict)
    """Request → the rooms that it asked for, and whether it asked for the user's messages."""
    known: dict[int, float] = field(default_factory=dict)
    """Room → since when the cluster knows."""
    takes_own: bool = False
    """Whether it asked for the user's own messages."""
    online: bool = False
    """Whether the cluster knows that the user's own messages go here."""
    seen: set[int] = field(default_factory=set)
    last: dict[tuple[int, int, int], Message] = field(default_factory=dict)
    """(session, kind, key) → the last message."""

    @property
    def uin(self) -> int:
        """Whose it is."""
        return self.user.uin


@dataclass(eq=False)
class User:
    """A user's device, with one connection at a time, or two while moving."""

    uin: int
    device: int
    device_class: int
    home: int
    login: bool = True
    """Else a service that reads rooms: it takes no messages to the user, and is not online."""
    rooms: dict[int, None] = field(default_factory=dict)
    connection: Connection | None = None


@dataclass(eq=False)
class Session:
    """A back end's stream to a proxy. It keeps order, and ends with the proxy."""

    number: int
    proxy: ProxyProcess
    failed: Callable[[Any], None]
    resolved: Callable[[Any, pe.Failure | None], None]
    position: int = 1
    unresolved: dict[int, Any] = field(default_factory=dict)
    last: float = 0.0
    over: bool = False


class Clients:
    """See the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers, self._requests, self.ids = count(1), count(1), count(1 << 22)
        self._sent = count(1)
        self.users = [User(uin, uin, 0, uin % 2) for uin in range(1, USERS + 1)]
        # A second device of the same class, one of another class, and one that is no login.
        self.users += [User(1, 11, 0, 0), User(2, 12, 1, 1), User(3, 13, 0, 0, login=False)]
        self.logins = Logins(world.shape.policy)
        self.connections: dict[int, Connection] = {}
        self._sessions: dict[tuple[int, int], Session] = {}
        self._publishers: dict[int, Session | None] = {1: None, 2: None}
        self._senders = {1: SignalCore(), 2: SignalCore()}
        self._sender_sessions: dict[tuple[int, Place], Session] = {}
        self._signals: dict[int, Signal] = {}
        self._room_signals = 0
        self.announces = False
        """Whether publishers say of a third of their batches that more follows at once."""

    @property
    def unresolved(self) -> int:
        """What publishers and senders still wait for."""
        waiting = sum(len(s.unresolved) for s in self._sessions.values() if not s.over)
        waiting += sum(gateway.core.confirming.unresolved for gateway in self._world.alive(GatewayProcess))
        return waiting + sum(core.unresolved for core in self._senders.values())

    @property
    def unanswered(self) -> int:
        """Joins whose answer is missing."""
        return sum(len(connection.pending) for connection in self.connections.values())

    # --- users

    def act(self) -> None:
        """A user does something."""
        rng = self._world.rng
        user = rng.choice(self.users)
        room = BIG_ROOM if rng.random() < 0.1 else rng.randint(1, ROOMS)
        if rng.random() < 0.15:
            self.move(user)
            return
        self.toggle(user, room)
        if rng.random() < 0.4:
            self._world.wire.after(rng.uniform(0.002, 0.06), lambda: self.toggle(user, room))

    def toggle(self, user: User, room: int) -> None:
        """Joins where the user is not, leaves where they are."""
        if room in user.rooms:
            del user.rooms[room]
        else:
            user.rooms[room] = None
        connection = user.connection
        if connection is None:
            self.connect(user)
        elif room in user.rooms:
            self._join(connection, [room])
        else:
            connection.gateway.do(lambda: self._leave(connection, room))

    def move(self, user: User) -> None:
        """To the next gateway, of whatever instance number; now and then there are two connections for a while."""
        user.home += 1
        old = user.connection
        user.connection = None
        if old is not None:
            # Closed first, just after the new one, or when a relay says that it is replaced.
            overlap = self._world.rng.choice([0.0, 0.02, 1.0])
            self._world.wire.after(overlap, lambda: old.gateway.do(lambda: self._close(old)))
        self._world.wire.after(0.01, lambda: self.connect(user))

    def connect(self, user: User) -> None:
        """To the user's gateway, or another while that is down."""
        places = self._world.places_of("gateway")
        if user.connection is not None:
            return
        for step in range(len(places)):
            process = places[(user.home + step) % len(places)].process
            if isinstance(process, GatewayProcess) and process.alive and process.state == "Running":
                number = next(self._numbers)
                connection = Connection(number, user, process, -number)
                user.connection = connection
                process.do(lambda connection=connection: self._open(connection))  # type: ignore[misc]
                self._join(connection, list(user.rooms), chat=user.login)
                return
        self._world.wire.after(0.1, lambda: self.connect(user))

    def _open(self, connection: Connection) -> None:
        self.connections[connection.number] = connection
        # Their clocks differ by more than a move takes.
        wall_ms = int(self._world.now * 1000) + 1_000_000 + 300 * connection.gateway.place.number
        user, told = connection.user, connection.user.login or self._world.shape.through_relays
        device = user.device if told else 0
        self.logins.opened(connection)
        opened = ge.Opened(connection.number, user.uin, 0, device, user.device_class, wall_ms, user.login)
        connection.gateway.step(opened)

    def _close(self, connection: Connection) -> None:
        if self.connections.pop(connection.number, None) is not None:
            connection.gateway.step(ge.Closed(connection.number, LEFT))

    def _join(self, connection: Connection, rooms: list[int], chat: bool = False) -> None:
        connection.gateway.do(lambda: self._joined(connection, rooms, chat))

    def _joined(self, connection: Connection, rooms: list[int], chat: bool) -> None:
        if connection.number not in self.connections:
            return
        request = next(self._requests)
        connection.pending[request] = (rooms, chat)
        connection.takes_own |= chat
        connection.rooms.update(dict.fromkeys(rooms, request))
        connection.gateway.step(ge.Join(connection.number, request, wants(*(room for room in rooms)), chat))
        presence = connection.gateway.core.rooms.own
        for room in rooms:
            found = presence.get(self._world.vrooms.room_of_user(room, connection.uin), connection.uin, connection.gateway.instance)
            assert found is not None, "a gateway does not know who has just joined"
            self._world.watch.joined(room, connection.uin, found[0])

    def _leave(self, connection: Connection, room: int) -> None:
        if connection.number in self.connections:
            connection.rooms.pop(room, None)
            connection.known.pop(room, None)
            connection.gateway.step(ge.Leave(connection.number, names(room)))

    def answered(self, process: GatewayProcess, number: int, request: int, known: bool) -> None:
        """A join took effect."""
        connection = self.connections.get(number)
        assert connection is None or connection.gateway is process
        if connection is not None:
            rooms, chat = connection.pending.pop(request)
            connection.online |= chat and known
            if connection.online:
                self.logins.known(connection)
            for room in rooms:
                if known and room in connection.rooms:
                    connection.known[room] = self._world.now
                    self._world.counts["answered"] += 1

    def replaced(self, process: GatewayProcess, number: int, reason: int) -> None:
        """A newer connection of the user's device is elsewhere."""
        connection = self.connections.pop(number, None)
        self._world.counts["replaced"] += 1
        if connection is None:
            return
        self.logins.ended(connection)
        # It does not come again by itself: the two would replace each other for ever.
        if connection.user.connection is connection:
            connection.user.connection = None
        process.step(ge.Closed(number, reason))

    def gateway_gone(self, process: GatewayProcess) -> None:
        """A gateway crashed: its connections end with it, and their users come again."""
        for connection in [c for c in self.connections.values() if c.gateway is process]:
            del self.connections[connection.number]
        for user in self.users:
            if user.connection is not None and user.connection.gateway is process:
                user.connection = None
                self._world.wire.after(self._world.rng.uniform(0.05, 0.5), self.connect, user)

    def to_user(self, process: GatewayProcess, uin: int) -> list[Connection]:
        """The connections on a gateway that asked for a user's own messages."""
        return [c for c in self.connections.values() if c.gateway is process and c.uin == uin and c.takes_own]

    def on_gateway(self, process: GatewayProcess, key: int) -> list[Connection]:
        """The connections that get what comes with this key."""
        vrooms = self._world.vrooms
        shown = vrooms.shown(key)
        found = (c for c in self.connections.values() if c.gateway is process and shown in c.rooms)
        return [c for c in found if vrooms.room_of_user(shown, c.uin) == key]

    # --- room messages

    def _message(self, kind: Kind, room: int, session: int, *, to_user: bool = False) -> tuple[Message, bytes]:
        number, id_ = next(self._sent), next(self.ids)
        # Some take several datagrams, and a few a stream.
        size = 40_000 if number % 50 == 7 else 3000 if number % 10 == 3 else 0
        body = (b"%d:%d:%d" % (room, session, number)).ljust(size)
        message = Message(id_, kind, room, session, number, self._world.now, body, to_user)
        self._world.watch.messages[id_] = message
        flags = Flag.TO_ROOM if kind is Kind.SIGNAL and not to_user else 0
        type_ = FIRST_LANE if kind is Kind.SIGNAL else TYPE_NORMAL
        return message, encode(kind, room, body, id_, flags=flags, type=type_)

    def publish(self) -> None:
        """A publisher sends a message to a room, or a few."""
        rng = self._world.rng
        publisher = rng.choice(list(self._publishers))
        session = self._publishers[publisher]
        if session is None or session.over:
            session = self._publishers[publisher] = self._session(self._proxy(), lambda _: None, self._published)
        if session is None:
            return
        made = [self._message(Kind.ROOM, rng.randint(1, ROOMS), session.number) for _ in range(rng.randint(1, 3))]
        more = self.announces and session.position % 3 == 0
        self._send(session, [record for _, record in made], [message for message, _ in made], more=more)

    def chat(self) -> None:
        """A publisher sends messages to users."""
        rng = self._world.rng
        session = self._session(self._proxy(), lambda _: None, self._published)
        if session is not None:
            made = [self._message(Kind.CHAT, rng.randint(1, USERS), session.number, to_user=True) for _ in range(rng.randint(1, 2))]
            self._send(session, [record for _, record in made], [message for message, _ in made])

    def publish_big(self) -> None:
        """A message to the big room."""
        session = self._session(self._proxy(), lambda _: None, self._published)
        if session is not None:
            message, record = self._message(Kind.ROOM, BIG_ROOM, session.number)
            self._send(session, [record], [message])

    def publish_by_user(self) -> None:
        """A user sends a message to a room through the gateway."""
        rng = self._world.rng
        connection = rng.choice(self.users).connection
        if connection is not None:
            message, record = self._message(Kind.ROOM, rng.randint(1, ROOMS), connection.session)
            connection.gateway.do(lambda: connection.gateway.step(ge.Publish([(message.room, record)])))

    def publish_confirmed(self) -> None:
        """A user sends messages at QoS 1 through the gateway, to a room as a rule, each in order."""
        rng = self._world.rng
        connection = rng.choice(self.users).connection
        if connection is None:
            return
        room, made = BIG_ROOM if rng.random() < 0.1 else rng.randint(1, ROOMS), []
        for _ in range(rng.randint(1, 3)):
            message, record = self._message(Kind.ROOM, room, connection.session - CONFIRMED)

            def resolved(_: ge.Confirmable, error: PixiuError | None, message: Message = message) -> None:
                self._published(message, error)

            made.append(ge.Confirmable(resolved, 0, room, record, SnowflakeID(message.id)))
        connection.gateway.do(lambda: connection.gateway.step(ge.PublishConfirmed(made)))

    def _published(self, message: Message, failure: pe.Failure | PixiuError | None) -> None:
        if failure is None:
            self._world.watch.accepted(message)
        elif failure.code == Offline.code:
            self._world.watch.offline(message.id)
        elif failure.code == Unavailable.code:
            self._world.watch.unserved(message)

    def _proxy(self) -> ProxyProcess | None:
        proxies = [p.process for p in self._world.places_of("proxy") if p.process is not None and p.process.alive]
        running = [p for p in proxies if isinstance(p, ProxyProcess) and p.state == "Running"]
        return self._world.rng.choice(running) if running else None

    # --- sessions

    def _session(self, proxy: ProxyProcess | None, failed: Any, resolved: Any) -> Session | None:
        if proxy is None:
            return None
        session = Session(next(self._numbers), proxy, failed, resolved)
        self._sessions[proxy.endpoint, session.number] = session
        session.last = self._world.now + 0.002
        opened = pe.PublisherOpened(session.number)
        self._world.wire.after(0.002, lambda: proxy.do(lambda: proxy.step(opened)))
        return session

    def _send(
        self,
        session: Session,
        records: list[bytes],
        owners: list[Any],
        copy: int = 0,
        receipt: bool = False,
        more: bool = False,
    ) -> None:
        wire, proxy = self._world.wire, session.proxy
        data = b"".join(records)
        event = pe.BatchPublished(session.number, data, len(records), session.position, copy, receipt, more)
        for owner in owners:
            session.unresolved[session.position] = owner
            session.position += 1
        session.last = max(session.last, self._world.now + self._world.rng.uniform(0.001, 0.003))
        wire.after(session.last - self._world.now, lambda: proxy.do(lambda: proxy.step(event)))

    def replied(self, proxy: ProxyProcess, stream: int, up_to: int, failures: list[pe.Failure]) -> None:
        """A proxy says what became of positions."""
        session = self._sessions[proxy.endpoint, stream]
        if session.over:
            return
        for position in [position for position in session.unresolved if position <= up_to]:
            failure = next((f for f in failures if f.first <= position <= f.last), None)
            session.resolved(session.unresolved.pop(position), failure)

    def proxy_gone(self, proxy: ProxyProcess) -> None:
        """A proxy crashed: what was under way through it has no answer."""
        for (endpoint, _), session in list(self._sessions.items()):
            if endpoint == proxy.endpoint and not session.over:
                session.over = True
                owners, session.unresolved = list(session.unresolved.values()), {}
                for owner in owners:
                    session.failed(owner)

    # --- signals

    def signal(self, receipt: bool, to_user: bool) -> None:
        """A sender sends a signal to a room or a user."""
        number = self._world.rng.choice(list(self._senders))
        key = self._world.rng.randint(1, USERS) if to_user else self._world.rng.randint(1, ROOMS)
        self._room_signals += not to_user
        if not to_user and self._room_signals % 5 == 0 and self._room_signals <= MAX_BIG_SIGNALS * 5:
            key = BIG_ROOM
        message, record = self._message(Kind.SIGNAL, key, 0, to_user=to_user)
        signal = Signal(record, message.id, FIRST_LANE, receipt)
        self._do(number, self._senders[number].offer(signal, self._world.now))

    def _do(self, number: int, effects: list[Any]) -> None:
        core = self._senders[number]
        for effect in effects:
            if isinstance(effect, SendCopies):
                self._send_copies(number, effect.signal)
            elif effect.signal.failure is None and effect.signal.wants_receipt:
                self._world.watch.receipt(effect.signal.message_id)
            elif effect.signal.failure is not None and effect.signal.failure.code == Offline.code:
                self._world.watch.offline(effect.signal.message_id)
        due = core.next_deadline()
        if due < NEVER:
            self._world.wire.after(max(due - self._world.now, 0.0), lambda: self._tick(number))

    def _tick(self, number: int) -> None:
        core = self._senders[number]
        if core.next_deadline() <= self._world.now:
            self._do(number, core.tick(self._world.now))

    def _send_copies(self, number: int, signal: Signal) -> None:
        core = self._senders[number]
        places = [p for p in self._world.places_of("proxy") if p.process is not None and p.process.alive]
        for copy in range(3):
            place = places[copy % len(places)] if places else None
            session = self._sender_session(number, place) if place is not None else None
            if session is None:
                self._world.wire.after(0.0, lambda: self._do(number, core.copy_done(signal, NO_PROXY)))
            else:
                self._send(session, [signal.record], [signal], copy, signal.wants_receipt)

    def _sender_session(self, number: int, place: Place) -> Session | None:
        session = self._sender_sessions.get((number, place))
        process = place.process
        if session is None or session.over:
            core = self._senders[number]

            def resolved(signal: Signal, failure: pe.Failure | None) -> None:
                self._do(number, core.copy_done(signal, Failure(failure.code, failure.text) if failure is not None else None))

            def failed(signal: Signal) -> None:
                self._do(number, core.copy_done(signal, Failure("UNAVAILABLE", "the proxy is gone")))

            session = self._session(process if isinstance(process, ProxyProcess) else None, failed, resolved)
            if session is not None:
                self._sender_sessions[number, place] = session
        return session

    def told_delivered(self, proxy: ProxyProcess, stream: int, signals: list[int], gateway: EndpointID) -> None:
        """A gateway has delivered these."""
        session = self._sessions[proxy.endpoint, stream]
        if session.over:
            return
        for (number, _), found in self._sender_sessions.items():
            if found is session:
                self._do(number, self._senders[number].delivered(signals, gateway))
                return
