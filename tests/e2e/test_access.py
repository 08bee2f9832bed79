"""Who may come in at the clients' listeners, with every identity, against real processes: the table of docs/security.md."""

from __future__ import annotations

import asyncio
import base64
import http.client
import itertools
import json
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jwt
import pytest

import pixiu
import pixiu.testing
from cluster.listeners.call_guard import METHODS
from cluster.listeners.streams import stream_keys
from cluster.mqtt.codec import encode as encode_packet
from cluster.mqtt.packets import Connect, PacketType, Publish
from cluster.rpc.framed import Framed
from cluster.rpc.methods import TICKETS
from cluster.settings.options import ClusterOptions
from cluster.wire.v1 import tickets_pb2
from pixiu.discovery.target import parse_address
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import snowflake, snowflake_worker
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.inbox_operations import next_generation
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc, wire_pb2, wire_pb2_grpc
from registry.session import read_view
from tests.support.cluster import status_of
from tests.support.forks import fork_pixiu
from tests.support.logins import RULES, Logins
from tests.support.waiting import until
from tools.load.mqtt import ConnectionRefused, MQTTClient, SubscriptionRefused

WAIT_S = 60.0
PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
TRIES = 20
CALLERS = ("nobody", "expired", "wrong key", "alice", "bob", "service")
ACCESS = (
    """
[quota]
failed_logins_per_min = 60000
[[rule]]
allow = ["publish"]
topics = ["names/{username}"]
"""
    + RULES
)
FLOW = {"PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "PINGREQ", "DISCONNECT", "AUTH"}
"""What clients send that asks for nothing by itself."""
GENERATIONS = itertools.count(1)
PAYLOAD = b"the-payload-of-a-message"


@dataclass
class World:
    """A cluster whose clients log in, and tokens."""

    cluster: pixiu.testing.Cluster
    logins: Logins
    tokens: dict[str, str]

    @property
    def mqtt(self) -> tuple[str, int]:
        host, _, port = self.cluster.mqtt[0].rpartition(":")
        return host, int(port)

    def counted(self, role: str, name: str) -> float:
        """A metric of the one process of a role."""
        (found,) = [process for process in status_of(self.cluster.target)["processes"] if process["role"] == role]
        with urllib.request.urlopen(f"{found['http']}/metrics", timeout=WAIT_S) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"pixiu_{role}_{name}"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logins = Logins(tmp_path_factory.mktemp("logins"))
    logins.write_rules(ACCESS)
    tokens = {
        "nobody": "",
        "expired": logins.token("alice", 7, "players", lasts_s=-60),
        "wrong key": logins.token("alice", 7, "players", key=logins.other),
        "alice": logins.token("alice", 7, "players"),
        "bob": logins.token("bob", 8, "guests"),
        "service": logins.token("billing", None, "services"),
    }
    settings = logins.settings() | {"cluster.ticket_key_dir": str(logins.ticket_keys)}
    with pixiu.testing.cluster(settings=settings) as cluster:
        yield World(cluster, logins, tokens)
        said = b"".join(path.read_bytes() for path in cluster.logs.rglob("*") if path.is_file())
        said += b"".join(path.read_bytes() for path in cluster.logs.parent.rglob("audit/*.log") if path.is_file())
    assert b"login_refused" in said
    assert b"denied" in said
    secrets = [token.encode() for token in tokens.values() if token]
    for secret in (
        *secrets,
        *(token.split(b".")[2] for token in secrets),
        b"carols-password",
        b"carols-passwort",
        (logins.keys / "1.key").read_bytes(),
        (logins.ticket_keys / "1.key").read_bytes(),
        PAYLOAD,
    ):
        assert secret not in said
    assert b"Traceback" not in said


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


@asynccontextmanager
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened


async def answer(asked: Callable[[], Awaitable[str]]) -> str:
    """What somebody is told: what the call returns, or its status.

    A write that meets the end of a refused call makes gRPC's client forget the status (`pixiu.rpc.grpc_streams`): asked again.
    """
    told = ""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(WAIT_S):
                return await asked()
        except grpc.aio.AioRpcError as error:
            told = error.code().name
        if told != "INTERNAL":
            break
    return told


# --- what is tried

Try = Callable[[World, str], Awaitable[str]]


async def connect(world: World, token: str, name: str = "", client_id: str = "") -> MQTTClient:
    client = MQTTClient(*world.mqtt, client_id, name or "any", password=token or None)
    await client.connect()
    return client


async def mqtt(world: World, token: str, act: Callable[[MQTTClient], Awaitable[str]], name: str = "") -> str:
    try:
        client = await connect(world, token, name)
    except ConnectionRefused as refused:
        return f"CONNACK {refused.return_code}"
    try:
        return await act(client)
    finally:
        await client.close()


def subscribing(topic: str) -> Callable[[MQTTClient], Awaitable[str]]:
    async def act(client: MQTTClient) -> str:
        try:
            await client.subscribe([topic])
        except SubscriptionRefused:
            return "SUBACK 0x80"
        return "yes"

    return act


def publishing(topic: str) -> Callable[[MQTTClient], Awaitable[str]]:
    async def act(client: MQTTClient) -> str:
        try:
            await client.publish_with_ack(topic, PAYLOAD)
        except pixiu.PixiuError:
            return "closed"
        return "yes"

    return act


def dropping(topic: str) -> Try:
    """A message of QoS 0, which nobody answers: it is dropped and counted, or taken."""

    async def tried(world: World, token: str) -> str:
        async def act(client: MQTTClient) -> str:
            before = await asyncio.to_thread(world.counted, "gateway", "denied_total")
            client.publish(topic, PAYLOAD)
            await client.unsubscribe([topic])  # what comes after it is served
            return "dropped" if await asyncio.to_thread(world.counted, "gateway", "denied_total") > before else "yes"

        return await mqtt(world, token, act)

    return tried


async def read_or_end(reader: asyncio.StreamReader) -> bytes:
    """What comes next; empty when the connection has been closed, in whichever way."""
    try:
        return await reader.read(100)
    except ConnectionError:
        return b""


def publishing_twice(topic: str) -> Try:
    """A message of QoS 2, of which the gateway has the first half when it says PUBREC."""

    async def tried(world: World, token: str) -> str:
        reader, writer = await asyncio.open_connection(*world.mqtt)
        try:
            async with asyncio.timeout(WAIT_S):
                writer.write(encode_packet(Connect("qos-2", keep_alive_s=60, user_name="any", password=token.encode() or None)))
                connack = await reader.readexactly(4)
                if connack[3]:
                    return f"CONNACK {connack[3]}"
                writer.write(encode_packet(Publish(topic, PAYLOAD, qos=2, packet_id=5)))
                answer = await read_or_end(reader)
                return "yes" if answer == b"\x50\x02\x00\x05" else "closed" if not answer else answer.hex()
        finally:
            writer.close()

    return tried


async def unsubscribing(client: MQTTClient) -> str:
    await client.unsubscribe(["room/42"])
    return "yes"


async def connecting(client: MQTTClient) -> str:
    return "yes"


async def subscribe(world: World, token: str, *, uin: int = 0, mail: bool = False, **joins: Any) -> str:
    async def asked() -> str:
        async with channel(world.cluster.gateways[0]) as to:
            call: Any = wire_pb2_grpc.SubscriberStub(to).Subscribe(metadata=metadata(token))
            hello = wire_pb2.SubscribeHello(uin=uin, client="listener", mail=mail)
            await call.write(wire_pb2.SubscribeRequest(hello=hello, request=1, **joins))
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.error_code or reply.request:
                    call.cancel()
                    return str(reply.error_code) or "yes"
            raise AssertionError("no answer")

    return await answer(asked)


async def lent_to(call: Any) -> wire_pb2.PublishReply:
    """A worker number that a proxy lends to who calls, on a stream that is open."""
    # Called as a gateway is: a name proves nothing.
    await call.write(wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="gateway-0000000000000001", lend_worker=True)))
    reply = await call.read()
    assert reply is grpc.aio.EOF or reply.worker_until_ms
    return reply  # type: ignore[no-any-return]


def id_of(loan: wire_pb2.PublishReply) -> int:
    return snowflake(max(time.time_ns() // 1_000_000, loan.worker_from_ms), loan.worker, next(GENERATIONS) % 1024)


async def publish(world: World, token: str, make: Callable[[int], bytes], message_id: int = 0) -> str:
    async def asked() -> str:
        async with channel(world.cluster.proxies[0]) as to:
            call: Any = wire_pb2_grpc.PublisherStub(to).Publish(metadata=metadata(token))
            loan = await lent_to(call)
            record, loans = make(message_id or id_of(loan)), [loan.loan]
            await call.write(wire_pb2.PublishRequest(batch=record, count=1, position=1, loans=loans))
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.up_to:
                    call.cancel()
                    code = str(reply.failures[0].code) if reply.failures else ""
                    return "yes" if code in ("", "OFFLINE") else code
            raise AssertionError("no answer")

    return await answer(asked)


async def mail(world: World, token: str, uin: int, worker: int = -1, message_id: int = 0) -> str:
    async def asked() -> str:
        async with channel(world.cluster.proxies[0]) as to:
            lending: Any = wire_pb2_grpc.PublisherStub(to).Publish(metadata=metadata(token))
            loan = await lent_to(lending)
            call: Any = mail_pb2_grpc.MailerStub(to).Send(metadata=metadata(token))
            hello = mail_pb2.MailHello(
                client="listener", worker=loan.worker if worker < 0 else worker, generation=next_generation(0, time.time())
            )
            await call.write(mail_pb2.MailRequest(hello=hello, loans=[loan.loan]))
            first = await call.read()
            if first is not grpc.aio.EOF and first.HasField("end"):
                return f"end {first.end.code}"
            record = encode(Kind.MAIL, uin, PAYLOAD, message_id or id_of(loan))
            await call.write(mail_pb2.MailRequest(batch=record, count=1, position=1))
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.results:
                    call.cancel()
                    lending.cancel()
                    return str(reply.results[0].code) or "yes"
                assert not reply.HasField("end"), reply
            raise AssertionError("no answer")

    return await answer(asked)


async def unary(world: World, token: str, call: Callable[[grpc.aio.Channel, Any], Awaitable[object]]) -> str:
    async def asked() -> str:
        async with channel(world.cluster.proxies[0]) as to:
            await call(to, metadata(token))
            return "yes"

    return await answer(asked)


def room(number: int) -> Callable[[int], bytes]:
    return lambda message_id: encode(Kind.ROOM, number, PAYLOAD, message_id, flags=Flag.TO_ROOM, sender=99)


TRIED: dict[str, Try] = {
    "MQTT: CONNECT": lambda w, t: mqtt(w, t, connecting),
    "MQTT: CONNECT, user name `7`": lambda w, t: mqtt(w, t, connecting, "7"),
    "MQTT: SUBSCRIBE `user/7`": lambda w, t: mqtt(w, t, subscribing("user/7")),
    "MQTT: SUBSCRIBE `room/42`": lambda w, t: mqtt(w, t, subscribing("room/42")),
    "MQTT: SUBSCRIBE `room/13`": lambda w, t: mqtt(w, t, subscribing("room/13")),
    "MQTT: SUBSCRIBE `games/7/chess`": lambda w, t: mqtt(w, t, subscribing("games/7/chess")),
    "MQTT: PUBLISH `room/42`, QoS 1": lambda w, t: mqtt(w, t, publishing("room/42")),
    "MQTT: PUBLISH `room/13`, QoS 1": lambda w, t: mqtt(w, t, publishing("room/13")),
    "MQTT: PUBLISH `games/8/chess`, QoS 1": lambda w, t: mqtt(w, t, publishing("games/8/chess")),
    "MQTT: PUBLISH `user/9`, QoS 1": lambda w, t: mqtt(w, t, publishing("user/9")),
    "MQTT: PUBLISH `room/42`, QoS 0": dropping("room/42"),
    "MQTT: PUBLISH `room/13`, QoS 0": dropping("room/13"),
    "MQTT: PUBLISH `room/42`, QoS 2": publishing_twice("room/42"),
    "MQTT: PUBLISH `room/13`, QoS 2": publishing_twice("room/13"),
    "MQTT: UNSUBSCRIBE": lambda w, t: mqtt(w, t, unsubscribing),
    "gateway: Subscriber.Subscribe, room 42": lambda w, t: subscribe(w, t, join_rooms=[42]),
    "gateway: Subscriber.Subscribe, room 13": lambda w, t: subscribe(w, t, join_rooms=[13]),
    "gateway: Subscriber.Subscribe as UIN 7": lambda w, t: subscribe(w, t, uin=7),
    "gateway: Subscriber.Subscribe as UIN 7, its mail": lambda w, t: subscribe(w, t, uin=7, mail=True),
    "proxy: Publisher.Publish to room 42": lambda w, t: publish(w, t, room(42)),
    "proxy: Publisher.Publish to room 13": lambda w, t: publish(w, t, room(13)),
    "proxy: Publisher.Publish to user 9": lambda w, t: publish(w, t, lambda id_: encode(Kind.CHAT, 9, PAYLOAD, id_)),
    "proxy: Mailer.Send to user 9": lambda w, t: mail(w, t, 9),
    "proxy: Presence.Query of user 9": lambda w, t: unary(
        w, t, lambda to, m: wire_pb2_grpc.PresenceStub(to).Query(wire_pb2.PresenceRequest(uins=[9]), metadata=m)
    ),
    "proxy: Publisher.Cluster": lambda w, t: unary(
        w, t, lambda to, m: wire_pb2_grpc.PublisherStub(to).Cluster(wire_pb2.ClusterRequest(), metadata=m)
    ),
}


async def test_nobody_uses_a_message_id_of_somebody_else(world: World) -> None:
    """S12: whoever publishes an ID before its owner does has gateways drop the owner's copy, and Xiu refuse the owner's mail; who
    writes mail by another's number with a later generation ends the other's stream."""
    mallory = world.logins.token("mallory", 10, "players")
    async with pixiu.connect(world.cluster.target, token=world.tokens["alice"]) as alice:
        mine = await alice.user(9).mail(PAYLOAD)
        worker = snowflake_worker(mine.id)
        next_ = snowflake(time.time_ns() // 1_000_000 + 5_000, worker, 0)
        assert await publish(world, mallory, room(42), next_) == "NOT_ALLOWED"
        assert (
            await publish(world, mallory, lambda id_: encode(Kind.SIGNAL, 42, PAYLOAD, id_, flags=Flag.TO_ROOM), next_)
            == "NOT_ALLOWED"
        )
        assert await publish(world, mallory, lambda id_: encode(Kind.CHAT, 9, PAYLOAD, id_), next_) == "NOT_ALLOWED"
        assert await mail(world, mallory, 9, message_id=next_) == "NOT_ALLOWED"
        assert await mail(world, mallory, 9, worker=worker) == "end NOT_ALLOWED"
        # Derived IDs are for back ends: what a sink will write could be guessed, and taken before it does.
        derived = Flag.TO_ROOM | Flag.DERIVED_ID
        for caller, told in (("alice", "NOT_ALLOWED"), ("service", "yes")):
            record = encode(Kind.ROOM, 42, PAYLOAD, 12345, flags=derived)
            assert await publish(world, world.tokens[caller], lambda _, record=record: record) == told  # type: ignore[misc]
        await alice.user(9).mail(PAYLOAD)
        await alice.room(42).send(PAYLOAD)
        await alice.room(42).signal(PAYLOAD)


async def test_a_stranger_with_a_gateways_keys_shows_no_tickets(world: World) -> None:
    """A stream that is signed with the cluster's keys, as a gateway's are."""
    zookeeper = ZooKeeper(parse_address(world.cluster.target))
    await zookeeper.connect()
    try:
        view = await read_view(zookeeper, parse_address(world.cluster.target).root)
    finally:
        await zookeeper.close()
    (proxy,), (gateway,) = view.running("proxy"), view.running("gateway")
    keys = stream_keys(ClusterOptions(key_dir=str(world.logins.keys)).key_ring(), "gateway", "proxy")
    assert keys is not None
    stranger = Framed("gateway", gateway.endpoint + 1, lambda _role: keys[0], 1 << 20)
    with pytest.raises(StreamEnded, match="no gateway with this endpoint"):
        async with stranger.call(proxy, TICKETS, tickets_pb2.TicketReply.FromString) as call:
            await call.write(tickets_pb2.TicketRequest(number=1))
            await call.read()


def documented() -> dict[str, list[str]]:
    """The table of the page: what is tried → what each caller is told."""
    _, _, section = PAGE.read_text().partition("\n### Who may do what\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.partition("\n## ")[0].splitlines()
        if line[:1] == "|"
    ]
    assert rows[0][1:] == list(CALLERS)
    return {row[0]: row[1:] for row in rows[2:]}


async def test_every_listener_says_to_everybody_what_the_page_says(world: World) -> None:
    found = {what: [await tried(world, world.tokens[caller]) for caller in CALLERS] for what, tried in TRIED.items()}
    assert found == documented()


def test_every_method_of_the_clients_services_is_tried() -> None:
    services = [wire_pb2.DESCRIPTOR.services_by_name[name] for name in ("Publisher", "Subscriber", "Presence")]
    services += [mail_pb2.DESCRIPTOR.services_by_name["Mailer"]]
    methods = {f"{service.name}.{method.name}" for service in services for method in service.methods}
    assert methods == {found[1] for what in TRIED if (found := re.search(r"(\w+\.\w+)", what)) is not None}


def test_every_action_of_mqtt_is_tried() -> None:
    kinds = {kind.name for kind in PacketType} - FLOW - {"CONNACK", "SUBACK", "UNSUBACK", "PINGRESP"}
    assert kinds == {found[1] for what in TRIED if (found := re.match(r"MQTT: (\w+)", what)) is not None}
    assert {found[1] for what in TRIED if (found := re.search(r"QoS (\d)", what)) is not None} == {"0", "1", "2"}


async def test_nothing_is_said_to_who_has_not_connected(world: World) -> None:
    for kind in PacketType:
        if kind is PacketType.CONNECT:
            continue
        reader, writer = await asyncio.open_connection(*world.mqtt)
        flags = 2 if kind in (PacketType.PUBREL, PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE) else 0
        body = {
            "PUBLISH": b"\x00\x07room/42x",
            "SUBSCRIBE": b"\x00\x01\x00\x06user/7\x00",
            "UNSUBSCRIBE": b"\x00\x01\x00\x06user/7",
        }
        rest = body.get(kind.name, b"" if kind.name in ("PINGREQ", "PINGRESP", "DISCONNECT") else b"\x00\x01")
        writer.write(bytes((kind << 4 | flags, len(rest))) + rest)
        async with asyncio.timeout(WAIT_S):
            assert await read_or_end(reader) == b"", kind
        writer.close()


@pytest.mark.parametrize("role", ["gateway", "proxy"])
async def test_a_listener_of_clients_has_their_methods_and_no_others(world: World, role: str) -> None:
    """What the cluster calls is at another port."""
    served = {"gateway": ("Subscriber",), "proxy": ("Publisher", "Mailer", "Presence", "Topics")}[role]
    address = (world.cluster.gateways if role == "gateway" else world.cluster.proxies)[0]
    for_all = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
    others = [method for method in METHODS if method.split("/")[1].removeprefix("pixiu.v1.") not in (*served, *for_all)]
    assert len(others) >= 30
    at_a_time = asyncio.Semaphore(16)  # a client's connection has 32 streams
    async with channel(address) as to:
        for caller in ("nobody", "alice", "service"):

            async def code(method: str, caller: str = caller) -> grpc.StatusCode:
                async with at_a_time:
                    call: Any = to.stream_stream(method)(iter(()), timeout=WAIT_S, metadata=metadata(world.tokens[caller]))
                    return await call.code()  # type: ignore[no-any-return]

            found = dict(zip(others, await asyncio.gather(*map(code, others)), strict=True))
            assert set(found.values()) == {grpc.StatusCode.UNIMPLEMENTED}, (caller, found)


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


async def test_each_wrong_login_is_refused_in_the_protocols_own_words_and_counted(world: World) -> None:
    logins, now = world.logins, time.time()
    said = {"sub": "alice", "uin": 7, "aud": "pixiu", "exp": now + 60}
    wrong = {
        "not valid yet": logins.token("alice", 7, nbf=now + 600),
        "valid for ever": logins.token("alice", 7, lasts_s=1e9),
        "for somebody else": logins.token("alice", 7, aud="another"),
        "a number for an audience": logins.token("alice", 7, aud=5),
        "alg none": f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(said)}.",
        "nested": jwt.encode(said, logins.key, "EdDSA", headers={"kid": "1", "cty": "JWT"}),
        "a key of its own": jwt.encode(said, logins.key, "EdDSA", headers={"kid": "1", "jku": "http://127.0.0.1/"}),
        "large": logins.token("alice", 7, filler="x" * 2000, exp=now - 60),
        "no UTF-8": logins.token("\ud800", 7),
    }
    forbidden = {name: logins.token(name, 7, "players") for name in ("#", "+", "a/b", "a\0b", "$SYS")}
    before = [await asyncio.to_thread(world.counted, role, "access_refused_total") for role in ("gateway", "proxy")]
    for tokens, codes in ((wrong, ("CONNACK 4", "UNAUTHENTICATED")), (forbidden, ("CONNACK 5", "PERMISSION_DENIED"))):
        for name, token in tokens.items():
            tried = [
                TRIED[what] for what in ("MQTT: CONNECT", "gateway: Subscriber.Subscribe, room 42", "proxy: Publisher.Cluster")
            ]
            told = [await each(world, token) for each in tried]
            assert told == [codes[0], codes[1], codes[1]], name
    after = [await asyncio.to_thread(world.counted, role, "access_refused_total") for role in ("gateway", "proxy")]
    count = len(wrong) + len(forbidden)
    # A call whose status gRPC's client forgot is made again.
    assert after[0] - before[0] >= 2 * count
    assert after[1] - before[1] >= count
    audited = "".join(path.read_text() for path in world.cluster.logs.parent.glob("*/audit/*"))
    for name in forbidden:
        assert json.dumps({"kind": "login_refused"})[1:-1] in audited
        assert json.dumps({"user": name})[1:-1] in audited, name


async def test_what_comes_to_the_http_listener_is_not_logged(world: World) -> None:
    """The fixture looks for the tokens in all logs."""
    token = world.tokens["alice"]

    def ask(address: str) -> list[int]:
        codes = []
        for path in ("live", "metrics", "nonsense"):
            connection = http.client.HTTPConnection(address, timeout=WAIT_S)
            connection.request("GET", f"/{path}?token={token}", headers={"Authorization": f"Bearer {token}"})
            codes.append(connection.getresponse().status)
            connection.close()
        return codes

    for process in (await asyncio.to_thread(status_of, world.cluster.target))["processes"]:
        assert await asyncio.to_thread(ask, process["http"].removeprefix("http://")) == [200, 200, 404]


async def test_what_is_too_long_for_a_login_is_refused(world: World) -> None:
    token = world.logins.token("alice", 7, filler="x" * 20_000)
    with pytest.raises(pixiu.PixiuError):
        await connect(world, token)
    assert await TRIED["proxy: Publisher.Cluster"](world, token) in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")
    assert await TRIED["proxy: Publisher.Cluster"](world, world.tokens["alice"]) == "yes"


async def test_a_client_of_the_sdk_sends_as_who_has_logged_in_whatever_it_says(world: World) -> None:
    target, tokens = world.cluster.target, world.tokens
    async with (
        pixiu.connect(target, token=lambda: tokens["alice"]) as alice,
        pixiu.connect(target, uin=7, token=tokens["alice"]) as reader,
        pixiu.connect(target, token=tokens["service"], uin=55) as service,
        reader.subscribe(room=50) as messages,
    ):
        await alice.room(50).send(PAYLOAD)
        async with asyncio.timeout(WAIT_S):
            assert (await anext(messages)).sender == 7
        with pytest.raises(pixiu.NotAllowed, match="acl test"):
            await alice.room(13).send(PAYLOAD)
        # Who may speak for others keeps the sender that it gives.
        await service.room(50).send(PAYLOAD)
        async with asyncio.timeout(WAIT_S):
            assert (await anext(messages)).sender == 55
        with pytest.raises(pixiu.NotAllowed):
            async with asyncio.timeout(WAIT_S):
                await messages.join([13])


async def test_what_is_no_login_is_said_at_once(world: World) -> None:
    for token in ("", world.tokens["expired"]):
        with pytest.raises(pixiu.NotAuthenticated, match=r"requires a login|expired"):
            async with pixiu.connect(world.cluster.proxies[0], token=token):
                pass
    said = [world.tokens["alice"]]
    async with pixiu.connect(world.cluster.proxies[0], token=lambda: said[0]) as px:
        said[0] = world.tokens["expired"]
        with pytest.raises(pixiu.NotAuthenticated, match="expired"):
            await px.room(42).send(PAYLOAD)
        said[0] = world.tokens["alice"]
        await px.room(42).send(PAYLOAD)
    async with pixiu.connect(world.cluster.target, uin=8, token=world.tokens["alice"]) as px:
        with pytest.raises(pixiu.NotAuthenticated, match="belongs to another user"):
            async with asyncio.timeout(WAIT_S), px.subscribe(room=42):
                pass


async def test_a_password_opens_the_listener_and_two_users_may_have_clients_of_one_name(world: World) -> None:
    carol = MQTTClient(*world.mqtt, "tablet", "carol", password="carols-password")
    await carol.connect()
    alice = await connect(world, world.tokens["alice"], client_id="tablet")
    await asyncio.gather(carol.subscribe(["user/9"]), alice.subscribe(["user/7"]))
    assert carol.connected
    assert alice.connected
    for password in ("carols-passwort", ""):
        wrong = MQTTClient(*world.mqtt, "x", "carol", password=password)
        with pytest.raises(ConnectionRefused) as refused:
            await wrong.connect()
        assert refused.value.return_code == 4
    await asyncio.gather(carol.close(), alice.close())


async def test_a_session_ends_when_its_token_expires(world: World) -> None:
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    token = world.logins.token("dora", 20, "players", lasts_s=5)
    client = MQTTClient(*world.mqtt, "short", "dora", password=token, on_disconnect=gone.set_result)
    await client.connect()
    async with channel(world.cluster.gateways[0]) as to:
        call: Any = wire_pb2_grpc.SubscriberStub(to).Subscribe(metadata=metadata(token))
        await call.write(wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(client="short")))
        with pytest.raises(grpc.aio.AioRpcError, match="expired"):
            async with asyncio.timeout(WAIT_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
                raise AssertionError("ended without a word")
    await asyncio.wait_for(gone, WAIT_S)


async def test_an_operator_ends_a_users_sessions_and_nobody_elses(world: World) -> None:
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    token = world.logins.token("eve", 30, "players")
    kicked = MQTTClient(*world.mqtt, "k", "eve", password=token, on_disconnect=gone.set_result)
    await kicked.connect()
    other = await connect(world, world.tokens["alice"], client_id="stays")
    told = await asyncio.to_thread(fork_pixiu, "kick", "30", "--target", world.cluster.target)
    assert told.returncode == 0, told.stderr
    await asyncio.wait_for(gone, WAIT_S)
    await other.subscribe(["room/44"])
    await other.close()


async def test_new_rules_take_effect_without_a_restart(world: World) -> None:
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    client = MQTTClient(*world.mqtt, "r", "any", password=world.tokens["alice"], on_disconnect=gone.set_result)
    await client.connect()
    await client.subscribe(["room/60"])
    world.logins.write_rules('[[rule]]\ndeny = ["subscribe"]\nrooms = ["60"]\n' + ACCESS)
    try:
        await asyncio.wait_for(gone, WAIT_S)
        assert await mqtt(world, world.tokens["alice"], subscribing("room/60")) == "SUBACK 0x80"
        assert await mqtt(world, world.tokens["alice"], subscribing("room/61")) == "yes"
    finally:
        world.logins.write_rules(ACCESS)
    # A file that does not do changes nothing, and the log says so.
    world.logins.write_rules("[[rule]]\nallow = 1\n")
    logs = world.cluster.logs
    await until(
        lambda: any("access_file_wrong" in path.read_text() for path in logs.rglob("*.log")), "the log's word about the file"
    )
    assert await mqtt(world, world.tokens["alice"], subscribing("room/61")) == "yes"
    world.logins.write_rules(ACCESS)
