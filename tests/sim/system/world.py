"""A whole system in one process: that of `tests.sim.cluster`, with writers of mail, Xiu, Pi, and devices that receive it.

writers ─▶ proxies ─▶ Xiu, Pi         streams, which keep order or break
             │ notices     ▲
             ▼             │
           relays ─────────┘ sessions, entries, messages, cursors
             │
             ▼
          gateways ─▶ devices         and rooms, signals and chat by the same processes' links
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from pixiu.discovery.paths import DRAIN_ORDER
from pixiu.wire.levels import Level
from tests.sim.cluster.process import Place, Process
from tests.sim.cluster.registry import POLL_S
from tests.sim.cluster.stores import BrokerProcess, RouterProcess
from tests.sim.cluster.world import Shape, World
from tests.sim.system.base import Served
from tests.sim.system.client import Device, SystemClients, Writer
from tests.sim.system.faults import SystemVariant
from tests.sim.system.gateway import SystemGateway
from tests.sim.system.pi import PiProcess
from tests.sim.system.proxy import SystemProxy
from tests.sim.system.relay import SystemRelay
from tests.sim.system.replica import Partition
from tests.sim.system.streams import Stream, Streams
from tests.sim.system.tool import Tool
from tests.sim.system.watch import MailWatch
from tests.sim.system.xiu import XiuProcess

START_US: Final = 1_750_000_000_000_000
REPLICAS: Final = 2
"""Of each partition of Xiu and Pi."""
USERS: Final = (1, 2, 3, 4)
DOUBLED_S: Final = 3 * POLL_S + 1.0
BURST: Final = 0.01
"""Probability of one when somebody sends."""
FIRST_DEVICE: Final = 101
"""DeviceIDs below are those of the clients of rooms."""


@dataclass(frozen=True)
class SystemShape(Shape):
    """What differs from run to run besides chance."""

    xius: int = 1
    pis: int = 1
    writers: int = 2
    stores: tuple[str, ...] = ()
    """Of Xiu and Pi, which double meanwhile."""
    harsh: bool = False
    """Whether a parent of Pi has troubles of its own when it is told to split."""


class SystemWorld(World):
    """See the module."""

    roles: ClassVar[dict[str, type[Process]]] = {
        "router": RouterProcess,
        "relay": SystemRelay,
        "broker": BrokerProcess,
        "gateway": SystemGateway,
        "proxy": SystemProxy,
        "xiu": XiuProcess,
        "pi": PiProcess,
    }
    proxies = 2
    shape: SystemShape
    variant: SystemVariant
    clients: SystemClients

    def __init__(self, seed: int, shape: SystemShape, variant: SystemVariant) -> None:
        super().__init__(seed, shape, variant)
        self.streams = Streams(self.wire)
        self.clients = SystemClients(self)
        self.mail = MailWatch(self)
        self.partitions: dict[tuple[str, int], Partition] = {}
        for role, number in (("xiu", shape.xius), ("pi", shape.pis)):
            self.registry.layout(role, number, number)
            for partition in range(number):
                self.add_store(role, partition)
        self.tools: dict[str, Tool] = {}
        """By role: what doubles it."""
        self.writers = [Writer(self, number) for number in range(shape.writers)]
        self.devices = [Device(self, uin, FIRST_DEVICE + number) for uin in USERS for number in range(self.rng.choice((1, 1, 2)))]

    def add_store(self, role: str, partition: int) -> None:
        """Replicas of a partition of Xiu or Pi start."""
        self.partitions[role, partition] = Partition(role, partition)
        self.add(role, partition, REPLICAS)

    def leader_of(self, role: str, partition: int) -> XiuProcess | PiProcess | None:
        """Who leads a partition of Xiu or Pi, if anybody does."""
        running: list[XiuProcess | PiProcess] = [*(self.running(PiProcess) if role == "pi" else self.running(XiuProcess))]
        return next((each for each in running if each.place.partition == partition and each.core.epoch), None)

    def unix_us(self) -> int:
        """Every host's clock."""
        return START_US + int(self.now * 1e6)

    def device(self, uin: int, number: int) -> Device:
        """By UIN and DeviceID."""
        return next(device for device in self.devices if (device.uin, device.number) == (uin, number))

    def devices_of(self, uin: int) -> list[Device]:
        """Of a user."""
        return [device for device in self.devices if device.uin == uin]

    def running_relays(self) -> list[SystemRelay]:
        """Relays."""
        return self.running(SystemRelay)

    def running_pis(self, uin: int) -> list[PiProcess]:
        """Replicas of Pi that serve a user."""
        return [process for process in self.running(PiProcess) if process.place.partition == uin % self.registry.view.count("pi")]

    # --- faults

    def double(self, role: str) -> None:
        """An operator doubles a role: those before it, if any, are over first."""
        if all(tool.over for tool in self.tools.values()):
            self.tools[role] = Tool(self, role, 77 + len(self.tools))
        else:
            self.wire.after(0.5, lambda: self.double(role))

    def doubles(self) -> bool:
        """Whether partitions double, or have done so just now: what moved away is dropped some seconds later."""
        wanted = [role for role in (self.shape.doubles, *self.shape.stores) if role]
        over = [self.tools[role].over_at if role in self.tools else float("inf") for role in wanted]
        return self.now < max(over, default=-DOUBLED_S) + DOUBLED_S

    def is_troubled(self) -> bool:
        """Whether some process came up, or was troubled, just now: less than the time in which maps become equal again."""
        return any(place.troubled_until > self.now for place in self.places)

    def break_stream(self) -> None:
        """One stream of all."""
        self.counts["streams broken"] += 1
        self.streams.break_one(self._choose)

    def _choose(self, streams: list[Stream]) -> Stream:
        return self.rng.choice(streams)

    def isolate(self) -> None:
        """ZooKeeper does not hear from the leader of a partition for so long that its session ends: another one leads."""
        partition = self.rng.choice(list(self.partitions.values()))
        state = partition.register.state
        replica = partition.replicas.get(int(state.leader)) if state is not None else None
        if replica is not None:
            self.counts["leaders isolated"] += 1
            self.mail.told.fault(replica.process.place)
            replica.isolate(self.rng.uniform(2.2, 3.5))

    def sever(self, leader: XiuProcess | PiProcess, seconds: float) -> None:
        """Neither ZooKeeper nor the other replicas hear from a leader, and everybody else does: another one leads beside it."""
        self.counts["leaders severed"] += 1
        self.mail.told.fault(leader.place)
        leader.replica.isolate(seconds)
        for place in self.places_of(leader.place.role):
            if place is not leader.place and place.partition == leader.place.partition:
                self.cut(leader.place, place, True, seconds)

    def crash_leader(self) -> None:
        """The leader of a partition of Xiu or Pi is killed."""
        partition = self.rng.choice(list(self.partitions.values()))
        state = partition.register.state
        replica = partition.replicas.get(int(state.leader)) if state is not None else None
        if replica is not None:
            self.counts["leaders killed"] += 1
            self.crash(replica.process.place)

    def some_place(self) -> Place:
        """Every role as often as any other, however many processes it has."""
        return self.rng.choice(self.places_of(self.rng.choice(list(self.roles))))

    def crash(self, place: Place) -> None:
        """See `World`."""
        for each in place.node.places:
            self.mail.told.fault(each)
        self.counts[f"{place.role} crashed"] += place.process is not None and place.process.alive
        super().crash(place)

    def drain_some(self) -> None:
        """SIGTERM: a process leaves what it does to others, role by role, and ends; something runs there again."""
        roles = [role for role, kind in self.roles.items() if issubclass(kind, Served)]
        place = self.rng.choice(self.places_of(self.rng.choice(roles)))
        processes = [each.process for each in place.node.places]
        if any(process is None or not process.is_serving for process in processes):
            return
        self.counts["drained"] += 1
        self.counts[f"{place.role} drained"] += 1
        self.counts["nodes drained"] += len(place.node.places) > 1
        run = place.node.runs
        leaving = sorted(place.node.places, key=lambda each: DRAIN_ORDER.index(each.role))

        def go_on() -> None:
            if place.node.runs != run:
                return
            if not leaving:
                place.node.killed()
                self.start_again(place, self.rng.uniform(0.1, 1.0))
                return
            each = leaving[0].process
            if each is None or not each.alive:
                leave()
                return
            leaving[0].troubled_until = float("inf")
            each.set_state("Draining")
            if isinstance(each, Served):
                each.do(lambda: each.drain(leave))
            else:
                each.do(leave)

        def leave() -> None:
            if place.node.runs != run:
                return
            gone = leaving.pop(0)
            if gone.process is not None and gone.process.alive:
                if len(place.node.places) > 1:
                    gone.process.leave()
                self.end(gone)
                self.registry.remove(gone.process.endpoint)
                place.node.work(lambda: self.now, self.wire.after)
            go_on()

        go_on()

    def cut_some(self) -> None:
        """Between two hosts nothing passes for a while, or nothing one way."""
        one, other = self.rng.sample(self.places, 2)
        self.cut(one, other, both=self.rng.random() < 0.6)

    # --- a run

    def mailed(self) -> None:
        """A writer sends a mail, or a few; now and then more than a window, to one user whose devices are slow just then."""
        rng: random.Random = self.rng
        writer, lane, burst = rng.choice(self.writers), rng.choice((0, 1, 1, 1, 3)), rng.random() < BURST
        one = rng.choice(USERS)
        if burst:
            self.counts["bursts"] += 1
            for device in self.devices_of(one):
                device.slow_until = self.now + rng.uniform(0.5, 3.0)
        for _ in range(rng.choice((70, 100)) if burst else rng.choice((1, 1, 2, 5))):
            several = not burst and rng.random() < 0.15
            receivers = tuple(rng.sample(USERS, rng.choice((2, 3)))) if several else (one if burst else rng.choice(USERS),)
            level = rng.choices((Level.REPLICATED, Level.PERSISTED, Level.ACCEPTED), (8, 1, 1))[0]
            writer.send(receivers, lane, level, rng.choice((0, 20, 400)))

    def wander(self) -> None:
        """A device comes, goes, moves, dies, or takes its time."""
        rng = self.rng
        device = rng.choice(self.devices)
        what = rng.choice(("go", "move", "follow", "restart", "slow"))
        if device.away:
            device.come()
        elif what == "go":
            device.go()
            self.wire.after(rng.uniform(0.1, 4.0), device.come)
        elif what == "move":
            device.move()
        elif what == "follow":
            device.follow()
        elif what == "restart":
            device.restart()
        else:
            device.slow_until = self.now + rng.uniform(0.5, 3.0)

    def pairs(self) -> Iterator[tuple[str, int]]:
        """See `World`."""
        counts = self.counts + self.watch.checked + self.clients.logins.checked + self.mail.checked
        yield from sorted(counts.items())
