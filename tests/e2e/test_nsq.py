"""NSQ's clients at listeners in front of durable topics, and topics that move from one side to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from functools import partial

import pytest

import pixiu
from tests.support.nsq import Got, Http, NsqClient, NsqError, http, listener, mpub
from tests.support.roles import WAIT_S, Roles
from tests.support.waiting import until

GROUP = ("topic-a", "topic-b")


async def start(roles: Roles) -> None:
    """One group of two replicas, an admin, a proxy."""
    await roles.layout(topic=1)
    for name in GROUP:
        roles.start(name, partition=0)
    roles.start("admin-a")
    roles.start("proxy-a")
    await roles.running(*GROUP, "admin-a", "proxy-a")


async def test_clients_publish_consume_and_give_back(roles: Roles) -> None:
    await start(roles)
    tcp, web = await listener(roles, "nsq-a", "--max-attempts", "3")
    async with http() as asks, NsqClient(tcp) as producer, NsqClient(tcp, deflate=False, msg_timeout=30_000) as consumer:
        assert await asks.get(web, "/ping") == "OK"
        assert await asks.get(web, "/lookup?topic=orders") is None
        # Topics and channels are made when they are first named. The first channel gets what was published before it.
        assert await producer.say(b"PUB orders", b"one") == b"OK"
        assert await producer.say(b"MPUB orders", mpub(b"two", b"three")) == b"OK"
        began = time.time_ns()
        assert await producer.say(b"DPUB orders 300", b"later") == b"OK"
        assert await asks.post(web, "/pub?topic=orders", b"by http") == (200, "OK")
        assert await consumer.say(b"SUB orders billing") == b"OK"
        consumer.tell(b"RDY 10")
        found: dict[bytes, Got] = {}
        given_back = 0
        while len(found) < 5:
            message = await consumer.next()
            if message.body == b"two" and message.attempts < 3:
                consumer.tell(b"REQ %s 0" % message.id)
                given_back += 1
                continue
            consumer.tell(b"TOUCH " + message.id)
            consumer.tell(b"FIN " + message.id)
            found[message.body] = message
        assert (given_back, found[b"two"].attempts, set(found)) == (2, 3, {b"one", b"two", b"three", b"later", b"by http"})
        assert time.time_ns() - began >= 300_000_000
        assert abs(found[b"one"].time_ns - began) < 600 * 1_000_000_000

        looked = await asks.get(web, "/lookup?topic=orders")
        assert (looked["channels"], [each["tcp_port"] for each in looked["producers"]]) == (["billing"], [tcp])

        async def drained() -> bool:
            channels = (await asks.get(web, "/stats?format=json&topic=orders"))["topics"][0]["channels"]
            return [each["depth"] + each["in_flight_count"] + each["deferred_count"] for each in channels] == [0]

        await until(drained, "everything is acknowledged")
        with pytest.raises(NsqError, match="E_FIN_FAILED"):
            await consumer.say(b"FIN " + found[b"one"].id)
        with pytest.raises(NsqError, match="E_BAD_TOPIC"):
            await producer.say(b"PUB orders#ephemeral", b"x")
    async with pixiu.connect(roles.target()) as px:
        described = await px.topics.describe("orders")
        assert described.retain_acknowledged
        assert described.channels["billing"].max_attempts == 3
        state = await px.topics.channel_state("orders", "billing")
        assert sum(each.dead for each in state) == 0


async def test_a_paused_client_gets_nothing_and_a_closed_one_gives_all_back(roles: Roles) -> None:
    await start(roles)
    tcp, _ = await listener(roles, "nsq-a")
    async with NsqClient(tcp) as producer, NsqClient(tcp) as first, NsqClient(tcp) as second:
        assert await first.say(b"SUB orders work") == b"OK"
        assert await producer.say(b"MPUB orders", mpub(b"0", b"1", b"2", b"3")) == b"OK"
        first.tell(b"RDY 3")
        held = {(await first.next()).body for _ in range(3)}
        first.tell(b"RDY 0")
        assert await first.say(b"CLS") == b"CLOSE_WAIT"
        assert await second.say(b"SUB orders work") == b"OK"
        second.tell(b"RDY 10")
        message = await second.next()
        assert message.body not in held
        second.tell(b"FIN " + message.id)
        await first.__aexit__()
        again = [await second.next() for _ in range(3)]
        assert {each.body for each in again} == held
        assert {each.attempts for each in again} == {2}
        for each in again:
            second.tell(b"FIN " + each.id)


class Traffic:
    """Producers and consumers that begin again whenever their connection is over."""

    def __init__(self, asks: Http, ports: dict[str, tuple[int, int]]) -> None:
        self._asks, self._ports = asks, ports
        self.stored: set[bytes] = set()
        self.got: Counter[bytes] = Counter()
        self.finish = False

    async def produce(self, name: str) -> None:
        """Publish until told to end; what is not answered is published again, under another number."""
        number = 0
        while not self.finish:
            with contextlib.suppress(ConnectionError, NsqError):
                async with NsqClient(self._ports[name][0]) as client:
                    while not self.finish:
                        bodies = [b"%s-%d" % (name.encode(), number + at) for at in range(5)]
                        number += 5
                        for body in bodies:
                            client.tell(b"PUB orders", body)
                        for body in bodies:
                            assert await client.answer() == b"OK"
                            self.stored.add(body)
            await asyncio.sleep(0.05)

    async def consume(self, name: str) -> None:
        """Consume until cancelled."""
        while True:
            with contextlib.suppress(ConnectionError, NsqError):
                async with NsqClient(self._ports[name][0]) as client:
                    await client.say(b"SUB orders work")
                    client.tell(b"RDY 20")
                    while True:
                        message = await client.next()
                        self.got[message.body] += 1
                        client.tell(b"FIN " + message.id)
            await asyncio.sleep(0.05)

    @property
    def missing(self) -> int:
        """Messages that were confirmed and did not come."""
        return len(self.stored - self.got.keys())


async def test_nothing_confirmed_is_lost_when_listeners_and_leaders_are_killed(roles: Roles) -> None:
    await start(roles)
    names = ("nsq-a", "nsq-b")
    ports = {name: await listener(roles, name) for name in names}
    async with http() as asks:
        looked = [len((await asks.get(web, "/nodes"))["producers"]) for _, web in ports.values()]
        assert max(looked) == 2
        traffic = Traffic(asks, ports)
        producing = [asyncio.create_task(traffic.produce(name)) for name in names]
        consuming = [asyncio.create_task(traffic.consume(name)) for name in names]

        async def grows(by: int) -> None:
            least = len(traffic.stored) + by
            await until(lambda: len(traffic.stored) >= least, "messages are confirmed")

        await grows(200)
        await roles.kill("nsq-a")
        await grows(200)
        # Its node is in the registry until the session ends, and a listener of the same name has another port.
        ports["nsq-a"] = await listener(roles, "nsq-a")
        await grows(200)
        nodes = dict(zip(GROUP, await roles.running(*GROUP), strict=True))
        leads = {name: await roles.metric(node, "leads") for name, node in nodes.items()}
        leader = max(leads, key=lambda name: leads[name])
        await roles.kill(leader)
        await grows(200)
        roles.start(leader, partition=0)
        await grows(200)
        traffic.finish = True
        await asyncio.gather(*producing)
        await until(lambda: not traffic.missing, lambda: f"{traffic.missing} messages are missing")
        for task in consuming:
            task.cancel()
        await asyncio.gather(*consuming, return_exceptions=True)


class Command:
    """`pixiu nsq-proxy phase` of two sides."""

    def __init__(self, roles: Roles, old: int, new: int) -> None:
        self._roles, self._number = roles, 0
        self._end = ("--old", f"127.0.0.1:{old}", "--new", f"127.0.0.1:{new}", "--target", roles.target(), "--json")

    async def phase(self, topic: str, number: int, *more: str) -> tuple[int, str]:
        """Exit code and what it says."""
        self._number += 1
        log = self._roles.folder / f"command-{self._number}.log"
        done = self._roles.fork("nsqdoor.migration", ["phase", topic, str(number), *more, *self._end], log)
        code = await asyncio.to_thread(done.wait, WAIT_S)
        return code, log.read_text()


async def test_a_topic_moves_in_three_phases(roles: Roles) -> None:
    """Both sides are listeners of one cluster here, so what one holds the other holds; `tests/clients/nsq/migration.py` moves a
    topic from a real nsqd."""
    await start(roles)
    (old_tcp, old), (new_tcp, new) = [
        await listener(roles, name, "--target", f"127.0.0.1:{(await roles.running('proxy-a'))[0].client_port}")
        for name in ("nsq-old", "nsq-new")
    ]
    sides = ["--old", f"127.0.0.1:{old}", "--new", f"127.0.0.1:{new}"]
    roles.start_program(
        "nsq-proxy", "nsqdoor.migration", ["serve", *sides, "--target", roles.target(), "--port", "0", "--log-format", "json"]
    )
    said: list[int] = []

    def listens() -> bool:
        found = [json.loads(line) for line in roles.log("nsq-proxy").splitlines() if line.startswith("{")]
        said.extend(each["http_port"] for each in found if each["event"] == "nsq_proxy_listens")
        return bool(said)

    await until(listens, lambda: f"the proxy listens: {roles.log('nsq-proxy')}")
    command = Command(roles, old, new)
    async with http() as asks, NsqClient(old_tcp) as client:

        async def named(access: str) -> set[int]:
            found = await asks.get(said[0], f"/lookup?topic=orders&access={access}")
            return {each["tcp_port"] for each in found["producers"]} if found is not None else set()

        async def names(access: str, wanted: set[int]) -> bool:
            return await named(access) == wanted

        assert await named("r") == set()
        await client.say(b"PUB orders", b"one")
        await client.say(b"SUB orders work")
        assert (await named("r"), await named("w")) == ({old_tcp}, {old_tcp})
        code, text = await command.phase("orders", 2)
        assert (code, "go to phase 1 first" in text) == (2, True), text
        assert (await command.phase("orders", 1))[0] == 0
        await until(partial(names, "r", {old_tcp, new_tcp}), "consumers get both")
        assert await named("w") == {old_tcp}
        assert (await command.phase("orders", 2))[0] == 0
        await until(partial(names, "w", {new_tcp}), "producers get the new one")
        assert await named("r") == {old_tcp, new_tcp}
        code, text = await command.phase("orders", 3)
        assert (code, "still holds 1 messages" in text) == (2, True), text
        client.tell(b"RDY 1")
        message = await client.next()
        client.tell(b"FIN " + message.id)

        async def moves() -> bool:
            return (await command.phase("orders", 3))[0] == 0

        await until(moves, "the old side is empty")
        await until(partial(names, "r", {new_tcp}), "consumers get the new one")
        assert (await command.phase("orders", 0))[0] == 0
        await until(partial(names, "w", {old_tcp}), "and back")
        assert (await asks.get(said[0], "/topics"))["topics"] == ["orders"]
        assert (await asks.get(said[0], "/channels?topic=orders"))["channels"] == ["work"]
        assert await asks.get(said[0], "/ping") == "OK"
