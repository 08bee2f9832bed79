"""Random schedules of faults, and a whole run.

python -m tests.sim.delivery.schedule 17     one seed: what happened, and what was wrong
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass

from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from tests.sim.delivery.clients import Client
from tests.sim.delivery.world import FAULTS_S, HEALING_S, HEARTBEAT_S, USERS, World

FAULTS = (
    "kill relay",
    "pause relay",
    "kill gateway",
    "break stream",
    "pi down",
    "xiu down",
    "trim",
    "silence",
    "reconnect",
    "leave",
    "herd",
)


@dataclass
class Verdict:
    """What a run came to."""

    seed: int
    violations: list[tuple[str, str]]
    counts: Counter[str]
    trace: str
    healed_s: float
    """After the last fault everything was well."""


class Schedule:
    """Does something bad every now and then; which faults a run has is drawn once, so that each is also seen alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.rng
        # A relay that wrongly takes itself for the owner confirms a notify: only a poll finds what it was about.
        possible = [fault for fault in FAULTS if not (world.reliable and "relay" in fault)]
        self.faults = [fault for fault in possible if rng.random() < 0.5] or possible
        self.mean_s = rng.choice((0.3, 0.6, 1.2))

    def begin(self) -> None:
        world = self.world
        for relay in world.relays:
            world.start_relay(relay)
        for client in world.clients.values():
            world.after(world.rng.uniform(0.0, 2.0), self._connect, client)
        world.after(0.5, self.write)
        world.after(1.0, self.turn)
        world.after(HEARTBEAT_S, world.heartbeats)

    def _connect(self, client: Client) -> None:
        up = [gateway for gateway in self.world.gateways if gateway.up]
        if up:
            client.connect(self.world.rng.choice(up))
        else:
            self.world.after(0.3, self._connect, client)

    def write(self) -> None:
        """Mail: single, to many, and in bursts beyond the window."""
        world, rng = self.world, self.world.rng
        if world.calm:
            return
        lane = rng.choice((0, 1, 1, 1, 3))
        for _ in range(rng.choice((80, 150)) if rng.random() < 0.015 else rng.choice((1, 1, 2, 5))):
            uins = rng.sample(USERS, rng.choice((1, 1, 1, 3)))
            world.append(uins, lane, rng.choice((0, 20, 400)))
        world.after(rng.expovariate(6.0), self.write)

    def turn(self) -> None:
        world, rng = self.world, self.world.rng
        if world.calm:
            return
        fault = rng.choice(self.faults)
        world.counts[f"fault: {fault}"] += 1
        getattr(self, "_" + fault.replace(" ", "_"))(rng)
        world.after(rng.expovariate(1 / self.mean_s), self.turn)

    def _kill_relay(self, rng: random.Random) -> None:
        relay = rng.choice(self.world.relays)
        self.world.stop_relay(relay)
        self.world.after(rng.choice((0.2, 1.0, 3.0)), self.world.start_relay, relay)

    def _pause_relay(self, rng: random.Random) -> None:
        self.world.pause_relay(rng.choice(self.world.relays), rng.choice((0.5, 2.0)))

    def _kill_gateway(self, rng: random.Random) -> None:
        gateway = rng.choice(self.world.gateways)
        if not gateway.up:
            return
        there = [connection.client for connection in gateway.connections.values()]
        gateway.crash()
        self.world.after(rng.choice((0.1, 1.0)), self._start_gateway, gateway)
        for client in there:
            self.world.after(rng.uniform(0.1, 2.0), self._back, client)

    def _start_gateway(self, gateway: object) -> None:
        for each in self.world.gateways:
            if each is gateway:
                each.up = True

    def _back(self, client: Client) -> None:
        if client.connection is None:
            self._connect(client)

    def _break_stream(self, rng: random.Random) -> None:
        relay = rng.choice(self.world.relays)
        for gateway in list(relay.streams):
            self.world.break_stream(relay, gateway)

    def _pi_down(self, rng: random.Random) -> None:
        self.world.pi.down_until = self.world.now + rng.choice((0.2, 1.5))

    def _xiu_down(self, rng: random.Random) -> None:
        self.world.xiu.down_until = self.world.now + rng.choice((0.2, 1.5))

    def _trim(self, rng: random.Random) -> None:
        uin, lane = rng.choice(USERS), rng.choice((0, 1, 3))
        last = self.world.pi.last(uin, lane)
        self.world.pi.trim(uin, lane, max(0, last - rng.choice((0, 3, 20))))

    def _silence(self, rng: random.Random) -> None:
        """A client that reads and does not acknowledge."""
        rng.choice(list(self.world.clients.values())).silent_until = self.world.now + rng.choice((1.0, 4.0))

    def _reconnect(self, rng: random.Random) -> None:
        self._connect(rng.choice(list(self.world.clients.values())))

    def _leave(self, rng: random.Random) -> None:
        client = rng.choice(list(self.world.clients.values()))
        client.cut(told=rng.random() < 0.8)
        self.world.after(rng.choice((0.05, 1.0, 3.0)), self._back, client)

    def _herd(self, rng: random.Random) -> None:
        """Everybody at once."""
        for client in self.world.clients.values():
            self._connect(client)


def heal(world: World, schedule: Schedule) -> None:
    """No more faults, nothing new; every process is up and everybody connected."""
    world.calm, world.loss = True, 0.0
    world.pi.down_until = world.xiu.down_until = 0.0
    for gateway in world.gateways:
        gateway.up = True
    for relay in world.relays:
        relay.paused_until = min(relay.paused_until, world.now)
        world.start_relay(relay)
    world.views_change()
    for client in world.clients.values():
        client.silent_until = 0.0
        schedule._back(client)


def run(seed: int, session: type[Session] = Session, table: type[Deliveries] = Deliveries, fencing: bool = True) -> Verdict:
    """A whole run; arguments as `World` has them."""
    world = World(seed, session, table, fencing)
    schedule = Schedule(world)
    schedule.begin()
    world.run_until(FAULTS_S)
    heal(world, schedule)
    calm_at = world.now
    world.run_until(calm_at + 3.0)
    world.run_until(calm_at + HEALING_S, lambda: not world.watch.open_work())
    violations = world.watch.violations + world.watch.open_work()
    counts = world.counts + world.watch.counts
    for relay in world.relays:
        if relay.core is not None:
            counts["from notices"] += relay.core.counters.from_notices
            counts["answers late"] += relay.core.counters.answers_late
            counts["old acknowledgements"] += relay.core.counters.acknowledgements_old
    counts["received"] = sum(len(client.application) for client in world.clients.values())
    return Verdict(seed, violations, counts, world.trace, world.now - calm_at)


if __name__ == "__main__":
    for number in sys.argv[1:] or ["0"]:
        verdict = run(int(number))
        print(number, verdict.violations[:10], dict(verdict.counts), f"well after {verdict.healed_s:.1f} s")
