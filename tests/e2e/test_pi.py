"""A Pi replica as a process of its own: kills, damage, a full disk."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from pi.keys import CHUNK_ENTRIES, chunk_key
from pixiu.discovery.node import Node
from pixiu.wire.inbox_operations import AddDevice, Code
from tests.support.alerts import until_firing
from tests.support.disks import fill, small_disk
from tests.support.pi import PiClient, acknowledges, appends, message
from tests.support.roles import Roles
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
UIN = 7


async def connect(roles: Roles, name: str = "pi-0") -> tuple[PiClient, int]:
    """A client of the running replica, which leads by now, and the epoch."""
    node: Node = (await roles.running(name))[0]
    client = PiClient(node.address)
    epoch = 0

    async def leads() -> bool:
        nonlocal epoch
        reply = await client.ask()
        epoch = reply.epoch
        return bool(epoch)

    await until(leads, "this replica leads")
    return client, epoch


async def test_append_read_acknowledge_and_the_triple(roles: Roles) -> None:
    await roles.layout(pi=2)
    roles.start("pi-1", partition=1)
    client, epoch = await connect(roles, "pi-1")
    reply = await client.ask(appends(epoch, (message(1), UIN), (message(2), UIN), (message(1), UIN)))
    assert (list(reply.results), reply.copies, reply.epoch, reply.layout_version) == ([1, 2, 1], 1, epoch, 1)
    assert reply.committed > 0
    session = await client.session(UIN)
    found = await client.read(UIN, session)
    assert (list(found.seqs), list(found.msg_ids), found.last) == ([1, 2], [message(1), message(2)], 2)
    assert not (await client.ask(acknowledges(UIN, session, 1))).code
    assert list((await client.read(UIN, session)).seqs) == [2]
    assert list((await client.ask(acknowledges(UIN, session, 3))).results) == [-Code.CURSOR_BEYOND_END]
    newer = await client.session(UIN)
    assert (await client.read(UIN, session)).code == "OLD_SESSION"
    assert list((await client.ask(acknowledges(UIN, session, 2))).results) == [-Code.OLD_SESSION]
    assert list((await client.read(UIN, newer)).seqs) == [2]
    refused = await client.ask(appends(epoch, (message(3), 8)))
    assert (refused.code, refused.server.partition, refused.server.partitions) == ("WRONG_PARTITION", 0, 2)
    again = await client.ask(appends(epoch, (message(4), UIN)))
    assert again.code == "STALE_WRITER"
    assert list((await client.ask(appends(epoch, (message(4), UIN), generation=2))).results) == [3]
    assert list((await client.ask(appends(epoch - 1, (message(5), UIN), generation=3))).results) == [-Code.STALE_WRITER]
    devices = [(await client.ask(AddDevice(UIN, b"phone%d" % number))).results for number in range(8)]
    assert [number for (number,) in devices] == [*range(1, 8), -Code.TOO_MANY_DEVICES]
    await client.close()


async def test_a_leaders_limits_are_in_force_when_it_has_taken_office(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", partition=0, inbox_cap=3, clock_interval_s=3600)
    client, epoch = await connect(roles)
    sent = 0

    async def capped() -> bool:
        nonlocal sent
        sent += 1
        assert list((await client.ask(appends(epoch, (message(sent), UIN)))).results) == [sent]
        found = await client.read(UIN, await client.session(UIN), start=0)
        return sent > 3 and len(found.seqs) == 3 and found.gap == sent - 3

    await until(capped, "an inbox at its cap")
    await client.close()


async def stopped(roles: Roles, name: str) -> None:
    """End a process in good order."""
    roles.send_signal(name, signal.SIGTERM)
    await roles.ended(name)


def address_in_log(roles: Roles, name: str) -> str:
    """Where a process is that never became Running."""
    lines = [json.loads(line) for line in roles.log(name).splitlines() if line.startswith("{")]
    return str([line["address"] for line in lines if line.get("event") == "registered"][-1])


async def test_a_flipped_byte_in_the_inboxes_is_refused_and_everything_else_is_served(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", partition=0)
    client, epoch = await connect(roles)
    first, last = CHUNK_ENTRIES + 1, 2 * CHUNK_ENTRIES + 20
    pairs = [(message(number), UIN) for number in range(1, last + 1)]
    assert not (await client.ask(appends(epoch, *pairs))).code
    await client.close()
    await stopped(roles, "pi-0")
    (file,) = (roles.folder / "pi-0").rglob("data.mdb")
    data = bytearray(file.read_bytes())
    key = chunk_key(UIN, 1, first)
    at = data.find(key)
    while at >= 0:
        data[at + len(key) + 2] ^= 1
        at = data.find(key, at + 1)
    file.write_bytes(data)
    roles.start("pi-0", partition=0)
    client, epoch = await connect(roles)
    session = await client.session(UIN)
    assert list((await client.read(UIN, session, num=first - 1)).seqs) == list(range(1, first))
    assert (await client.read(UIN, session, num=first)).code == "STATE_DAMAGED"
    assert list((await client.read(UIN, session, start=2 * CHUNK_ENTRIES)).seqs) == list(range(2 * CHUNK_ENTRIES + 1, last + 1))
    assert list((await client.ask(appends(epoch, (message(last + 1), UIN), (message(1), UIN + 1)))).results) == [last + 1, 1]
    node = (await roles.running("pi-0"))[0]
    assert await roles.metric(node, "damaged") == 1
    await client.close()


async def test_a_log_whose_tail_was_cut_is_not_served(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", partition=0, flush_interval_s=60)
    client, epoch = await connect(roles)
    for number in range(1, 21):
        assert not (await client.ask(appends(epoch, (message(number), UIN)))).code
    roles.send_signal("pi-0", signal.SIGKILL)
    await client.close()
    await roles.ended("pi-0")
    segment = max((roles.folder / "pi-0").rglob("*.log"))
    with open(segment, "r+b") as file:
        file.truncate(segment.stat().st_size - 300)
    roles.start("pi-0", partition=0, flush_interval_s=60)
    await until(lambda: asyncio.to_thread(lambda: "damaged" in roles.log("pi-0")), "the damage is reported")
    client = PiClient(address_in_log(roles, "pi-0"))
    reply = await client.ask(appends(epoch + 1, (message(21), UIN)))
    assert (reply.code, reply.epoch) == ("NOT_LEADER", 0)
    await client.close()


async def test_inboxes_at_their_bound_refuse_mail_and_take_acknowledgements(roles: Roles) -> None:
    await roles.layout(pi=1)
    roles.start("pi-0", partition=0, flush_interval_s=0.05, store_mb=16)
    client, epoch = await connect(roles)
    sent, code = 0, ""
    session = await client.session(UIN)
    while not code:
        pairs = [(message(number), UIN + number) for number in range(sent, sent + 2000)]
        reply = await client.ask(appends(epoch, *pairs))
        code, known = reply.code, sent
        sent += 2000
        assert sent < 1_000_000
    assert code == "DISK_FULL"
    assert "pi.store_mb" in reply.text
    assert list((await client.ask(acknowledges(UIN, session, 1))).results) == [0]
    assert not (await client.read(UIN, session)).seqs
    again = await client.ask(appends(epoch, (message(0), UIN), worker=2))
    assert (again.code, list(again.results)) == ("", [1])
    assert (await client.ask(appends(epoch, (message(1 << 40), UIN), worker=3))).code == "DISK_FULL"
    await client.close()
    await stopped(roles, "pi-0")
    roles.start("pi-0", partition=0, store_mb=64)
    client, epoch = await connect(roles)
    found = await client.read(UIN + known - 1, await client.session(UIN + known - 1))
    assert list(found.msg_ids) == [message(known - 1)], "what was confirmed"
    assert list((await client.ask(appends(epoch, (message(1 << 40), UIN)))).results) == [2]
    await client.close()
    await stopped(roles, "pi-0")


async def test_a_full_disk_refuses_writes_serves_reads_and_needs_no_restart(roles: Roles) -> None:
    with small_disk(roles.folder / "pi-0", "12m") as folder:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(8 << 20))
        await roles.layout(pi=1)
        roles.start("pi-0", partition=0, flush_interval_s=0.1, segment_mb=1)
        client, epoch = await connect(roles)
        session = await client.session(UIN)
        sent, code, known = 0, "", 0
        while not code:
            pairs = [(message(number), UIN) for number in range(sent + 1, sent + 1001)]
            reply = await client.ask(appends(epoch, *pairs))
            code = reply.code
            if not code:
                assert list(reply.results) == list(range(sent + 1, sent + 1001))
                known = sent + 1000
            sent += 1000
            assert sent < 1_000_000
        assert code == "DISK_FULL"
        # What is left is taken too, and again and again: the store needs little, and segments that the log lets go make space.
        rest = [fill(folder / "rest")]
        (node,) = await roles.running("pi-0")
        fires = asyncio.create_task(until_firing({}, {"pi-0": node}, "PixiuDiskFull"))
        number = 0
        while not fires.done():  # also where the store had all of it, and the log alone has no space
            number += 1
            rest.append(fill(folder / f"rest-{number}"))
            await client.ask(appends(epoch, (message((1 << 41) + number), UIN + 1), worker=3, generation=number))
            await asyncio.sleep(0.05)
        await fires
        reply = await client.ask(appends(epoch, (message(1), UIN), (message(1 << 40), UIN), worker=2))
        assert (reply.code, list(reply.results)) == ("", [1, -Code.DISK_FULL])  # what is there is confirmed all the same
        assert list((await client.read(UIN, session, start=known - 5)).seqs)[:5] == list(range(known - 4, known + 1))
        for file in (ballast, *rest):
            file.unlink()
        generation = 1

        async def taken() -> bool:
            nonlocal generation
            generation += 1
            pairs = [(message(number), UIN) for number in range(known + 1, known + 101)]
            reply = await client.ask(appends(epoch, *pairs, generation=generation))
            assert reply.code in ("", "DISK_FULL")
            return list(reply.results) == list(range(known + 1, known + 101))

        await until(taken, "writes are taken again")
        await client.close()
        await stopped(roles, "pi-0")
        roles.start("pi-0", partition=0)
        client, _ = await connect(roles)
        session = await client.session(UIN)
        assert (await client.read(UIN, session, start=known)).last == known + 100
        await client.close()
        await stopped(roles, "pi-0")
