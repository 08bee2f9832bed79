"""Two tenants of one cluster whose users, client IDs and topics have the same names: nothing of one reaches the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import paho.mqtt.client as paho
import pytest

import pixiu
import pixiu.testing
from pixiu.errors import NotAllowed
from tests.clients.paho_client import PahoClient
from tests.clients.script import Message, Where
from tests.e2e.test_http import two_free_ports
from tests.e2e.test_sessions import Phone
from tests.support.forks import fork_pixiu
from tests.support.logins import Logins
from tests.support.waiting import until

TENANTS = ("acme", "globex")
ACCESS = """
[tenant.acme]
uins = "1000001-2000000"
rooms = "5001-6000"
kept_sessions = 1

[tenant.globex]
uins = "2000001-3000000"
connections = 20

[[rule]]
allow = ["publish", "subscribe", "mail"]
"""
WAIT_S = 60.0


@dataclass
class World:
    cluster: pixiu.testing.Cluster
    logins: Logins
    api: list[str]

    def token(self, tenant: str, uin: int | None) -> str:
        return self.logins.token("alice", uin, tenant=tenant or None)

    async def client(self, tenant: str, uin: int, name: str, *, gateway: int = 0, will: Message | None = None) -> PahoClient:
        """A client of MQTT 5 that has logged in."""
        port = int(self.cluster.mqtt[gateway].rpartition(":")[2])
        found = PahoClient(Where("127.0.0.1", port, "tcp", "5", ""), name)
        found._client.username_pw_set("alice", self.token(tenant, uin))
        await found.connect(will)
        return found

    def http(self, tenant: str, uin: int | None, gateway: int = 0) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.token(tenant, uin)}"}
        return aiohttp.ClientSession(
            self.api[gateway], headers=headers, timeout=aiohttp.ClientTimeout(WAIT_S), raise_for_status=True
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logins = Logins(tmp_path_factory.mktemp("tenants"))
    logins.write_rules(ACCESS)
    api = two_free_ports()
    settings = logins.settings() | {"cluster.ticket_key_dir": str(logins.ticket_keys), "gateway.api_port": api}
    with pixiu.testing.cluster(gateways=2, settings=settings) as cluster:
        yield World(cluster, logins, [f"http://127.0.0.1:{api + number}" for number in (0, 1)])
        said = b"".join(path.read_bytes() for path in cluster.logs.rglob("*") if path.is_file())
    assert b"Traceback" not in said


async def until_end(client: PahoClient) -> list[tuple[str, bytes]]:
    """Messages up to the last one of a test."""
    found: list[tuple[str, bytes]] = []
    async with asyncio.timeout(WAIT_S):
        while not found or found[-1][0] != "end":
            message = await client.messages.get()
            found.append((message.topic, message.payload))
    return sorted(found[:-1])


async def fields(answer: Any) -> Any:
    async with answer as got:
        return await got.json()


async def test_nothing_of_one_tenant_reaches_the_other(world: World) -> None:
    operator = await world.client("", 1, "operator", gateway=1)
    await operator.subscribe("#", 1)
    phones = {tenant: await world.client(tenant, 7, "phone") for tenant in TENANTS}
    senders = {tenant: await world.client(tenant, 8, "sender", gateway=1) for tenant in TENANTS}
    shared = {tenant: await world.client(tenant, 9, "shared", gateway=1) for tenant in TENANTS}
    for tenant in TENANTS:
        await senders[tenant].publish("kept/1", f"kept {tenant}".encode(), 1, True)
        await phones[tenant].subscribe("#", 1)
        await phones[tenant].subscribe("user/7", 1)
        await shared[tenant].subscribe("$share/g/jobs", 1)
    await phones["acme"].subscribe("room/5", 1)
    with pytest.raises(ConnectionRefusedError):
        await phones["globex"].subscribe("room/5", 1)
    expected: dict[str, list[tuple[str, bytes]]] = {}
    for tenant, sender in senders.items():
        told = tenant.encode()
        gone = await world.client(tenant, 10, "gone", gateway=1, will=Message("will", told, 1, False))
        for topic in ("a/b", "jobs", "user/7"):
            await sender.publish(topic, told, 1)
        async with world.http(tenant, 11) as http:
            await fields(http.post("/v1/publish", json={"topic": "by/http", "payload": tenant}))
        await gone.cut()
        topics = {"a/b": told, "jobs": told, "user/7": told, "by/http": told, "will": told, "kept/1": f"kept {tenant}".encode()}
        expected[tenant] = sorted(topics.items())
    await senders["acme"].publish("room/5", b"acme", 1)
    expected["acme"] = sorted([*expected["acme"], ("room/5", b"acme")])
    got: dict[str, list[tuple[str, bytes]]] = {tenant: [] for tenant in TENANTS}
    for tenant in TENANTS:  # wills come last, and wait for the gateway to see that the connection is gone
        while len(got[tenant]) < len(expected[tenant]):
            async with asyncio.timeout(WAIT_S):
                message = await phones[tenant].messages.get()
            got[tenant].append((message.topic, message.payload))
    for sender in senders.values():
        await sender.publish("end", b"", 1)
    for tenant in TENANTS:
        assert sorted(got[tenant]) == expected[tenant]
        assert await until_end(phones[tenant]) == [], "what is not its own would have come before the end"
        job = await shared[tenant].messages.get()
        assert (job.topic, job.payload, shared[tenant].messages.qsize()) == ("jobs", tenant.encode(), 0)
    seen: set[str] = set()
    while not {"acme/end", "globex/end"} <= seen:
        async with asyncio.timeout(WAIT_S):
            seen.add((await operator.messages.get()).topic)
    assert {"acme/a/b", "globex/a/b", "acme/will", "globex/will", "acme/by/http"} <= seen, "the operator has the whole names"
    for client in (operator, *phones.values(), *senders.values(), *shared.values()):
        await client.disconnect()


async def test_http_mail_retained_messages_and_events_are_the_tenants_own(world: World) -> None:
    async with world.http("acme", 7, 1) as acme, world.http("globex", 7) as globex:
        for tenant, http in (("acme", acme), ("globex", globex)):
            sender = await world.client(tenant, 8, "sender")
            await sender.publish("http/kept", tenant.encode(), 1, True)
            await sender.disconnect()
            found = await fields(http.get("/v1/retained?filter=http/%23"))
            assert [(each["topic"], each["payload"], each["sender"]) for each in found["messages"]] == [("http/kept", tenant, 8)]
        async with acme.get("/v1/events?topic=x/y&topic=user/7") as events:
            await fields(globex.post("/v1/publish", json={"topic": "x/y", "payload": "no"}))
            with pytest.raises(aiohttp.ClientResponseError, match="404"):  # acme's 7 is online, globex's is not
                await fields(globex.post("/v1/publish", json={"topic": "user/7", "payload": "no"}))
            await fields(acme.post("/v1/publish", json={"topic": "x/y", "payload": "yes"}))
            while not (line := await events.content.readline()).startswith(b"data: "):
                pass
            event = json.loads(line.removeprefix(b"data: "))
            assert (event["topic"], event["payload"], event["sender"]) == ("x/y", "yes", 7)
        for http in (acme, globex):
            assert await fields(http.get("/v1/inbox?device=phone")) == {"mails": []}
        await fields(acme.post("/v1/mail", json={"to": 7, "payload": "for acme's 7"}))
        await fields(globex.post("/v1/mail", json={"to": 7, "payload": "for globex's 7"}))
        for http, payload in ((acme, "for acme's 7"), (globex, "for globex's 7")):
            found = await fields(http.get("/v1/inbox?device=phone&wait=30"))
            assert [(mail["payload"], mail["sender"]) for mail in found["mails"]] == [(payload, 7)]


async def test_a_client_id_is_taken_over_within_its_tenant_only_and_the_sdk_stays_within(world: World) -> None:
    first = {tenant: await world.client(tenant, 7, "phone") for tenant in TENANTS}
    ended: list[str] = []
    for tenant, client in first.items():
        client._client.on_disconnect = lambda *_, tenant=tenant: ended.append(tenant)
    again = await world.client("acme", 7, "phone")
    await until(lambda: ended)
    assert ended == ["acme"]
    await first["globex"].subscribe("still/here", 1)
    said = await asyncio.to_thread(command, "tenants", "--json", "--target", world.cluster.target)
    shown = {each["tenant"]: each for each in json.loads(said)["tenants"]}
    assert shown["acme"]["sessions"] >= 1
    assert shown["globex"]["subscriptions"] == 1
    assert "globex" in await asyncio.to_thread(command, "tenants", "--target", world.cluster.target)
    async with pixiu.connect(world.cluster.target, token=world.token("acme", 12)) as px:
        await px.topic("acme/of/sdk").send(b"x")
        for topic in ("globex/of/sdk", "of/sdk"):
            with pytest.raises(NotAllowed):
                await px.topic(topic).send(b"x")
        with pytest.raises(NotAllowed):
            await px.user(2000007).mail(b"x")
    await again.disconnect()
    await first["globex"].disconnect()


async def test_sessions_that_were_away_get_their_own_tenants_messages(world: World) -> None:
    ports = [int(address.rpartition(":")[2]) for address in world.cluster.mqtt]
    phones = {tenant: Phone("away", paho.MQTTv5) for tenant in TENANTS}
    filters = {"acme": [("a/#", 2), ("room/5", 1)], "globex": [("a/#", 2)]}
    for tenant, phone in phones.items():
        phone.paho.username_pw_set("alice", world.token(tenant, 7))
        assert not await asyncio.to_thread(phone.connect, ports[0])
        assert await asyncio.to_thread(phone.subscribe, *filters[tenant]) == [qos for _, qos in filters[tenant]]
        await asyncio.to_thread(phone.disconnect)
    operator = await world.client("", 1, "operator")
    await operator.publish("acme/a/room", b"by its whole name", 1)
    await operator.publish("room/5005", b"to acme's room", 1)
    more = Phone("more", paho.MQTTv5, may_be_refused=True)
    more.paho.username_pw_set("alice", world.token("acme", 7))
    await asyncio.to_thread(more.connect, ports[1])
    await asyncio.to_thread(more.stopped)
    assert more.code == 0x97, "the tenant keeps one session, begun at another gateway"
    senders = {tenant: await world.client(tenant, 8, "sender") for tenant in TENANTS}
    for tenant, sender in senders.items():
        for qos in (2, 1):
            await sender.publish("a/b", f"{tenant} {qos}".encode(), qos)
    for sender in senders.values():  # after everything that is another's
        await sender.publish("a/end", b"", 1)
    for tenant, phone in phones.items():
        assert await asyncio.to_thread(phone.connect, ports[1]), "session present"
        expected = [("a/b", f"{tenant} 1".encode(), 1), ("a/b", f"{tenant} 2".encode(), 2), ("a/end", b"", 1)]
        if tenant == "acme":
            expected += [("a/room", b"by its whole name", 1), ("room/5", b"to acme's room", 1)]
        for topic, _, _ in expected:
            await asyncio.to_thread(phone.wait, topic, sum(topic == each for each, _, _ in expected))
        assert sorted(each[:3] for each in phone.found) == expected
    said = await asyncio.to_thread(command, "tenants", "--json", "--target", world.cluster.target)
    shown = {each["tenant"]: each for each in json.loads(said)["tenants"]}
    assert {name: shown[name]["subscriptions"] for name in TENANTS} == {name: len(filters[name]) for name in TENANTS}
    counts = {name: tuple(shown[name][key] for key in ("kept", "max_kept", "refused_kept")) for name in TENANTS}
    assert counts == {"acme": (1, 1, 1), "globex": (1, 0, 0)}
    for phone in phones.values():
        await asyncio.to_thread(phone.disconnect)
    for client in (operator, *senders.values()):
        await client.disconnect()


def command(*words: str) -> str:
    """What `pixiu` prints."""
    done = fork_pixiu(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout
