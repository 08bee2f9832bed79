"""Gateways and the clients on them.

A gateway keeps for each connection the session that it serves, and for each lane the highest InboxSeq that it wrote: it drops
what is not above it, and refuses lower sessions. A repeat is answered with what is acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pixiu.wire.envelope import GAP, Delivery
from pixiu.wire.record import INBOX_LANES
from relay.delivery import events as ev

if TYPE_CHECKING:
    from tests.sim.delivery.world import Relay, World


class Connection:
    """A client on a gateway."""

    def __init__(self, client: Client, gateway: Gateway, number: int) -> None:
        self.client, self.gateway = client, gateway
        self.login = ev.Login(client.uin, client.device, gateway.endpoint, number)
        self.open = True
        self.session = 0
        self.relay: Relay | None = None
        self.written: list[dict[int, bool]] = [{} for _ in range(INBOX_LANES)]
        """Under this session: InboxSeq → acknowledged."""
        self.highest = [0] * INBOX_LANES
        self.due: set[int] = set()
        """Lanes whose acknowledgements are about to leave."""


class Gateway:
    """See the module."""

    def __init__(self, world: World, endpoint: int) -> None:
        self.world, self.endpoint = world, endpoint
        self.up = True
        self.connections: dict[tuple[int, int], Connection] = {}

    def take(self, relay: Relay, deliveries: Sequence[Delivery]) -> None:
        """Deliveries from a relay."""
        for delivery in deliveries:
            connection = self.connections.get((delivery.uin, delivery.device))
            if self.up and connection is not None:
                self._write(connection, relay, delivery)

    def asked(self, relay: Relay, lanes: Sequence[ev.DeviceLane]) -> None:
        """What was written of these?"""
        for lane in lanes:
            connection = self.connections.get((lane.uin, lane.device))
            if self.up and connection is not None and connection.session == lane.session:
                self._acknowledge_soon(connection, lane.lane)

    def _write(self, connection: Connection, relay: Relay, delivery: Delivery) -> None:
        counts, lane, seq = self.world.counts, delivery.lane, delivery.seq
        if delivery.session < connection.session:
            counts["delivery refused"] += 1
            return
        if delivery.session > connection.session:
            if connection.session:
                counts["session followed on a connection"] += 1
            connection.session, connection.relay = delivery.session, relay
            connection.written, connection.highest = [{} for _ in range(INBOX_LANES)], [0] * INBOX_LANES
        if seq <= connection.highest[lane]:
            counts["repeat dropped"] += 1
            self._acknowledge_soon(connection, lane)
            return
        connection.highest[lane] = seq
        connection.written[lane][seq] = False
        connection.client.receive(connection, connection.session, delivery)

    def acknowledged(self, connection: Connection, lane: int, seqs: Sequence[int]) -> None:
        """What a client says, in any order."""
        written = connection.written[lane]
        for seq in seqs:
            if seq in written:  # else of an earlier session: it comes again
                written[seq] = True
        self._acknowledge_soon(connection, lane)

    def _acknowledge_soon(self, connection: Connection, lane: int) -> None:
        if lane not in connection.due:
            connection.due.add(lane)
            self.world.after(0.01, self._send, connection, lane)

    def _send(self, connection: Connection, lane: int) -> None:
        connection.due.discard(lane)
        if not connection.open or not self.up or connection.relay is None:
            return
        written = connection.written[lane]
        up_to = min((seq for seq, done in written.items() if not done), default=connection.highest[lane] + 1) - 1
        bits = sum(1 << (seq - up_to - 1) for seq, done in written.items() if done and seq > up_to)
        self.world.acknowledge(connection.relay, self.endpoint, self._item(connection, lane, up_to, bits))

    @staticmethod
    def _item(connection: Connection, lane: int, up_to: int, bits: int) -> ev.Acknowledgement:
        client = connection.client
        return ev.Acknowledgement(client.uin, client.device, connection.session, lane, up_to, bits, connection.highest[lane])

    def lie(self, connection: Connection, lane: int) -> None:
        """A client acknowledges what it cannot have."""
        if connection.open and self.up and connection.relay is not None:
            item = self._item(connection, lane, connection.highest[lane] + 3, 0b101)
            self.world.acknowledge(connection.relay, self.endpoint, item)

    def crash(self) -> None:
        """All connections are gone; nobody says so to the relays but the silence."""
        world = self.world
        self.up = False
        for connection in list(self.connections.values()):
            connection.client.cut(told=False)
        self.connections.clear()
        world.gateway_lost(self.endpoint)
        self.endpoint += 1000


class Client:
    """One device of a user, with its application."""

    def __init__(self, world: World, uin: int, device: int, *, rogue: bool) -> None:
        self.world, self.uin, self.device, self.rogue = world, uin, device, rogue
        self.connection: Connection | None = None
        self.got: list[set[int]] = [set() for _ in range(INBOX_LANES)]
        """InboxSeqs: of messages, and of gap markers."""
        self.application: list[int] = []
        """MsgIDs, each once."""
        self._seen: set[int] = set()
        self._number = 0
        self._last: list[tuple[int, int]] = [(0, 0)] * INBOX_LANES
        """Connection's and session's number, and the InboxSeq that came last."""
        self.silent_until = 0.0

    def connect(self, gateway: Gateway) -> None:
        """A login, also while there is an older connection."""
        world = self.world
        if not gateway.up:
            return
        if self.connection is not None:
            self.cut(told=world.rng.random() < 0.5)
        self._number += 1
        self._last = [(0, 0)] * INBOX_LANES
        self.connection = Connection(self, gateway, self._number)
        gateway.connections[self.uin, self.device] = self.connection
        world.counts["logins"] += 1
        world.connected(self.connection)

    def cut(self, *, told: bool) -> None:
        """The connection ends."""
        connection = self.connection
        if connection is None:
            return
        self.connection = None
        connection.open = False
        gateway = connection.gateway
        if gateway.connections.get((self.uin, self.device)) is connection:
            del gateway.connections[self.uin, self.device]
        self.world.disconnected(connection, told=told)

    def receive(self, connection: Connection, session: int, delivery: Delivery) -> None:
        """One message, or a gap marker."""
        world, lane, seq = self.world, delivery.lane, delivery.seq
        if connection is not self.connection:
            return
        if (session, seq) <= self._last[lane]:
            world.watch.bad("out of order on a connection", (session, seq, self._last[lane]))
        self._last[lane] = (session, seq)
        if delivery.flags & GAP:
            known = world.inboxes.get((self.uin, lane), {})
            self.got[lane] |= {number for number in known if number <= seq} if not delivery.msg_id else {seq}
        elif delivery.msg_id in self._seen:
            world.counts["received again"] += 1
            self.got[lane].add(seq)
        else:
            self._seen.add(delivery.msg_id)
            self.application.append(delivery.msg_id)
            self.got[lane].add(seq)
        wait = world.rng.uniform(0.005, 0.3) + max(0.0, self.silent_until - world.now)
        world.after(wait, self._acknowledge, connection, session, lane, seq)

    def _acknowledge(self, connection: Connection, session: int, lane: int, seq: int) -> None:
        if connection is not self.connection or connection.session != session:
            return
        connection.gateway.acknowledged(connection, lane, [seq])
        if self.rogue and not self.world.calm and self.world.rng.random() < 0.1:
            connection.gateway.lie(connection, lane)
