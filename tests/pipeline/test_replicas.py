"""Exports from replicas of a Xiu as processes: the same rows from leader and follower, whoever dies meanwhile. No Spark."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from pipeline.spark import registry
from pipeline.spark.replicas import Replicas, Rows
from pixiu.discovery.node import Node
from pixiu.errors import Gone, InvalidArgument, NotServed, PixiuError, Unavailable
from pixiu.ids import snowflake
from pixiu.wire.export_tables import MESSAGES, columns_of
from pixiu.wire.record import STAMP, Flag, Kind, decode, encode
from pixiu.wire.v1 import xiu_pb2
from tests.support.framed import store_call
from tests.support.roles import Roles
from tests.support.stores import Mailer, equal_scans, wait_in_sync

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NAMES = ("xiu-a", "xiu-b")
EVERY = columns_of(MESSAGES, ())
T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """The client blocks; the test's own writers go on."""
    return await asyncio.to_thread(work)


def read_all(target: str, partition: int = 0, begin: int = 0, end: int = 0, users: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    with Replicas(target, "xiu", retry_s=60) as replicas:
        replicas.find()
        behind = end or replicas.bounds(partition).end
        rows = Rows(partition, MESSAGES, EVERY, users, begin, behind)
        return [row for batch in replicas.read(rows) for row in batch.to_pylist()]


def odd_records() -> list[bytes]:
    """One of each kind of mail that a Xiu stores."""
    now_ms, numbers = time.time_ns() // 1_000_000, itertools.count()

    def mail(body: bytes, **more: Any) -> bytes:
        return encode(Kind.MAIL, 4, body, snowflake(now_ms, 9, next(numbers)), **more)

    traced = mail(b"traced", flags=Flag.TRACED)
    stamp = STAMP.pack(1, 0, 0, 0, 5, 6)
    return [
        mail(b""),
        mail(b"\x1f\x8b zipped", flags=Flag.COMPRESSED),
        mail(b"with headers", extension=b'{"tag": "a"}', lifetime_min=9, sender=77, type=3),
        encode(Kind.MAIL, 6, b"derived", 12345, flags=Flag.DERIVED_ID),
        (len(traced) - 4 + len(stamp)).to_bytes(4, "little") + traced[4:-1] + stamp + b"\1",
        mail(b"x" * 500_000),
    ]


async def put(node: Node, records: list[bytes]) -> None:
    async with store_call(node) as call:
        await call.write(xiu_pb2.StoreRequest(batch=b"".join(records), count=len(records), position=1))
        await call.done_writing()
        done = 0
        while (reply := await call.read()) is not None:
            assert [result.code for result in reply.results] == [""] * len(reply.results)
            done += sum(result.count for result in reply.results)
        assert done == len(records)


async def test_rows_are_the_same_from_leader_and_follower_and_when_the_leader_dies(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, partition=0, export_share=1.0)
    leader = await wait_in_sync(roles, *NAMES)
    follower = next(name for name in NAMES if name != leader)
    nodes = {name: (await roles.running(name))[0] for name in NAMES}
    records = odd_records()
    await put(nodes[leader], records)
    alive = set(NAMES)
    mailer = Mailer(roles, alive, body_bytes=2000)
    await mailer.more(4000)
    mailer.paused = True
    await asyncio.sleep(1.0)  # what is under way is stored
    scanned = await equal_scans(*nodes.values())

    for where in (nodes[leader].address, nodes[follower].address, roles.target()):
        found = await aside(lambda where=where: read_all(where))  # type: ignore[misc]
        assert [row["msg_id"] for row in found] == [identity for identity, _ in scanned]
        for row, (_, raw) in zip(found, scanned, strict=True):
            record = decode(raw)
            assert (row["snowflake_id"], row["key"], row["sender"]) == (record.snowflake_id, record.key, record.sender)
            assert (row["body"], row["ext"], row["flags"]) == (record.body, record.extension, record.flags)
            assert row["trace"] == b"".join(STAMP.pack(*stamp) for stamp in record.stamps)
    assert [row["body"] for row in await aside(lambda: read_all(roles.target(), users=(6,)))] == [b"derived"]

    with Replicas(roles.target(), "xiu", retry_s=60) as replicas:
        await aside(replicas.find)
        bounds = await aside(lambda: replicas.bounds(0, limit=100))
        assert (bounds.rows, bounds.leads, bounds.partitions, len(bounds.replicas)) == (len(scanned), True, 1, 2)
        assert bounds.advanced == (scanned[99][0] & (1 << 48) - 1) + 1
        replicas.addresses = {0: (nodes[leader].address, nodes[follower].address)}
        replicas.leaders.clear()  # else followers are read first
        batches = replicas.read(Rows(0, MESSAGES, EVERY, (), 0, bounds.end))
        first = await aside(lambda: next(batches))
        got = first.column("msg_id").to_pylist()
        assert len(got) < len(scanned)
        mailer.paused = False
        alive.discard(leader)
        roles.send_signal(leader, signal.SIGKILL)
        rest = await aside(lambda: [identity for batch in batches for identity in batch.column("msg_id").to_pylist()])
        assert got + rest == [identity for identity, _ in scanned]
    key = os.getpid(), roles.target()
    session = registry._SESSIONS[key]
    epoch = mailer.epoch
    await mailer.more(200, epoch)
    await mailer.stop()
    again = await aside(lambda: read_all(roles.target()))
    assert [row["msg_id"] for row in again][: len(scanned)] == [identity for identity, _ in scanned]
    seen = {row["msg_id"] for row in again}
    assert {identity for known in mailer.known for identity in known.values()} <= seen, "over two epochs"
    assert len(seen) == len(again)
    assert {identity >> 56 for identity in seen} == {0}
    roles.start(leader, partition=0)
    await wait_in_sync(roles, *NAMES)
    with Replicas(roles.target(), "xiu") as replicas:
        await aside(replicas.find)
        assert (await roles.running(leader))[0].address in replicas.addresses[0], "by a watch"
    assert registry._SESSIONS[key] is session, "one session for all that were here"
    monkeypatch.setattr(registry, "IDLE_S", 0.0)
    until = time.monotonic() + 60
    while key in registry._SESSIONS:
        assert time.monotonic() < until
        await asyncio.sleep(0.1)


async def test_what_cannot_be_read_is_one_sentence(roles: Roles) -> None:
    await roles.layout(xiu=1)
    roles.start("xiu-a", partition=0, keep_mb=1, trim_interval_s=0.2)
    (node,) = await roles.running("xiu-a")
    now_ms = time.time_ns() // 1_000_000
    for begin in range(4):
        records = [encode(Kind.MAIL, 4, b"x" * 600_000, snowflake(now_ms, 9, begin * 2 + place)) for place in range(2)]
        await put(node, records)

    def ask(work: Callable[[Replicas], Any], target: str = "", role: str = "xiu") -> Any:
        with Replicas(target or roles.target(), role, retry_s=1) as replicas:
            replicas.find()
            return work(replicas)

    async def refused(kind: type[PixiuError], work: Callable[[Replicas], Any], target: str = "", role: str = "xiu") -> str:
        with pytest.raises(kind) as raised:
            await aside(lambda: ask(work, target, role))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    until = time.monotonic() + 60
    while (bounds := await aside(lambda: ask(lambda replicas: replicas.bounds(0)))).rows > 2:
        assert time.monotonic() < until
        await asyncio.sleep(0.1)
    trimmed = Rows(0, MESSAGES, EVERY, (), 1, bounds.end)
    assert "was trimmed by retention" in await refused(Gone, lambda replicas: list(replicas.read(trimmed)))
    beyond = Rows(0, MESSAGES, EVERY, (), bounds.end, bounds.end + 9)
    assert "so far" in await refused(PixiuError, lambda replicas: list(replicas.read(beyond)))
    assert "has no pi" in await refused(NotServed, lambda replicas: None, role="pi")
    assert "is a xiu" in await refused(InvalidArgument, lambda replicas: None, node.address, "pi")
    assert "connection refused" in await refused(Unavailable, lambda replicas: None, "127.0.0.1:1")

    await aside(lambda: ask(lambda replicas: replicas.hold(0, "archive", bounds.first)))
    for place in range(4):
        await put(node, [encode(Kind.MAIL, 4, b"y" * 900_000, snowflake(now_ms, 10, place))])
    await asyncio.sleep(1.5)
    held = await aside(lambda: ask(lambda replicas: replicas.bounds(0)))
    assert held.first == bounds.first, "a reader still needs it"
    assert await roles.metric(node, "reader_lag") == held.rows
