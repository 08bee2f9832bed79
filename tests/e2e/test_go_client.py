"""The client in Go of `examples/go`, as its README builds it: test vectors, then rooms and mail to and from Python's."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pixiu
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.waiting import until

GO = shutil.which("go")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.skipif(GO is None, reason="needs Go")]
ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ["google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc"]
PATIENT_S = 110.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with generated stubs, and the program in `bin/`. Skips where the modules cannot be had."""
    folder = tmp_path_factory.mktemp("go") / "client"
    shutil.copytree(ROOT / "examples/go", folder, ignore=shutil.ignore_patterns("bin", "wire"))
    downloaded = subprocess.run([str(GO), "mod", "download"], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    if downloaded.returncode:
        pytest.skip(f"Go's modules cannot be had: {downloaded.stderr[-200:]}")
    run(folder, str(GO), "build", "-o", "bin/", *PLUGINS)
    options: list[str] = []
    for plugin in ("go", "go-grpc"):
        options += [f"--plugin=protoc-gen-{plugin}={folder}/bin/protoc-gen-{plugin}", f"--{plugin}_out={folder}"]
        options += [f"--{plugin}_opt=module=pixiu"]
    protos = [f"pixiu/wire/v1/{name}.proto" for name in ("level", "mail", "wire")]
    run(folder, sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *options, *protos)
    run(folder, str(GO), "build", "-o", "bin/pixiu-go", ".")
    return folder


def run(folder: Path, *command: str) -> None:
    """A step of the build; its output when it fails."""
    environment = {**os.environ, "PIXIU_VECTORS": str(ROOT / "proto/vectors.json")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Every role once."""
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(folder, "--xius=1", "--pis=1", layout="small") as cluster:
        cluster.wait_healthy()
        yield cluster


class Program:
    """The Go program in the background, a line at a time."""

    def __init__(self, folder: Path, cluster: LocalCluster, *arguments: str) -> None:
        proxy = cluster.processes("proxy")[0]["client_address"]
        command = [str(folder / "bin/pixiu-go"), "-proxy", proxy, *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    async def line(self) -> str:
        """The next line; at its end what it said about an error."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        async with asyncio.timeout(PATIENT_S):
            found = await asyncio.to_thread(self._process.stdout.readline)
            return found or await asyncio.to_thread(self._process.stderr.read)

    async def ended(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self._process.wait, PATIENT_S)

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()


def test_its_codec_makes_the_test_vectors(folder: Path) -> None:
    run(folder, str(GO), "test", "-vet=all", ".")


async def test_room_messages_go_both_ways(folder: Path, small: LocalCluster) -> None:
    listener = Program(folder, small, "-n", "1", "listen", "1242")
    try:
        assert await listener.line() == "joined\n"
        async with pixiu.connect(small.target, uin=7) as px:
            await px.room(1242).send("grüße aus Python".encode())
            assert await listener.line() == "7: grüße aus Python\n"
            assert await listener.ended() == 0
            async with px.subscribe(room=1242) as messages, asyncio.timeout(PATIENT_S):
                sender = Program(folder, small, "-uin", "8", "send", "1242", "grüße aus Go")
                try:
                    message = await anext(messages)
                    assert (message.sender, message.payload.decode(), message.type) == (8, "grüße aus Go", 0)
                    assert (await sender.line(), await sender.ended()) == ("accepted\n", 0)
                finally:
                    sender.stop()
    finally:
        listener.stop()


async def test_mail_goes_both_ways_and_is_acknowledged(folder: Path, small: LocalCluster) -> None:
    async with pixiu.connect(small.target, uin=7) as px, pixiu.InboxView(small.target) as view:
        for text in (b"one", b"two"):
            await px.user(1208).mail(text)
        device = Program(folder, small, "-n", "2", "inbox", "1208", "phone")
        try:
            lines = {await device.line() for _ in range(3)}
            assert lines == {"ready\n", "7: one\n", "7: two\n"}
            assert await device.ended() == 0
        finally:
            device.stop()

        async def acknowledged() -> bool:
            lanes = await view.unread(1208)
            return [each.unread for lane in lanes for each in lane.devices] == [0, 0] and lanes[1].last == 2

        await until(acknowledged, "Pi has what the Go client acknowledged")

        writer = Program(folder, small, "-uin", "8", "mail", "1209", "kept for you")
        try:
            assert (await writer.line()).startswith("stored in 1 copies, MsgID ")
            assert await writer.ended() == 0
        finally:
            writer.stop()
        async with px.inbox(uin=1209, device="phone") as inbox, asyncio.timeout(PATIENT_S):
            mail = await anext(inbox)
            assert (mail.sender, mail.payload, mail.lane) == (8, b"kept for you", 1)
            mail.acknowledge()
