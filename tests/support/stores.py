"""Replicas of Xiu and Pi as processes: who leads, who is in sync; writers of a Xiu that go on whoever leads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import urllib.request
from typing import Any

import grpc.aio

from cluster.rpc.framed import FramedCall
from pixiu.discovery.node import Node
from pixiu.ids import msg_id, snowflake
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.record import Kind, decode, encode, split
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from tests.support.framed import store_call
from tests.support.roles import Roles
from tests.support.waiting import until

ANSWER_S = 30.0
"""A stream on which nothing comes for so long is given up: its replica hangs."""


def figures(what: str, times: list[float]) -> str:
    """Seconds, for people."""
    return f"\n{what}: {', '.join(f'{t:.2f}' for t in times)} s; least {min(times):.2f} s, most {max(times):.2f} s"


async def service(node: Node) -> dict[str, Any]:
    """What a store says of itself."""

    def get() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/health", timeout=30) as reply:
                found: dict[str, Any] = json.load(reply)["service"]
        except OSError:  # it is not serving
            found = {}
        return found

    return await asyncio.to_thread(get)


async def health(node: Node) -> dict[str, Any]:
    """What a store's replica says of itself."""
    found: dict[str, Any] = (await service(node)).get("replication", {})
    return found


async def leader_of(roles: Roles, *names: str) -> str:
    """The name of the replica that leads; empty when none does."""
    for name in names:
        node = await roles.node(name)
        if node is not None and (await health(node)).get("state") == "Leading":
            return name
    return ""


async def wait_in_sync(roles: Roles, *names: str) -> str:
    """Until all are in sync; the name of the leader."""
    await roles.running(*names)  # of one that was started again the leader may not know yet that it was gone
    found = ""

    async def all_in() -> bool:
        nonlocal found
        found = await leader_of(roles, *names)
        node = await roles.node(found) if found else None
        return node is not None and len((await health(node)).get("in_sync", ())) == len(names)

    await until(all_in, f"{names} in sync")
    return found


class Mailer:
    """Writers that store records in a Xiu partition, each in order, one batch at a time, whoever leads, and remember what was
    acknowledged.

    Args:
        roles: of the processes.
        alive: names of those that may be asked; the caller takes out whom it kills.
        writers: how many write at the same time.
        batch: records of one batch.
        body_bytes: of each record.
    """

    def __init__(self, roles: Roles, alive: set[str], writers: int = 4, batch: int = 20, body_bytes: int = 50) -> None:
        self._roles, self._alive, self._batch, self._padding = roles, alive, batch, b"x" * body_bytes
        self.known: list[dict[int, int]] = [{} for _ in range(writers)]
        """Of each writer: number of a record → MsgID, in the order of the acknowledgements."""
        self.epoch = 0
        """Of the leader that acknowledged last."""
        self.refusals: dict[str, int] = {}
        self._numbers = [itertools.count() for _ in range(writers)]
        self.paused = False
        """Whether no further batch is sent."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._run(writer)) for writer in range(writers)]

    @property
    def acknowledged(self) -> int:
        """Records, in all."""
        return sum(map(len, self.known))

    async def _run(self, writer: int) -> None:
        records: list[tuple[int, bytes]] = []
        while not self._stopping:
            for name in sorted(self._alive):
                try:
                    node = await self._roles.node(name)
                except AssertionError:  # it was killed just now
                    continue
                if node is not None:
                    with contextlib.suppress(StreamEnded, TimeoutError):
                        async with store_call(node) as call:
                            await self._send(writer, records, call)
            await asyncio.sleep(0.05)

    def _fresh(self, writer: int) -> list[tuple[int, bytes]]:
        found = []
        for _ in range(self._batch):
            number = next(self._numbers[writer])
            identity = snowflake(time.time_ns() // 1_000_000, writer + 1, number % 1024)
            found.append((number, encode(Kind.MAIL, 4, b"%d %d %s" % (writer, number, self._padding), identity)))
        return found

    async def _send(
        self, writer: int, records: list[tuple[int, bytes]], call: FramedCall[xiu_pb2.StoreRequest, xiu_pb2.StoreReply]
    ) -> None:
        """What is unconfirmed, then more, until an answer is no acknowledgement. `records`: what is unconfirmed."""
        while not self._stopping:
            if self.paused:
                await asyncio.sleep(0.05)
                continue
            if not records:
                records += self._fresh(writer)
            batch = b"".join(record for _, record in records)
            await call.write(xiu_pb2.StoreRequest(batch=batch, count=len(records), position=1))
            fates: dict[int, tuple[str, int]] = {}
            while len(fates) < len(records):
                reply = await asyncio.wait_for(call.read(), ANSWER_S)
                if reply is None:
                    return
                for result in reply.results:
                    for index in range(result.count):
                        made = result.msg_id or msg_id(reply.partition, records[0][1][6], result.sequence + index)
                        fates[result.position + index] = result.code, made
                epoch = reply.epoch
            refused = {code for code, _ in fates.values() if code}
            for code in refused:
                self.refusals[code] = self.refusals.get(code, 0) + 1
            if refused:
                return
            for index, (number, _) in enumerate(records):
                self.known[writer][number] = fates[1 + index][1]
            records.clear()
            self.epoch = epoch

    async def more(self, count: int, epoch: int = 0) -> float:
        """Wait for so many more acknowledgements, the last of a later epoch; seconds."""
        before, began = self.acknowledged, time.monotonic()

        async def came() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.acknowledged >= before + count and self.epoch > epoch

        await until(came, f"{count} more acknowledgements, refused: {self.refusals}")
        return time.monotonic() - began

    async def stop(self) -> None:
        """Write no more."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def check(self, scanned: list[tuple[int, bytes]]) -> None:
        """Whether a partition, as it was scanned, has every acknowledged record under its MsgID, each once, every writer's in
        order."""
        found: list[dict[int, int]] = [{} for _ in self.known]
        for identity, record in scanned:
            writer, number = map(int, decode(record).body.split(b" ", 2)[:2])
            assert number not in found[writer], f"record {number} of writer {writer} is stored twice"
            found[writer][number] = identity
        for known, there in zip(self.known, found, strict=True):
            assert {number: there.get(number) for number in known} == known
            assert list(there) == sorted(there), "not in the writer's order"


async def scan(node: Node) -> list[tuple[int, bytes]]:
    """(MsgID, record) of everything that a replica of a Xiu holds, in order."""
    found: list[tuple[int, bytes]] = []
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        async for part in stub.Scan(xiu_pb2.ScanRequest(local=True)):
            records = split(part.batch, part.count)
            found += [(msg_id(node.partition, record[6], part.sequence + index), record) for index, record in enumerate(records)]
    return found


async def equal_scans(*nodes: Node) -> list[tuple[int, bytes]]:
    """What these replicas hold, once they hold the same; nothing is written meanwhile."""
    found: list[tuple[int, bytes]] = []

    async def equal() -> bool:
        nonlocal found
        found, *others = [await scan(node) for node in nodes]
        return all(other == found for other in others)

    await until(equal, "equal replicas")
    return found
