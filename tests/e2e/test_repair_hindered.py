"""`pixiu repair` while writers press on, and on a disk that has no space for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import small_disk
from tests.support.effort import portion
from tests.support.pi import UIN, Sender, inbox
from tests.support.repairs import alter, damage_dedupe_window, flip, repair
from tests.support.roles import Roles
from tests.support.stores import Mailer, equal_scans, leader_of, wait_in_sync
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

NAMES = ("xiu-a", "xiu-b")
TRIES = 100
SETTINGS: dict[str, Any] = {"partition": 0, "reserve_mb": 0}
COMPACTING: dict[str, Any] = {"memtable_mb": 2, "flush_interval_s": 0.5}
"""Many small files, so that RocksDB reads them again soon."""
STILL: dict[str, Any] = {"memtable_mb": 256, "flush_interval_s": 3600}


async def hand_over(roles: Roles, leader: str, to: str, alive: set[str], **settings: Any) -> None:
    """Make the other replica lead; this one follows it then."""
    alive.discard(leader)
    await roles.end(leader)
    assert await wait_in_sync(roles, to) == to
    roles.start(leader, **settings)
    alive.add(leader)
    assert await wait_in_sync(roles, *NAMES) == to


@pytest.mark.parametrize("damaged_leads", portion([False, True]))
async def test_a_store_is_repaired_while_writers_press_on_and_no_acknowledged_record_is_missing(
    roles: Roles, damaged_leads: bool
) -> None:
    settings = SETTINGS | (STILL if damaged_leads else COMPACTING)
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, **settings)
    leader = await wait_in_sync(roles, *NAMES)
    (damaged,) = set(NAMES) - {leader}
    alive = set(NAMES)
    mailer = Mailer(roles, alive, writers=6, batch=100, body_bytes=300)
    await mailer.more(20_000)
    alive.discard(damaged)
    await roles.end(damaged)
    flip(roles.folder / damaged / "store")
    roles.start(damaged, **settings)
    alive.add(damaged)
    await wait_in_sync(roles, *NAMES)
    if damaged_leads:
        await hand_over(roles, leader, damaged, alive, **settings)
    before, began = mailer.acknowledged, time.monotonic()
    exit_code, found = await repair(roles, "--role", "xiu")
    meanwhile, took = mailer.acknowledged - before, time.monotonic() - began
    assert exit_code == 0, found
    assert [(each["left"], each["differing"]) for each in found["replicas"]] == [(0, 0), (0, 0)]
    told = sorted((bool(each["damaged"]), bool(each["repaired"])) for each in found["replicas"])
    assert told == [(False, False), (True, True)] or not damaged_leads
    (node,) = await roles.running(damaged)
    assert await roles.metric(node, "repairs_total") >= 1, "by the command, or by itself when a compaction met the damage first"
    assert meanwhile > 0
    await mailer.more(500)
    await mailer.stop()
    by_itself = " by itself" if told[1] == (False, False) else ""
    print(f"\nrepaired{by_itself} and compared in {took:.1f} s; acknowledged: {meanwhile} meanwhile, {mailer.acknowledged} in all")
    mailer.check(await equal_scans(*await roles.running(*NAMES)))
    exit_code, found = await repair(roles, "--role", "xiu")
    assert exit_code == 0
    assert [(each["damaged"], each["differing"]) for each in found["replicas"]] == [(0, 0), (0, 0)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    with small_disk(tmp_path / "small", "64m") as mount:
        yield mount


def leave(disk: Path, free: int) -> None:
    """Fill a disk but for so many bytes."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    with open(ballast, "wb") as file:
        for _ in range(TRIES):
            found = os.statvfs(disk)
            with contextlib.suppress(OSError):  # a replica has written more meanwhile
                os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - free)
                return
    raise RuntimeError(f"the space on {disk} was never what was found")


def size_of(store: Path) -> int:
    """What the files of a store's rows take."""
    return sum(file.stat().st_size for file in store.glob("*.sst"))


async def repair_with_the_other(roles: Roles) -> tuple[int, dict[str, Any]]:
    """A repair of Xiu for which the other replica, which has just started, was to be reached."""
    exit_code, found = 0, dict[str, Any]()

    async def reached() -> bool:
        nonlocal exit_code, found
        exit_code, found = await repair(roles, "--role", "xiu")
        return not any(each["text"].startswith("UNAVAILABLE") for each in found["replicas"])

    await until(reached, lambda: f"a repair that reaches the other replica: {found}")
    return exit_code, found


async def test_a_repair_on_a_full_disk_says_so_loses_nothing_and_works_when_there_is_space(disk: Path, roles: Roles) -> None:
    small, other = NAMES
    folder = disk / small
    settings: dict[str, dict[str, Any]] = {small: SETTINGS | STILL | {"data_dir": str(folder)}, other: SETTINGS | STILL}
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, **settings[name])
    await wait_in_sync(roles, *NAMES)
    alive = set(NAMES)
    mailer = Mailer(roles, alive, body_bytes=300)
    await mailer.more(5000)
    mailer.paused = True
    alive.discard(small)
    await roles.end(small)
    flip(folder / "store")
    roles.start(small, **settings[small])
    alive.add(small)
    if await wait_in_sync(roles, *NAMES) == other:
        await roles.end(other)
        assert await wait_in_sync(roles, small) == small
        roles.start(other, **settings[other])
        assert await wait_in_sync(roles, *NAMES) == small

    for free in (0, size_of(folder / "store") + (8 << 10)):  # not enough by what is known before; and by what shows
        leave(disk, free)
        exit_code, found = await repair_with_the_other(roles)
        assert exit_code == 1
        told = [each for each in found["replicas"] if each["text"]]
        assert [each["repaired"] for each in told] == [0]
        assert told[0]["left"] > 0
        assert told[0]["text"].startswith("DISK_FULL")
        assert sorted(path.name for path in folder.iterdir()) == ["audit", "replica", "store"], "nothing is left of the try"
    (node,) = await roles.running(small)
    assert await roles.metric(node, "repairs_failed_total") >= 2
    (disk / "ballast").unlink()

    exit_code, found = await repair(roles, "--role", "xiu")
    assert exit_code == 0, found
    assert sum(each["repaired"] for each in found["replicas"]) > 0
    mailer.paused = False
    await mailer.more(1000)
    await mailer.stop()
    mailer.check(await equal_scans(*await roles.running(*NAMES)))
    await roles.kill(small)
    roles.start(small, **settings[small])
    await wait_in_sync(roles, *NAMES)
    mailer.check(await equal_scans(*await roles.running(*NAMES)))


async def test_a_pi_on_a_full_disk_stays_as_it_is_and_is_repaired_when_there_is_space(disk: Path, roles: Roles) -> None:
    small, other = "pi-a", "pi-b"
    folder = disk / small
    idle: dict[str, Any] = {"partition": 0, "flush_interval_s": 0.1, "scrub_keys_per_s": 0, "clock_interval_s": 3600}
    settings: dict[str, dict[str, Any]] = {small: idle | {"data_dir": str(folder)}, other: idle}
    await roles.layout(pi=1)
    roles.start(other, **settings[other])
    await wait_in_sync(roles, other)
    roles.start(small, **settings[small])
    assert await wait_in_sync(roles, small, other) == other
    sender = Sender(roles, {other})
    await sender.more(500)
    await sender.stop()
    await roles.end(small)
    alter(folder / "inboxes", UIN, 10, right_crc=False)
    roles.start(small, **settings[small])
    assert await wait_in_sync(roles, small, other) == other

    leave(disk, 0)
    exit_code, found = await repair(roles, "--role", "pi")
    assert exit_code == 1
    assert ["DISK_FULL" in each["text"] for each in found["replicas"] if each["text"]] == [True]
    assert await wait_in_sync(roles, small, other) == other, "it goes on"
    (disk / "ballast").unlink()

    command = asyncio.create_task(repair(roles, "--role", "pi"))
    assert await roles.ended(small) == 1
    roles.start(small, **settings[small])
    exit_code, found = await command
    assert exit_code == 0, found
    assert sorted((each["damaged"], each["repaired"]) for each in found["replicas"]) == [(0, 0), (1, 1)]
    await roles.end(other)
    assert await wait_in_sync(roles, small) == small
    entries = await inbox(roles, small)
    assert {msg_id: seq for seq, msg_id in entries} == sender.known


async def test_a_leader_that_can_neither_decide_nor_be_repaired_makes_room_for_the_other_replica(disk: Path, roles: Roles) -> None:
    small, other = NAMES
    folder = disk / small
    settings: dict[str, dict[str, Any]] = {small: SETTINGS | {"data_dir": str(folder)}, other: SETTINGS}
    await roles.layout(xiu=1)
    roles.start(small, **settings[small])
    assert await wait_in_sync(roles, small) == small
    records, (node,) = mails(0, 400), await roles.running(small)
    async with Writer(node) as writer:
        fates = [fate for start in range(0, 400, 20) for fate in await writer.store(records[start : start + 20])]
    await roles.end(small)
    bad = damage_dedupe_window(folder / "store", records)
    roles.start(small, **settings[small])
    assert await wait_in_sync(roles, small) == small
    roles.start(other, **settings[other])
    assert await wait_in_sync(roles, *NAMES) == small
    leave(disk, 1 << 16)
    (node,) = await roles.running(small)
    async with Writer(node) as writer:
        assert {code for code, _ in await writer.store(bad)} == {"STORE_DAMAGED"}
        assert await roles.ended(small) == 1

    async def other_leads() -> bool:
        return await leader_of(roles, other) == other

    await until(other_leads, "the other replica leads")
    more = mails(500, 20)
    (node,) = await roles.running(other)
    async with Writer(node) as writer:
        assert await writer.store(bad) == [fates[records.index(record)] for record in bad]
        assert {code for code, _ in await writer.store(more)} == {""}
    (disk / "ballast").unlink()
    roles.start(small, **settings[small])
    assert await wait_in_sync(roles, *NAMES) == other
    assert [record for _, record in await equal_scans(*await roles.running(*NAMES))] == records + more
