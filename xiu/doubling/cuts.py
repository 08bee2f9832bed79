"""A Xiu's shell of doubling: the body of OPEN, questions of a child, and a parent's answers.

    tool ──Advance──▶ leader ──▶ log            child's core ──AskParent──▶ parent's leader ──(forwarded)──▶ its parent's leader

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import grpc.aio

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.doubling.phases import Command, Cut, Doubling, Phase, Step
from cluster.store.doubling.service import DoublingService
from cluster.store.doubling.steps import is_home
from cluster.wire.v1 import doubling_pb2, xiu_partitions_pb2, xiu_partitions_pb2_grpc
from pixiu.errors import NotYet, PixiuError, Unavailable
from pixiu.rpc.channels import CHANNEL_OPTIONS, STREAM_ERRORS
from pixiu.rpc.tls import generation, peer_channel
from xiu.core import Core
from xiu.doubling.answering import MAX_ASKED, Answers, Known, Wanted, check_question
from xiu.events import AskParent, ParentAnswered
from xiu.export.holding import Holding
from xiu.options import Options
from xiu.state.doubling import NO_RECORD, Record, opening, parent_of
from xiu.state.readers import inherited
from xiu.state.state import Head

ANSWERS: Final = Answers()
SPLIT_WAIT_MS: Final = 500
"""Time for which a parent that is not split delays its answer to a child that learns, milliseconds: moved users wait for the split.
Shorter than `CALL_S`."""
SPLIT_POLL_S: Final = 0.02
"""Pause before a child asks again, seconds: a parent that does not lead answers at once."""
CALL_S: Final = 1.0
ASK_S: Final = 2.0
"""Time limit of a whole question, seconds. Policy: then there was no answer, and the mail is refused for now."""


class Shell(Protocol):
    """Interface of the service."""

    @property
    def core(self) -> Core | None:
        """The core while the partition is open."""

    @property
    def head(self) -> Head:
        """The head of the committed state."""

    @property
    def holding(self) -> Holding:
        """The readers for which retention waits."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """Run a coroutine as a task."""


class Cuts(DoublingService, xiu_partitions_pb2_grpc.XiuPartitionsServicer):
    """Serves `pixiu.v1.Doubling` and `pixiu.v1.XiuPartitions` of one partition.

    Args:
        context: of the process.
        replica: of the partition.
        shell: the service.
        answered: called with the parent's answers.
    """

    def __init__(
        self, context: Context[Options], replica: Replica, shell: Shell, answered: Callable[[ParentAnswered], None]
    ) -> None:
        super().__init__(context, replica)
        self._shell, self._answered = shell, answered
        self._channels: dict[str, grpc.aio.Channel] = {}
        """By address. Bounded by the number of the parent's replicas."""
        self._generation = generation(context.tls)
        self._leader = ""
        """Address of the replica that answered last."""
        self._doubling = NO_RECORD
        """From the head, as last seen."""
        self._changed = asyncio.Event()
        xiu_partitions_pb2_grpc.add_XiuPartitionsServicer_to_server(self, context.server)

    async def close(self) -> None:
        """Close the channels to the parent."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def applied(self) -> None:
        """Note that entries were applied: waiting children get their answer when this partition was split."""
        if self._doubling is not (now := self._shell.head.doubling):
            self._doubling = now
            self._changed.set()

    # --- the operator's tool

    @property
    def record(self) -> Record:
        """See `DoublingService`."""
        return self._shell.head.doubling

    def _pending(self) -> Cut | None:
        ahead = self._core.doubling()
        splits = ahead.phase is Phase.SPLIT and ahead.doubling != self.record.doubling
        return Cut(ahead.split_at, ahead.doubling) if splits else None

    async def _opening(self, doubling: Doubling) -> bytes:
        """The parent's answer about its cut, which stays true."""
        said = await self._ask_once([], SPLIT_WAIT_MS)
        if said.doubling != doubling.number or not said.split_at:
            raise NotYet(f"partition {doubling.parent} is not split, or that is not committed: advance it to SPLIT first")
        return opening(said.split_at, said.split_us, said.holds)

    async def _progress(self) -> doubling_pb2.DoublingStatus:
        record = self.record
        learned = record.split_at if record.doubling.partition == self._partition else 0
        if record.phase is Phase.LEARNING:
            with contextlib.suppress(PixiuError):  # the parent has no leader now
                said = await self._ask_once([])
                learned = said.split_at if said.doubling == record.doubling.number else 0
        return doubling_pb2.DoublingStatus(learned=learned)

    async def look(self) -> None:
        """Open this child as soon as its parent is split, even without the tool, since moved users wait for it. End its doubling
        when the layout includes it."""
        while (now := self.record).phase is Phase.LEARNING and self._replica.is_leader:
            number, partitions, partition = now.doubling
            request = doubling_pb2.DoublingAdvanceRequest(
                doubling=number, partitions=partitions, phase=doubling_pb2.DOUBLING_OPEN, operator=f"xiu partition {partition}"
            )
            with contextlib.suppress(PixiuError):  # its parent is not split yet, or has no leader
                await self.advance(request)
                return
            await asyncio.sleep(SPLIT_POLL_S)
        if self._replica.is_leader and is_home(self.record, self._layout):
            with contextlib.suppress(PixiuError):
                await self._submit(Command(Step.END, self.record.doubling)).replicated()

    @property
    def _core(self) -> Core:
        core = self._shell.core
        if core is None:
            raise Unavailable("this Xiu is not open; try again soon")
        return core

    # --- a child asks

    def ask(self, effect: AskParent) -> None:
        """Send the core's question to the parent; it is answered in any case."""
        self._shell.spawn(self._ask(effect))

    async def _ask(self, effect: AskParent) -> None:
        known: Known | None
        try:
            known, copies = await self._known_to_parent(effect.wanted)
        except PixiuError:
            known, copies = None, 0
        self._answered(ParentAnswered(effect.number, known, copies))

    async def _known_to_parent(self, wanted: Wanted) -> tuple[Known, int]:
        """Ask the parent for MsgIDs and CRCs, and the number of disks with them. Raises PixiuError if it does not answer, or was
        not split."""
        found: Known = []
        on_disks: list[int] = []
        while len(found) < len(wanted):
            part = wanted[len(found) : len(found) + MAX_ASKED]
            said = await self._ask_once(part)
            if not said.doubling or len(said.msg_ids) != len(part) or len(said.crcs) != len(part):
                raise Unavailable(f"partition {parent_of(self._partition)} does not answer for {len(part)} SnowflakeIDs")
            found += [(msg_id, crc) if msg_id else None for msg_id, crc in zip(said.msg_ids, said.crcs, strict=True)]
            if any(said.msg_ids):
                on_disks.append(said.copies)
        return found, min(on_disks, default=0)

    async def _ask_once(self, wanted: Wanted, wait_ms: int = 0) -> xiu_partitions_pb2.AskReply:
        parent = parent_of(self._partition)
        request = xiu_partitions_pb2.AskRequest(
            child=self._partition,
            snowflakes=[one for one, _ in wanted],
            derived=[at for at, (_, derived) in enumerate(wanted) if derived],
            wait_ms=wait_ms,
        )
        reason = "no replica of it is running"
        try:
            async with asyncio.timeout(ASK_S):
                addresses = [node.address for node in self._context.view.replicas("xiu", parent)]
                for address in sorted(addresses, key=lambda one: one != self._leader):
                    try:
                        reply = await self._call(address, request)
                    except STREAM_ERRORS as error:
                        reason = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else repr(error)
                        continue
                    self._leader = address
                    return reply
        except TimeoutError:
            reason = "no answer in time"
        raise Unavailable(f"partition {parent} of Xiu cannot be asked: {reason}")

    async def _call(self, address: str, request: xiu_partitions_pb2.AskRequest) -> xiu_partitions_pb2.AskReply:
        newest = generation(self._context.tls)
        if newest != self._generation:  # with the former certificates a channel would never reconnect
            self._generation, former, self._channels = newest, self._channels, {}
            for channel in former.values():
                await channel.close(CALL_S)
        if address not in self._channels:
            there = {node.address for node in self._context.view.of_role("xiu")}
            for gone in [held for held in self._channels if held not in there]:
                await self._channels.pop(gone).close()
            self._channels[address] = peer_channel(address, "xiu", self._context.tls, CHANNEL_OPTIONS)
        stub: Any = xiu_partitions_pb2_grpc.XiuPartitionsStub(self._channels[address])
        reply: xiu_partitions_pb2.AskReply = await stub.Ask(request, timeout=CALL_S)
        return reply

    # --- a parent answers

    async def _until_split(self, child: int, wait_s: float) -> None:
        """Wait until this partition was split from a child, at most `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._shell.head.doubling.partitions <= child and self._replica.is_leader:
                    self._changed.clear()
                    await self._changed.wait()

    async def Ask(
        self, request: xiu_partitions_pb2.AskRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> xiu_partitions_pb2.AskReply:
        """Answer a child's question about SnowflakeIDs."""
        check_question(self._partition, request)
        self._replica.check_leader()
        if request.wait_ms and not request.snowflakes:
            await self._until_split(request.child, min(request.wait_ms, SPLIT_WAIT_MS) / 1000)
            self._replica.check_leader()
        look = ANSWERS.look(request, self._shell.head, self._core, self._layout, self._replica.lease_valid())
        reply = look.reply(*(await self._known_to_parent(look.asked()) if look.above else ([], 0)))
        if not request.snowflakes:
            reply.holds = inherited(self._shell.holding.readers)
        return reply
