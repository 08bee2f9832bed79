"""A third stored role, a counter, doubles while it counts and while its leaders are killed, over what Xiu and Pi are made of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pyarrow as pa
import pytest

from cluster.wire.v1 import doubling_pb2 as pb
from cluster.wire.v1 import repair_pb2, repair_pb2_grpc
from onebox.fork_server import Forked
from pixiu.wire.v1 import export_pb2, export_pb2_grpc
from tests.support.counter_role import ADD
from tests.support.forks import fork
from tests.support.pi_doubling import PiDoubling
from tests.support.roles import Roles
from tests.support.stores import leader_of, wait_in_sync
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NAMES: dict[int, tuple[str, ...]] = {0: ("pi-a", "pi-b"), 1: ("pi-c", "pi-d")}
KEYS = range(12)
PACE_S = 0.01
CALL_S = 5.0


def counter(_module: str, arguments: Sequence[str], log: Path) -> Forked:
    return fork("tests.support.counter_role", arguments, log)


class Counts:
    """Counts up every key, each in order, whoever has it, until it is told to stop."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.confirmed = dict.fromkeys(KEYS, 0)
        self._stopping = False

    @property
    def total(self) -> int:
        return sum(self.confirmed.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for key in KEYS:
                group.create_task(self._count(key))

    def stop(self) -> None:
        self._stopping = True

    async def _count(self, key: int) -> None:
        while not self._stopping:
            number = self.confirmed[key] + 1
            for name in (name for names in NAMES.values() for name in names):
                said = await call(self._roles, name, "Add", ADD.pack(key, number))
                if said.isdigit():
                    assert int(said) == number, f"{key} has {said.decode()}, and {number - 1} were confirmed"
                    self.confirmed[key] = number
                    break
            await asyncio.sleep(PACE_S)

    async def more(self, count: int) -> None:
        wanted = self.total + count
        await until(lambda: self.total >= wanted, "counts")


async def call(roles: Roles, name: str, method: str, data: bytes = b"") -> bytes:
    """An answer of one replica; empty where there is none."""
    with contextlib.suppress(AssertionError, KeyError, grpc.aio.AioRpcError):  # it was killed, or not started yet
        node = await roles.node(name)
        if node is not None:
            async with grpc.aio.insecure_channel(node.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                reply: bytes = await channel.unary_unary(f"/test.Counter/{method}")(data, timeout=CALL_S)  # type: ignore[arg-type]
                return reply
    return b""


async def kill_leader(roles: Roles, partition: int) -> None:
    leader = await wait_in_sync(roles, *NAMES[partition])
    await roles.kill(leader)
    roles.start(leader, partition=partition)

    async def led() -> bool:
        return bool(await leader_of(roles, *NAMES[partition]))

    await until(led, f"partition {partition} has a leader")


async def test_a_counter_loses_and_repeats_nothing_when_it_doubles_and_its_leaders_are_killed(roles: Roles) -> None:
    roles.fork = counter
    await roles.layout(pi=1)
    for name in NAMES[0]:
        roles.start(name, partition=0)
    await wait_in_sync(roles, *NAMES[0])
    counts = Counts(roles)
    counting = asyncio.create_task(counts.run())
    await counts.more(100)
    doubling = PiDoubling(roles, NAMES)
    await doubling.begin()
    for name in NAMES[1]:
        roles.start(name, partition=1)
    await wait_in_sync(roles, *NAMES[1])
    await doubling.advance(1, pb.DOUBLING_LEARNING)
    await kill_leader(roles, 1)
    await doubling.learn()
    await counts.more(50)
    await doubling.advance(0, pb.DOUBLING_SPLIT)
    await kill_leader(roles, 0)
    await doubling.cut()
    await counts.more(50)
    ((of_parent, of_child),) = await doubling.digests()
    assert of_parent == of_child
    await kill_leader(roles, 1)
    await doubling.commit()
    await doubling.advance(0, pb.DOUBLING_CLEANING)
    await kill_leader(roles, 0)
    await doubling.clean()
    await counts.more(50)
    counts.stop()
    await counting
    for partition, names in NAMES.items():
        await wait_in_sync(roles, *names)
        kept = {key: count for key, count in counts.confirmed.items() if key % 2 == partition}

        async def has(name: str, kept: dict[int, int] = kept) -> bool:
            return await exported(roles, name) == kept

        for name in names:
            await until(lambda name=name: has(name), f"the counts of {name}")  # type: ignore[misc]
            await compare(roles, name)


async def exported(roles: Roles, name: str) -> dict[int, int]:
    """Counts by key, as a replica exports them."""
    (node,) = await roles.running(name)
    async with grpc.aio.insecure_channel(node.address) as channel:
        rows = export_pb2_grpc.ExportStub(channel).Rows(export_pb2.RowsOfRequest(table="counts"), timeout=CALL_S)  # type: ignore[no-untyped-call, unused-ignore]
        replies = [reply async for reply in rows]
    schema = pa.ipc.read_schema(pa.py_buffer(replies[0].schema))
    found = [pa.ipc.read_record_batch(pa.py_buffer(reply.batch), schema).to_pylist() for reply in replies]
    return {row["key"]: row["count"] for part in found for row in part}


async def compare(roles: Roles, name: str) -> None:
    """A replica has what its leader has."""
    (node,) = await roles.running(name)
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub = repair_pb2_grpc.RepairStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        reply = await stub.Compare(repair_pb2.CompareRequest(), timeout=30)
    assert not reply.differing, reply.text
