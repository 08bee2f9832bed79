"""The script that every driver of a stock client plays, for clients in Python.

A driver is called with HOST PORT TRANSPORT VERSION [CA]: `tcp`, `tls` or `ws`, and `3.1.1` or `5`. It prints a JSON object: each
check with "ok", or what went wrong. All topics begin with a random prefix, so that drivers may share a broker.

    connect    CONNACK accepts
    qos0..2    a message of that QoS arrives once, and with it
    wildcard   p/+/c and p/# get p/b/c
    retained   a message that was retained before arrives at a new subscription with RETAIN, and not after it was cleared
    will       a client that is cut off leaves its will, one that disconnects does not
    shared     of two members of $share/g/… each message reaches one
    resume     a session gets what was published while it was away, with QoS 1 and 2, once and in order
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

WAIT_S = 10.0
"""Longest wait for a message, seconds."""
QUIET_S = 0.5
"""Time for which nothing must come, seconds."""
SHARED = 10


class Message(NamedTuple):
    topic: str
    payload: bytes
    qos: int
    retain: bool


@dataclass(frozen=True)
class Where:
    host: str
    port: int
    transport: str
    version: str
    ca: str


class Client(Protocol):
    """A stock client behind one face."""

    messages: asyncio.Queue[Message]

    async def connect(self, will: Message | None = None, keep: bool = False) -> bool:
        """Connect; raises if it is refused. `keep`: with a session that outlives the connection. Returns False if the server says
        that there is no session, and True where the client does not show it."""

    async def subscribe(self, topic: str, qos: int) -> None:
        """Subscribe; raises if the filter is refused."""

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        """Publish, and wait for what the QoS promises."""

    async def cut(self) -> None:
        """End the connection without a DISCONNECT."""

    async def disconnect(self) -> None:
        """End it with one."""


class Script:
    """Plays the checks with clients that `make` makes, each with a name of its own."""

    def __init__(self, make: Callable[[str], Client]) -> None:
        self._prefix = f"clients/{secrets.token_hex(6)}"
        self._make, self._number = make, 0

    def client(self) -> Client:
        return self._make(self._name())

    def _name(self) -> str:
        self._number += 1
        return f"{self._prefix.replace('/', '-')}-{self._number}"

    async def run(self, without: Collection[str] = ()) -> dict[str, str]:
        checks: dict[str, Callable[[], Awaitable[None]]] = {
            "connect": self._connect, "qos0": lambda: self._qos(0), "qos1": lambda: self._qos(1), "qos2": lambda: self._qos(2),
            "wildcard": self._wildcard, "retained": self._retained, "will": self._will, "shared": self._shared,
            "resume": self._resume,
        }  # fmt: skip
        found: dict[str, str] = {}
        for name, check in checks.items():
            if name in without:
                continue
            try:
                async with asyncio.timeout(3 * WAIT_S):
                    await check()
                found[name] = "ok"
            except Exception as error:  # whatever a client raises is the finding
                found[name] = f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__
        return found

    async def _connect(self) -> None:
        client = self.client()
        await client.connect()
        await client.disconnect()

    async def _qos(self, qos: int) -> None:
        topic, sender, receiver = f"{self._prefix}/qos{qos}", self.client(), self.client()
        await receiver.connect()
        await receiver.subscribe(topic, qos)
        await sender.connect()
        for number in range(5):
            await sender.publish(topic, b"%d" % number, qos)
        got = [await next_of(receiver) for _ in range(5)]
        expect([message.payload for message in got], [b"%d" % number for number in range(5)])
        expect({message.qos for message in got}, {qos})
        await nothing(receiver)
        await sender.disconnect()
        await receiver.disconnect()

    async def _wildcard(self) -> None:
        base, receivers, sender = f"{self._prefix}/w", [self.client(), self.client()], self.client()
        for receiver, topic in zip(receivers, (f"{base}/+/c", f"{base}/#"), strict=True):
            await receiver.connect()
            await receiver.subscribe(topic, 0)
        await sender.connect()
        await sender.publish(f"{base}/b/c", b"both", 1)
        await sender.publish(f"{base}/b/d", b"one", 1)
        expect((await next_of(receivers[0])).topic, f"{base}/b/c")
        expect([(await next_of(receivers[1])).payload for _ in range(2)], [b"both", b"one"])
        await nothing(receivers[0])
        for client in (*receivers, sender):
            await client.disconnect()

    async def _retained(self) -> None:
        topic, sender = f"{self._prefix}/retained", self.client()
        await sender.connect()
        await sender.publish(topic, b"kept", 1, retain=True)
        first = self.client()
        await first.connect()
        await first.subscribe(topic, 1)
        got = await next_of(first)
        expect((got.payload, got.retain), (b"kept", True))
        await sender.publish(topic, b"", 1, retain=True)
        expect((await next_of(first)).retain, False)
        second = self.client()
        await second.connect()
        await second.subscribe(topic, 1)
        await nothing(second)
        for client in (sender, first, second):
            await client.disconnect()

    async def _will(self) -> None:
        topic, watcher, cut, left = f"{self._prefix}/will", self.client(), self.client(), self.client()
        await watcher.connect()
        await watcher.subscribe(topic, 1)
        await left.connect(Message(topic, b"left", 1, False))
        await left.disconnect()
        await cut.connect(Message(topic, b"cut", 1, False))
        await cut.cut()
        expect((await next_of(watcher)).payload, b"cut")
        await nothing(watcher)
        await watcher.disconnect()

    async def _shared(self) -> None:
        topic, members, sender = f"{self._prefix}/shared", [self.client(), self.client()], self.client()
        for member in members:
            await member.connect()
            await member.subscribe(f"$share/g/{topic}", 1)
        await sender.connect()
        for number in range(SHARED):
            await sender.publish(topic, b"%d" % number, 1)
        got: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            while len(got) < SHARED:
                for member in members:
                    while not member.messages.empty():
                        got.append(member.messages.get_nowait().payload)
                await asyncio.sleep(0.02)
        expect(sorted(got), sorted(b"%d" % number for number in range(SHARED)))
        for member in members:
            await nothing(member)
        for client in (*members, sender):
            await client.disconnect()

    async def _resume(self) -> None:
        base, name, sender = f"{self._prefix}/resume", self._name(), self.client()
        first = self._make(name)
        await first.connect(keep=True)
        for qos in (1, 2):
            await first.subscribe(f"{base}/{qos}", qos)
        await first.disconnect()
        await sender.connect()
        for number in range(5):
            for qos in (1, 2):
                await sender.publish(f"{base}/{qos}", b"%d" % number, qos)
        again = self._make(name)
        if not await again.connect(keep=True):
            raise AssertionError("no session present")
        got = [await next_of(again) for _ in range(10)]
        for qos in (1, 2):
            mine = [(message.payload, message.qos) for message in got if message.topic == f"{base}/{qos}"]
            expect(mine, [(b"%d" % number, qos) for number in range(5)])
        await nothing(again)
        for client in (again, sender):
            await client.disconnect()


def expect(got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{got!r}, not {wanted!r}")


async def next_of(client: Client) -> Message:
    async with asyncio.timeout(WAIT_S):
        return await client.messages.get()


async def nothing(client: Client) -> None:
    """Nothing more has come, and nothing comes."""
    await asyncio.sleep(QUIET_S)
    if not client.messages.empty():
        raise AssertionError(f"one message too many: {client.messages.get_nowait()!r}")


def main(make: Callable[[Where, str], Client]) -> None:
    """Play the script with the arguments of the command line, and print what was found."""
    host, port, transport, version, *ca = sys.argv[1:]
    where = Where(host, int(port), transport, version, ca[0] if ca else "")
    print(json.dumps(asyncio.run(Script(lambda name: make(where, name)).run())), flush=True)
