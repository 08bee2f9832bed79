"""Move topics from a real nsqd to a listener by the migration proxy: stock clients produce and consume in each phase, and one topic
goes through all phases and back while it is written and read.

python -m tests.clients.nsq.migration --listener 127.0.0.1:4150:4151 --target zk://127.0.0.1:2181/pubsub
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

from comparison.processes import free_port
from tests.clients.nsq.matrix import CLIENTS, nsqd, play
from tests.clients.nsq.script import CHECKS
from tests.support.nsq import NsqClient, NsqError

PHASES = (0, 1, 2, 3)
LEFT = 50
"""Messages that each step of the moving topic publishes."""
LIMIT_S = 60.0


class Sides:
    """An nsqd with its nsqlookupd, a listener, and the proxy for both."""

    def __init__(self, target: str, tcp: str, lookup: str, listener: tuple[str, str]) -> None:
        self.tcp, self.lookup, (self.new_tcp, self.new_http) = tcp, lookup, listener
        self._ends = ["--old", lookup, "--new", self.new_http, "--target", target]
        self.proxy = f"127.0.0.1:{free_port()}"

    @contextlib.contextmanager
    def proxied(self) -> Iterator[None]:
        """Run the proxy."""
        command = (sys.executable, "-m", "nsqdoor.migration", "serve", *self._ends, "--port", self.proxy.split(":")[1])
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: ask(self.proxy, "/ping") == "OK")
            yield
        finally:
            process.terminate()
            process.wait(30)

    def phase(self, topic: str, number: int) -> str:
        """Bring a topic into a phase; why it was refused, or nothing."""
        command = (sys.executable, "-m", "nsqdoor.migration", "phase", topic, str(number), *self._ends)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return done.stderr if done.returncode else ""

    def producer(self, topic: str) -> str:
        """Where the proxy sends producers."""
        found = ask(self.proxy, f"/lookup?topic={topic}&access=w")["producers"][0]
        return f"{found['broadcast_address']}:{found['tcp_port']}"

    def consumers(self, topic: str) -> set[int]:
        """Where it sends consumers: ports."""
        return {each["tcp_port"] for each in ask(self.proxy, f"/lookup?topic={topic}")["producers"]}


def ask(address: str, path: str) -> Any:
    """An answer by HTTP."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
        text = reply.read().decode()
    return json.loads(text) if text[:1] == "{" else text


def wait_for(condition: Any) -> None:
    """Wait until something holds."""

    async def look() -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(OSError, urllib.error.URLError):
                    if condition():
                        return
                await asyncio.sleep(0.1)

    asyncio.run(look())


async def publish(address: str, topic: str, bodies: list[bytes]) -> None:
    """Publish, each message until it is answered."""
    async with NsqClient(int(address.split(":")[1])) as client:
        for body in bodies:
            assert await client.say(f"PUB {topic}".encode(), body) == b"OK"


async def consume(sides: Sides, topic: str, got: Counter[bytes]) -> None:
    """Consume as a client does: look up, and connect to each nsqd that is named."""
    connected: dict[int, asyncio.Task[None]] = {}

    async def of(port: int) -> None:
        with contextlib.suppress(ConnectionError, NsqError):
            async with NsqClient(port) as client:
                await client.say(f"SUB {topic} work".encode())
                client.tell(b"RDY 10")
                while True:
                    message = await client.next()
                    got[message.body] += 1
                    client.tell(b"FIN " + message.id)

    try:
        while True:
            with contextlib.suppress(urllib.error.URLError):
                for port in await asyncio.to_thread(sides.consumers, topic):
                    if port not in connected or connected[port].done():
                        connected[port] = asyncio.create_task(of(port))
            await asyncio.sleep(0.2)
    finally:
        for task in connected.values():
            task.cancel()
        await asyncio.gather(*connected.values(), return_exceptions=True)


async def moves(sides: Sides) -> list[str]:
    """Move a topic forth and back while it is written and read."""
    topic, got, sent, said = f"moving-{secrets.token_hex(4)}", Counter[bytes](), 0, []
    await publish(sides.tcp, topic, [b"0"])
    await asyncio.to_thread(wait_for, lambda: sides.consumers(topic))
    for number in (1, 2, 3, 2, 1, 0):
        if number == PHASES[-1]:  # nobody reads, so the old side still holds what comes now
            await publish(sides.tcp, topic, [b"left"])
            refused = await asyncio.to_thread(sides.phase, topic, number)
            said.append(
                "phase 3 while the old side holds a message: " + ("refused" if "still holds" in refused else f"WRONG {refused}")
            )
        reader = asyncio.create_task(consume(sides, topic, got))
        async with asyncio.timeout(LIMIT_S):
            while why := await asyncio.to_thread(sides.phase, topic, number):
                assert "still holds" in why, why
                await asyncio.sleep(0.2)
        where = await asyncio.to_thread(sides.producer, topic)
        bodies = [b"%d" % (sent + at) for at in range(1, LEFT + 1)]
        sent += LEFT
        await publish(where, topic, bodies)
        async with asyncio.timeout(LIMIT_S):
            while not all(got[body] for body in bodies):
                await asyncio.sleep(0.1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        side = "new" if where == sides.new_tcp else "old"
        said.append(f"phase {number}: producers at the {side} side, {len(got)} messages, {sum(got.values()) - len(got)} repeated")
    return said


def main() -> int:
    """Run everything; exit code 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listener", required=True, metavar="HOST:TCP:HTTP")
    parser.add_argument("--target", required=True)
    parser.add_argument("--moving", action="store_true", help="only the topic that goes through all phases")
    wanted = parser.parse_args()
    host, new_tcp, new_http = wanted.listener.split(":")
    wrong = False
    with nsqd() as (tcp, lookup):
        sides = Sides(wanted.target, tcp, lookup, (f"{host}:{new_tcp}", f"{host}:{new_http}"))
        with sides.proxied():
            for line in asyncio.run(moves(sides)):
                wrong |= "WRONG" in line
                print(line, flush=True)
            for number in () if wanted.moving else PHASES:
                for name in CLIENTS:
                    topic = f"phase-{secrets.token_hex(4)}"
                    asyncio.run(publish(sides.tcp, topic, [b"first"]))
                    wait_for(lambda topic=topic: sides.consumers(topic))
                    empty(sides, topic)
                    problems = [why for each in range(1, number + 1) if (why := sides.phase(topic, each))]
                    found = play(name, sides.producer(topic), sides.proxy, topic)
                    wrong |= bool(problems) or any(found[check] != "ok" for check in CHECKS)
                    checks = "".join(f"{check} {found[check]:6}" for check in CHECKS)
                    print(f"phase {number} {name:8}{checks}", *problems, flush=True)
    return int(wrong)


def empty(sides: Sides, topic: str) -> None:
    """Empty a topic of the old side."""
    address = ask(sides.lookup, f"/lookup?topic={topic}")["producers"][0]
    where = f"{address['broadcast_address']}:{address['http_port']}"
    request = urllib.request.Request(f"http://{where}/topic/empty?topic={topic}", method="POST")
    urllib.request.urlopen(request, timeout=10).close()


if __name__ == "__main__":
    sys.exit(main())
