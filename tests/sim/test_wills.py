"""Wills through the production cores of gateways and relays, on a seeded network that loses, repeats and overtakes messages.

Clients connect with a will, at once or delayed, and leave, are lost, or come back at any gateway; gateways and relays are killed
and start again. Afterwards each will was published once, or not at all where its client took it back or was back in time. Where the
fault came so soon after the client's act that no relay could know of it, both are right.

A failure prints its seed; the same seed gives the same run. Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import gateway.events as gw
import gateway.wills.core
import gateway.wills.events as ge
import relay.wills.core
import relay.wills.events as re
from cluster.core.contract import END_OF_TURN, TICK, SendControl, Settled
from cluster.wills.will import WillMessage, decode
from cluster.wire.v1 import control_pb2
from gateway.events import RelaysChanged, Replica
from pixiu.ids import EndpointID, gateway_msg_id, gateway_run
from tests.sim.network import Network

NOBODY = EndpointID(0)
GONE_S = 3.0
SILENT_S = 1.0
"""Time after which everybody sees that a process is gone, at the latest."""
SOON_S = 4.0
"""A fault that comes sooner after a client's act may find no relay that knows of it."""
DELAY_MS = 6_000
FAULTS_S = 30.0
HEALING_S = 90.0
REST_S = 12.0
"""From one relay's loss to that of the next one: until then the new one has learned what it needs."""
USERS = range(1, 9)


@dataclass
class Gateway:
    number: int
    generation: int = 0
    endpoint: EndpointID = NOBODY
    core: gateway.wills.core.Core | None = None
    tick_at: float = 0.0

    @property
    def run(self) -> int:
        return gateway_run(gateway_msg_id(self.number, self.generation, 0))


@dataclass
class Relay:
    number: int
    endpoint: EndpointID = NOBODY
    core: relay.wills.core.Core | None = None
    devices: set[tuple[int, int, int]] = field(default_factory=set)
    """(UIN, device, run) that are connected, as it knows."""
    newest: dict[int, int] = field(default_factory=dict)
    """User → newest connection that it heard of."""
    tick_at: float = 0.0


@dataclass
class Case:
    """One connection with a will."""

    topic: str
    uin: int
    gateway: Gateway
    delay_ms: int
    since: float
    connection: int
    run: int
    ended_at: float = -1.0
    published: set[int] = field(default_factory=set)
    """SnowflakeIDs with which it reached subscribers."""
    least: int = 0
    most: int = 0


class World(Network):
    def __init__(self, seed: int, relays: int) -> None:
        super().__init__(seed, drop=0.15, repeat=0.1)
        self.gateways = [Gateway(number) for number in (1, 2, 3)]
        self.relays = [Relay(number) for number in range(relays)]
        self.cases: dict[str, Case] = {}
        self.current: dict[int, Case | None] = {}
        """Client → its connection."""
        self.calm_until = 0.0
        self._endpoints = 1000
        self._connections = 0
        for gateway_ in self.gateways:
            self.start_gateway(gateway_)
        for relay_ in self.relays:
            self.start_relay(relay_)
        self.run(2.0)

    # --- processes

    def endpoint(self) -> EndpointID:
        self._endpoints += 1
        return EndpointID(self._endpoints)

    def start_gateway(self, it: Gateway) -> None:
        it.generation += 1
        it.endpoint, it.tick_at = self.endpoint(), 0.0
        it.core = gateway.wills.core.Core(
            instance=it.number, generation=it.generation, unix_ms=lambda: 1_800_000_000_000 + round(self.now * 1000)
        )
        self.views_change()

    def start_relay(self, it: Relay) -> None:
        it.endpoint, it.tick_at = self.endpoint(), 0.0
        it.devices = {(case.uin, 1, case.run) for case in self.current.values() if case is not None}
        it.core = relay.wills.core.Core(
            endpoint=it.endpoint,
            gone_s=GONE_S,
            unix_ms=lambda: 1_800_000_000_000 + round(self.now * 1000) + it.number,
            is_back=lambda uin, device, run, over: any(entry[:2] == (uin, device) and entry[2] != run for entry in it.devices),
        )
        self.views_change()

    def kill_gateway(self, it: Gateway) -> None:
        run, it.core = it.run, None
        for case in [case for case in self.current.values() if case is not None and case.gateway is it]:
            for old in self.cases.values():
                if old.uin == case.uin and old.delay_ms and self.now < old.ended_at + old.delay_ms / 1000 + SOON_S:
                    old.most = 1  # a relay that heard late that it ended may not know any more that the client was back
            self.end(case, lost=True, gateway_lost=True)
        for case in self.cases.values():
            if case.run == run and self.now - case.ended_at < SOON_S and case.ended_at >= 0 and not case.published:
                case.least, case.most = 0, 1
        for relay_ in self.relays:
            self.after(SILENT_S + self.delay(), self.purge, relay_, run)
        self.views_change()

    def purge(self, relay_: Relay, run: int) -> None:
        relay_.devices = {entry for entry in relay_.devices if entry[2] != run}

    def kill_relay(self, it: Relay) -> None:
        it.core = None
        self.views_change()

    def views_change(self) -> None:
        for each in (*self.gateways, *self.relays):
            self.after(self.rng.uniform(0.0, SILENT_S), self.see, each)

    def see(self, it: Gateway | Relay) -> None:
        relays = [each for each in self.relays if each.core is not None]
        if isinstance(it, Gateway):
            self.step(it, RelaysChanged(1, tuple(Replica(each.endpoint, 0) for each in relays)))
            return
        gateways = {each.run: each.endpoint for each in self.gateways if each.core is not None}
        owners = tuple(sorted(each.endpoint for each in relays))
        self.step(it, re.ClusterSeen(0, 1, owners, gateways, frozenset(gateways.values())))

    # --- clients

    def connect(self, uin: int) -> None:
        before, it = self.current.get(uin), self.rng.choice([each for each in self.gateways if each.core is not None])
        self._connections += 1
        delay_ms = self.rng.choice((0, DELAY_MS))
        case = Case(f"will/{len(self.cases)}", uin, it, delay_ms, self.now, self._connections, it.run)
        self.cases[case.topic] = case
        self.step(it, ge.DeviceOpened(case.connection, uin, 1))
        self.step(it, gw.SetWill(case.connection, uin, 1, WillMessage(case.topic, b"lost"), delay_ms))
        for relay_ in self.relays:
            self.after(self.delay() * 5, self.came, relay_, (uin, 1, it.run), case.connection)
        for old in self.cases.values():
            if old.uin == uin and old.delay_ms and old.ended_at >= 0 and old.most and not old.published:
                # It is certainly in time when the will cannot be due yet.
                in_time = self.now < old.ended_at + DELAY_MS / 1000 - SOON_S
                old.least, old.most = 0, 0 if in_time else 1
        self.current[uin] = case
        if before is not None:
            self.end(before, lost=True, taken_over=True)

    def came(self, relay_: Relay, entry: tuple[int, int, int], connection: int) -> None:
        if any(each.run == entry[2] and each.core is not None for each in self.gateways):
            relay_.devices.add(entry)
            newest = relay_.newest[entry[0]] = max(connection, relay_.newest.get(entry[0], 0))
            self.step(relay_, re.DeviceCame(*entry, connection == newest))

    def left(self, relay_: Relay, entry: tuple[int, int, int]) -> None:
        now = self.current.get(entry[0])
        if now is None or now.run != entry[2]:
            relay_.devices.discard(entry)

    def end(self, case: Case, *, lost: bool, taken_over: bool = False, gateway_lost: bool = False) -> None:
        case.ended_at = self.now
        if self.current.get(case.uin) is case:
            self.current[case.uin] = None
        if lost:
            case.least = case.most = 1
        if taken_over and case.delay_ms:
            # A relay that hears of the will after the take-over decides by what is connected when the will is due.
            case.least, case.most = 0, 0 if self.now - case.since > SILENT_S else 1
        if gateway_lost and self.now - case.since < SOON_S:
            case.least = 0
        if not gateway_lost:
            self.step(case.gateway, gw.EndWill(case.connection, lost))
            for relay_ in self.relays:
                self.after(0.4 + self.delay(), self.left, relay_, (case.uin, 1, case.run))

    # --- the network

    def step(self, it: Gateway | Relay, event: object) -> None:
        if it.core is None:
            return
        endpoint = it.endpoint
        effects = it.core.step(event, self.now)
        if isinstance(it, Gateway):
            effects = [*effects, *it.core.step(END_OF_TURN, self.now)]
        for effect in effects:
            if isinstance(effect, SendControl):
                self.send(it, endpoint, effect)
            else:
                assert isinstance(effect, ge.PublishWill)
                self.after(self.delay(), self.publish, it, endpoint, effect)
        due = max(it.core.next_deadline(), self.now + 0.001)
        if due < 1e9 and not self.now < it.tick_at <= due:
            it.tick_at = due
            self.at(due, self.tick, it, endpoint)

    def tick(self, it: Gateway | Relay, endpoint: EndpointID) -> None:
        if it.endpoint == endpoint and it.core is not None:
            if it.core.next_deadline() <= self.now:
                self.step(it, TICK)
            else:
                self.step(it, Settled([]))

    def send(self, source: Gateway | Relay, endpoint: EndpointID, effect: SendControl) -> None:
        handled: list[bool] = []

        def arrive(first: bool) -> None:
            everybody: list[Gateway | Relay] = [*self.gateways, *self.relays]
            target = next((each for each in everybody if each.endpoint == effect.peer), None)
            if target is None or target.core is None:
                return
            if first:
                handled.append(True)
            for message in effect.messages:
                self.take(source, endpoint, target, control_pb2.Control.FromString(message))

        def settle() -> None:
            if source.endpoint == endpoint:
                lost_answer = self.chance(self.drop)
                self.step(source, Settled([(effect.token, bool(handled) and not lost_answer)]))

        self.datagram(endpoint, effect.peer, effect.messages, arrive)
        if effect.token:
            self.after(0.3, settle)

    def take(self, source: Gateway | Relay, endpoint: EndpointID, target: Gateway | Relay, control: control_pb2.Control) -> None:
        if control.HasField("publish_will"):
            state = decode(control.publish_will)
            assert state.will is not None
            self.step(target, ge.WillAsked(endpoint, state.will, state.message_id))
        elif control.HasField("will_published"):
            over = control.will_published.id
            self.step(target, ge.WillOver(over) if isinstance(target, Gateway) else re.WillPublished(over))
        else:
            run = source.run if isinstance(source, Gateway) else None
            self.step(target, re.WillsReceived(endpoint, run, [decode(each) for each in control.will_states.wills]))

    def publish(self, it: Gateway, endpoint: EndpointID, effect: ge.PublishWill) -> None:
        if it.endpoint != endpoint or it.core is None:
            return
        if self.chance(0.1):
            self.step(it, ge.WillDone(effect.will.id, again=True))
            return
        self.cases[effect.will.message.topic].published.add(effect.message_id)
        self.after(self.delay(), self.step, it, ge.WillDone(effect.will.id))

    # --- a run

    def play(self) -> None:
        end = self.now + FAULTS_S
        while self.now < end:
            self.run(self.rng.uniform(0.05, 0.8))
            chosen, uin = self.rng.random(), self.rng.choice(USERS)
            case = self.current.get(uin)
            if chosen < 0.55:
                self.connect(uin)
            elif chosen < 0.9 and case is not None:
                self.end(case, lost=self.rng.random() < 0.6)
            elif chosen < 0.95 and all(each.core is not None for each in self.gateways):
                lost = self.rng.choice(self.gateways)
                self.kill_gateway(lost)
                self.after(self.rng.uniform(0.5, 8.0), self.start_gateway, lost)
            elif len(self.relays) > 1 and self.now > self.calm_until:
                self.calm_until = self.now + REST_S
                gone = self.rng.choice(self.relays)
                self.kill_relay(gone)
                self.after(self.rng.uniform(1.0, 6.0), self.start_relay, gone)
        self.faults = False
        self.run(HEALING_S)

    def wrong(self) -> list[str]:
        for case in self.current.values():
            if case is not None:
                case.least = case.most = 0
        return [
            f"{case.topic}: published as {sorted(case.published)}, not {case.least} to {case.most} times; "
            f"connected {case.since:.2f}, ended {case.ended_at:.2f}, delay {case.delay_ms}"
            for case in self.cases.values()
            if not case.least <= len(case.published) <= case.most
        ]


def play(seed: int, relays: int) -> World:
    world = World(seed, relays)
    world.play()
    return world


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("relays", [1, 2, 3])
def test_every_will_is_published_once(seed: int, relays: int) -> None:
    world = play(seed, relays)
    assert not world.wrong(), f"seed {seed}"
    assert sum(len(case.published) for case in world.cases.values()) > 3
    assert all(not len(each.core) for each in world.relays if each.core is not None and not any(world.current.values()))


def test_the_same_seed_gives_the_same_run() -> None:
    assert play(1, 2).trace == play(1, 2).trace
