"""Roles run from the image, each in a container of its own: messages and mail go through them, and their end drains.

PIXIU_IMAGE names an image that was built from deploy/Containerfile; podman must be able to run it here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import pixiu
from comparison.processes import free_port
from onebox.embedded import EmbeddedZooKeeper
from tests.support.cluster import is_healthy, wait_for

IMAGE = os.environ.get("PIXIU_IMAGE", "")
PODMAN = shlex.split(os.environ.get("PIXIU_PODMAN", "podman"))
"""The program, with its global options."""
pytestmark = [pytest.mark.process, pytest.mark.skipif(not IMAGE, reason="PIXIU_IMAGE names no image")]
LAYOUT = ("router=1x1", "broker=1x1", "relay=1x1", "xiu=1x1", "pi=1x1", "proxy=1", "gateway=1")
ROLES = ("xiu", "pi", "router", "relay", "broker", "proxy", "gateway")
STORES = ("xiu", "pi", "router", "relay")
BUILD = "import os; from cluster.core.compiled import BUILD; print(os.environ['PIXIU_COMPILE'], BUILD)"
WAIT_S = 120.0
STOP_S = 60.0


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run([*PODMAN, *words], capture_output=True, text=True, timeout=WAIT_S, check=False)


def command(*words: str) -> str:
    """What a command of the image prints."""
    done = podman("run", "--rm", "--network=host", "--entrypoint", words[0], IMAGE, *words[1:])
    assert done.returncode == 0, done.stderr
    return done.stdout


class Container:
    """A role in a container."""

    def __init__(self, role: str, settings: dict[str, object], log: Path) -> None:
        self.role, self.log = role, log
        self.name = f"pixiu-test-{os.getpid()}-{role}"
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        run = ["run", "--rm", "--network=host", "--shm-size=256m", "--stop-timeout=45", "--name", self.name, IMAGE, role, *words]
        with log.open("wb") as output:
            self.process = subprocess.Popen([*PODMAN, *run], stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def stop(self) -> int:
        """End it as podman does: SIGTERM. Returns its exit code."""
        podman("stop", self.name)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            podman("kill", self.name)
            self.process.kill()
            return self.process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its target: ZooKeeper beside this test, all roles from the image."""
    folder = tmp_path_factory.mktemp("image")
    running: list[Container] = []
    with EmbeddedZooKeeper(folder / "zookeeper") as server, contextlib.ExitStack() as ends:
        target = f"zk://{server.address}/image"
        command("pixiu", "layout", "set", *LAYOUT, "--target", target)
        for role in ROLES:
            settings: dict[str, object] = {"registry": target, "port": free_port(), "http_port": free_port()}
            if role in ("proxy", "gateway"):
                settings["client_port"] = free_port()
            if role in STORES:
                settings["data_dir"] = "/var/lib/pixiu/data"
            if role == "gateway":
                settings["mqtt_port"] = free_port()
            running.append(Container(role, settings, folder / f"{role}.log"))
            ends.callback(running[-1].stop)

        def healthy() -> bool:
            ended = [each.log.read_text() for each in running if each.process.poll() is not None]
            assert not ended, ended
            return is_healthy(target)

        wait_for(healthy, "a healthy status", pause_s=0.5)
        yield target
        ends.pop_all()
        codes = {each.role: each.stop() for each in reversed(running)}
    assert codes == dict.fromkeys(reversed(ROLES), 0), [each.log.read_text()[-2000:] for each in running]


def test_the_image_has_a_user_of_its_own_and_no_compiler() -> None:
    assert command("id", "-u").strip() == "10001"
    assert podman("run", "--rm", "--entrypoint", "gcc", IMAGE, "--version").returncode != 0
    wanted, build = command("python", "-P", "-c", BUILD).split()[:2]
    assert build == ("compiled" if wanted == "1" else "plain")


async def test_a_message_and_a_mail_go_through_containers(cluster: str) -> None:
    async with pixiu.connect(cluster) as px, asyncio.timeout(WAIT_S):
        async with px.subscribe(room=42) as messages:
            await px.room(42).send(b"hello")
            assert (await anext(messages)).payload == b"hello"
        await px.user(7).mail(b"kept for you")
        async with px.inbox(uin=7, device="phone") as inbox:
            mail = await anext(aiter(inbox))
            assert mail.payload == b"kept for you"
            mail.acknowledge()
            await inbox.flush()


def test_commands_of_the_image_reach_the_cluster(cluster: str) -> None:
    assert "healthy" in command("pixiu", "status", "--target", cluster)
    assert "accepted" in command("pixiu", "send", "--room", "42", "hello", "--target", cluster)
