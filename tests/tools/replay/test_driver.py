"""The driver against a cluster in memory: order of events, back-pressure, broken connections, verdicts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pixiu.errors import Unavailable
from pixiu.ids import UIN, RoomID, uin_of_name
from tools.load.verdict import Cause, Death, judge
from tools.replay.driver import Driver
from tools.replay.log import LogEvent, room_of_name
from tools.replay.options import ReplayOptions
from tools.replay.plan import Plan, make_plan
from tools.replay.sessions import Done

FAST = ReplayOptions(speed=1e9, settle_s=0.4, linger_s=0.05, overdue_s=0.5, join_timeout_s=5.0)


def log(*events: tuple[int, str, str, str]) -> Plan:
    return make_plan(
        [LogEvent(ts_ms, room, kind, user, f"{user} {ts_ms}", "", line) for line, (ts_ms, kind, user, room) in enumerate(events, 1)]
    )


@dataclass
class Cluster:
    """Delivers each message to the members of its room, each connection in its order; faults are made on demand."""

    members: dict[RoomID, dict[UIN, Connection]] = field(default_factory=dict)
    sent: list[tuple[str, UIN, RoomID]] = field(default_factory=list)
    refuse_opens: int = 0
    drop: Callable[[UIN, int], bool] = lambda uin, count: False
    repeat: bool = False
    delay_s: float = 0.0
    open_now: int = 0
    peak: int = 0
    opened: int = 0
    connections: list[Connection] = field(default_factory=list)

    async def open(
        self, uin: UIN, on_message: Callable[[UIN, RoomID, bytes], None], on_broken: Callable[[UIN, str], None]
    ) -> Connection:
        await asyncio.sleep(0)
        if self.refuse_opens:
            self.refuse_opens -= 1
            raise Unavailable("no gateway")
        self.opened += 1
        connection = Connection(self, uin, on_message, on_broken, gateway=1 + self.opened % 2)
        self.connections.append(connection)
        return connection

    async def publish(self, uin: UIN, room: RoomID, payload: bytes, done: Done) -> None:
        self.fan_out("sdk", uin, room, payload, done)

    def fan_out(self, path: str, uin: UIN, room: RoomID, payload: bytes, done: Done) -> None:
        self.sent.append((path, uin, room))
        self.open_now += 1
        self.peak = max(self.peak, self.open_now)
        count = len(self.sent)
        members = list(self.members.get(room, {}).values())

        def arrive() -> None:
            self.open_now -= 1
            for connection in members:
                if not connection.broken and not self.drop(connection.uin, count):
                    for _ in range(1 + self.repeat):
                        connection.on_message(connection.uin, room, payload)
            done("")

        asyncio.get_running_loop().call_later(self.delay_s, arrive)


@dataclass
class Connection:
    cluster: Cluster
    uin: UIN
    on_message: Callable[[UIN, RoomID, bytes], None]
    on_broken: Callable[[UIN, str], None]
    gateway: int
    publishes: bool = True
    broken: bool = False
    closed: bool = False

    async def join(self, room: RoomID) -> None:
        await asyncio.sleep(random.random() * 0.002)
        if self.broken:
            raise Unavailable("the connection is broken")
        self.cluster.members.setdefault(room, {})[self.uin] = self

    async def leave(self, room: RoomID) -> None:
        await asyncio.sleep(0)
        self.cluster.members[room].pop(self.uin, None)

    async def publish(self, room: RoomID, payload: bytes, done: Done) -> None:
        self.cluster.fan_out("mqtt", self.uin, room, payload, done)

    async def close(self) -> None:
        self.closed = True
        for members in self.cluster.members.values():
            if members.get(self.uin) is self:
                del members[self.uin]

    def break_off(self) -> None:
        self.broken = True
        for members in self.cluster.members.values():
            if members.get(self.uin) is self:
                del members[self.uin]
        self.on_broken(self.uin, "reset")


def chatter(rooms: int = 4, users: int = 12, lines: int = 400, seed: int = 1) -> Plan:
    chance = random.Random(seed)
    events = []
    for line in range(lines):
        room, user = f"r{chance.randrange(rooms)}", f"u{chance.randrange(users)}"
        kind = chance.choices(["msg", "join", "part"], [8, 1, 1])[0] if room != "r0" else "msg"
        events.append((line * 10, kind, user, room))
    return log(*events)


async def test_a_whole_log_is_delivered_exactly_as_the_plan_expects() -> None:
    plan, cluster = chatter(), Cluster()
    driver = Driver(plan, FAST, cluster)
    await driver.run()
    verdict = judge(driver.ledger)
    assert verdict.broken == []
    assert (verdict.sent, verdict.expected, verdict.delivered) == (plan.messages, plan.expected, plan.expected)
    assert driver.users.logins == plan.joins
    assert all(connection.closed for connection in cluster.connections)


async def test_each_pair_of_sender_and_room_keeps_one_path_and_both_paths_are_used() -> None:
    cluster = Cluster()
    await Driver(chatter(), FAST, cluster).run()
    paths: dict[tuple[UIN, RoomID], set[str]] = {}
    for path, uin, room in cluster.sent:
        paths.setdefault((uin, room), set()).add(path)
    assert all(len(used) == 1 for used in paths.values())
    assert {path for path, _, _ in cluster.sent} == {"sdk", "mqtt"}


async def test_no_more_than_the_bound_is_on_its_way() -> None:
    cluster = Cluster(delay_s=0.002)
    plan = chatter(lines=300)
    driver = Driver(plan, ReplayOptions(speed=1e9, settle_s=1, linger_s=0.01, max_open_messages=5), cluster)
    await driver.run()
    assert cluster.peak <= 5
    assert judge(driver.ledger).delivered == plan.expected


async def test_the_speed_factor_paces_by_the_log() -> None:
    plan = log((0, "msg", "a", "r"), (20_000, "msg", "a", "r"))
    started = asyncio.get_running_loop().time()
    await Driver(plan, ReplayOptions(speed=100, settle_s=1, linger_s=0.01), Cluster()).run()
    assert asyncio.get_running_loop().time() - started >= 0.2


async def test_a_leaver_gets_what_it_is_owed_before_it_goes() -> None:
    plan = log((0, "join", "a", "r"), (1, "join", "b", "r"), (2, "msg", "a", "r"), (3, "part", "b", "r"), (4, "msg", "a", "r"))
    driver = Driver(plan, FAST, Cluster(delay_s=0.1))
    await driver.run()
    verdict = judge(driver.ledger)
    assert (verdict.expected, verdict.delivered, verdict.alien) == (3, 3, 0)


@pytest.mark.slow
async def test_a_lost_delivery_holds_up_a_leaver_only_for_a_bounded_time_and_is_found() -> None:
    victim = uin_of_name("b")
    plan = log((0, "join", "a", "r"), (1, "join", "b", "r"), (2, "msg", "a", "r"), (3, "part", "b", "r"), (4, "msg", "a", "r"))
    driver = Driver(plan, FAST, Cluster(drop=lambda uin, count: uin == victim))
    async with asyncio.timeout(20):
        await driver.run()
    verdict = judge(driver.ledger)
    assert (verdict.sent, verdict.lost, verdict.exit_code) == (2, 1, 1)
    assert verdict.causes["unexplained"] == 1


async def test_repeated_deliveries_are_found() -> None:
    driver = Driver(log((0, "msg", "a", "r"), (1, "msg", "b", "r")), FAST, Cluster(repeat=True))
    await driver.run()
    verdict = judge(driver.ledger)
    assert (verdict.lost, verdict.repeated, verdict.exit_code) == (0, 4, 1)


@pytest.mark.slow
async def test_a_login_is_tried_again_while_gateways_refuse() -> None:
    cluster = Cluster(refuse_opens=3)
    driver = Driver(log((0, "msg", "a", "r")), FAST, cluster)
    await driver.run()
    assert judge(driver.ledger).broken == []
    assert driver.users.failed_logins == 0


async def test_a_login_that_never_succeeds_is_counted_and_the_replay_goes_on() -> None:
    options = ReplayOptions(speed=1e9, settle_s=0.2, linger_s=0.01, join_timeout_s=0.3)
    driver = Driver(log((0, "msg", "a", "r")), options, Cluster(refuse_opens=1_000_000))
    async with asyncio.timeout(20):
        await driver.run()
    assert driver.users.failed_logins == 1
    assert judge(driver.ledger, failed_logins=1).exit_code == 1


@pytest.mark.slow
async def test_users_of_a_dead_gateway_come_back_and_the_death_explains_what_they_missed() -> None:
    plan, cluster = chatter(rooms=2, users=6, lines=2_000), Cluster(delay_s=0.001)
    driver = Driver(plan, FAST, cluster)

    async def kill_gateway_1() -> None:
        while len(cluster.sent) < 500:
            await asyncio.sleep(0.001)
        for connection in [one for one in cluster.connections if one.gateway == 1 and not one.closed and not one.broken]:
            connection.break_off()

    killer = asyncio.create_task(kill_gateway_1())
    async with asyncio.timeout(60):
        await driver.run()
    await killer
    breaks = driver.users.breaks
    assert breaks
    assert all(found.resumed_us is not None for found in breaks)
    assert {found.gateway for found in breaks} == {1}
    death = Death(
        "gateway 0",
        "gateway",
        -1,
        1,
        min(found.at_us for found in breaks),
        max(found.resumed_us or 0 for found in breaks),
        frozenset(found.uin for found in breaks),
    )
    verdict = judge(driver.ledger, [death])
    assert verdict.broken == []
    assert verdict.causes[Cause.UNEXPLAINED.value] == 0
    assert sum(death.counts.values()) == verdict.lost


async def test_an_interrupt_ends_the_replay_with_what_was_sent() -> None:
    plan = log((0, "msg", "a", "r"), (10_000_000, "msg", "a", "r"))
    driver = Driver(plan, ReplayOptions(speed=1, settle_s=1, linger_s=0.01), Cluster())
    running = asyncio.create_task(driver.run())
    while not driver.ledger.sent:
        await asyncio.sleep(0.01)
    driver.interrupt()
    async with asyncio.timeout(20):
        await running
    assert (driver.ledger.sent, driver.ledger.lost, driver.interrupted) == (1, 0, True)


@pytest.mark.parametrize("name", ["speed", "settle_s", "max_open_messages"])
def test_an_option_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(Exception, match=name):
        ReplayOptions(**{name: 0}).validate()


def test_rooms_and_users_of_the_test_have_the_logs_ids() -> None:
    assert set(log((0, "msg", "a", "r")).rooms) == {room_of_name("r")}
