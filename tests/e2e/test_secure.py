"""`pixiu up --secure`: rooms, mail and commands with certificates and signed datagrams, which are exchanged in mid-run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pixiu
from cluster.trust.audit import verify
from cluster.trust.key_folder import add_key, drop_keys, use_key
from cluster.trust.key_ring import read_key_ring
from cluster.trust.pki import CALLERS, ZOOKEEPER, issue, make_authority, renew
from onebox.grouping import CLIENT_ROLES
from pixiu.discovery.paths import ROLES
from pixiu.rpc import tls
from pixiu.rpc.tls import TLS_DIR, TLS_NAME
from tests.support.cluster import PIXIU, LocalCluster, running_cluster, wait_for
from tests.support.forks import fork_pixiu
from tests.support.listener_fuzz import Attack, Target
from tests.support.waiting import until
from tools.cli.main import application

pytestmark = pytest.mark.e2e
ONE = [
    f"--{each}=1"
    for each in ("proxies", "gateways", "brokers", "routers", "relays", "xius", "pis", "router-replicas", "relay-replicas")
]
WAIT_S = 120.0
LISTENERS_S = float(os.environ.get("PIXIU_LISTENERS_S", "0.5"))
ROOM, USER = 42, 7


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_cluster(tmp_path_factory.mktemp("secure"), "--secure", *ONE) as running, pytest.MonkeyPatch.context() as patch:
        folder = running.folder / "run/tls"
        patch.setenv(TLS_DIR, str(folder))
        tls.use(tls.Tls(folder, tls.OPERATOR))
        yield running
        tls.use(None)
        data = running.folder / "run"
        assert not [path for path in (data, *data.rglob("*")) if not path.is_symlink() and path.lstat().st_mode & 0o077]
        said = b"".join(path.read_bytes() for path in (*data.glob("logs/*"), *data.rglob("audit/*.log")) if path.is_file())
        private = [
            path
            for folder in ("keys", "pki", "tls", "listeners", "secure")
            for path in (data / folder).rglob("*")
            if path.is_file()
        ]
        secrets = {line for path in private if path.stat().st_mode & 0o077 == 0 for line in path.read_bytes().split(b"\n")}
        secrets |= {word for line in (data / "zookeeper/credentials").read_bytes().split(b"\n") for word in line.split()[1:]}
        found = [line[:8] for line in secrets if len(line) >= 16 and b"-----" not in line and line in said]
        assert len(secrets) > 20
        assert not found
        assert len(said) > 1000


def token(cluster: LocalCluster) -> str:
    """Of the user whom `pixiu up --secure` makes."""
    return (cluster.folder / "run/secure/token").read_text()


def authority(cluster: LocalCluster) -> str:
    """Of what clients are shown."""
    return str(cluster.folder / "run/listeners/ca.pem")


def run(cluster: LocalCluster, folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A `pixiu` command with the certificate of this name in a folder, and the token."""
    environment = {TLS_DIR: str(folder), TLS_NAME: name, "PIXIU_TOKEN": token(cluster), "PIXIU_CA": authority(cluster)}
    return fork_pixiu(*arguments, "--target", cluster.target, environment=environment)


def health(process: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(f"{process['http']}/health", timeout=WAIT_S) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


def counted(processes: list[dict[str, Any]], name: str) -> float:
    """The sum of a metric of all processes."""
    total = 0.0
    for process in processes:
        with urllib.request.urlopen(f"{process['http']}/metrics", timeout=WAIT_S) as reply:
            prefix = f"pixiu_{process['role']}_{name}"
            total += sum(float(line.split()[-1]) for line in reply.read().decode().splitlines() if line.startswith(prefix))
    return total


async def test_rooms_and_mail_flow_while_keys_and_certificates_are_exchanged(cluster: LocalCluster) -> None:
    data = cluster.folder / "run"
    processes = cluster.status()["processes"]
    got: list[bytes] = []
    mails: list[bytes] = []
    async with (
        pixiu.connect(cluster.target, token=token(cluster), ca=authority(cluster)) as px,
        px.subscribe(room=ROOM) as messages,
        px.inbox(uin=USER, device="phone") as inbox,
    ):

        async def listen() -> None:
            async for message in messages:
                got.append(message.payload)

        async def read() -> None:
            async for mail in inbox:
                mails.append(mail.payload)
                mail.acknowledge()

        tasks = [asyncio.create_task(listen()), asyncio.create_task(read())]

        async def round_trip(number: int) -> None:
            said = b"%d" % number
            await px.room(ROOM).send(said)
            await px.user(USER).mail(said, level="replicated")
            await until(lambda: said in got and said in mails, f"message and mail {number}")

        def all_have(ring: str) -> bool:
            return all(health(process)["keys"] == ring for process in processes)

        await round_trip(0)
        steps = (
            (add_key, "signs with 1, accepts 1, 2"),
            (use_key, "signs with 2, accepts 1, 2"),
            (drop_keys, "signs with 2, accepts 2"),
        )
        for number, (step, ring) in enumerate(steps, 1):
            await asyncio.to_thread(step, data / "keys")
            assert read_key_ring(data / "keys").name() == ring
            await until(partial(asyncio.to_thread, all_have, ring), ring)
            await round_trip(number)
        assert len(renew(data / "pki", data / "tls")) == len((*ROLES, *CALLERS, ZOOKEEPER))
        assert len(renew(data / "pki", data / "listeners")) == len(CLIENT_ROLES)
        await round_trip(4)
        # A new process of a new certificate is taken by those that have been there, and they by it.
        broker = next(process for process in processes if process["role"] == "broker")
        os.kill(broker["pid"], 9)
        await asyncio.to_thread(cluster.wait_healthy)
        for number in range(5, 8):
            await round_trip(number)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    after = cluster.processes("broker")
    assert broker["pid"] not in [process["pid"] for process in after]
    there = cluster.status()["processes"]
    assert counted(there, "links_role_refused_total") == 0
    assert counted(there, "calls_refused_total") == 0


def test_commands_need_a_certificate_that_may(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = cluster.folder / "run/tls"
    sent = run(cluster, folder, "operator", "send", "--mail", "--user", "99", "kept")
    assert sent.returncode == 0, sent.stderr
    listed = run(cluster, folder, "operator", "inbox", "list", "99", "--json")
    assert (listed.returncode, "kept" in listed.stdout) == (0, True), listed.stderr
    deleted = run(cluster, folder, "operator", "inbox", "delete", "99", "--lane", "1", "1", "--yes", "--json")
    assert deleted.returncode == 0, deleted.stderr
    lines = [json.loads(line) for path in (cluster.folder / "run").glob("pi-*/audit/audit.log") for line in path.open()]
    changes = [line for line in lines if line["kind"] == "inbox_change"]
    assert changes
    # Who waits long for an answer asks again, so that there may be several, all the same.
    for line in changes:
        said = {key: line[key] for key in ("caller", "name", "what", "uin", "lane", "first", "last")}
        assert said == {"caller": "operator", "name": "operator", "what": "delete", "uin": 99, "lane": 1, "first": 1, "last": 1}
    refused = run(cluster, folder, "client", "inbox", "list", "99")
    assert (refused.returncode, "client may not call /pixiu.v1.Pi/Exchange" in refused.stderr) == (2, True), refused.stderr
    refused = run(cluster, folder, "client", "repair", "--role", "xiu", "--json")
    assert refused.returncode == 1
    assert "client may not call /pixiu.v1.Repair/Verify of xiu" in refused.stdout
    make_authority(tmp_path / "ca")
    issue(tmp_path / "ca", "operator", tmp_path / "tls")
    stranger = run(cluster, tmp_path / "tls", "operator", "repair", "--role", "xiu", "--json")
    assert (stranger.returncode, "Traceback" in stranger.stderr) == (2, False)
    assert "TLS fails" in stranger.stdout
    plain = fork_pixiu("status", "--target", cluster.target.replace("zks://", "zk://"))
    assert (plain.returncode, "Traceback" in plain.stderr, "no ZooKeeper answered" in plain.stderr) == (2, False, True)
    assert run(cluster, folder, "operator", "repair", "--role", "xiu", "--json").returncode == 0
    logs = (cluster.folder / "run").glob("xiu-*/audit/refusals.log")
    audit = next(path for path in logs if "call_refused" in path.read_text())
    assert verify(audit).lines


def test_a_support_bundle_has_no_secret_of_the_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    data = cluster.folder / "run"
    held = {
        line.strip()
        for folder in ("keys", "tls", "listeners", "secure")
        for path in (data / folder).rglob("*")
        if path.is_file() and path.name != "ca.pem"
        for line in path.read_bytes().split(b"\n")
    }
    held |= {word for line in (data / "zookeeper/credentials").read_bytes().split(b"\n") for word in line.split()[1:]}
    secrets = {word for word in held if len(word) >= 32 and b" " not in word}
    assert len(secrets) > 20
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/told.log").write_bytes(b"\n".join([b"before", *sorted(secrets), token(cluster).encode(), b"after\n"]))
    tables = {
        "cluster": {"key_dir": data / "keys", "tls_dir": data / "tls", "registry_credentials_file": data / "zookeeper/credentials"},
        **{
            path.stem: {"access_file": data / "secure/access.toml", "tls_certificate": path}
            for path in (data / "listeners").glob("*.pem")
            if path.stem != "ca"
        },
    }
    lines = [line for name, table in tables.items() for line in (f"[{name}]", *(f'{key} = "{at}"' for key, at in table.items()))]
    (tmp_path / "pixiu.toml").write_text("\n".join(lines))
    words = ["support-bundle", "--out", str(tmp_path / "bundle.tar.gz"), "--json", "--target", cluster.target]
    words += ["--logs", str(tmp_path / "logs"), "--logs", str(data / "logs"), "--config", str(tmp_path / "pixiu.toml")]
    made = CliRunner().invoke(application(words), words, env={"PIXIU_TOKEN": token(cluster)})
    assert made.exit_code == 0, made.output
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        files = {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}
    everything = b"\n".join(files.values())
    assert [secret[:8] for secret in secrets | {token(cluster).encode()} if secret in everything] == []
    assert b"before" in files["pixiu-support/logs/told.log"]
    assert b"after" in files["pixiu-support/logs/told.log"]
    processes = cluster.status()["processes"]
    assert sum(name.endswith("/health.json") for name in files) == len(processes)
    assert json.loads(made.stdout)["silent"] == {}
    assert any(b'"settings":' in data for name, data in files.items() if name.endswith("/health.json"))
    assert sum(name.startswith("pixiu-support/logs/") for name in files) > len(processes)


def test_inboxes_without_a_certificate_say_at_once_what_to_give(cluster: LocalCluster) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIXIU_")}
    command = [PIXIU, "inbox", "list", "7", "--target", cluster.target]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)
    assert (told.returncode, TLS_DIR in told.stderr, "Traceback" in told.stderr) == (2, True, False), told.stderr


async def test_peers_without_a_login_harm_no_listener(cluster: LocalCluster, tmp_path: Path) -> None:
    """Half a second at each, or `PIXIU_LISTENERS_S`, and at least twenty attacks."""
    before = cluster.status()["processes"]
    processes = {process["role"]: process for process in before}
    make_authority(tmp_path / "strangers")
    stranger = issue(tmp_path / "strangers", "client", tmp_path / "own")
    wanted = [
        ("mqtt", "gateway", "mqtt", "tls"), ("gateway", "gateway", "client_address", "tls"),
        ("proxy", "proxy", "client_address", "tls"), ("cluster", "xiu", "address", "tls"), ("links", "broker", "address", "udp"),
        ("http", "pi", "http", "plain"),
    ]  # fmt: skip
    listeners = []
    for name, role, key, speaks in wanted:
        process = processes[role]
        host, _, port = process[key].removeprefix("http://").rpartition(":")
        listeners.append(Target(name, host, int(port), process["pid"], speaks))
    for seed, listener in enumerate(listeners):
        await Attack(listener, seed, stranger).run(LISTENERS_S, at_least=20)
        print(listener.told())
        assert max(listener.rss_kb) < listener.rss_kb[0] + (100 << 10), listener
    assert [process["pid"] for process in cluster.status()["processes"]] == [process["pid"] for process in before]
    logs = "".join(path.read_text() for path in (cluster.folder / "run/logs").glob("*.log"))
    assert "Traceback" not in logs
    assert "E0000" not in logs, "gRPC's own lines have bytes of strangers in them"
    async with pixiu.connect(cluster.target, token=token(cluster), ca=authority(cluster)) as px:
        await px.room(ROOM).send(b"still served")

    def judged() -> bool:
        return all(counted([processes[role]], "grpc_handshakes_failed_total") for role in ("gateway", "proxy", "xiu"))

    await until(partial(asyncio.to_thread, judged), "handshakes that failed at gRPC's listeners are counted")
    kept = "".join(path.read_text() for path in (cluster.folder / "run").glob("xiu-*/audit/audit.log"))
    assert '"handshakes_failed"' in kept


def test_datagrams_without_a_key_of_the_ring_are_not_answered(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[0]
    host, _, port = gateway["address"].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        before = counted([gateway], "links_refused_total")
        for _ in range(20):
            sock.sendto(b"PX\x01\x03\x00\x01" + bytes(60), (host, int(port)))
        wait_for(lambda: counted([gateway], "links_refused_total") >= before + 20, "all are refused")
        with pytest.raises(BlockingIOError):
            sock.recv(2048, socket.MSG_DONTWAIT)
