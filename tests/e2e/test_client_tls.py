"""Clients' listeners that speak TLS, of real processes: stock clients, certificates as logins, files exchanged in mid-run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

import pixiu
import pixiu.testing
from cluster.trust.pki import issue, make_authority
from tests.support.cluster import PIXIU, status_of
from tests.support.logins import RULES, Logins
from tests.support.waiting import until
from tools.load.mqtt import ConnectionRefused, MQTTClient, SubscriptionRefused

WAIT_S = 60.0
ASK = """
[callbacks.fire]
url = "http://127.0.0.1:{port}/acl"
timeout_s = 1.0
[[rule]]
ask = ["subscribe", "publish"]
callback = "fire"
rooms = ["900-999"]
"""
CERTIFICATES = (
    '[certificate]\ntemplate = "{user}"\nrevoked = "revoked"\ngroups = ["players"]\nuins = {ann = 40, ben = 41, eve = 42}\n'
)


@dataclass
class World:
    """A cluster whose clients come by TLS, and who may come."""

    cluster: pixiu.testing.Cluster
    logins: Logins
    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "listener/ca.pem"

    @property
    def mqtt(self) -> tuple[str, int]:
        host, _, port = self.cluster.mqtt[0].rpartition(":")
        return host, int(port)

    def context(self, certificate: Path | None = None, ca: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(ca or self.ca))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context

    def metrics(self, role: str) -> str:
        (found,) = [process for process in status_of(self.cluster.target)["processes"] if process["role"] == role]
        with urllib.request.urlopen(f"{found['http']}/metrics", timeout=WAIT_S) as reply:
            return str(reply.read().decode())

    def counted(self, role: str, name: str) -> float:
        prefix = f"pixiu_{role}_{name}"
        return sum(float(line.split()[-1]) for line in self.metrics(role).splitlines() if line.startswith(prefix))


class Backend(ThreadingHTTPServer):
    """Knows who has bound which device; it is asked by gateways and proxies."""

    def __init__(self) -> None:
        backend = self
        self.bound, self.asked = {("alice", "phone")}, list[dict[str, Any]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                backend.asked.append(question)
                answer = json.dumps(
                    {"allow": (question["user"], question["client_id"].partition(":")[0]) in backend.bound}
                ).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with Backend() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tls")
    for authority in ("ca", "clients", "strangers"):
        make_authority(folder / authority, authority)
    for role in ("gateway", "proxy", "topic"):
        issue(folder / "ca", role, folder / "listener", hosts=("127.0.0.1", "localhost"))
    for name in ("ann", "ben", "eve"):
        issue(folder / "clients", "client", folder / "own", name=name)
    issue(folder / "clients", "client", folder / "own", name="late", days=1e-6)
    issue(folder / "clients", "xiu", folder / "own")
    issue(folder / "strangers", "client", folder / "own", name="stranger")
    logins = Logins(folder)
    (folder / "revoked").write_text("")
    logins.write_rules(CERTIFICATES + ASK.format(port=backend.server_port) + RULES)
    settings = logins.settings()
    for role in ("gateway", "proxy", "topic"):
        settings[f"{role}.tls_certificate"] = str(folder / f"listener/{role}.pem")
        settings[f"{role}.client_ca"] = str(folder / "clients/ca.pem")
    with pixiu.testing.cluster(settings=settings, mail=False) as cluster:
        yield World(cluster, logins, folder)
        said = b"".join(path.read_bytes() for path in cluster.logs.rglob("*") if path.is_file())
    assert b"Traceback" not in said


def run(world: World, *command: str, ca: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIXIU_")} | more
    if ca:
        environment["PIXIU_CA"] = str(world.ca)
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)


async def test_stock_clients_and_the_sdk_meet_by_tls(world: World) -> None:
    if shutil.which("mosquitto_pub") is None:
        pytest.skip("mosquitto_pub is not installed")
    token, (host, port) = world.logins.token("alice", 7, "players"), world.mqtt
    got: asyncio.Queue[bytes] = asyncio.Queue()
    async with (
        pixiu.connect(world.cluster.target, token=token, ca=str(world.ca)) as px,
        px.subscribe(room=42) as messages,
    ):

        async def listen() -> None:
            async for message in messages:
                got.put_nowait(message.payload)

        task = asyncio.create_task(listen())
        common = ["mosquitto_pub", "-h", host, "-p", str(port), "-u", "any", "-P", token, "-t", "room/42", "-q", "1", "-m", "stock"]
        told = await asyncio.to_thread(run, world, *common, "--cafile", str(world.ca))
        assert told.returncode == 0, told.stderr
        assert await asyncio.wait_for(got.get(), WAIT_S) == b"stock"
        sent = await asyncio.to_thread(
            run, world, PIXIU, "send", "--room", "42", "by-command", "--target", world.cluster.target, PIXIU_TOKEN=token
        )
        assert sent.returncode == 0, sent.stderr
        assert await asyncio.wait_for(got.get(), WAIT_S) == b"by-command"
        for wrong in ([], ["--cafile", str(world.folder / "strangers/ca.pem")]):
            assert (await asyncio.to_thread(run, world, *common, *wrong)).returncode != 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_without_the_authority_a_client_is_told_what_to_give_at_once(world: World) -> None:
    with pytest.raises(pixiu.Unreachable, match="PIXIU_CA"):
        async with pixiu.connect(world.cluster.target):
            pass


async def test_a_new_certificate_is_shown_without_a_restart_and_connections_stay(world: World) -> None:
    token = world.logins.token("alice", 7, "players")
    stays = MQTTClient(*world.mqtt, "stays", "any", password=token, tls=world.context())
    await stays.connect()
    paths = {
        role: issue(world.folder / "ca", role, world.folder / "listener", hosts=("127.0.0.1",)) for role in ("gateway", "proxy")
    }

    def serial(address: str) -> int:
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), WAIT_S)
        with world.context().wrap_socket(plain, server_hostname=host) as encrypted:
            return x509.load_der_x509_certificate(encrypted.getpeercert(True) or b"").serial_number

    listeners = {"gateway": [world.cluster.mqtt[0], world.cluster.gateways[0]], "proxy": [world.cluster.proxies[0]]}
    for role, addresses in listeners.items():
        wanted = x509.load_pem_x509_certificate(paths[role].read_bytes()).serial_number

        async def shown(addresses: list[Any] = addresses, wanted: int = wanted) -> bool:
            return [await asyncio.to_thread(serial, address) for address in addresses] == [wanted] * len(addresses)

        await until(shown, "the new certificate, once nobody has written it for a second")
    await stays.subscribe(["room/43"])
    assert stays.connected
    await stays.close()


async def code(world: World, name: str, **more: Any) -> str:
    """What the MQTT listener says to somebody with this certificate."""
    client = MQTTClient(*world.mqtt, name, None, tls=world.context(world.folder / f"own/{name}.pem"), **more)
    try:
        await client.connect()
    except ConnectionRefused as refused:
        return f"CONNACK {refused.return_code}"
    except pixiu.PixiuError as error:
        return str(error)
    await client.close()
    return "yes"


async def test_a_certificate_is_a_login_and_each_wrong_one_is_refused_counted_and_audited(world: World) -> None:
    assert await code(world, "ann") == "yes"
    ann = MQTTClient(*world.mqtt, "ann", None, tls=world.context(world.folder / "own/ann.pem"))
    await ann.connect()
    await ann.subscribe(["user/40", "room/42"])
    await ann.close()
    assert await code(world, "xiu") == "CONNACK 4"
    before = world.counted("gateway", "access_refused_total")

    def audited() -> str:
        return "".join(path.read_text() for path in world.cluster.logs.parent.glob("gateway*/audit/*"))

    async def refused(name: str, why: str) -> bool:
        said = await code(world, name)
        assert said.startswith(("the connection", "no connection")), said
        return why in audited()  # of each address it has one line a second

    await until(lambda: refused("stranger", "unable to get local issuer certificate"), "the audit log's word of a stranger")
    await until(lambda: refused("late", "certificate has expired"), "the audit log's word of one that has expired")
    assert "belongs to a process" in audited()
    assert world.counted("gateway", "access_refused_total") >= before + 2


async def test_a_certificate_that_is_revoked_ends_its_session_and_opens_no_other(world: World) -> None:
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    eve, path = world.folder / "own/eve.pem", world.folder / "revoked"
    client = MQTTClient(*world.mqtt, "e", None, tls=world.context(eve), on_disconnect=gone.set_result)
    await client.connect()
    path.write_text(f"{x509.load_pem_x509_certificate(eve.read_bytes()).serial_number:x}\n")
    await asyncio.wait_for(gone, WAIT_S)
    assert await code(world, "eve") == "CONNACK 4"
    assert await code(world, "ben") == "yes"


async def test_what_is_no_tls_is_closed_counted_and_harms_nobody(world: World) -> None:
    before = world.counted("gateway", "tls_failures_total")

    def knock(data: bytes) -> bytes:
        with socket.create_connection(world.mqtt, WAIT_S) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                while sock.recv(4096):
                    pass
            return b"closed"

    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00", os.urandom(3000)):
        assert await asyncio.to_thread(knock, data) == b"closed"
    await until(lambda: world.counted("gateway", "tls_failures_total") >= before + 3, "three failures that are counted")
    assert await code(world, "ann") == "yes"


async def test_a_callback_decides_at_every_listener_by_topic_and_device(world: World, backend: Backend) -> None:
    token = world.logins.token("alice", 7, "players")

    async def subscribes(client_id: str, topic: str) -> bool:
        client = MQTTClient(*world.mqtt, client_id, "any", password=token, tls=world.context())
        await client.connect()
        try:
            await client.subscribe([topic])
        except SubscriptionRefused:
            return False
        finally:
            await client.close()
        return True

    assert await subscribes("phone:1", "room/999")
    assert not await subscribes("tablet:1", "room/999")
    assert await subscribes("tablet:1", "room/42")  # a rule of its own allows it
    got: list[bytes] = []
    phone = MQTTClient(
        *world.mqtt, "phone:2", "any", password=token, tls=world.context(), on_message=lambda _, said: got.append(said)
    )
    await phone.connect()
    await phone.subscribe(["room/998"])
    # What a client says and then leaves is said, although the callback is asked meanwhile.
    leaves = MQTTClient(*world.mqtt, "phone:3", "any", password=token, tls=world.context())
    await leaves.connect()
    for number in range(3):
        leaves.publish("room/998", b"%d" % number)
    await leaves.close()
    await until(lambda: got == [b"0", b"1", b"2"], lambda: f"three messages, {got}")
    async with pixiu.connect(world.cluster.target, token=token, ca=str(world.ca)) as px:
        with pytest.raises(pixiu.NotAllowed):  # a publisher has no device
            await px.room(997).send(b"x")
        backend.bound.add(("alice", ""))
        await px.room(996).send(b"x")
        async with (
            asyncio.timeout(WAIT_S),
            pixiu.connect(world.cluster.target, token=token, ca=str(world.ca), client="phone:4") as subscriber,
            subscriber.subscribe(room=995) as messages,
        ):
            await px.room(995).send(b"by grpc")
            assert (await anext(messages)).payload == b"by grpc"
    assert {question["topic"] for question in backend.asked} == {f"room/{number}" for number in range(995, 1000)}
    assert {question["action"] for question in backend.asked} == {"publish", "subscribe"}
    await phone.close()
