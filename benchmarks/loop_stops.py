"""For how long does one turn of an event loop last while something large happens, and what do heartbeats cost?

    router      a gateway with 200,000 memberships starts anew; half of 500,000 memberships move at a doubling
    gateway     a client sends 1 MiB of PINGREQ; 50,000 joins wait for a router, which comes
    scrape      a page of metrics, with 300 peers, of which each is in another state
    heartbeats  1,000 peers, of a gateway: those that it sends, and those that it answers

Estimate: every one of these is worked off in slices: 128 entries of a map at 12 µs, 256 packets at 8 µs, 256 messages at 20 µs, 64
samples at 3 µs, so that no turn is above 5 ms; heartbeats are 2,000 datagrams a second at 10 µs, 2 % of a core.

    python -m benchmarks.loop_stops [router gateway scrape heartbeats] [--tenth]

One process, no network. A turn's time is the thread's CPU time, which others on the machine do not make longer; the collector of
garbage is set as in a process of the cluster. The exit code is 1 when a turn was above 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

from cluster.links.api import PeerState
from cluster.links.sender import Address
from cluster.links.stats import Counts, LinkStats, PeerStats
from cluster.membership import events as membership
from cluster.membership.lww_map import Update
from cluster.runtime.collector import Collector
from cluster.runtime.contract import END_OF_TURN, Settled, Tick
from cluster.runtime.metrics import Metrics, Sample, link_samples
from gateway import events as ev
from gateway.core import Core as GatewayCore
from pixiu.ids import EndpointID, gateway_msg_id
from router.core import Core as RouterCore
from tests.cluster.links.world import Node as LinkNode
from tests.cluster.links.world import World as LinkWorld
from tests.gateway.world import World, mqtt_client

P = ParamSpec("P")
R = TypeVar("R")
AIM_S: Final = 0.005
ROUTER, OTHER, BROKER, GATEWAY = (EndpointID(number) for number in (10, 11, 20, 30))
INSTANCE: Final = 3
ROOMS_EACH: Final = 4
"""Members of a room of the map, on average."""
AT_ONCE: Final = 500
"""Messages of a step in which a map is filled."""
PEERS: Final = 1000
HEARTBEATS_S: Final = 10.0
TURN_S: Final = 0.005
"""Until an answer is in."""


class Turns:
    """The turns of what is measured, one line in the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.longest_s = 0.0
        self._turns = 0
        self._sum_s = 0.0

    def took(self, seconds: float) -> None:
        """One is over."""
        self._turns += 1
        self._sum_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def step(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Measure one."""
        begin = time.thread_time()
        found = do(*args, **kwargs)
        self.took(time.thread_time() - begin)
        return found

    def show(self) -> float:
        """Print. Returns the longest, seconds."""
        each = f"longest {self.longest_s * 1000:6.2f} ms"
        print(f"{self._what:<62}{self._turns:>7,} turns, {self._sum_s:6.2f} CPU s, {each}", flush=True)
        return self.longest_s


async def turning(turns: Turns, until: Callable[[], bool]) -> None:
    """Measure the turns of this event loop until something is so."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    last = time.thread_time()

    def turned() -> None:
        nonlocal last
        now = time.thread_time()
        turns.took(now - last)
        if until():
            done.set_result(None)
            return
        loop.call_soon(turned)
        last = time.thread_time()

    loop.call_soon(turned)
    await done


def router_with(count: int) -> RouterCore:
    """A router's core that knows so many memberships of one gateway."""
    core = RouterCore(endpoint=ROUTER, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=3600.0)
    core.step(membership.StoreOpened(None), 0.0)
    for _ in range(2):
        core.step(view(), 0.0)
    for first in range(0, count, AT_ONCE):
        part = range(first, min(first + AT_ONCE, count))
        updates = [Update(gateway_msg_id(INSTANCE, 1, n + 1), n // ROOMS_EACH, n + 1, True) for n in part]
        core.step(membership.MessagesReceived(GATEWAY, updates), 0.0)
    return core


def view(version: int = 1, partitions: int = 1, generation: int = 1) -> membership.ClusterChanged:
    """What the registry says: one router, one broker, one gateway."""
    gateways = (membership.Gateway(GATEWAY, INSTANCE, generation),)
    brokers = membership.OtherRole(1, replicas=(membership.Replica(BROKER, 0),))
    return membership.ClusterChanged(version, partitions, (), brokers, gateways)


def purge(what: str, core: RouterCore, change: membership.ClusterChanged, count: int) -> float:
    """The turns from a change of the view until so many entries are dropped."""
    turns, now = Turns(what), 1.0
    turns.step(core.step, change, now)
    while core.membership.counters.purged < count:
        now = max(now, core.next_deadline())
        turns.step(core.step, Tick(), now)
    return turns.show()


def router(part: int) -> list[float]:
    """Memberships that vanish."""
    dead, moved = 200_000 // part, 500_000 // part
    core = router_with(dead)
    gone = purge(f"a gateway with {dead:,} memberships starts anew", core, view(2, generation=2), dead)
    del core
    return [gone, purge(f"of {moved:,} memberships half move", router_with(moved), view(2, partitions=2), moved // 2)]


def gateway(part: int) -> list[float]:
    """What clients do."""
    return [asyncio.run(pings((1 << 20) // part)), joins(50_000 // part)]


async def pings(size: int) -> float:
    """One client's PINGREQs, each of two bytes, in reads of a quarter."""
    connection, wire = mqtt_client(World())
    turns = Turns(f"a client sends {size:,} bytes of PINGREQ")
    reads, taken = [b"\xc0\x00" * (size // 8)] * 4, 0
    wire.writes.clear()

    def answered() -> bool:
        nonlocal taken
        taken += sum(map(len, wire.writes))
        wire.writes.clear()
        if reads and wire.reading:
            turns.step(connection.data_received, reads.pop())
        return not reads and taken >= size // 8 * 8

    await turning(turns, answered)
    return turns.show()


def all_of(core: GatewayCore, events: tuple[ev.Event, ...], now: float) -> list[ev.Effect]:
    """The effects of several events."""
    return [effect for event in events for effect in core.step(event, now)]


def joins(count: int) -> float:
    """Clients join without a router; then one comes, which confirms in the next turn what it got."""
    core = GatewayCore(instance=INSTANCE, generation=1)
    turns = Turns(f"{count:,} joins wait for a router, which comes")
    core.step(ev.RoutersChanged(1, ()), 0.0)
    for client in range(1, count + 1):
        core.step(ev.Opened(client, client, False), 0.0)
        core.step(ev.Join(client, 1, [(client // ROOMS_EACH + 1, None)]), 0.0)
    now = 1.0
    for _ in range(100):  # half a second without it
        turns.step(core.step, Tick(), now)
        turns.step(core.step, END_OF_TURN, now)
        now += TURN_S
    turns.step(core.step, ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), now)
    answered, under_way = 0, list[ev.SendMembership]()
    while answered < count:
        now += TURN_S
        confirmed = [message.id for effect in under_way for message in effect.messages]
        settled = [(effect.token, True) for effect in under_way if effect.token]
        events = (Settled(settled), ev.Confirmed(ROUTER, confirmed), Tick(), END_OF_TURN)
        effects = turns.step(all_of, core, events, now)
        under_way = [effect for effect in effects if isinstance(effect, ev.SendMembership)]
        answered += sum(isinstance(effect, ev.Answer) for effect in effects)
    return turns.show()


def scrape(_part: int) -> list[float]:
    """One page."""
    return [asyncio.run(page(300))]


async def page(count: int) -> float:
    """Of so many peers, all of them with counts of their own, and 1,000 other samples."""
    metrics = Metrics("gateway")
    states = list(PeerState)
    peers = {EndpointID(n): PeerStats("broker", states[n % len(states)], Counts(records_sent=n), 0, n, 0, 0) for n in range(count)}

    def samples() -> Iterator[Sample]:
        for number in range(1000):
            yield Sample("members", number, {"room": str(number)})

    metrics.collect_from(lambda: link_samples(LinkStats(Counts(), {}, {}, {}), peers.items(), str))
    metrics.collect_from(samples)
    turns = Turns(f"a scrape with {count} peers")
    asked = asyncio.create_task(metrics.render())
    await turning(turns, asked.done)
    assert b"pixiu_gateway_members" in asked.result()
    return turns.show()


def heartbeats(part: int) -> list[float]:
    """A gateway's core and its peers', which heartbeat it, too; the time is that of the gateway's alone."""
    world = LinkWorld()
    own, *others = [world.node(1 + number) for number in range(1 + PEERS // part)]
    nodes: dict[Address, LinkNode] = {}
    for number, node in enumerate((own, *others)):
        node.address = (f"10.0.{number // 200}.{number % 200}", 7000)
        nodes[node.address] = node
    for node in others:
        node.know(own)
    own.know(*others)
    due = {node.id: node.core.next_deadline(world.now) for node in nodes.values()}
    spent, datagrams, end = 0.0, 0, world.now + HEARTBEATS_S
    arriving: list[tuple[LinkNode, bytes, Address]] = []
    while world.now < end:
        world.now += TURN_S
        taken, arriving = arriving, []
        polled = {node.id for node in nodes.values() if due[node.id] <= world.now}
        active = {node.id: node for node, _, _ in taken} | {node.id: node for node in nodes.values() if node.id in polled}
        for node in active.values():
            start = time.thread_time()
            for receiver, data, sender in taken:
                if receiver is node:
                    node.receive(data, sender)
            left = node.poll() if node.id in polled else node.turn()
            due[node.id] = node.core.next_deadline(world.now)
            if node is own:
                spent += time.thread_time() - start
                datagrams += len(left) + sum(receiver is own for receiver, _, _ in taken)
            arriving += [(nodes[address], data, node.address) for data, address in node.sent]
            node.sent.clear()
    print(
        f"heartbeats with {len(others):,} peers: {spent / HEARTBEATS_S:.2%} of a core, {datagrams / HEARTBEATS_S:,.0f} datagrams a "
        f"second, {spent / datagrams * 1e6:.1f} µs each, without system calls"
    )
    return []


WHAT: Final = {"router": router, "gateway": gateway, "scrape": scrape, "heartbeats": heartbeats}


def known(name: str) -> str:
    """One of `WHAT`. Not argparse's `choices`, which takes no empty list of them."""
    if name not in WHAT:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WHAT)}")
    return name


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", type=known, help=f"{', '.join(WHAT)}; all without one")
    parser.add_argument("--tenth", action="store_true", help="a tenth of everything")
    options = parser.parse_args()
    collector = Collector()
    collector.start()
    longest = [found for name in options.what or WHAT for found in WHAT[name](10 if options.tenth else 1)]
    collector.stop()
    return int(max(longest, default=0.0) > AIM_S)


if __name__ == "__main__":
    sys.exit(main())
