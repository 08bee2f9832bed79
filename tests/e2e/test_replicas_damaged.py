"""Replicas whose disks fail them: full, rotten, or lost, and the operator's word that ends the wait of the last one."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from onebox.embedded import EmbeddedZooKeeper
from tests.support.disks import small_disk
from tests.support.forks import fork_pixiu
from tests.support.replicas import Make, Writers, making
from tests.support.waiting import until


@pytest.fixture
async def make(zookeeper_server: EmbeddedZooKeeper, tmp_path: Path) -> AsyncIterator[Make]:
    async with making(zookeeper_server, tmp_path) as start:
        yield start


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "small", "2m") as mount:
        yield mount


def fill(disk: Path) -> Path:
    """A file that takes all the space that is left."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def flip_a_byte(log: Path) -> None:
    """In the middle of the newest segment."""
    segment = max(log.glob("*.log"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x40
    segment.write_bytes(data)


async def test_a_leader_with_a_full_disk_hands_over_to_a_replica_with_space(make: Make, disk: Path) -> None:
    replicas = await make("a", "b", folder=disk)
    async with Writers(replicas, payload_bytes=100) as writers:
        await writers.wait_more(100)
        assert await replicas.leader() == "a"
        ballast = fill(disk)
        assert await replicas.wait_leader("a") == "b"
        assert "are free on the disk" in (await replicas.status("a"))["no_space"]
        assert (await replicas.status("b"))["no_space"] == ""
        await writers.wait_more(100)
        ballast.unlink()
        await replicas.wait_in_sync(2)
        await writers.wait_more(100)
    writers.check(await replicas.wait_equal("a", "b"))


async def test_a_leader_whose_disk_hangs_is_replaced_and_follows_when_it_is_back(make: Make) -> None:
    replicas = await make("a", "b", "c")
    async with Writers(replicas) as writers:
        await writers.wait_more(100)
        await replicas.wait_in_sync(3)  # a leader that was left alone in its set on a busy machine has no successor
        hung = await replicas.wait_leader()
        replicas.send_signal(hung, signal.SIGUSR1)
        other = await replicas.wait_leader(hung)
        await writers.wait_more(100)
        assert "replica_disk_hangs" in replicas.log(hung)
        replicas.send_signal(hung, signal.SIGUSR2)
        await replicas.wait_in_sync(3)
        assert await replicas.leader() == other
    writers.check(await replicas.wait_equal("a", "b", "c"))


async def test_the_last_replica_if_damaged_serves_nothing_until_an_operator_says_so(make: Make) -> None:
    replicas = await make("a")
    async with Writers(replicas) as writers:
        await writers.wait_more(300)
    replicas.send_signal("a", signal.SIGKILL)
    flip_a_byte(replicas.folder / "a/replica/log")
    replicas.start("a")

    async def damaged() -> bool:
        return (await replicas.status("a")).get("state") == "Damaged"

    await until(damaged, "a replica that says that it is damaged")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await replicas.call("a", "Append", b"x")
    assert str(refused.value.details()).startswith("NOT_LEADER")

    shown = await asyncio.to_thread(fork_pixiu, "status", "--target", replicas.target)
    assert shown.returncode == 1
    assert "operator" in " ".join(shown.stdout.split())
    member = str((await replicas.status("a"))["member"])
    command = ("promote", "xiu", "0", member, "--force", "--reason", "its disk rotted", "--target", replicas.target)
    asked = await asyncio.to_thread(fork_pixiu, *command, given="n\n")
    assert asked.returncode == 1
    assert "lost" in asked.stdout
    assert (await replicas.status("a"))["state"] == "Damaged"
    done = await asyncio.to_thread(fork_pixiu, *command, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert await replicas.leader() == "a"
    assert int(await replicas.call("a", "Append", b"goes on")) > 0
    audit = json.loads((replicas.folder / "a/replica/audit.log").read_text())
    assert audit["reason"] == "its disk rotted"
    assert audit["member"] == member
