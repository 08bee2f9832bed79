"""What a link between machines does with messages of mixed sizes, with many senders, and with a sender that waits.

    mixed    one sender, 1,000 records a second in 100 rooms at an MTU of 1,400 bytes; one in ten, or two, of 2 KB; one in ten of 60
    many     64 senders, 3,000 records a second in all, the receive buffer of a stock kernel (212,992 bytes)
    waiting  one parcel at a time: the next one leaves when the last was acknowledged, beside other traffic
    published  the same through a whole cluster: a publisher that waits until each message was accepted

Estimate, stated before the first run: a record of 200 bytes is handled 0.2 ms after it was sent, whatever the others' sizes,
because nothing makes it wait for them: p50 below 1 ms, p99 below 10 ms, all of them there; many senders the same. One at
a time: two wake-ups of 0.1 ms each, some 3,000 a second.

Measured on two cores that others used as well, before fragments and orders, and with them: one in ten of 2 KB 97.8 % and p50 98 ms,
100 % and 0.1 ms; one in two 37 % and 199 ms, 100 % and 0.1 ms; one in ten of 60 KB 98.5 % and 110 ms, 100 % and 0.2 ms; many
senders 32 % and 198 ms, 100 % and 0.1 ms; one at a time 90 a second and 3,700; published 80 and 1,040, at a third of the CPU.

    python -m benchmarks.links [mixed many waiting published] [--seconds 3]

But for `published`, all endpoints live in one process, with real sockets and streams; a record's age comes from its body.
`late`: records that came after a later one of the same room.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc.aio

import pixiu
from benchmarks.harness import cluster
from benchmarks.harness import cpu_seconds as cpu_of
from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.endpoint import Endpoint
from cluster.links.options import LinkOptions
from pixiu.ids import EndpointID
from pixiu.wire.record import Kind, encode, split

MTU: Final = 1400
STOCK_BUFFER: Final = 106_496
"""What is asked for; the kernel gives twice as much, as it does to those who ask for nothing."""
SMALL: Final = 200
ROOMS: Final = 100
SENDERS: Final = 64
TICK_S: Final = 0.001
RECEIVER: Final = EndpointID(1 << 40)
STAMP: Final = struct.Struct("<dQ")


class Handler:
    """Writes down how old each record is when it is handled, and counts what became of parcels."""

    def __init__(self) -> None:
        self.ages: dict[int, list[float]] = {}
        self.last: dict[tuple[int, int], int] = {}
        self.late = 0
        self.settled = asyncio.Event()

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        now = asyncio.get_running_loop().time()
        for record in split(data[start:end], count):
            sent, number = STAMP.unpack_from(record, 40)
            self.ages.setdefault(len(record), []).append(now - sent)
            room = peer, int.from_bytes(record[24:32], "little")
            self.late += number < self.last.get(room, 0)
            self.last[room] = number
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        if any(token == 1 for token, _ in settled):
            self.settled.set()

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        pass

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""


class Process:
    """An endpoint with a gRPC server on the same port number, as a role's process has it."""

    def __init__(self, id_: EndpointID, options: LinkOptions) -> None:
        self.id = id_
        self.handler = Handler()
        self.endpoint = Endpoint(id_, options, self.handler)
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self.port = 0

    async def start(self) -> None:
        self.endpoint.attach(self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.endpoint.bind("127.0.0.1", self.port)
        await self.server.start()
        await self.endpoint.start()

    @property
    def peer(self) -> Peer:
        return Peer(self.id, "test", "127.0.0.1", self.port)

    async def stop(self) -> None:
        await self.endpoint.close()
        await self.server.stop(None)


@asynccontextmanager
async def processes(
    senders: int, options: LinkOptions, receiver_options: LinkOptions | None = None
) -> AsyncIterator[tuple[Process, list[Process]]]:
    """A receiver and senders that know each other, gone afterwards."""
    receiver = Process(RECEIVER, receiver_options or options)
    sending = [Process(EndpointID(number + 1), options) for number in range(senders)]
    everybody = [receiver, *sending]
    try:
        for process in everybody:
            await process.start()
        receiver.endpoint.set_peers([process.peer for process in sending])
        for process in sending:
            process.endpoint.set_peers([receiver.peer])
        while any(process.endpoint.state(RECEIVER) is not PeerState.ALIVE for process in sending):
            await asyncio.sleep(0.01)
        yield receiver, sending
    finally:
        for process in everybody:
            await process.stop()


def make_record(rng: random.Random, size: int, number: int, now: float) -> bytes:
    """A record of `size` bytes in one of the rooms, with the time in its body."""
    body = STAMP.pack(now, number) + bytes(size - 40 - STAMP.size)
    return encode(Kind.ROOM, rng.randrange(1, ROOMS + 1), body, number)


async def send(senders: list[Process], rate: int, large: int, every: int, seconds: float) -> int:
    """Send at a rate, each `every`-th record `large` bytes long (0: none). Returns how many were sent."""
    loop = asyncio.get_running_loop()
    rng = random.Random(1)
    begun, number = loop.time(), 0
    while (now := loop.time()) < begun + seconds:
        while number < (now - begun) * rate:
            number += 1
            size = large if every and number % every == 0 else SMALL
            # With many one has most to say; all of them are active, and share the receiver's buffer.
            sender = senders[0] if number % 10 else senders[number // 10 % len(senders)]
            sender.endpoint.send_records(RECEIVER, [make_record(rng, size, number, loop.time())])
        await asyncio.sleep(TICK_S)
    return number


def percentile(ages: list[float], share: float) -> float:
    """So many milliseconds were enough for this share."""
    return sorted(ages)[min(len(ages) - 1, int(len(ages) * share))] * 1000 if ages else float("nan")


async def case(name: str, senders: int, rate: int, large: int, every: int, seconds: float, stock: bool = False) -> None:
    """Run one case and print a line."""
    options = LinkOptions(loopback_mtu_bytes=MTU)
    receiving = LinkOptions(loopback_mtu_bytes=MTU, receive_buffer_bytes=STOCK_BUFFER) if stock else options
    async with processes(senders, options, receiving) as (receiver, sending):
        before = cpu_seconds()
        sent = await send(sending, rate, large, every, seconds)
        await asyncio.sleep(0.5)
        used = cpu_seconds() - before
        ages = receiver.handler.ages
        arrived = sum(map(len, ages.values()))
        small, big = ages.get(SMALL, []), ages.get(large, [])
        sizes = f"   {large:,} bytes p50 {percentile(big, 0.5):6.1f} p99 {percentile(big, 0.99):6.1f}" if every else ""
        print(
            f"{name:<34} arrived {arrived / sent:6.1%}   "
            f"small p50 {percentile(small, 0.5):6.1f} ms p99 {percentile(small, 0.99):6.1f}{sizes}   "
            f"late {receiver.handler.late}   {used / sent * 1e6:.0f} us CPU a record",
            flush=True,
        )


async def waiting(name: str, beside: bool, seconds: float) -> None:
    """One parcel at a time, whose sender waits for its acknowledgement."""
    async with processes(1, LinkOptions()) as (_, (sender,)):
        loop = asyncio.get_running_loop()
        task = loop.create_task(send([sender], 1000, 0, 0, seconds)) if beside else None
        rng = random.Random(2)
        until, number, ages = loop.time() + seconds, 0, []
        before = cpu_seconds()
        while (now := loop.time()) < until:
            number += 1
            sender.handler.settled.clear()
            send_urgently(sender, make_record(rng, SMALL, number, now))
            await asyncio.wait_for(sender.handler.settled.wait(), 5)
            ages.append(loop.time() - now)
        used = cpu_seconds() - before
        if task is not None:
            await task
        print(
            f"{name:<34} {number / seconds:7,.0f} a second   p50 {percentile(ages, 0.5):6.2f} ms p99 {percentile(ages, 0.99):6.2f}"
            f"   {used / number * 1e6:.0f} us CPU each",
            flush=True,
        )


async def published(name: str, seconds: float) -> None:
    """One room message at a time through real processes: the next one is sent when the last was accepted."""
    async with cluster() as running, pixiu.connect(running.registry) as px:
        room = px.room(42)
        await room.send(b"warm")
        loop = asyncio.get_running_loop()
        before = cpu_of(running.servers)
        until, ages = loop.time() + seconds, []
        while (now := loop.time()) < until:
            await room.send(bytes(100))
            ages.append(loop.time() - now)
        used = cpu_of(running.servers) - before
    print(
        f"{name:<34} {len(ages) / seconds:7,.0f} a second   p50 {percentile(ages, 0.5):6.2f} ms p99 {percentile(ages, 0.99):6.2f}"
        f"   {used / len(ages) * 1e6:.0f} us CPU each, all servers",
        flush=True,
    )


def send_urgently(sender: Process, record: bytes) -> None:
    """Send one for whose acknowledgement somebody waits."""
    sender.endpoint.send_records(RECEIVER, [record], token=1, urgent=True)


def cpu_seconds() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run(cases: list[str], seconds: float) -> None:
    """Run these cases."""
    if "mixed" in cases:
        await case("1,000/s, all 200 bytes", 1, 1000, 0, 0, seconds)
        await case("1,000/s, every 10th 2 KB", 1, 1000, 2048, 10, seconds)
        await case("1,000/s, every 2nd 2 KB", 1, 1000, 2048, 2, seconds)
        await case("1,000/s, every 10th 60 KB", 1, 1000, 60_000, 10, seconds)
    if "many" in cases:
        await case("3,000/s, 64 senders, stock buffer", SENDERS, 3000, 0, 0, seconds, stock=True)
    if "waiting" in cases:
        await waiting("one at a time", False, seconds)
        await waiting("one at a time beside 1,000/s", True, seconds)
    if "published" in cases:
        await published("published one at a time", seconds)


def main() -> None:
    """Run the cases that are named, or all."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", nargs="*", help="mixed, many, waiting, published; all without one")
    arguments.add_argument("--seconds", type=float, default=3.0, help="for each case")
    given = arguments.parse_args()
    asyncio.run(run(given.cases or ["mixed", "many", "waiting", "published"], given.seconds))


if __name__ == "__main__":
    main()
