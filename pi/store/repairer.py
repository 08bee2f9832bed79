"""Repair of a Pi's state, taken from an undamaged replica and never from one that is broken as well, and its digests.

    a broken value ──▶ another replica in sync checks all of its own ──▶ whole: this process ends, and begins again with its state
                                                                   └─▶ broken as well, or none exists: undamaged values are served,
                                                                       until an operator gives up the lost ones

    replica ── a new mark ──▶ leader ── entry ──▶ log ──▶ both apply it: a view on each, which is digested

Source: docs/pi.md, docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.repair.digests import Digests
from cluster.store.repair.repairer import StoreRepairer
from cluster.wire.v1 import repair_pb2 as pb
from cluster.wire.v1.repair_pb2_grpc import RepairStub
from pi.early import EARLY_KIND, encode_early
from pi.keys import name_of
from pi.store.machine import Machine
from pi.store.view import MARK_BYTES, MARK_KIND, View
from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument, MalformedData, OutcomeUnknown, StateDamaged, StorageError, Unavailable
from pixiu.ids import MAX_ID
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import peer_channel
from pixiu.wire.inbox_operations import ENTRY_KIND, GiveUp, encode

NOT_MARKED: Final = "pi_state_not_marked"
GIVEN_UP: Final = "pi_values_given_up"
ANSWER_S: Final = 0.5
"""Delay from the answer to an operator to the end of a process that begins again, seconds."""
ASK_AGAIN_S: Final = 300.0
"""Interval after which a replica that is broken as well is asked again, seconds: for the answer it reads its whole store."""
CHECK_S: Final = 3600.0
EARLY_POLL_S: Final = 0.05
STANDSTILL_S: Final = 3.0
"""Time after which a state that stands still is called damaged, seconds: an operator's entry that others have may be on its way."""
MARK_S: Final = 30.0
"""Time limit for a replica to apply the mark, seconds."""
KEYS_AT_ONCE: Final = 1000
"""Keys in one entry of the log."""
MAX_NAMED: Final = 1000
"""Limit of values named in the answer and in the audit. Policy: the rest is only counted."""


class Repairer(StoreRepairer):
    """Repairs one replica's state.

    Args:
        context: of the process.
        machine: its state.
        replica: its log.
        spawn: runs a task of the process.
    """

    RANGES = "users"

    def __init__(
        self, context: Context[Any], machine: Machine, replica: Replica, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        super().__init__(context, replica)
        self._machine, self._spawn = machine, spawn
        self._asking = asyncio.Lock()
        self._ask_at = 0.0
        self._giving_up = asyncio.Lock()
        self.alone = ""
        """Why the damage is not repaired; empty: it is, or there is none."""

    @property
    def opened(self) -> bool:
        """True while the state can be read."""
        return self._machine.opened

    async def whole_one(self) -> Node | None:
        """Another replica in sync that reports its whole state as undamaged."""
        for node in self.others():
            async with peer_channel(node.address, "pi", self._context.tls, PEER_CHANNEL) as channel:
                stub: Any = RepairStub(channel)
                try:
                    reply = await stub.Verify(pb.VerifyRequest(repair=False), timeout=CHECK_S)
                except grpc.aio.AioRpcError:
                    continue
            if not reply.left:
                return node
        return None

    # --- comparison with the leader

    def mark(self) -> int:
        """Choose a mark at random."""
        return secrets.randbelow(MAX_ID) + 1

    async def digests(self, mark: int, *, leads: bool) -> Digests:
        """Digest the state right after a mark's entry, which a leader writes. Raises NotLeader, Overloaded, Unavailable,
        MalformedData, StorageError."""
        if not 0 < mark <= MAX_ID:
            raise MalformedData(f"there is no mark {mark}")
        async with self._expected(mark) as future:
            try:
                if leads:
                    await self._replica.propose([(MARK_KIND, mark.to_bytes(MARK_BYTES, "little"))])
                async with asyncio.timeout(MARK_S):
                    view = await asyncio.shield(future)
            except OutcomeUnknown as unknown:
                raise Unavailable("this replica is no longer the leader; compare again") from unknown
            except TimeoutError as late:
                raise Unavailable(f"this replica does not reach the mark within {MARK_S:.0f} s; compare again later") from late
            digest = await self._machine.digest(view)
            return Digests(view.position, dict(enumerate(digest.sums)))

    @asynccontextmanager
    async def _expected(self, mark: int) -> AsyncIterator[asyncio.Future[View]]:
        future = self._machine.views.expect(mark)
        try:
            yield future
        finally:
            self._machine.views.forget(mark)

    # --- damage

    async def verify(self, repair: bool) -> pb.VerifyReply:
        """Check every stored value; repaired, the process starts again. Raises PixiuError."""
        await self._wait_at_standstill()
        try:
            return pb.VerifyReply(checked=await self._machine.verify())
        except StateDamaged as damage:
            text = self._machine.damaged = str(damage)
        restarts = repair and await self.begin_again(text)
        alone = "; no other replica in sync is undamaged" if repair and not restarts else ""
        return pb.VerifyReply(damaged=1, left=1, text=text + alone, restarts=restarts)

    async def _wait_at_standstill(self) -> None:
        """Wait up to `STANDSTILL_S` for an operator's entry that lets the state go on."""
        limit = time.monotonic() + STANDSTILL_S
        while self._machine.stop.at and time.monotonic() < limit:
            await asyncio.sleep(EARLY_POLL_S)

    def damaged(self, text: str) -> None:
        """Begin a repair: a value is broken."""
        if not self.others():
            self._stay("no other replica is in sync")
        elif not self._asking.locked() and time.monotonic() >= self._ask_at:
            self._spawn(self._repair(text))

    def _stay(self, why: str) -> None:
        self.alone = (
            f"{why}: start one that is undamaged, or give up what is lost with "
            f"`pixiu repair --role pi --partition {self._context.options.partition} --drop --reason TEXT`"
        )

    async def _repair(self, text: str) -> None:
        async with self._asking:
            given_up = self._machine.given_up
            if given_up > self._machine.flushed:
                return  # the store still holds what was given up; the scrub reports other damage again
            if await self.whole_one() is None:
                self._ask_at = time.monotonic() + ASK_AGAIN_S
                self._stay("no other replica in sync is undamaged")
                return
            async with self._giving_up:  # an operator's entry may have made the other one whole: it mends this one, too
                await self._wait_at_standstill()
            if self._machine.given_up != given_up:
                return
            if self._mark(text) or (self._machine.stop.at and self._replica.is_leader):  # the other one leads then
                self._end(text)

    async def begin_again(self, text: str) -> bool:
        """Take the state from another replica if one is undamaged; return True if this begins. Raises DiskFull, DiskFailed."""
        if await self.whole_one() is None:
            return False
        self._machine.mark_damaged(text)
        # The answer leaves before the process does.
        asyncio.get_running_loop().call_later(ANSWER_S, self._end, text)
        return True

    def _mark(self, text: str) -> bool:
        try:
            self._machine.mark_damaged(text)
        except StorageError as full:  # the scrub, a read or an operator finds the damage again
            self._context.log.error(NOT_MARKED, error=str(full), code=full.code)
            return False
        return True

    def _end(self, text: str) -> None:
        self._context.crash(StateDamaged(f"{text}; after a restart this replica takes its inboxes from another one"))

    # --- values that no replica has

    async def give_up(self, operator: str, reason: str) -> tuple[int, list[str]]:
        """Give up every broken value, on all replicas; return their number and names. Audited first.

        Raises InvalidArgument, NotLeader; Unavailable: another replica is whole; StorageError, OutcomeUnknown.
        """
        if not operator or not reason:
            raise InvalidArgument("giving up data needs an operator and a reason")
        self._replica.check_leader()
        async with self._giving_up:
            keys = await self._machine.broken()
            stands_at = self._machine.stop.at
            if not keys and not stands_at:
                return 0, []
            node = await self.whole_one()
            if node is not None:
                raise Unavailable(f"the replica at {node.address} is undamaged: `pixiu repair` takes the state from there")
            names = [name_of(key) for key in keys[:MAX_NAMED]]
            what = {"gave_up": len(keys), "values": names, "before_entry": stands_at}
            await asyncio.to_thread(self._replica.audit, operator, reason, what)
            self._context.log.error(GIVEN_UP, operator=operator, reason=reason, values=len(keys), first="".join(names[:1]))
            if stands_at:
                await self._give_up_early(stands_at, keys)
            for begin in range(0, 0 if stands_at else len(keys), KEYS_AT_ONCE):
                payload = encode([GiveUp(tuple(keys[begin : begin + KEYS_AT_ONCE]))])
                await self._replica.propose([(ENTRY_KIND, payload)])
            await self._machine.verify()
            self._machine.damaged = self.alone = ""
        return len(keys), names

    async def _give_up_early(self, before: int, keys: list[bytes]) -> None:
        """Give up values before the entry that cannot be applied, and wait until the state has gone on. Raises StateDamaged if it
        has not; or as `Replica.propose`."""
        proposal = self._replica.submit([(EARLY_KIND, encode_early(before, keys))], unblocks=True)
        applied = asyncio.ensure_future(proposal.replicated())
        try:
            while not applied.done():
                await asyncio.wait({applied}, timeout=EARLY_POLL_S)
                if self._machine.stop.tried >= proposal.last:
                    raise StateDamaged(f"{self._machine.stop.text}; run it again")
            await applied
        finally:
            applied.cancel()
        while self._replica.may_leave:  # writes were refused meanwhile: another replica that goes on as well may lead now
            await asyncio.sleep(EARLY_POLL_S)
