"""One run of a role: its production core, the production core of its links, and the few lines of a shell around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.local import Delivery
from cluster.links.local_core import LocalCore
from pixiu.ids import EndpointID
from tests.sim.cluster import nodes
from tests.sim.cluster.registry import Node, View
from tests.sim.cluster.wire import ITEMS, Stream

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

INFINITY = float("inf")


@dataclass(eq=False)
class Place:
    """Where one process after the other runs: a replica of a partition, a gateway's host."""

    role: str
    partition: int
    number: int
    node: nodes.Node
    runs: int = 0
    kept: Any = None
    """What survives a crash: a Router DB, a gateway's table of signals."""
    process: Process | None = None
    troubled_until: float = INFINITY
    """Until then what it misses has an excuse."""

    has_run: bool = False
    """Whether something here was ever Running."""

    @property
    def is_up(self) -> bool:
        """Whether a process is here, and goes on."""
        return self.process is not None and self.process.alive and not self.process.paused

    @property
    def host(self) -> str:
        """Its address without a port."""
        return self.node.host

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role}{self.partition}.{self.number}"


@dataclass(eq=False)
class Process:
    """See the module; each role is a subclass."""

    world: World
    place: Place
    alive: bool = True
    paused: bool = False
    state: str = "Init"
    view: View = field(default_factory=View)

    def __post_init__(self) -> None:
        self.endpoint: EndpointID = self.world.new_endpoint()
        self.place.runs += 1
        # Half of the time at the port of the run before.
        port = 7000 + 100 * self.place.node.places.index(self.place) + (self.place.runs if self.world.rng.random() < 0.5 else 0)
        self.address = (self.place.host, port)
        self.links = LocalCore(
            self.endpoint,
            self.world.link_options,
            self,
            self.place.node.switch,
            layout_version=lambda: self.view.version,
            on_warning=self._warn,
        )
        self.place.node.switch.attach(self.links.port, self)
        self._entered = False
        self._waiting: list[tuple[Callable[[], None], bytes]] = []
        self._wake_at = INFINITY
        self._slept_through = False
        self.of_strangers = 0
        """Datagrams that were not taken, as the view did not have their sender yet."""
        self.untaken: Counter[EndpointID] = Counter()
        """Their items. A repeat of one is no loss any more where it is taken, and is counted here again where it is not."""
        self.start_core()

    @property
    def is_serving(self) -> bool:
        """Whether it is Running, and goes on."""
        return self.alive and not self.paused and self.state == "Running"

    # --- what a role has

    def start_core(self) -> None:
        """Make the core."""
        raise NotImplementedError

    def on_view(self) -> None:
        """The view is another one."""
        raise NotImplementedError

    def peer_roles(self) -> tuple[str, ...]:
        """Whom it heartbeats."""
        raise NotImplementedError

    def is_peer(self, node: Node) -> bool:
        """Whether it heartbeats this one."""
        return node.role in self.peer_roles() and node.endpoint != self.endpoint

    def deadline(self) -> float:
        """The core's."""
        raise NotImplementedError

    def tick(self) -> None:
        """The core's time has come."""
        raise NotImplementedError

    def take_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """A batch came."""
        return Outcome.MALFORMED

    def take_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome | None:
        """Control messages came. None: they are taken."""
        return None

    def take_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Parcels are decided."""

    def take_state(self, peer: EndpointID, state: PeerState) -> None:
        """Heartbeats say so."""

    def take_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """A heartbeat, or an answer to one."""
        return b""

    def end_of_turn(self) -> None:
        """What came together has been taken."""

    # --- what the links call: what goes wrong inside must not be taken for a malformed datagram

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """See `LinkHandler`."""
        taken: Outcome | None = self._guard(lambda: self.take_records(peer, data, start, end, count))
        return Outcome.NOT_TAKEN if taken is None else taken

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """See `LinkHandler`."""
        if self._guard(lambda: self.take_control(peer, messages)) is not Outcome.NOT_TAKEN:
            return Outcome.TAKEN
        assert all(node.endpoint != peer for node in self.view.nodes), "what a process of the view says is not taken"
        self.of_strangers += 1
        self.untaken[peer] += len(messages)
        return Outcome.NOT_TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """See `LinkHandler`."""
        self._guard(lambda: self.take_settled(peer, settled))

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """See `LinkHandler`."""
        self._guard(lambda: self.take_state(peer, state))

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """See `LinkHandler`."""
        return self._guard(lambda: self.take_heartbeat(peer, reply, attachment)) or b""

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self.world.raised.append(error)
            raise

    def _warn(self, event: str, **details: object) -> None:
        self.world.warnings.append((self.place.name, event, str(details.get("reason", ""))))

    # --- what the network calls

    def datagram(self, data: bytes, source: tuple[str, int]) -> None:
        """See `Host`."""
        self.do(lambda: self.links.receive(data, source, self.world.now), data)

    def frame(self, data: bytes, stream: Stream) -> None:
        """See `Host`."""

        def take() -> None:
            if not stream.broken:
                stream.speaker = self.links.receive_frame(data, stream.speaker, "stream", self.world.now) or stream.speaker

        self.do(take)

    def answer(self, data: bytes, stream: Stream) -> None:
        """See `Host`."""

        def take() -> None:
            if not stream.broken:
                self.links.receive_frame(data, stream.target.endpoint, "stream", self.world.now)

        self.do(take)

    def stream_state(self, peer: EndpointID, up: bool) -> None:
        """See `Host`."""
        self.do(lambda: self.links.stream_connected(peer, up, self.world.now))

    def wants_stream(self, peer: EndpointID) -> bool:
        """See `Host`."""
        return self.alive and self.links.stream_wanted(peer)

    # --- turns

    def do(self, action: Callable[[], None], datagram: bytes = b"") -> None:
        """Something happens to this process: now, or when it is no longer stopped."""
        if not self.alive:
            return
        if self.paused:
            self._waiting.append((action, datagram))
            return
        self._enter(action)
        self.turn()

    def _enter(self, action: Callable[[], None]) -> None:
        before, self._entered = self._entered, True
        try:
            action()
        finally:
            self._entered = before

    def take_local(self, now: float, most: int, done: list[Delivery]) -> None:
        """See `LocalHost`."""
        assert self.alive, "nothing is handed to a process that is gone"
        assert not self.paused, "nor to one that is stopped"
        assert not self._entered, "no role is entered while it works"
        self._enter(partial(self.links.port.take, now, most, done))
        self.turn()

    def turn(self) -> None:
        """The end of a turn of the event loop."""
        links, now = self.links, self.world.now
        while self.alive:
            if links.has_events:
                links.dispatch(now)
            self.end_of_turn()
            links.flush(now)
            links.acknowledge(now)
            self._transmit()
            if not links.has_events:
                break
        if self.world.raised:
            raise self.world.raised[0]
        self._arm()
        if self.alive:
            self.place.node.work(lambda: self.world.now, self.world.wire.after)

    def _transmit(self) -> None:
        outputs, world = self.links.outputs, self.world
        if not (outputs.datagrams or outputs.resets or outputs.streams or outputs.frames or outputs.replies):
            return
        datagrams, outputs.datagrams = outputs.datagrams, []
        for data, address in datagrams:
            world.wire.send(self, world.receiver_of(self, data, address) if data[3] in ITEMS else None, data, address)
        resets, outputs.resets = outputs.resets, []
        streams, outputs.streams = outputs.streams, []
        frames, outputs.frames = outputs.frames, []
        replies, outputs.replies = outputs.replies, []
        for peer in resets:
            world.wire.break_stream(self.endpoint, peer)
        for peer in streams:
            world.wire.open(self, peer, world.by_endpoint.get(peer))
        for peer, frame in frames:
            world.wire.frame(self, peer, frame)
        for peer, frame in replies:
            world.wire.reply(self, peer, frame)

    def _arm(self) -> None:
        now = self.world.now
        when = max(min(self.links.next_deadline(), self.deadline()), now + 0.001)
        if when < self._wake_at or self._wake_at < now:
            self._wake_at = when
            self.world.wire.after(when - now, lambda: self._wake(when))

    def _wake(self, when: float) -> None:
        if not self.alive or when != self._wake_at:
            return
        if self.paused:
            self._slept_through = True
            return
        self._wake_at = INFINITY
        now, due = self.world.now, self.deadline()
        self.links.poll(now)
        if due <= now:
            self._enter(self.tick)
        self.turn()

    # --- life

    def tell_view(self, view: View) -> None:
        """The registry has news."""

        def take() -> None:
            self.view = view
            found = [node for node in view.nodes if self.is_peer(node)]
            self.links.set_peers({node.endpoint: (_peer(node), node.address) for node in found}, self.world.now)
            self.on_view()

        self.do(take)

    def set_state(self, state: str) -> None:
        """Register as this."""
        self.state = state
        if state == "Running":
            self.place.has_run = True
            self.place.troubled_until = self.world.now + self.world.recovery_s
        self.world.registry.set_state(self.endpoint, state)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: first what waited in the sockets, then the timers."""
        waiting, self._waiting = self._waiting, []
        for action, _ in waiting:
            self._enter(action)
        if self._slept_through:
            self._slept_through = False
            self._wake(self._wake_at)
        else:
            self.turn()

    def leave(self) -> None:
        """The links close: what is queued leaves, and for the other roles of the process this one is dead."""
        now = self.world.now
        self.links.flush(now, every=True)
        self.links.acknowledge(now, every=True)
        self._transmit()
        self.links.close_port(now)

    def crash(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.world.wire.break_streams_of(self.endpoint)
        for _, data in self._waiting:
            if data:
                self.world.wire.forget(data, self.endpoint)
        self._waiting = []


def _peer(node: Node) -> Peer:
    return Peer(node.endpoint, node.role, *node.address)
