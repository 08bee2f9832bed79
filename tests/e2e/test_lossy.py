"""Real processes behind a network that loses 5 %, repeats 2 % and reorders 5 % of all datagrams, in both directions.

    gateways, routers, relays, brokers, proxies ── 127.0.0.2 ── tests.support.lossy ── 127.0.0.1

Memberships become equal, signals with receipts arrive exactly once, those without are lost as often as the arithmetic says, and
every lost record is a counted gap. `PIXIU_LOSSY_TIMES=10` makes everything ten times as long (`make lossy`); `PIXIU_LOSSY_SEED`
is the network's seed. What was measured is printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from math import sqrt
from statistics import median

import pytest

import pixiu
from cluster.links.datagrams.head import RECORDS
from onebox.embedded import EmbeddedZooKeeper
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.fleet import WAIT_S, Fleet, Player
from tests.support.lossy import Counts, Faults, LossyNetwork, Path
from tests.support.waiting import until

TIMES = int(os.environ.get("PIXIU_LOSSY_TIMES", "1"))
SEED = int(os.environ.get("PIXIU_LOSSY_SEED", "1"))
LOSSY = Faults(lost=0.05, repeated=0.02, reordered=0.05)
USERS = 240
ROOMS = 60
PLAYERS = 100
IN_ONE_ROOM = 20
"""Half of them on each gateway, of whom all get what it gets: more make no share more exact, and are most of what a run costs."""
SIGNALS = 1000 * TIMES
APART_S = 0.004
PAUSE_S = 0.002
"""Between two signals, so that each copy travels in a datagram of its own: else they would be lost together."""
ARGUMENTS = [
    "--brokers",
    "1",
    "--broker-replicas",
    "3",
    "--routers",
    "2",
    "--router-replicas",
    "2",
    "--relays",
    "1",
    "--proxies",
    "3",
]
RoomsOf = Callable[[int], Sequence[int]]
"""The rooms of the n-th player."""

pytestmark = pytest.mark.timeout(300 + 120 * TIMES)


class LossyFleet(Fleet):
    """The cluster's processes and the network between them."""

    def __init__(self, cluster: LocalCluster, network: LossyNetwork) -> None:
        super().__init__(cluster)
        self.network = network


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyFleet]:
    """Three proxies and three replicas of one broker partition, so that a signal's copies have nothing in common."""
    folder = tmp_path_factory.mktemp("lossy")
    with EmbeddedZooKeeper(folder / "zookeeper") as server:
        registry = f"zk://{server.address}/pubsub"
        network = LossyNetwork(registry, SEED)
        network.start()
        try:
            with running_cluster(folder, "--registry", registry, *ARGUMENTS, *network.settings()) as cluster:
                yield LossyFleet(cluster, network)
        finally:
            network.stop()


@contextlib.asynccontextmanager
async def players(
    fleet: LossyFleet, number: int, first_uin: int, rooms_of: RoomsOf, *, chat: bool = False
) -> AsyncIterator[list[Player]]:
    """Connected, in their rooms, on all gateways in turn; every router and broker knows it."""
    ports = fleet.mqtt_ports
    found = [Player(ports[index % len(ports)], first_uin + index, rooms_of(index), chat=chat) for index in range(number)]
    try:
        await asyncio.gather(*(player.come() for player in found))
        await fleet.until_equal()
        yield found
    finally:
        await asyncio.gather(*(player.client.close() for player in found))


async def one_by_one(actions: Sequence[Coroutine[None, None, None]]) -> None:
    """Begin them a few milliseconds apart, so that each has datagrams of its own, and wait until all are done."""
    tasks = []
    for action in actions:
        tasks.append(asyncio.create_task(action))
        await asyncio.sleep(APART_S)
    await asyncio.gather(*tasks)


async def send_signals(fleet: LossyFleet, room_of: Callable[[int], int], *, receipts: bool) -> list[bytes]:
    """Signals one after the other; returns their payloads when the outcome of all is known."""
    payloads = [b"%d" % number for number in range(SIGNALS)]
    async with pixiu.connect(fleet.target) as px:
        pending = []
        for number, payload in enumerate(payloads):
            pending.append(px.room(room_of(number)).signal_soon(payload, receipt=receipts))
            await asyncio.sleep(PAUSE_S)
        for receipt in pending:
            # Without a receipt this is a broker's acceptance, which may be lost as well; with one it may come too late on a
            # machine that stands still for a second. Whether the signal came is for the players to say.
            with contextlib.suppress(pixiu.RemoteError):
                await receipt
        if receipts:
            # A receipt is waited for less than a second: on a machine that is busy with other things many are too late.
            assert px.stats().signals.delivered > 0.1 * SIGNALS
    return payloads


async def the_end(fleet: LossyFleet, room: int, found: Sequence[Player]) -> None:
    """What is sent last, over a whole network, comes last: nothing else is under way."""
    await settle(fleet)
    async with pixiu.connect(fleet.target) as px:
        await px.room(room).send(b"the end")
    await until(lambda: all(player.got[b"the end"] for player in found), lambda: "the end did not reach everybody")
    for player in found:
        del player.got[b"the end"]


async def settle(fleet: LossyFleet) -> None:
    """With a whole network again: wait until nothing is held back and every sender's last item is known to its receiver."""
    async with asyncio.timeout(WAIT_S):
        while fleet.network.held:
            await asyncio.sleep(0.02)
        while any(link["sent"] != link["received"] + link["gaps"] for link in (await fleet.links()).values()):
            await asyncio.sleep(0.1)


async def test_memberships_are_equal_within_ten_heartbeats_of_the_last_join(fleet: LossyFleet) -> None:
    """Users join, leave and move on, all under loss."""
    chance = random.Random(SEED)
    for round_ in range(TIMES):
        with fleet.network.faults(LOSSY):
            async with players(fleet, USERS, 100_000, lambda _: chance.sample(range(7000, 7000 + ROOMS), 3)) as users:
                moves = []
                for user in users:
                    do = chance.random()
                    if do < 0.3:
                        moves.append(user.move(next(port for port in fleet.mqtt_ports if port != user.port)))
                    elif do < 0.5:
                        moves.append(user.leave(min(user.rooms)))
                    elif do < 0.6:
                        moves.append(user.go())
                    else:
                        moves.append(user.join(*chance.sample(range(7000, 7000 + ROOMS), 2)))
                await one_by_one(moves)
                before, start = await fleet.heartbeats(), time.monotonic()
                await one_by_one([user.join(7000 + ROOMS) for user in users if user.rooms])
                confirmed = time.monotonic()
                await fleet.until_equal()
                end = time.monotonic()
                after = await fleet.heartbeats()
                # Counted by those who heartbeat, so that a machine without CPU does not make it more.
                heartbeats = median(value - before.get(path, 0.0) for path, value in after.items())
                print(f"\nround {round_}: equal {end - start:.1f} s, {heartbeats:.0f} heartbeats after the first of the last joins")
                print(f"(the last of them was confirmed after {confirmed - start:.1f} s)")
                assert heartbeats <= 10
                on_gateways = [json.loads(await fleet.page(process, "/health"))["service"] for process in fleet.of("gateway")]
                assert sum(service["presences"] for service in on_gateways) == sum(len(user.rooms) for user in users)
            await fleet.until_equal()
        lost = sum(counts.items_lost for path, counts in fleet.network.counts().items() if path[1].startswith("router:"))
        assert lost > 0, "no message of a gateway was lost: this has tested nothing"


async def test_signals_with_receipts_reach_each_player_exactly_once(fleet: LossyFleet) -> None:
    """Ten signals, or more, to each of a hundred players, each in a room of his own."""
    async with players(fleet, PLAYERS, 200_000, lambda index: [8000 + index]) as found:
        with fleet.network.faults(LOSSY):
            payloads = await send_signals(fleet, lambda number: 8000 + number % PLAYERS, receipts=True)
        wanted = [Counter(payloads[index::PLAYERS]) for index in range(PLAYERS)]
        await until(
            lambda: all(want <= player.got for want, player in zip(wanted, found, strict=True)),
            lambda: f"{sum((want - player.got).total() for want, player in zip(wanted, found, strict=True))} are missing",
        )
        await settle(fleet)
        assert [player.got for player in found] == wanted, "something came twice"


async def test_a_receipt_of_a_room_says_that_a_gateway_has_delivered(fleet: LossyFleet) -> None:
    """A room on two gateways: each signal reaches everybody on one of them at least, and nobody twice. The other gateway may miss
    one, as often as without a receipt, because nobody repeats what was answered."""
    room = 8400
    async with players(fleet, IN_ONE_ROOM, 250_000, lambda _: [room]) as found:
        with fleet.network.faults(LOSSY):
            payloads = await send_signals(fleet, lambda _: room, receipts=True)
        await the_end(fleet, room, found)
        assert {count for player in found for count in player.got.values()} == {1}, "something came twice"
        on_gateway = [[player.got for player in found if player.port == port] for port in fleet.mqtt_ports]
        missed = [[payload for payload in payloads if not all(got[payload] for got in gots)] for gots in on_gateway]
        print(f"\nmissed by each gateway of {SIGNALS}: {[len(some) for some in missed]}")
        assert not set.intersection(*map(set, missed))
        expected = (1 - (1 - LOSSY.lost) ** 2) ** 3
        for some in missed:
            assert len(some) / SIGNALS < expected + 5 * sqrt(expected * (1 - expected) / SIGNALS)


async def test_records_lost_on_each_hop_are_the_gaps_counted(fleet: LossyFleet) -> None:
    """Room messages: sent = received + gaps on each path, and the network's own count is that of the gaps."""
    room, messages = 8600, 1000 * TIMES
    async with players(fleet, PLAYERS, 400_000, lambda index: [room + index % 20]) as found:
        await settle(fleet)
        before, lost_before = await fleet.links(), fleet.network.counts()
        with fleet.network.faults(LOSSY):
            async with pixiu.connect(fleet.target) as px:
                for number in range(messages):
                    px.room(room + number % 20).send_soon(b"%d" % number)
                    await asyncio.sleep(PAUSE_S)
                with contextlib.suppress(pixiu.PixiuError):
                    await px.flush()
        await settle(fleet)
        after, lost_after = await fleet.links(), fleet.network.counts()
        for sender, receiver in (("proxy", "broker"), ("broker", "gateway")):
            paths = [path for path in after if path[0].startswith(f"{sender}:") and path[1].startswith(f"{receiver}:")]
            change = {path: after[path] - before.get(path, Counter()) for path in paths}
            lost = {path: lost_items(lost_after, path) - lost_items(lost_before, path) for path in paths}
            assert {path: counts["sent"] - counts["received"] for path, counts in change.items()} == lost
            assert {path: counts["gaps"] for path, counts in change.items()} == lost
            total = sum(counts["sent"] for counts in change.values())
            print(f"\n{sender} -> {receiver}: {total} sent, {sum(lost.values())} lost, all of them gaps")
            assert sum(lost.values()) > 0
        assert {count for player in found for count in player.got.values()} <= {1}, "something came twice"


async def test_chat_to_online_devices_arrives_but_for_what_the_gaps_counted(fleet: LossyFleet) -> None:
    """Each message goes to one device over two hops, so that every record that the network loses is a message that is missing."""
    messages, first = 1000 * TIMES, 600_000
    async with players(fleet, PLAYERS, first, lambda _: [], chat=True) as found:
        await settle(fleet)
        before, lost_before = await fleet.links(), fleet.network.counts()
        with fleet.network.faults(LOSSY._replace(types=frozenset({RECORDS}))):
            async with pixiu.connect(fleet.target) as px:
                for number in range(messages):
                    px.user(first + number % PLAYERS).chat_soon(b"%d" % number)
                    await asyncio.sleep(PAUSE_S)
                with contextlib.suppress(pixiu.PixiuError):
                    await px.flush()
                failures = px.stats().failures_by_code
        await settle(fleet)
        after, lost_after = await fleet.links(), fleet.network.counts()
        total = 0
        for sender, receiver in (("proxy", "relay"), ("relay", "gateway")):
            paths = [path for path in after if path[0].startswith(f"{sender}:") and path[1].startswith(f"{receiver}:")]
            lost = {path: lost_items(lost_after, path) - lost_items(lost_before, path) for path in paths}
            gaps = {path: after[path]["gaps"] - before.get(path, Counter())["gaps"] for path in paths}
            assert gaps == lost
            assert sum(lost.values()) > 0
            total += sum(lost.values())
        arrived = sum(player.got.total() for player in found)
        print(f"\n{messages} sent, {arrived} arrived, {total} gaps, told: {dict(failures)}")
        assert messages - arrived == total
        assert {count for player in found for count in player.got.values()} == {1}, "something came twice"
        assert set(failures) <= {"DROPPED"}


def lost_items(counts: dict[Path, Counts], path: Path) -> int:
    """Items that the network lost on a path."""
    return counts[path].items_lost if path in counts else 0
