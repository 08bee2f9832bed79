"""The same schedules with the production gateway's book of mail in the place of the model's gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import pytest

from gateway import events as ev
from gateway.delivery.mail import MailBook
from gateway.mail.lane import MailLane
from gateway.mail.run import read_runs
from pixiu.ids import EndpointID
from pixiu.wire.envelope import Delivery, encode, split
from relay.delivery.events import Acknowledgement, Device, DeviceLane
from tests.sim.delivery import clients, world
from tests.sim.delivery.schedule import run

if TYPE_CHECKING:
    from tests.sim.delivery.world import Relay, World

EventT = TypeVar("EventT")
SEEDS = 12
ENOUGH = {"received": 300, "received again": 12, "session followed on a connection": 0.75, "gap markers": 1, "lies": 2.5}
"""What a run has at least on average."""


class _Connections(dict[tuple[int, int], clients.Connection]):
    """(UIN, device) → connection; the book is told of those that go."""

    def __init__(self, gateway: BookedGateway) -> None:
        super().__init__()
        self._gateway = gateway

    def __setitem__(self, pair: tuple[int, int], connection: clients.Connection) -> None:
        super().__setitem__(pair, connection)
        self._gateway.opened(connection)

    def __delitem__(self, pair: tuple[int, int]) -> None:
        self._gateway.closed(self[pair])
        super().__delitem__(pair)


class BookedGateway(clients.Gateway):
    """A gateway whose book is the production one."""

    def __init__(self, world: World, endpoint: int) -> None:
        super().__init__(world, endpoint)
        self.connections = _Connections(self)
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._numbers: dict[clients.Connection, int] = {}
        self._by_number: dict[int, clients.Connection] = {}
        self._relays: dict[int, Relay] = {}
        """By the numbers of their streams."""
        self._meant: dict[tuple[int, int, int], int] = {}
        """(UIN, device, session) → the connect time that the session is of."""
        self._book = MailBook(self._target, lambda: len(self.connections), lambda _: False, lambda: 0)

    def _target(self, uin: int, key: int, connect_time: int) -> int:
        found = self.connections.get((uin, key))
        return self._numbers[found] if found is not None and found.login.connection == connect_time else 0

    def opened(self, connection: clients.Connection) -> None:
        self._number += 1
        self._numbers[connection] = self._number
        self._by_number[self._number] = connection

    def closed(self, connection: clients.Connection) -> None:
        number = self._numbers.pop(connection)
        del self._by_number[number]
        self._perform(self._book.closed(number))

    def take(self, relay: Relay, deliveries: Sequence[Delivery]) -> None:
        stream = relay.streams[self.endpoint]
        if not self.up or relay.core is None:
            return
        if stream not in self._relays:
            self._relays[stream] = relay
            self._tell(self._book.opened, ev.MailStreamOpened(stream, EndpointID(relay.number + 1)))
        devices = []
        for item in deliveries:
            session = relay.core.sessions.get(Device(item.uin, item.device))
            meant = item.uin, item.device, item.session
            if session is not None and session.number == item.session:
                self._meant[meant] = session.connection
            if meant in self._meant:
                devices.append(ev.MailDevice(item.uin, item.device, self._meant[meant], item.device))
        data = b"".join(encode(*item) for item in deliveries)
        self._tell(self._book.arrived, ev.MailArrived(stream, devices, read_runs(data, len(deliveries))))

    def asked(self, relay: Relay, lanes: Sequence[DeviceLane]) -> None:
        stream = relay.streams[self.endpoint]
        if self.up and stream in self._relays:
            self._tell(self._book.arrived, ev.MailArrived(stream, [], [], lanes))

    def acknowledged(self, connection: clients.Connection, lane: int, seqs: Sequence[int]) -> None:
        said = ev.MailAcknowledged(self._numbers[connection], [(lane, seq, seq) for seq in seqs])
        self._tell(self._book.acknowledged, said)

    def lie(self, connection: clients.Connection, lane: int) -> None:
        if connection.open and self.up:
            self.world.counts["lies"] += 1
            first = connection.highest[lane] + 1
            said = ev.MailAcknowledged(self._numbers[connection], [(lane, first, first + 5)])
            self._tell(self._book.acknowledged, said)

    def crash(self) -> None:
        super().crash()
        self._begin()

    def _tell(self, handler: Callable[[EventT, float, list[ev.Effect]], None], event: EventT) -> None:
        effects: list[ev.Effect] = []
        handler(event, self.world.now, effects)
        self._perform(effects)

    def _perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.WriteMail):
                connection = self._by_number[effect.connection]
                if effect.anew:
                    self.world.counts["session followed on a connection"] += bool(connection.session)
                    connection.highest = [0] * len(connection.highest)
                for item in [item for run in effect.runs for item in split(run.data, run.count)]:
                    connection.session = item.session
                    connection.highest[item.lane] = item.seq
                    connection.client.receive(connection, item.session, item)
            elif isinstance(effect, ev.AcknowledgementsDue):
                self.world.after(0.01, self._flush, self._book, effect.stream)

    def _flush(self, book: MailBook, stream: int) -> None:
        relay = self._relays.get(stream)
        if book is self._book and relay is not None and relay.streams.get(self.endpoint) == stream:
            for item in book.take_acknowledgements(stream, 100):
                self.world.acknowledge(relay, self.endpoint, Acknowledgement(*item))


def test_mail_arrives_under_faults_through_the_production_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "Gateway", BookedGateway)
    totals: Counter[str] = Counter()
    for seed in range(SEEDS):
        verdict = run(seed)
        assert not verdict.violations, (seed, verdict.violations[:3])
        totals += verdict.counts
    too_few = {what: totals[what] for what, least in ENOUGH.items() if totals[what] < least * SEEDS}
    assert not too_few, too_few


def test_a_gateway_that_acknowledges_what_it_has_only_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "Gateway", BookedGateway)
    monkeypatch.setattr(MailLane, "up_to", property(lambda lane: lane.highest))
    found = {violation for seed in range(5) for violation in run(seed).violations}
    assert any("acknowledged, not delivered" in violation for violation in map(str, found)), found


def test_a_gateway_that_writes_what_it_wrote_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(MailLane):
        """Writes repeats again."""

        highest = property(lambda lane: 0, lambda lane, seq: None)

    monkeypatch.setattr(world, "Gateway", BookedGateway)
    monkeypatch.setattr("gateway.delivery.mail.MailLane", Forgetful)
    found = {str(violation) for seed in range(5) for violation in run(seed).violations}
    assert any("out of order" in violation for violation in found), found
