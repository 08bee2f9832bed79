"""Fetch messages by MsgID from the leaders of Xiu's partitions.

Source: PiXiu §6.1.2; docs/delivery.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc.aio

from pixiu.discovery.view import View
from pixiu.errors import MalformedData, NotYet, Overloaded, Unavailable
from pixiu.ids import msg_partition
from pixiu.rpc.channels import STREAM_ERRORS, Channels
from pixiu.wire.record import split
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc

MAX_FETCH: Final = 1000
"""MsgIDs of one call."""
MAX_BYTES: Final = 16 << 20
"""Bytes of records that one `fetch` takes from one partition. Policy: the others are not fetched, and are `FULL`."""
SHARE_BYTES: Final = 1 << 20
"""Bytes of these for one requester; one answer may exceed it. Policy: the requester's other records are `FULL` too."""
FULL: Final = Overloaded.code
"""Code of a MsgID that was not requested, and may be requested again at once."""
CALL_S: Final = 1.0
"""Time-out of one call, seconds."""


class Fetcher:
    """Fetches messages by MsgID from the leaders of Xiu.

    Args:
        view: gives the newest view of the cluster.
        channels: gRPC channels by address.
    """

    def __init__(self, view: Callable[[], View], channels: Channels) -> None:
        self._view, self._channels = view, channels
        self._leaders: dict[int, str] = {}
        """Partition → host:port of its leader as last known. Bounded by the partitions."""
        self._looking: dict[int, asyncio.Lock] = {}
        """Locks that allow one search for a leader at a time."""
        self._held: dict[str, grpc.aio.Channel] = {}
        """Channels by address. Bounded by the replicas of Xiu."""
        self._generation = channels.generation
        """Generation of the certificates with which the channels connect."""
        self._turn = itertools.count()

    async def fetch(self, wanted: Sequence[Sequence[int]], timeout_s: float) -> dict[int, tuple[str, bytes]]:
        """MsgID → (a code of `pixiu.errors`, b"") or ("", the record). MsgIDs without an answer in time are missing.

        Args:
            wanted: MsgIDs of each requester; first ones come before later ones of others.
        """
        askers: dict[int, list[int]] = {}
        for turn in itertools.zip_longest(*wanted):
            for asker, each in enumerate(turn):
                if each is not None:
                    askers.setdefault(each, []).append(asker)
        partitions: dict[int, list[int]] = {}
        for each in askers:
            partitions.setdefault(msg_partition(each), []).append(each)
        found: dict[int, tuple[str, bytes]] = {}
        took = [0] * len(wanted)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._partition(one, ids, askers, took, found) for one, ids in partitions.items()))
        except TimeoutError:
            pass  # answers that came in time count
        return found

    async def _partition(
        self,
        partition: int,
        msg_ids: list[int],
        askers: Mapping[int, Sequence[int]],
        took: list[int],
        found: dict[int, tuple[str, bytes]],
    ) -> None:
        taken = 0
        while msg_ids:
            over = [each for each in msg_ids if taken >= MAX_BYTES or min(took[one] for one in askers[each]) >= SHARE_BYTES]
            if over:
                found.update(dict.fromkeys(over, (FULL, b"")))
                msg_ids = [each for each in msg_ids if each not in found]
                continue
            async with self._looking.setdefault(partition, asyncio.Lock()):
                address = await self._leader(partition)
            if not address:
                return
            try:
                answers = await self._ask(address, msg_ids[:MAX_FETCH])
            except (MalformedData, Unavailable, *STREAM_ERRORS):
                self._leaders.pop(partition, None)
                return
            if any(code == NotYet.code for code, _ in answers):
                self._leaders.pop(partition, None)  # it may be a former leader, which learns late what is committed
            for each, answer in zip(msg_ids, answers, strict=False):
                found[each] = answer
                taken += len(answer[1])
                for one in askers[each]:
                    took[one] += len(answer[1])
            msg_ids = msg_ids[len(answers) :]

    async def _ask(self, address: str, msg_ids: list[int]) -> list[tuple[str, bytes]]:
        """Request records; returns at least one answer. Raises MalformedData, Unavailable and gRPC's errors."""
        stub = await self._stub(address)
        reply: xiu_pb2.FetchReply = await stub.Fetch(xiu_pb2.FetchRequest(msg_ids=msg_ids), timeout=CALL_S)
        if not 0 < len(reply.codes) <= len(msg_ids):
            raise Unavailable(f"{address} answered for {len(reply.codes)} of {len(msg_ids)} messages")
        records = iter(split(reply.batch, sum(not code for code in reply.codes)))
        return [(code, b"" if code else next(records)) for code in reply.codes]

    async def _stub(self, address: str) -> Any:
        newest = self._channels.generation
        if newest != self._generation:  # otherwise a channel with the previous certificates would never connect again
            self._generation, former, self._held = newest, self._held, {}
            for held in former.values():
                await self._channels.release(held)
        channel = self._held.get(address)
        if channel is None:
            channel = self._held[address] = self._channels.acquire(address, "xiu")
            there = {node.address for node in self._view().of_role("xiu")} | {address}
            for gone in [place for place in self._held if place not in there]:
                await self._channels.release(self._held.pop(gone))
        return xiu_pb2_grpc.XiuStub(channel)

    async def _leader(self, partition: int) -> str:
        """Address of the leader; "" if none is known."""
        there = self._leaders.get(partition)
        if there:
            return there
        nodes = self._view().replicas("xiu", partition)
        turn = next(self._turn)
        for at in range(len(nodes)):
            address = nodes[(turn + at) % len(nodes)].address
            stub = await self._stub(address)
            try:
                said: xiu_pb2.PositionReply = await stub.Position(xiu_pb2.PositionRequest(), timeout=CALL_S)
            except STREAM_ERRORS:
                continue
            leader = address if said.epoch else said.leader
            if leader:
                self._leaders[partition] = leader
                return leader
        return ""
