"""A Xiu's shell of doubling: what the operator's tool asks, what a child asks its parent, and what a parent answers.

    tool ──Advance──▶ leader ──▶ log            child's core ──AskParent──▶ parent's leader ──(forwarded)──▶ its parent's leader

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import grpc.aio

from cluster.replication.doubling import DoublingService
from cluster.replication.replica import Replica
from cluster.runtime.context import Context
from cluster.runtime.export import abort
from pixiu.errors import InvalidArgument, NotYet, PixiuError, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.channels import CHANNEL_OPTIONS, STREAM_ERRORS
from pixiu.rpc.tls import generation, peer_channel
from pixiu.wire.levels import Level
from pixiu.wire.v1 import doubling_pb2, xiu_partitions_pb2, xiu_partitions_pb2_grpc
from xiu.core import Core
from xiu.doubling import NO_DOUBLING, Change, Phase, is_asked, parent_of, reached
from xiu.events import AskParent, ParentAnswered
from xiu.holding import Holding
from xiu.options import Options
from xiu.readers import inherited
from xiu.state import Head

ADVANCED: Final = "xiu_doubling_advanced"
MAX_ASKED: Final = 4096
"""SnowflakeIDs of one call."""
SPLIT_WAIT_MS: Final = 500
"""So long a parent waits with its answer to a child that learns, until it is split: moved users wait for that. Shorter than
`CALL_S`."""
SPLIT_POLL_S: Final = 0.02
"""Before a child asks again: a parent that does not lead, or one of an earlier version, answers at once."""
CALL_S: Final = 1.0
ASK_S: Final = 2.0
"""For a whole question. Policy: then nobody has answered, and the mail is refused for now."""

Wanted = Sequence[tuple[int, bool]]
Known = list[tuple[int, int] | None]


class Shell(Protocol):
    """What is needed of the service."""

    @property
    def core(self) -> Core | None:
        """While the partition is open."""

    @property
    def head(self) -> Head:
        """The head of what is committed."""

    @property
    def holding(self) -> Holding:
        """Whom retention waits for."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """Run it beside."""


class Cuts(xiu_partitions_pb2_grpc.XiuPartitionsServicer):
    """Serves `pixiu.v1.Doubling` and `pixiu.v1.XiuPartitions` of one partition.

    Args:
        context: of the process.
        replica: of the partition.
        shell: the service.
        answered: takes the parent's answers.
    """

    def __init__(
        self, context: Context[Options], replica: Replica, shell: Shell, answered: Callable[[ParentAnswered], None]
    ) -> None:
        self._context, self._replica, self._shell, self._answered = context, replica, shell, answered
        self._partition = context.options.partition
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._generation = generation()
        """By address. Bounded by the replicas of the parent."""
        self._leader = ""
        """Address of who answered last."""
        self._doubling = NO_DOUBLING
        """Of the head, as it was seen last."""
        self._changed = asyncio.Event()
        DoublingService(context.server, replica, self)
        xiu_partitions_pb2_grpc.add_XiuPartitionsServicer_to_server(self, context.server)

    async def close(self) -> None:
        """Ask nobody any more."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def applied(self) -> None:
        """Entries were applied: children that wait are told when this partition was split."""
        if self._doubling is not (now := self._shell.head.doubling):
            self._doubling = now
            self._changed.set()

    # --- the operator's tool

    async def open_when_split(self) -> None:
        """A child opens by itself as soon as its parent is split: moved users wait for it, whatever became of the tool. Goes on
        while it learns."""
        while True:
            now = self._shell.head.doubling if self._shell.core is not None else NO_DOUBLING
            if now.phase is not Phase.LEARNING or not self._replica.is_leader:
                return
            request = doubling_pb2.DoublingAdvanceRequest(
                doubling=now.id,
                partitions=now.partitions,
                phase=doubling_pb2.DOUBLING_OPEN,
                operator=f"xiu partition {self._partition}",
            )
            with contextlib.suppress(PixiuError):  # its parent is not split yet, or has no leader
                await self._advance(request, SPLIT_WAIT_MS)
                return
            await asyncio.sleep(SPLIT_POLL_S)

    async def advance_doubling(self, request: doubling_pb2.DoublingAdvanceRequest) -> None:
        """See `Doubled`."""
        await self._advance(request)

    async def _advance(self, request: doubling_pb2.DoublingAdvanceRequest, wait_ms: int = 0) -> None:
        """`wait_ms`: how long a parent that is not split may take to answer."""
        change = await self._change(request, wait_ms)
        if change is None:
            return
        self._core.doubling_entry(change)
        what = {
            "doubling": hex_id(request.doubling),
            "partitions": request.partitions,
            "phase": doubling_pb2.DoublingPhase.Name(request.phase),
        }
        audit = functools.partial(self._replica.audit, request.operator, f"to {request.partitions} partitions", what)
        if change.step is not Phase.OPEN:  # moved users wait for that; it follows from a SPLIT, which was audited
            await asyncio.to_thread(audit)
        # What holds when it is appended counts, and somebody else may have asked for the same meanwhile. What a parent has said of
        # its cut stays true.
        if not reached(self._shell.head.doubling, change):
            if change.step in (Phase.LEARNING, Phase.SPLIT):
                self._check_layout(change)
            await self._replica.submit([self._core.doubling_entry(change)]).reached(Level.REPLICATED)
            self._context.log.info(ADVANCED, operator=request.operator, **what)
        if change.step is Phase.OPEN:
            await asyncio.to_thread(audit)
        if not reached(self._shell.head.doubling, change):
            raise Unavailable("the partition took another step meanwhile; look at its status, and ask again")

    async def _change(self, request: doubling_pb2.DoublingAdvanceRequest, wait_ms: int) -> Change | None:
        """What takes the partition to a phase; None: it is there, or beyond. Raises PixiuError."""
        change = Change(Phase(request.phase), request.doubling, request.partitions)
        if reached(self._shell.head.doubling, change):
            return None
        if change.step in (Phase.LEARNING, Phase.SPLIT):
            self._check_layout(change)
        if change.step is Phase.OPEN and self._partition > 0:
            said = await self._ask_once([], wait_ms)
            if said.doubling != request.doubling:
                parent = parent_of(self._partition)
                raise NotYet(f"partition {parent} is not split, or that is not committed: advance it to SPLIT first")
            change = Change(change.step, change.doubling, change.partitions, said.split_at, said.split_us, said.holds)
        return change

    def _check_layout(self, change: Change) -> None:
        """Nobody is cut whose doubling was taken back, or never began."""
        there = self._context.view.layout.roles.get("xiu")
        if there is None or there.next != change.partitions or there.doublings[-1:] != (hex_id(change.doubling),):
            text = f"doubling {hex_id(change.doubling)} to {change.partitions} partitions is not the last one in the layout"
            raise Unavailable(f"{text}, as far as this replica has seen; try again in a moment if it has just begun")

    async def doubling_status(self) -> doubling_pb2.DoublingStatus:
        """See `Doubled`."""
        now, learned = self._shell.head.doubling, 0
        if now.phase is Phase.LEARNING:
            try:
                said = await self._ask_once([])
                learned = said.split_at if said.doubling == now.id else 0
            except PixiuError:
                pass  # the parent has no leader now
        elif now.cut_us and self._partition >= now.partitions // 2:
            learned = now.split_at
        return doubling_pb2.DoublingStatus(
            doubling=now.id,
            partitions=now.partitions or self._context.view.layout.partitions("xiu"),
            phase=doubling_pb2.DoublingPhase.ValueType(now.phase),
            committed=self._core.committed,
            split_at=now.split_at or learned,
            learned=learned,
        )

    @property
    def _core(self) -> Core:
        core = self._shell.core
        if core is None:
            raise Unavailable("this Xiu is not open; try again soon")
        return core

    # --- a child asks

    def ask(self, effect: AskParent) -> None:
        """The core's question; it is answered in any case."""
        self._shell.spawn(self._ask(effect))

    async def _ask(self, effect: AskParent) -> None:
        known: Known | None
        try:
            known = await self._known_to_parent(effect.wanted)
        except PixiuError:
            known = None
        self._answered(ParentAnswered(effect.number, known))

    async def _known_to_parent(self, wanted: Wanted) -> Known:
        """Raises PixiuError where the parent does not answer, or was not split."""
        found: Known = []
        while len(found) < len(wanted):
            part = wanted[len(found) : len(found) + MAX_ASKED]
            said = await self._ask_once(part)
            if not said.doubling or len(said.msg_ids) != len(part) or len(said.crcs) != len(part):
                raise Unavailable(f"partition {parent_of(self._partition)} says nothing of {len(part)} SnowflakeIDs")
            found += [(msg_id, crc) if msg_id else None for msg_id, crc in zip(said.msg_ids, said.crcs, strict=True)]
        return found

    async def _ask_once(self, wanted: Wanted, wait_ms: int = 0) -> xiu_partitions_pb2.AskReply:
        parent = parent_of(self._partition)
        request = xiu_partitions_pb2.AskRequest(
            child=self._partition,
            snowflakes=[one for one, _ in wanted],
            derived=[at for at, (_, derived) in enumerate(wanted) if derived],
            wait_ms=wait_ms,
        )
        reason = "nobody of it is running"
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
        if generation() != self._generation:  # with the certificates of before a channel would not connect again for ever
            self._generation, former, self._channels = generation(), self._channels, {}
            for channel in former.values():
                await channel.close(CALL_S)
        if address not in self._channels:
            there = {node.address for node in self._context.view.of_role("xiu")}
            for gone in [held for held in self._channels if held not in there]:
                await self._channels.pop(gone).close()
            self._channels[address] = peer_channel(address, "xiu", CHANNEL_OPTIONS)
        stub: Any = xiu_partitions_pb2_grpc.XiuPartitionsStub(self._channels[address])
        reply: xiu_partitions_pb2.AskReply = await stub.Ask(request, timeout=CALL_S)
        return reply

    # --- a parent answers

    async def _until_split(self, child: int, wait_s: float) -> None:
        """Until this partition was split from a child, or for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._shell.head.doubling.partitions <= child and self._replica.is_leader:
                    self._changed.clear()
                    await self._changed.wait()

    async def Ask(
        self, request: xiu_partitions_pb2.AskRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> xiu_partitions_pb2.AskReply:
        """What is known here of SnowflakeIDs of a child."""
        try:
            return await self._asked(request)
        except PixiuError as error:
            await abort(context, error)

    async def _asked(self, request: xiu_partitions_pb2.AskRequest) -> xiu_partitions_pb2.AskReply:
        if len(request.snowflakes) > MAX_ASKED or any(at >= len(request.snowflakes) for at in request.derived):
            raise InvalidArgument(f"at most {MAX_ASKED} SnowflakeIDs are asked for at once")
        if request.child < 1 or parent_of(request.child) != self._partition:
            raise InvalidArgument(f"partition {request.child} did not come from partition {self._partition}")
        self._replica.check_leader()
        if request.wait_ms and not request.snowflakes:
            await self._until_split(request.child, min(request.wait_ms, SPLIT_WAIT_MS) / 1000)
            self._replica.check_leader()
        head, core = self._shell.head, self._core
        now = head.doubling
        if now.partitions <= request.child:
            return xiu_partitions_pb2.AskReply()
        derived = set(request.derived)
        wanted = [(one, at in derived) for at, one in enumerate(request.snowflakes)]
        # It may not have applied the split's own entries yet; whoever has the lease has applied all that is committed.
        if not self._replica.lease_valid():
            raise Unavailable("whether this replica still leads, or has applied everything, is not sure; try again in a moment")
        known = core.known(wanted)
        above = [at for at, each in enumerate(known) if each is None and is_asked(now, head.clock_us, *wanted[at])]
        if above:
            for at, each in zip(above, await self._known_to_parent([wanted[at] for at in above]), strict=True):
                known[at] = each
        return xiu_partitions_pb2.AskReply(
            doubling=now.id,
            split_at=now.split_at,
            split_us=now.split_us,
            msg_ids=[each[0] if each else 0 for each in known],
            crcs=[each[1] if each else 0 for each in known],
            holds=b"" if wanted else inherited(self._shell.holding.readers),
        )
