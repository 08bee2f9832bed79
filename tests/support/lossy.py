"""A network that loses, repeats and reorders datagrams between real processes, at run time and by a seed.

    A, bound to 127.0.0.1:7001                            B, bound to 127.0.0.1:7005
      │ to where B wants its datagrams: 127.0.0.2:7005       ▲
      └────────────▶ the network, as 127.0.0.2:7005          │ from 127.0.0.2:7001, which is where A wants its own
                     loses, repeats, holds back ─────────────┘

Each process is told `advertised_udp_host=127.0.0.2`; the network finds it in the registry and stands at that address with
its port number. Streams (gRPC) go past it. Every path from one process to another has a random sequence of its own, so
that the n-th datagram of a path has the same fate in every run with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from cluster.links.datagrams.head import CONTROL, HEAD, HEAD_SIZE, RECORDS, Type
from pixiu.discovery.node import Node
from pixiu.discovery.target import parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper

OUTSIDE: Final = "127.0.0.2"
INSIDE: Final = "127.0.0.1"
ROLES: Final = ("router", "relay", "broker", "proxy", "gateway")
MAX_DATAGRAM: Final = 1 << 16
DRAIN: Final = 64
HELD_S: Final = (0.002, 0.02)
"""How long a datagram is held back, so that later ones overtake it."""
START_TIMEOUT_S: Final = 60.0
Result = TypeVar("Result")
Path = tuple[str, str]
"""Sender and receiver, each as metrics name a peer: role:host:port."""


class Faults(NamedTuple):
    """The chance of each fault for each datagram of the given types."""

    lost: float = 0.0
    repeated: float = 0.0
    reordered: float = 0.0
    types: frozenset[int] = frozenset(Type)


@dataclass(slots=True)
class Counts:
    """What became of the datagrams of one path. Items are records and control messages."""

    datagrams: int = 0
    lost: int = 0
    repeated: int = 0
    reordered: int = 0
    items: int = 0
    items_lost: int = 0
    chance: random.Random = field(default_factory=random.Random, repr=False)


class LossyNetwork:
    """See the module. A thread of its own with an event loop.

    Args:
        registry: zk://HOST:PORT/ROOT of the cluster.
        seed: of all chances.
    """

    def __init__(self, registry: str, seed: int) -> None:
        self._address = parse_address(registry)
        self._seed = seed
        self._faults = Faults()
        self._delays: Mapping[tuple[str, str], float] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._names: dict[int, tuple[str, str]] = {}
        """Port → the process's name in metrics, and the one that its chances follow from."""
        self._counts: dict[tuple[int, int], Counts] = {}
        self._held = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="lossy network")

    @staticmethod
    def settings() -> list[str]:
        """What `pixiu up` has to be told."""
        return [part for role in ROLES for part in ("--set", f"{role}.advertised_udp_host={OUTSIDE}")]

    def start(self) -> None:
        """Returns when it watches the registry."""
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_S), "the lossy network did not start"

    def stop(self) -> None:
        """Close everything."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def faults(self, faults: Faults) -> Iterator[None]:
        """These faults inside the block, none after it."""
        self._faults = faults
        try:
            yield
        finally:
            self._faults = Faults()

    def delay(self, seconds: Mapping[tuple[str, str], float]) -> None:
        """From now on datagrams from one role to another take so much longer; they keep their order."""
        self._call(lambda: setattr(self, "_delays", dict(seconds)))

    @property
    def held(self) -> int:
        """Datagrams that are held back now."""
        return self._held

    def counts(self) -> dict[Path, Counts]:
        """A copy of what was counted, by path."""
        return self._call(lambda: {self._path(ports): replace(counts) for ports, counts in self._counts.items()})

    def _call(self, function: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(START_TIMEOUT_S)

    def _path(self, ports: tuple[int, int]) -> Path:
        sender, receiver = (self._names.get(port, (f"unknown:{port}", ""))[0] for port in ports)
        return sender, receiver

    async def _run(self) -> None:
        zookeeper = ZooKeeper(self._address.hosts)
        await zookeeper.connect()
        discovery = Discovery(zookeeper, self._address.root, self._on_view)
        await discovery.start()
        self._ready.set()
        await self._stop.wait()
        await discovery.close()
        await zookeeper.close()
        for sock in self._sockets.values():
            self._loop.remove_reader(sock.fileno())
            sock.close()

    def _on_view(self, view: View) -> None:
        for node in view.nodes:
            if node.udp_address[0] == OUTSIDE:
                self._names[node.port] = f"{node.role}:{node.address}", _place(node)
                if node.port not in self._sockets:
                    self._open(node.port)

    def _open(self, port: int) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
        sock.bind((OUTSIDE, port))
        self._sockets[port] = sock
        self._loop.add_reader(sock.fileno(), self._readable, sock, port)

    def _readable(self, sock: socket.socket, receiver: int) -> None:
        for _ in range(DRAIN):
            try:
                data, (_, sender) = sock.recvfrom(MAX_DATAGRAM)
            except BlockingIOError:
                return
            self._arrived(data, sender, receiver)

    def _arrived(self, data: bytes, sender: int, receiver: int) -> None:
        counts = self._counts.get((sender, receiver))
        if counts is None:
            counts = self._counts[sender, receiver] = Counts()
            places = [self._names.get(port, ("", str(port)))[1] for port in (sender, receiver)]
            counts.chance.seed(f"{self._seed} {places[0]} {places[1]}")
        kind, items = 0, 0
        if len(data) >= HEAD_SIZE:
            _, _, kind, _, _, count, *_ = HEAD.unpack_from(data)
            items = count if kind in (RECORDS, CONTROL) else 0
        faults = self._faults if kind in self._faults.types else Faults()
        # As many numbers for every datagram, whatever the faults are: its fate does not depend on those of others.
        lose, repeat, hold, delay_s = (*(counts.chance.random() for _ in range(3)), counts.chance.uniform(*HELD_S))
        counts.datagrams += 1
        counts.items += items
        if lose < faults.lost or sender not in self._sockets:
            counts.lost += 1
            counts.items_lost += items
            return
        if repeat < faults.repeated:
            counts.repeated += 1
            self._later(data, sender, receiver, delay_s)
        if hold < faults.reordered:
            counts.reordered += 1
            self._later(data, sender, receiver, delay_s)
        else:
            self._pass_on(data, sender, receiver)

    def _later(self, data: bytes, sender: int, receiver: int, delay_s: float) -> None:
        self._held += 1
        self._loop.call_later(delay_s, self._release, data, sender, receiver)

    def _release(self, data: bytes, sender: int, receiver: int) -> None:
        self._held -= 1
        self._pass_on(data, sender, receiver)

    def _pass_on(self, data: bytes, sender: int, receiver: int) -> None:
        hop = (_role(self._names[sender][0]), _role(self._names[receiver][0])) if self._delays else ("", "")
        if hop in self._delays:
            self._loop.call_later(self._delays[hop], self._sockets[sender].sendto, data, (INSIDE, receiver))
        else:
            self._sockets[sender].sendto(data, (INSIDE, receiver))


def _role(name: str) -> str:
    """Of a process, by its name in metrics."""
    return name.partition(":")[0]


def _place(node: Node) -> str:
    """The same in every run, as far as processes register in the same order."""
    return f"{node.role} {node.partition} {node.replica}"
