"""Relays (the production core), gateways, clients, Pi and Xiu, and a network between them, under random faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from cluster.core.contract import TICK
from pixiu.wire.envelope import split
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from tests.sim.delivery.clients import Client, Connection, Gateway
from tests.sim.delivery.stores import Pi, Xiu
from tests.sim.delivery.watch import Watch
from tests.support.simulation import Simulation

FAULTS_S = 16.0
HEALING_S = 60.0
"""After the last fault everything must be well within this (simulated) time."""
HEARTBEAT_S = 1.5
NOTIFY_AFTER_S = (0.0, 0.05, 0.2, 0.8)
USERS = (11, 12, 13, 14, 15)


@dataclass
class Relay:
    """A relay's machine, and the process on it while it is up."""

    number: int
    start: int = 0
    """Of all relays' starts: what was meant for an earlier one is void."""
    core: Deliveries | None = None
    view: tuple[int, ...] = ()
    """The relays that it takes for Running."""
    known: dict[tuple[int, int], ev.Login] = field(default_factory=dict)
    paused_until: float = 0.0
    tick_at: float = 0.0
    streams: dict[int, int] = field(default_factory=dict)
    """Gateway → the stream's number; none: there is no stream."""
    broken: set[int] = field(default_factory=set)
    """Gateways whose stream broke, and the core does not know yet: what it sends them is lost."""


class World(Simulation):
    """One run.

    Args:
        seed: of everything random.
        session: the class of the sessions; a test puts a broken one here.
        table: the class of the table, likewise.
        fencing: sessions have numbers that grow.
    """

    def __init__(
        self, seed: int, session: type[Session] = Session, table: type[Deliveries] = Deliveries, fencing: bool = True
    ) -> None:
        super().__init__(seed)
        rng = self.rng
        self.session_class, self.table_class = session, table
        self.calm = False
        self.reliable = rng.random() < 0.5
        """Notifies are repeated until they are confirmed, relays stay, and nobody polls: what a notify says must be enough."""
        self.limits = Limits(
            opening=2, fetching=rng.choice((2, 8)), fetch_entries=rng.choice((4, 16, 64)), max_sessions=100,
            max_remembered=100, record_bytes=200,
            call_timeout_s=0.6, slot_timeout_s=2.0, pause_s=0.05, max_pause_s=0.5, resend_s=1.5, max_resend_s=4.0,
            hold_s=3.0, poll_s=1e6 if self.reliable else 4.0, acknowledge_batch=4, acknowledge_calls=2, fenced_pause_s=1.0,
        )  # fmt: skip
        self.pi = Pi(rng.choice((40, 100_000, 100_000)), fencing)
        self.xiu = Xiu(rng)
        self.watch = Watch(self)
        self.counts: Counter[str] = Counter()
        self.loss = rng.choice((0.0, 0.03, 0.1))
        self.inboxes: dict[tuple[int, int], dict[int, int]] = {}
        """(UIN, lane) → InboxSeq → MsgID."""
        self.relays = [Relay(number) for number in range(1, rng.choice((2, 3)) + 1)]
        self.gateways = [Gateway(self, number) for number in (101, 102)]
        self.clients: dict[tuple[int, int], Client] = {}
        for uin in USERS:
            for name in (b"", b"tablet")[: rng.choice((1, 2))]:
                device = self.pi.add_device(uin, name)
                self.clients[uin, device] = Client(self, uin, device, rogue=rng.random() < 0.1)
        self._starts = 0
        self._streams = 0
        self._arrival: dict[tuple[int, str], float] = {}
        self._notices: dict[int, ev.Notice] = {}
        """Under way, or in reliable runs not confirmed."""
        self._notice = 0
        self._saves: dict[tuple[int, int], tuple[float, Sequence[ev.Acknowledgement]]] = {}
        """(relay's start, call) → when it was made, and its cursors."""

    # --- the network

    def delay(self) -> float:
        return self.rng.uniform(0.001, 0.05) if self.rng.random() < 0.95 else self.rng.uniform(0.05, 0.4)

    def lost(self) -> bool:
        return not self.calm and self.rng.random() < self.loss

    # --- relays

    def start_relay(self, relay: Relay) -> None:
        if relay.core is not None:
            return
        self._starts += 1
        relay.start, relay.paused_until, relay.view, relay.tick_at = self._starts, 0.0, (), 0.0
        relay.streams.clear()
        relay.broken.clear()
        relay.known = {key: client.connection.login for key, client in self.clients.items() if client.connection is not None}
        relay.core = self.table_class(lambda uin: self.owner(uin, relay.view) == relay.number, self.limits, self.session_class)
        self.views_change()

    def stop_relay(self, relay: Relay) -> None:
        if relay.core is None:
            return
        self.counts["relay killed"] += 1
        self.counts["from notices"] += relay.core.counters.from_notices
        relay.core = None
        self.views_change()

    def pause_relay(self, relay: Relay, seconds: float) -> None:
        """It does nothing, the others take it for dead, and then it goes on with what it believed."""
        relay.paused_until = max(relay.paused_until, self.now + seconds)
        self.views_change()
        self.after(seconds + 0.5, self.views_change)

    @staticmethod
    def owner(uin: int, view: tuple[int, ...]) -> int:
        return max(view, key=lambda number: crc32(b"%d %d" % (uin, number)), default=0)

    def running(self) -> tuple[int, ...]:
        return tuple(relay.number for relay in self.relays if relay.core is not None and relay.paused_until <= self.now)

    def views_change(self) -> None:
        """Everybody learns who runs, each in its own time."""
        for relay in self.relays:
            self.after(self.rng.uniform(0.05, 1.0), self._see, relay, relay.start)

    def _see(self, relay: Relay, start: int) -> None:
        if relay.core is None or relay.start != start:
            return
        if relay.paused_until > self.now:
            self.after(relay.paused_until - self.now + 0.01, self._see, relay, start)
            return
        relay.view = self.running()
        self.tell(relay, ev.OwnersChanged())
        self.tell(relay, ev.LoggedIn(list(relay.known.values())))

    def send(self, relay: Relay, event: ev.Event, delay: float = 0.0) -> None:
        """Later; to this start of it alone."""
        self.after(delay, self._arrive, relay, relay.start, event)

    def _arrive(self, relay: Relay, start: int, event: ev.Event) -> None:
        if relay.start != start or relay.core is None:
            return
        if relay.paused_until > self.now:
            self.at(relay.paused_until, self._arrive, relay, start, event)  # in the order in which they came
            return
        self.tell(relay, event)

    def tell(self, relay: Relay, event: ev.Event) -> None:
        """Let a core take an event, and do what it says."""
        core = relay.core
        if core is None:
            return
        if isinstance(event, ev.Acknowledged):
            for item in event.acknowledgements:
                self.watch.acknowledged(relay, item)
        elif isinstance(event, ev.StreamBroken):
            relay.broken.discard(event.gateway)
        self._note_fences(relay, core, event)
        for effect in core.step(event, self.now):
            self._digest(relay, effect)
            _DO[type(effect)](self, relay, effect)
        at = core.next_deadline()
        if at < float("inf") and (relay.tick_at <= self.now or at < relay.tick_at):
            relay.tick_at = max(at, self.now + 1e-6)
            self.after(relay.tick_at - self.now, self._tick, relay, relay.start)

    def _digest(self, relay: Relay, effect: ev.Effect) -> None:
        said = b"".join(chunk.data for chunk in effect.chunks) if isinstance(effect, ev.Deliver) else type(effect).__name__.encode()
        self.note(b"%d " % relay.number, said)

    def _tick(self, relay: Relay, start: int) -> None:
        self._arrive(relay, start, TICK)

    # --- calls to Pi and Xiu: the request or the answer may be lost, or refused

    def _call(self, relay: Relay, store: Pi | Xiu, serve: Callable[[], ev.Event], refusal: ev.Event) -> None:
        if not self.lost():
            self.after(self.delay(), self._serve, relay, relay.start, store, serve, refusal)

    def _serve(self, relay: Relay, start: int, store: Pi | Xiu, serve: Callable[[], ev.Event], refusal: ev.Event) -> None:
        self.pi.at(self.now)
        if store.down_until > self.now:
            if self.rng.random() < 0.5:
                self.after(self.delay(), self._arrive, relay, start, refusal)
            return
        answer = serve()
        if not self.lost():
            self.after(self.delay(), self._arrive, relay, start, answer)

    def _open(self, relay: Relay, effect: ev.OpenSessions) -> None:
        def serve() -> ev.Event:
            return ev.Opened([(asked, self.pi.open(asked.uin, asked.device)) for asked in effect.items])

        self._call(relay, self.pi, serve, ev.Opened([(asked, ev.Failure.LATER) for asked in effect.items]))

    def _read(self, relay: Relay, effect: ev.ReadInboxes) -> None:
        def serve() -> ev.Event:
            answers = [(asked, self.pi.read(asked, session, reads)) for asked, session, reads in effect.items]
            self.counts["read refused"] += sum(answer is ev.Failure.FENCED for _, answer in answers)
            return ev.Listed(answers)

        self._call(relay, self.pi, serve, ev.Listed([(asked, ev.Failure.LATER) for asked, _, _ in effect.items]))

    def _fetch(self, relay: Relay, effect: ev.FetchMessages) -> None:
        def serve() -> ev.Event:
            return ev.Fetched([(asked, self.xiu.fetch(ids, self.now, not self.calm)) for asked, ids in effect.items])

        self._call(relay, self.xiu, serve, ev.Fetched([(asked, ev.Failure.LATER) for asked, _ in effect.items]))

    def _save(self, relay: Relay, effect: ev.SaveCursors) -> None:
        self._saves[relay.start, effect.number] = self.now, effect.items
        for item in effect.items:
            self.watch.saves(relay, item)

        def serve() -> ev.Event:
            results: list[ev.Failure | None] = []
            for item in effect.items:
                self.watch.taken(item)
                results.append(self.pi.acknowledge(item))
            self.counts["acknowledgement refused"] += results.count(ev.Failure.FENCED)
            return ev.Saved(effect.number, results)

        self._call(relay, self.pi, serve, ev.Saved(effect.number, None))

    def _note_fences(self, relay: Relay, core: Deliveries, event: ev.Event) -> None:
        if isinstance(event, ev.Listed):
            for asked, answer in event.answers:
                held = core.sessions.get(ev.Device(asked.uin, asked.device))
                if answer is ev.Failure.FENCED and held is not None and held.token == asked.token:
                    self.watch.fenced(relay, asked.uin, asked.device, held.number)
        elif isinstance(event, ev.Saved):
            made_at, items = self._saves.pop((relay.start, event.number))
            in_time = self.now < made_at + self.limits.call_timeout_s  # else the call was given up, and is made again
            for item, failure in zip(items, event.results or (), strict=False):
                if failure is ev.Failure.FENCED and in_time:
                    self.watch.fenced(relay, item.uin, item.device, item.session)

    # --- notifies: from Pi to the owner

    def append(self, uins: list[int], lane: int, size: int) -> None:
        """A mail is stored, and the owners are told."""
        msg_id, record = self.xiu.store(uins[0], lane, size)
        if not self.calm and self.rng.random() < 0.03:
            self.xiu.late[msg_id] = self.now + self.rng.uniform(0.05, 2.0)
        elif not self.calm and self.rng.random() < 0.02:
            self.xiu.gone.add(msg_id)
        self.pi.at(self.now)
        for uin, seq in zip(uins, self.pi.append(uins, msg_id), strict=True):
            self.inboxes.setdefault((uin, lane), {})[seq] = msg_id
            if not self.reliable and self.rng.random() < 0.03:
                self.counts["notify never sent"] += 1  # the leader died before
                continue
            known = 0 if self.rng.random() < 0.1 else seq
            in_notify = msg_id not in self.xiu.late and msg_id not in self.xiu.gone and self.rng.random() < 0.8
            self._notice += 1
            self._notices[self._notice] = ev.Notice(uin, lane, known, [msg_id], [record if in_notify else b""])
            for wait in NOTIFY_AFTER_S:
                self.after(wait, self._notify, self._notice, False)
            if self.reliable:
                self.after(1.5, self._notify, self._notice, True)

    def _notify(self, number: int, again: bool) -> None:
        notice = self._notices.get(number)
        if notice is None:
            return
        view = self.running() if self.rng.random() < 0.7 else tuple(relay.number for relay in self.relays)
        owner = next((relay for relay in self.relays if relay.number == self.owner(notice.uin, view)), None)
        if owner is not None and owner.core is not None and not self.lost():
            for _ in range(2 if self.rng.random() < 0.1 else 1):
                self.send(owner, ev.Notified(owner.number, number, [notice]), self.delay())
        if again:
            self.after(1.0, self._notify, number, True)

    def _confirm(self, relay: Relay, effect: ev.ConfirmNotices) -> None:
        if effect.elsewhere:
            self.counts["notify elsewhere"] += 1
        elif not self.lost():
            self._notices.pop(effect.number, None)

    # --- streams between relays and gateways

    def _deliver(self, relay: Relay, effect: ev.Deliver) -> None:
        deliveries = [delivery for chunk in effect.chunks for delivery in split(chunk.data, chunk.mails)]
        for delivery in deliveries:
            self.watch.delivered(relay, delivery)
        gateway = next((g for g in self.gateways if g.endpoint == effect.gateway and g.up), None)
        if gateway is None:
            relay.broken.add(effect.gateway)
            self.send(relay, ev.StreamBroken(effect.gateway), 0.05)
            return
        if effect.gateway in relay.broken:
            return
        if effect.gateway not in relay.streams:
            self._streams += 1
            relay.streams[effect.gateway] = self._streams
        self.on_stream(relay, effect.gateway, "down", gateway.take, relay, deliveries)

    def _ask_written(self, relay: Relay, effect: ev.AskWritten) -> None:
        gateway = next((g for g in self.gateways if g.endpoint == effect.gateway and g.up), None)
        if gateway is not None:
            self.counts["asked what was written"] += len(effect.lanes)
            self.on_stream(relay, effect.gateway, "down", gateway.asked, relay, effect.lanes)

    def on_stream(self, relay: Relay, gateway: int, way: str, action: Callable[..., None], *arguments: Any) -> None:
        """In order, or not at all once the stream is broken."""
        number = relay.streams.get(gateway)
        if number is None:
            return
        at = max(self._arrival.get((number, way), 0.0) + 1e-6, self.now + self.delay())
        self._arrival[number, way] = at
        self.at(at, self._through, relay, relay.start, gateway, number, action, arguments)

    def _through(
        self, relay: Relay, start: int, gateway: int, number: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if relay.start == start and relay.streams.get(gateway) == number:
            action(*arguments)

    def break_stream(self, relay: Relay, gateway: int) -> None:
        """What is under way both ways is lost; the relay is told before it can send again."""
        if relay.streams.pop(gateway, None) is None:
            return
        self.counts["stream broken"] += 1
        relay.broken.add(gateway)
        self.send(relay, ev.StreamBroken(gateway))
        self.send(relay, ev.StreamReady(gateway), self.rng.uniform(0.01, 1.0))

    def acknowledge(self, relay: Relay, gateway: int, item: ev.Acknowledgement) -> None:
        """From a gateway, on the stream that the delivery came on."""
        self.on_stream(relay, gateway, "up", self.send, relay, ev.Acknowledged(gateway, [item]))

    # --- logins

    def connected(self, connection: Connection) -> None:
        """Every relay learns of it, in its own time."""
        for relay in self.relays:
            self.after(self.delay(), self._learn, relay, connection)

    def _learn(self, relay: Relay, connection: Connection) -> None:
        login = connection.login
        old = relay.known.get((login.uin, login.device))
        if connection.open and (old is None or old.connection < login.connection):
            relay.known[login.uin, login.device] = login
            self.send(relay, ev.LoggedIn([login]))

    def disconnected(self, connection: Connection, *, told: bool) -> None:
        """A logout; not told where the gateway died."""
        for relay in self.relays:
            self.after(self.delay(), self._unlearn, relay, connection.login, told)

    def _unlearn(self, relay: Relay, login: ev.Login, told: bool) -> None:
        if relay.known.get((login.uin, login.device)) == login:
            del relay.known[login.uin, login.device]
        if told:
            self.send(relay, ev.LoggedOut([login]))

    def heartbeats(self) -> None:
        for relay in self.relays:
            alive = [c.connection.login for c in self.clients.values() if c.connection is not None]
            for login in alive:  # what was not known yet, or forgotten too soon
                held = relay.known.get((login.uin, login.device))
                if held is None or held.connection < login.connection:
                    relay.known[login.uin, login.device] = login
            self.send(relay, ev.StillThere(alive), self.delay())
        self.after(HEARTBEAT_S, self.heartbeats)

    def gateway_lost(self, endpoint: int) -> None:
        for relay in self.relays:
            relay.streams.pop(endpoint, None)
            self.send(relay, ev.GatewayLost(endpoint), self.rng.uniform(0.05, 2.0))


_DO: dict[type[Any], Callable[[World, Relay, Any], None]] = {
    ev.OpenSessions: World._open,
    ev.ReadInboxes: World._read,
    ev.FetchMessages: World._fetch,
    ev.SaveCursors: World._save,
    ev.Deliver: World._deliver,
    ev.AskWritten: World._ask_written,
    ev.ConfirmNotices: World._confirm,
}
