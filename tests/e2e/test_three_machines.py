"""`examples/three_machines` as its README starts it: the files' 27 processes on three loopback addresses, a message and a mail."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pixiu
from cluster.trust.key_folder import add_key, use_key
from onebox.embedded import EmbeddedZooKeeper
from onebox.fork_server import Forked
from tests.support.cluster import PIXIU, is_healthy, wait_for
from tests.support.forks import fork

pytestmark = pytest.mark.e2e
FOLDER = Path(__file__).resolve().parents[2] / "examples/three_machines"
README = (FOLDER / "README.md").read_text()
MACHINES = ("machine1", "machine2", "machine3")
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
STARTED = tuple(re.findall(r"^python -m (\w+) --config machine1.toml &$", README, re.MULTILINE))
"""In the README's order."""
ENDED = tuple(reversed(STARTED))
TABLES = {"xiu": {"table_dir": "{}", "table_mb": "8"}, "gateway": {"signal_table_dir": "{}"}}
"""Shared memory is a folder of each machine, which is removed with the test's."""
WAIT_S = 120.0


def can_bind(address: str, ports: list[int]) -> bool:
    """Whether a process could listen at all of these ports."""
    for port in ports:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((address, port))
            except OSError:
                return False
    return True


def ports_of(config: str) -> list[int]:
    return [
        table[key]
        for table in tomllib.loads(config).values()
        for key in ("port", "http_port", "client_port", "mqtt_port")
        if key in table
    ]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The target of the running cluster. Of the files only the registry's port and the folders are changed."""
    texts = {machine: (FOLDER / f"{machine}.toml").read_text() for machine in MACHINES}
    if not all(can_bind(address, ports_of(text)) for address, text in zip(ADDRESSES, texts.values(), strict=True)):
        pytest.skip("needs Linux's loopback addresses 127.0.0.2 to 127.0.0.4, with the ports of the files free")
    folder = tmp_path_factory.mktemp("machines")
    add_key(folder / "keys")
    use_key(folder / "keys")
    server = EmbeddedZooKeeper(str(folder / "zookeeper"))
    server.start()
    target = f"zk://{server.address}/three"
    processes: dict[tuple[str, str], Forked] = {}
    try:
        [words] = [line.split() for line in README.splitlines() if line.startswith("pixiu layout set ")]
        words = [PIXIU, *words[1 : words.index("--target")], "--target", target]
        subprocess.run(words, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)
        for machine, text in texts.items():
            changed = text.replace("zk://127.0.0.1:2181/three", target).replace("/etc/pixiu/keys", str(folder / "keys"))
            (folder / f"{machine}.toml").write_text(changed.replace("/var/lib/pixiu", str(folder)))
        for role in STARTED:
            for machine in MACHINES:
                memory = folder / machine
                memory.mkdir(exist_ok=True)
                arguments = ["--config", str(folder / f"{machine}.toml")]
                for key, value in TABLES.get(role, {}).items():
                    arguments += ["--set", f"{key}={value.format(memory)}"]
                processes[role, machine] = fork(role, arguments, folder / f"{machine}-{role}.log")
        wait_for(lambda: healthy(target, folder, processes), "a healthy status", pause_s=0.2)
        yield target
    finally:
        for role in ENDED:
            for machine in MACHINES:
                if (role, machine) in processes:
                    end(processes[role, machine])
        server.stop()
    for (role, machine), process in processes.items():
        assert process.returncode == 0, (folder / f"{machine}-{role}.log").read_text()


def healthy(target: str, folder: Path, processes: dict[tuple[str, str], Forked]) -> bool:
    """What `pixiu status` says, as the README ends. Fails when a process has ended."""
    for (role, machine), process in processes.items():
        assert process.poll() is None, (folder / f"{machine}-{role}.log").read_text()
    return is_healthy(target)


def end(process: Forked) -> None:
    """In good order, else by force."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


async def test_a_message_and_a_mail_go_through_the_three_machines(machines: str) -> None:
    async with pixiu.connect(machines) as px, asyncio.timeout(WAIT_S):
        cluster = px.cluster()
        assert {address.rpartition(":")[0] for address in cluster.proxies} == set(ADDRESSES)
        assert {address.rpartition(":")[0] for address in cluster.gateways} == set(ADDRESSES)
        async with px.subscribe(room=42) as messages:
            await px.room(42).send(b"hello")
            assert (await anext(messages)).payload == b"hello"
        receipt = await px.user(7).mail(b"kept for you")
        assert receipt.replicas >= 2, "min_in_sync: a second machine's disk has it"
        async with px.inbox(uin=7, device="phone") as inbox:
            mail = await anext(aiter(inbox))
            assert mail.payload == b"kept for you"
            mail.acknowledge()
            await inbox.flush()


def run(target: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PIXIU, *words, "--target", target], capture_output=True, text=True, timeout=WAIT_S, check=False)


async def test_a_machine_that_is_drained_is_not_missed(machines: str) -> None:
    shown = json.loads(run(machines, "layout", "show", "--json").stdout)
    assert (shown["version"], shown["missing"]) == (1, [])
    found = {one["check"]: one for one in json.loads(run(machines, "doctor", "--json").stdout)["findings"]}
    checks = ("registry", "layout", "answers", "versions", "settings", "clocks")
    assert {check: found[check]["grade"] for check in checks} == dict.fromkeys(checks, "ok"), found
    drained = await asyncio.to_thread(run, machines, "drain", ADDRESSES[2])
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout.count("has left") == len(STARTED)
    async with pixiu.connect(machines) as px, asyncio.timeout(WAIT_S):
        assert ADDRESSES[2] not in {address.rpartition(":")[0] for address in px.cluster().gateways}
        async with px.subscribe(room=43) as messages:
            await px.room(43).send(b"hello")
            assert (await anext(messages)).payload == b"hello"
        assert (await px.user(8).mail(b"kept by the others")).replicas == 2
    missing = json.loads(run(machines, "layout", "show", "--json").stdout)["missing"]
    assert {(lack["role"], lack["running"]) for lack in missing} == {(role, 2) for role in STARTED}
