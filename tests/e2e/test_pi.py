"""A Pi replica as a process of its own: kills, damage, a full disk."""

from __future__ import annotations

import asyncio
import signal

import pytest

from pi.operations import AddDevice, Code
from pixiu.discovery.node import Node
from tests.support.pi import Lost, PiClient, acknowledges, appends, message
from tests.support.roles import Roles

pytestmark = pytest.mark.e2e
UIN = 7


async def connect(roles: Roles, name: str = "pi-0") -> tuple[PiClient, int]:
    """A client of the running replica, and the epoch."""
    node: Node = (await roles.running(name))[0]
    client = PiClient(node.address)
    reply = await client.ask()
    assert reply.epoch, reply
    return client, reply.epoch


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
    devices = [(await client.ask(AddDevice(UIN, b"phone-%d" % number))).results for number in range(8)]
    assert [number for (number,) in devices] == [*range(1, 8), -Code.TOO_MANY_DEVICES]
    await client.close()


async def test_kill_nine_in_a_loop_loses_nothing_and_repeats_nothing(roles: Roles) -> None:
    await roles.layout(pi=1)
    sent = 0
    known: dict[int, int] = {}
    """MsgID → InboxSeq of everything that was acknowledged."""
    for round_number in range(5):
        roles.start("pi-0", partition=0, flush_interval_s=0.05, segment_mb=1)
        client, epoch = await connect(roles)
        open_batches: list[tuple[list[int], asyncio.Future[object]]] = []
        unknown = [number for number in range(1, sent + 1) if message(number) not in known]
        for start in range(40 if round_number < 4 else 1):
            numbers = unknown if start == 0 else list(range(sent + 1, sent + 26))
            sent = max(sent, numbers[-1]) if numbers else sent
            pairs = [(message(number), UIN) for number in numbers]
            if pairs:
                open_batches.append((numbers, client.begin(appends(epoch, *pairs))))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            if start == 20 + round_number:
                await open_batches[-10][1]
        if round_number < 4:
            roles.send_signal("pi-0", signal.SIGKILL)
        for numbers, future in open_batches:
            try:
                async with asyncio.timeout(60):
                    reply = await future
            except Lost:
                continue
            assert not reply.code, reply  # type: ignore[attr-defined]
            for number, seq in zip(numbers, reply.results, strict=True):  # type: ignore[attr-defined]
                assert known.setdefault(message(number), seq) == seq
        if round_number < 4:
            await client.close()
    assert len(known) == sent >= 500
    session = await client.session(UIN)
    found: list[tuple[int, int]] = []
    while len(found) < sent:
        page = await client.read(UIN, session, start=len(found))
        assert page.seqs, page
        found += zip(page.seqs, page.msg_ids, strict=True)
    assert [seq for seq, _ in found] == list(range(1, sent + 1))
    assert {msg_id: seq for seq, msg_id in found} == known
    await client.close()
