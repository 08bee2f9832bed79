"""Do a thousand hostile clients among ten thousand hurt the others? Does QoS 1 at more than the cluster takes disconnect anybody?

Estimate: hostile clients cost what their budgets say (unfinished packets `gateway.memory_bytes`, filters 64 KiB a connection, joins
`joins_per_s` of a gateway) and 2 ms of each turn of its loop; the innocent keep their p99 within twice and
their connections. At QoS 1 the gateway stops reading: throughput stays at its best, and latency is back when the flood is over.

    python -m benchmarks.attacks.hostile --clients 9000 --hostile 1000     # at most 90 s; exit code 1: something did not hold
    python -m benchmarks.attacks.hostile --overload-s 30

The machine must allow as many open files, for each gateway and for the clients; the clients take CPU from the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import struct
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from comparison.ours import cluster
from comparison.wires import packet, string

ROOM_SIZE: Final = 100
"""Innocent clients of one room."""
TALKING: Final = 20
"""Rooms in which somebody sends twice a second; their members are measured."""
HALF_S: Final = 0.5
QUIET_S: Final = 20.0
ATTACK_S: Final = 20.0
"""Length of the quiet and of the attacked measurement, so that each p99 covers as many messages."""
AT_ONCE: Final = 200
TRIES: Final = 30
"""Tries of a client that a gateway does not admit yet, a second apart."""
KINDS: Final = ("half", "filters", "topics", "partial", "churn", "deaf")
LOUD_ROOM: Final = 77_777
"""Room to which the deaf subscribe and publish."""
TURN: Final = "000000"
"""Placeholder of the turn's number in a filter."""
MIB: Final = 1 << 20


def connect_packet(client: str) -> bytes:
    """Make a CONNECT of MQTT 3.1.1, without keep-alive."""
    return packet(0x10, string("MQTT") + bytes([4, 2]) + struct.pack(">H", 0) + string(client))


def publish_packet(topic: str, body: bytes, number: int = 0) -> bytes:
    """Make a PUBLISH: QoS 0, or QoS 1 with a number."""
    return packet(0x32 if number else 0x30, string(topic) + (struct.pack(">H", number) if number else b"") + body)


def subscribe_packet(number: int, *filters: str) -> bytes:
    """Make a SUBSCRIBE of QoS 0."""
    return numbered(0x82, number, b"".join(string(name) + b"\0" for name in filters))


def numbered(first: int, number: int, rest: bytes) -> bytes:
    """Make a packet that begins with its identifier."""
    return packet(first, struct.pack(">H", number) + rest)


LONG: Final = publish_packet("t" * 65_500, b"x")
UNFINISHED: Final = publish_packet("room/1", bytes(MIB - 64))[:-1]
LOUD: Final = publish_packet(f"room/{LOUD_ROOM}", bytes(8000))


class Client(asyncio.Protocol):
    """A connection that splits packets, and passes them to a callback."""

    def __init__(self, on_packet: Callable[[int, bytes], None] | None = None) -> None:
        self.on_packet, self.closed = on_packet, False
        self.transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._data = b""
        self._over, self._space = asyncio.Event(), asyncio.Event()
        self._space.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass on whole packets."""
        self._data += data
        while len(self._data) >= 2:
            size, shift, at = 0, 0, 1
            while at < len(self._data):
                byte = self._data[at]
                size |= (byte & 127) << shift
                shift, at = shift + 7, at + 1
                if byte < 128:
                    break
            else:
                return
            if len(self._data) < at + size:
                return
            kind, body, self._data = self._data[0], self._data[at : at + size], self._data[at + size :]
            if kind in (0x20, 0x90) and not self.ready.done():
                if kind == 0x20 and body[1]:
                    self.ready.set_exception(ConnectionError(f"refused: {body[1]}"))
                else:
                    self.ready.set_result(None)
            elif self.on_packet is not None:
                self.on_packet(kind, body)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is over."""
        self.closed = True
        self._over.set()
        self._space.set()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("closed by the gateway"))
            self.ready.exception()

    def pause_writing(self) -> None:
        """Note that the gateway does not read fast enough."""
        self._space.clear()

    def resume_writing(self) -> None:
        """Note that the gateway has read."""
        self._space.set()

    async def until_over(self) -> None:
        """Wait for the end of the connection."""
        await self._over.wait()

    async def until_space(self) -> None:
        """Wait until more may be written, or for the end."""
        await self._space.wait()

    async def open(self, port: int, name: str, topic: str = "") -> None:
        """Connect, and subscribe if there is a topic. Raises ConnectionError, TimeoutError."""
        loop = asyncio.get_running_loop()
        for left in reversed(range(TRIES)):
            try:
                await loop.create_connection(lambda: self, "127.0.0.1", port)
                assert self.transport is not None
                self.transport.write(connect_packet(name))
                async with asyncio.timeout(20):
                    await self.ready
                break
            except (OSError, TimeoutError):
                if not left:
                    raise
                await asyncio.sleep(1.0)  # the gateway admits a number of clients a second
                await self._forget()
        if topic and self.transport is not None:
            self.ready = loop.create_future()
            self.transport.write(subscribe_packet(1, topic))
            async with asyncio.timeout(30):
                await self.ready

    async def _forget(self) -> None:
        """Wait until the connection is closed, so that its end is not taken for the next one's."""
        if self.transport is not None:
            self.transport.abort()
            await self.until_over()
        self.closed, self.transport, self._data = False, None, b""
        self._over.clear()
        self.ready = asyncio.get_running_loop().create_future()


class Innocent:
    """Clients in rooms of a hundred; in some rooms somebody sends, with the time in the message."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self.clients: list[Client] = []
        self.latencies: list[float] = []
        self.sent = 0
        self._speakers: list[tuple[Client, str]] = []

    async def connect(self, count: int) -> None:
        """Connect all clients."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            client = Client(self._got)
            room = number // ROOM_SIZE + 1
            async with slots:
                await client.open(self._ports[number % len(self._ports)], f"innocent-{number}", f"room/{room}")
            self.clients.append(client)
            if not number % ROOM_SIZE and len(self._speakers) < TALKING:
                self._speakers.append((client, f"room/{room}"))

        await asyncio.gather(*(one(number) for number in range(count)))

    def _got(self, kind: int, body: bytes) -> None:
        if kind & 0xF0 == 0x30:
            self.latencies.append(time.monotonic() - struct.unpack(">d", body[-8:])[0])

    async def talk(self, seconds: float) -> tuple[float, float, float]:
        """Send messages. Returns p50 and p99 in seconds, and the share that arrived."""
        self.latencies, self.sent = [], 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for client, topic in self._speakers:
                if client.transport is not None and not client.closed:
                    client.transport.write(publish_packet(topic, struct.pack(">d", time.monotonic())))
                    self.sent += 1
                await asyncio.sleep(HALF_S / len(self._speakers))
        await asyncio.sleep(3.0)
        found = sorted(self.latencies)
        if not found:
            return float("inf"), float("inf"), 0.0
        return found[len(found) // 2], found[len(found) * 99 // 100], len(found) / (self.sent * ROOM_SIZE)

    @property
    def disconnected(self) -> int:
        """Number of clients that lost their connection."""
        return sum(client.closed for client in self.clients)


def bodies(kind: str, number: int) -> tuple[bytes, ...]:
    """Return the packets that a hostile client of this kind repeats. Made once, before any client connects: making them later
    would take CPU from the clients under attack."""
    if kind == "half":
        return (connect_packet(f"half-{number}")[:9],)
    if kind == "filters":
        return (b"".join(string(f"wide/{number}/{TURN}/{one}") + b"\0" for one in range(1000)),)
    if kind == "topics":
        return (LONG,)
    if kind == "partial":
        return (UNFINISHED,)
    if kind == "churn":
        rooms = [string(f"room/{900_000 + number * 100 + one}") for one in range(50)]
        return b"".join(name + b"\0" for name in rooms), b"".join(rooms)
    return (LOUD,)


async def attack(kind: str, number: int, port: int, made: tuple[bytes, ...]) -> None:
    """Run one hostile client, for ever; it starts again whatever the gateway does. `made`: its `bodies`."""
    while True:
        client = Client()
        with contextlib.suppress(OSError, TimeoutError):
            await _attack_once(kind, number, port, made, client)
        if client.transport is not None:
            client.transport.abort()
        await asyncio.sleep(1.0)


async def _attack_once(kind: str, number: int, port: int, made: tuple[bytes, ...], client: Client) -> None:
    if kind == "half":
        await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
        assert client.transport is not None
        client.transport.write(made[0])
        await client.until_over()
        return
    await client.open(port, f"{kind}-{number}")
    assert client.transport is not None
    client.transport.set_write_buffer_limits(high=MIB)
    write, turn = client.transport.write, 0
    if kind == "partial":
        write(made[0])
        await client.until_over()
        return
    if kind == "deaf":
        write(subscribe_packet(1, f"room/{LOUD_ROOM}"))
        client.transport.pause_reading()
        if number % 40:
            await client.until_over()
    while not client.closed:
        turn += 1
        packet_id = turn % 60_000 + 1
        if kind == "filters":  # a hundred times a thousand
            write(numbered(0x82, packet_id, made[0].replace(TURN.encode(), b"%06d" % turn)))
        elif kind == "churn":
            write(numbered(0x82, packet_id, made[0]) + numbered(0xA2, packet_id, made[1]))
        else:
            write(made[0])
        await asyncio.sleep(0.1)
        await client.until_space()  # polling ten times a second would take CPU from the clients under attack


async def attackers(ports: list[int], count: int, kinds: list[str]) -> None:
    """Run the hostile clients in a process of their own, until it is ended. The cluster has priority for the CPU, as hostile
    clients would have a machine of their own; Linux shares the CPU by session where it has `autogroup`. They start all at once
    when a line arrives."""
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    hosts = [(kinds[n % len(kinds)], n, ports[n // len(kinds) % len(ports)]) for n in range(count)]
    made = [bodies(kind, number) for kind, number, _ in hosts]
    print("ready", flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        return
    await asyncio.gather(*(attack(*host, body) for host, body in zip(hosts, made, strict=True)))


def resident_mib(pids: list[int]) -> float:
    """Return the memory of the largest process, MiB."""
    return max(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in pids) / MIB


async def hostile(clients: int, count: int, kinds: list[str]) -> bool:
    """Run the innocent clients alone, then with the hostile ones. Returns True if everything held."""
    async with cluster(gateways=2, settings=["gateway.max_connections=20000"]) as running:
        innocent = Innocent(running.mqtt_ports)
        began = time.monotonic()
        await innocent.connect(clients)
        gateways = running.pids["gateway"]
        print(f"{clients:,} innocent clients on {len(gateways)} gateways after {time.monotonic() - began:.0f} s", flush=True)
        p50, quiet, part = await innocent.talk(QUIET_S)
        before = resident_mib(gateways)
        print(
            f"alone:              p50 {p50 * 1000:7.1f} ms, p99 {quiet * 1000:7.1f} ms, {part:.2%} arrived, {before:.0f} MiB",
            flush=True,
        )
        command = [sys.executable, "-m", "benchmarks.attacks.hostile", "--attack", str(count)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(f"--port={port}" for port in running.mqtt_ports),
            *(f"--kind={kind}" for kind in kinds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        most = before
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if not await process.stdout.readline():  # starting a Python takes CPU from the clients under attack
                raise RuntimeError("the hostile clients did not start: what is above says why")
            process.stdin.write(b"\n")
            talking = asyncio.create_task(innocent.talk(ATTACK_S))
            while not talking.done():
                most = max(most, resident_mib(gateways))
                await asyncio.wait({talking}, timeout=0.5)
            p50, loud, part = talking.result()
        finally:
            process.kill()
            await process.wait()
        lost = innocent.disconnected
        print(f"with {count:,} hostile: p50 {p50 * 1000:7.1f} ms, p99 {loud * 1000:7.1f} ms, {part:.2%} arrived, {most:.0f} MiB")
        await show_closed(running.http_ports["gateway"])
        print(f"innocent clients disconnected: {lost}; memory grew by {most - before:.0f} MiB of 256 a gateway")
        return not lost and loud <= 2 * quiet and most - before <= 256


class Flood:
    """Publishers of QoS 1, each with a window of unacknowledged messages."""

    def __init__(self, ports: list[int], name: str) -> None:
        self._ports, self._name = ports, name
        self.clients: list[Client] = []
        self.acknowledged = 0
        self._window = 0
        self._topics: list[str] = []
        self._numbers: list[int] = []

    async def connect(self, count: int) -> None:
        """Connect them, each for a room of its own."""
        for number in range(count):
            client = Client(self._taking(number))
            await client.open(self._ports[number % len(self._ports)], f"{self._name}-{number}")
            self.clients.append(client)
            self._topics.append(f"room/{number + 1}")
            self._numbers.append(0)

    def _taking(self, number: int) -> Callable[[int, bytes], None]:
        def got(kind: int, _body: bytes) -> None:
            if kind == 0x40:
                self.acknowledged += 1
                if self._window:
                    self._send(number)

        return got

    def _send(self, number: int) -> None:
        transport = self.clients[number].transport
        if transport is not None and not self.clients[number].closed:
            self._numbers[number] = self._numbers[number] % 65_535 + 1
            transport.write(publish_packet(self._topics[number], bytes(200), self._numbers[number]))

    async def run(self, window: int, seconds: float) -> float:
        """Publish for `seconds`. Returns acknowledged messages a second."""
        self._window, before, began = window, self.acknowledged, time.monotonic()
        for number in range(len(self.clients)):
            for _ in range(window):
                self._send(number)
        await asyncio.sleep(seconds)
        rate = (self.acknowledged - before) / (time.monotonic() - began)
        self._window = 0
        return rate


async def overload(seconds: float) -> bool:
    """Run QoS 1 at a window that the cluster can handle, then at forty times that. Returns True if nobody was disconnected and
    everything else held."""
    async with cluster(gateways=1) as running:
        flood, probe = Flood(running.mqtt_ports, "flood"), Flood(running.mqtt_ports, "probe")
        await flood.connect(50)
        await probe.connect(1)
        best = await flood.run(20, 8.0)
        await asyncio.sleep(2.0)
        loud = await flood.run(800, seconds)
        ended = time.monotonic()
        while (before := probe.acknowledged) >= 0 and time.monotonic() < ended + 30:
            asked = time.monotonic()
            probe._send(0)
            while probe.acknowledged == before and time.monotonic() < ended + 30:
                await asyncio.sleep(0.005)
            if time.monotonic() - asked < 0.1:
                break
        recovered = time.monotonic() - ended
        lost = sum(client.closed for client in [*flood.clients, *probe.clients])
        print(f"QoS 1: {best:,.0f}/s with 1,000 on their way, {loud:,.0f}/s with 40,000 ({loud / best:.0%}) for {seconds:.0f} s")
        print(f"disconnected: {lost}; an answer within 100 ms again after {recovered:.1f} s")
        await show_closed(running.http_ports["gateway"])
        return not lost and loud >= 0.9 * best and recovered <= 5


async def show_closed(ports: list[int]) -> None:
    """Print the number of connections that gateways have closed, by reason."""
    for port in ports:
        page = await asyncio.to_thread(_page, port)
        lines = [line for line in page.splitlines() if "connections_closed_total" in line and not line.startswith("#")]
        print(", ".join(line.partition("reason=")[2].replace("}", "") for line in lines if not line.endswith(" 0.0")))


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=9000)
    parser.add_argument("--hostile", type=int, default=1000)
    parser.add_argument("--kind", action="append", choices=KINDS, help="one kind of hostile client; may be given again")
    parser.add_argument("--overload-s", type=float, default=0.0)
    parser.add_argument("--attack", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.attack:
        asyncio.run(attackers(options.port, options.attack, options.kind or list(KINDS)))
        return 0
    held = asyncio.run(
        overload(options.overload_s)
        if options.overload_s
        else hostile(options.clients, options.hostile, options.kind or list(KINDS))
    )
    print("all held" if held else "not all held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
