"""Measure how many records a link moves per CPU second: two endpoints in two processes on loopback.

Estimate, stated before the first run: a datagram costs the sender about 15 µs (a turn of the loop, packing, one sendto, its
share of the acknowledgements) and the receiver about 10 µs, a record about 0.3 µs on either side. So at 1 / 10 / 50 records a
datagram (one datagram a turn): sender 60 000 / 500 000 / 1 600 000, receiver 90 000 / 700 000 / 2 000 000 records per CPU second;
the aim is more than 500 000 on each side at 50.

Measured, two shared cores: sender 64 000 / 590 000 / 3 000 000, receiver 104 000 / 910 000 / 3 700 000; signed sender
51 000 / 510 000 / 2 200 000, receiver 84 000 / 760 000 / 2 500 000.

A second question: the cost inside a process, where sender and receiver share a loop, by datagrams and by its switch. Estimate: a
turn with a hand-over costs 12 µs, half of it the loop's, so 80 000 / 700 000 / 2 500 000 for both together, against 40 000 /
360 000 / 1 700 000 by datagrams; and a parcel whose outcome is waited for 25 µs instead of 80.

Measured, plain, two shared cores, busy with other work: datagrams 39 000 / 350 000 / 1 150 000, switch 100 000 / 750 000 /
1 950 000; waiting for each outcome 17 000 and 76 000.

    python benchmarks/cores/links_hop.py [--seconds 2] [--signed]

CPU time is user and system time of each process (`resource.getrusage`); wall-clock figures are noise on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import secrets
from multiprocessing.connection import Connection

from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.endpoint import Endpoint
from cluster.links.local import LocalSwitch
from cluster.links.options import LinkOptions
from cluster.trust.key_ring import KeyRing
from pixiu.ids import EndpointID
from pixiu.wire.record import Kind, encode, offsets

RECORD_BYTES = 140
RECEIVER = EndpointID(1)
SENDER = EndpointID(2)
TOKEN_EVERY = 16
"""Turns between two parcels with a token."""
MAX_UNSETTLED = 16
"""Maximum unresolved parcels with a token: 256 datagrams, four acknowledgements."""


class Handler:
    """Counts records; walks each batch as a role would."""

    def __init__(self) -> None:
        self.records = 0
        self.unsettled = 0
        self.lost = 0

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        if offsets(data, start, end, count) is None:
            return Outcome.MALFORMED
        self.records += count
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        self.unsettled -= len(settled)
        self.lost += sum(not handled for _, handled in settled)

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        pass

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""


def cpu_seconds() -> float:
    """Return the user and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def receive(pipe: Connection, ring: KeyRing | None) -> None:
    """Run the receiver's process: report (records, CPU seconds) at every request, until it is asked to stop."""
    handler = Handler()
    endpoint = Endpoint(RECEIVER, LinkOptions(), handler, ring=ring, role="broker")
    pipe.send(endpoint.bind("127.0.0.1", 0))
    await endpoint.start()
    done = asyncio.Event()

    def on_request() -> None:
        if pipe.recv() == "stop":
            done.set()
        else:
            pipe.send((handler.records, cpu_seconds()))

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_request)
    await done.wait()
    await endpoint.close()


def receiver_process(pipe: Connection, ring: KeyRing | None) -> None:
    """Start the event loop of the receiver's process."""
    asyncio.run(receive(pipe, ring))


async def measure(per_datagram: int, seconds: float, pipe: Connection, port: int, ring: KeyRing | None) -> None:
    """Send for `seconds` and print one line of figures."""
    handler = Handler()
    endpoint = Endpoint(EndpointID(SENDER + per_datagram), LinkOptions(), handler, ring=ring, role="broker")
    endpoint.bind("127.0.0.1", 0)
    await endpoint.start()
    endpoint.set_peers([Peer(RECEIVER, "receiver", "127.0.0.1", port)])
    batch = [encode(Kind.ROOM, 42, bytes(RECORD_BYTES - 40), 1)] * per_datagram
    loop = asyncio.get_running_loop()
    pipe.send("report")
    records_before, receiver_before = pipe.recv()
    before = cpu_seconds()
    until = loop.time() + seconds
    sent = turn = 0
    while loop.time() < until:
        if handler.unsettled >= MAX_UNSETTLED:
            await asyncio.sleep(0.0005)
            continue
        turn += 1
        token = turn if turn % TOKEN_EVERY == 0 else 0
        handler.unsettled += token > 0
        endpoint.send_records(RECEIVER, batch, token=token)
        sent += per_datagram
        await asyncio.sleep(0)
    limit = loop.time() + 5
    while handler.unsettled and loop.time() < limit:
        await asyncio.sleep(0.01)
    used = cpu_seconds() - before
    pipe.send("report")
    records, receiver_used = pipe.recv()
    records -= records_before
    receiver_used -= receiver_before
    stats = endpoint.stats()
    await endpoint.close()
    print(
        f"{per_datagram:>3} a datagram: sender {sent / used:>11,.0f}/CPU s   receiver {records / receiver_used:>11,.0f}/CPU s   "
        f"sent {sent:,} received {records:,} datagrams {stats.total.datagrams_sent:,} "
        f"dropped {stats.total.queue_drops:,} lost {stats.total.sent_lost:,}"
    )


async def measure_inside(per_batch: int, seconds: float, switch: LocalSwitch | None, waits: bool) -> float:
    """Send for `seconds` from one role of this process to another one. Returns records per CPU second of both. `switch`: None for
    datagrams; `waits`: each parcel waits for the outcome of the one before."""
    sender, receiver = Handler(), Handler()
    ends = [Endpoint(id_, LinkOptions(), each, switch=switch) for id_, each in ((SENDER, sender), (RECEIVER, receiver))]
    ports = [end.bind("127.0.0.1", 0) for end in ends]
    for end in ends:
        await end.start()
    ends[0].set_peers([Peer(RECEIVER, "receiver", "127.0.0.1", ports[1])])
    await asyncio.sleep(0.1)
    batch = [encode(Kind.ROOM, 42, bytes(RECORD_BYTES - 40), 1)] * per_batch
    loop = asyncio.get_running_loop()
    before, until, turn = cpu_seconds(), loop.time() + seconds, 0
    while loop.time() < until:
        while sender.unsettled >= (1 if waits else MAX_UNSETTLED):
            await asyncio.sleep(0)
        turn += 1
        token = turn if waits or turn % TOKEN_EVERY == 0 else 0
        sender.unsettled += token > 0
        ends[0].in_turn(lambda: ends[0].send_records(RECEIVER, batch, token=token, urgent=waits))  # noqa: B023
        await asyncio.sleep(0)
    while sender.unsettled:
        await asyncio.sleep(0.001)
    used = cpu_seconds() - before
    for end in ends:
        await end.close()
    assert not sender.lost
    return receiver.records / used


def inside(seconds: float) -> None:
    """Compare a hop by datagrams and by the switch, in one process."""
    for per_batch, waits in ((1, True), (1, False), (10, False), (50, False)):
        by_datagrams, by_switch = (
            asyncio.run(measure_inside(per_batch, seconds, switch, waits)) for switch in (None, LocalSwitch())
        )
        how = "each waits for its outcome" if waits else f"{per_batch} a batch"
        gain = by_switch / by_datagrams
        print(f"{how:>27}: datagrams {by_datagrams:>11,.0f}/CPU s   switch {by_switch:>11,.0f}/CPU s   {gain:.1f} x")


def main() -> None:
    """Run the three cases, and those inside a process."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=2.0, help="for each case")
    arguments.add_argument("--signed", action="store_true", help="authenticate datagrams")
    given = arguments.parse_args()
    ring = KeyRing({1: secrets.token_bytes(32)}, 1) if given.signed else None
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=receiver_process, args=(other, ring))
    process.start()
    try:
        port = pipe.recv()
        for per_datagram in (1, 10, 50):
            asyncio.run(measure(per_datagram, given.seconds, pipe, port, ring))
    finally:
        pipe.send("stop")
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    inside(given.seconds)


if __name__ == "__main__":
    main()
