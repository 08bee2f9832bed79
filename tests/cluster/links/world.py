"""Two or more pure link cores and a network that is a list: a lost datagram is one that nobody delivers.

Or they are roles of one process, and a switch joins them.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.local import Delivery, LocalSwitch
from cluster.links.local_core import LocalCore
from cluster.links.options import LinkOptions
from cluster.links.peer.sender import Address
from cluster.trust.key_ring import KeyRing
from pixiu.ids import EndpointID
from pixiu.wire.record import Kind, encode, split


class Recorder:
    """A handler that writes down what it is told."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.batches: list[int] = []
        self.control: list[bytes] = []
        self.arrived: list[str] = []
        self.settled: list[tuple[int, bool]] = []
        self.states: list[tuple[EndpointID, PeerState]] = []
        self.heartbeats: list[tuple[EndpointID, bool, bytes]] = []
        self.answer = b""
        self.accept = True
        self.outcome = Outcome.TAKEN
        """Of control messages."""
        self.error: Exception | None = None

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        if self.error is not None:
            raise self.error
        if not self.accept:
            return Outcome.MALFORMED
        self.records += split(data[start:end], count)
        self.batches.append(count)
        self.arrived.append("records")
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        self.control += messages
        self.arrived.append("control")
        return self.outcome

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        self.settled += settled

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        self.states.append((peer, state))

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        self.heartbeats.append((peer, reply, attachment))
        return self.answer

    def keys(self) -> list[int]:
        """The SnowflakeIDs of the records, in the order of arrival."""
        return [int.from_bytes(record[16:24], "little") for record in self.records]


def ring_of(key: bytes | None) -> KeyRing | None:
    """A ring of one key; None for none."""
    return KeyRing({1: key}, 1) if key is not None else None


class Node:
    """One core, its handler and its address. `sent` holds the datagrams that have left and were not delivered yet."""

    def __init__(self, world: World, number: int, options: LinkOptions, key: bytes | None) -> None:
        self.world = world
        self.id = EndpointID(number)
        self.address: Address = ("127.0.0.1", 7000 + number % 1000)
        self.handler = Recorder()
        self.warnings: list[dict[str, object]] = []
        self.core = LocalCore(
            self.id, options, self.handler, world.switch or LocalSwitch(), on_warning=self._warn, ring=ring_of(key), role="router",
            layout_version=lambda: number,
        )  # fmt: skip
        self.at_end: list[Callable[[], None]] = []
        self.serving = False
        if world.switch is not None:
            world.switch.attach(self.core.port, self)
        self.sent: list[tuple[bytes, Address]] = []

    def _warn(self, event: str, **fields: object) -> None:
        self.warnings.append({"event": event, **fields})

    def peer(self) -> Peer:
        return Peer(self.id, "test", str(self.address[0]), self.address[1])

    def know(self, *others: Node) -> None:
        self.core.set_peers({other.id: (other.peer(), other.address) for other in others}, self.world.now)

    def send(
        self,
        to: Node,
        records: list[bytes],
        lane: int = 1,
        token: int = 0,
        urgent: bool = False,
        more: bool = False,
    ) -> None:
        self.core.send_records(to.id, records, lane, token, self.world.now, urgent, more)

    def control(self, to: Node, messages: list[bytes], token: int = 0) -> None:
        self.core.send_control(to.id, messages, token, self.world.now)

    def receive(self, data: bytes, address: Address = ("127.0.0.1", 9)) -> None:
        self.core.receive(data, address, self.world.now)

    def turn(self) -> list[bytes]:
        """End a turn of the loop. Returns the datagrams that left."""
        now = self.world.now
        if self.world.switch is None or not self.core.flush_locally():
            self.core.flush(now)
            self.core.acknowledge(now)
            self.core.dispatch(now)
        if self.world.switch is not None:
            self.world.switch.work(now)
        return self.take()

    def take_local(self, now: float, most: int, done: list[Delivery]) -> None:
        """See `LocalHost`."""
        assert not self.serving, "nobody is entered twice"
        self.serving = True
        self.core.port.take(now, most, done)
        at_end, self.at_end = self.at_end, []
        for act in at_end:
            act()
        self.serving = False
        self.turn()

    def poll(self) -> list[bytes]:
        """Do what is due and end the turn."""
        self.core.poll(self.world.now)
        return self.turn()

    def batches_sent(self) -> int:
        """How many datagrams with items have left, or batches for a role of the same process."""
        total = self.core.stats().total
        return total.datagrams_sent + total.local_batches_sent

    def take(self) -> list[bytes]:
        left, self.core.outputs.datagrams = self.core.outputs.datagrams, []
        self.sent += left
        return [data for data, _ in left]


class World:
    """Nodes, a clock, and the delivery of what they send. `local`: the nodes are roles of one process."""

    def __init__(self, local: bool = False) -> None:
        self.now = 1000.0
        self.switch = LocalSwitch() if local else None
        self.nodes: list[Node] = []

    def node(self, number: int, options: LinkOptions | None = None, key: bytes | None = b"0123456789abcdef") -> Node:
        node = Node(self, number, options or LinkOptions(), key)
        self.nodes.append(node)
        return node

    def deliver(self, keep: Callable[[bytes], bool] = lambda data: True) -> int:
        """Deliver what has left, in order, but for what `keep` refuses. Returns how many were delivered."""
        delivered = 0
        for node in self.nodes:
            sent, node.sent = node.sent, []
            for data, address in sent:
                for other in self.nodes:
                    if other.address == address and keep(data):
                        other.core.receive(data, node.address, self.now)
                        delivered += 1
        return delivered

    def settle(self) -> None:
        """Turns and deliveries until nothing moves."""
        for _ in range(1000):
            for node in self.nodes:
                node.turn()
            if not self.deliver() and (self.switch is None or not self.switch.waits()):
                return
        raise AssertionError("the nodes never come to rest")

    def advance(self, seconds: float, step: float = 0.01, keep: Callable[[bytes], bool] = lambda data: True) -> None:
        """Let time pass in steps, with everything that becomes due."""
        for _ in range(round(seconds / step)):
            self.now += step
            for node in self.nodes:
                node.poll()
            self.deliver(keep)


def make_record(number: int, size: int = 140, room: int = 42) -> bytes:
    """A room record of `size` bytes whose SnowflakeID is `number`."""
    return encode(Kind.ROOM, room, bytes(size - 40), number)


def flood(alice: Node, bob: Node, parcels: int) -> None:
    """Queue that many parcels of a record of 1,000 bytes each."""
    for token in range(1, parcels + 1):
        alice.send(bob, [make_record(token, 1000)], token=token)
