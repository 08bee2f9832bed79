"""Repair of a Pi's state: taken from an undamaged replica, never from one that is broken as well.

    a broken value ──▶ another replica in sync checks all of its own ──▶ whole: this process ends, and begins again with its state
                                                                   └─▶ broken as well, or none exists: undamaged values are served,
                                                                       until an operator gives up the lost ones

Source: docs/pi.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import grpc.aio

from cluster.process.context import Context
from cluster.replication.replica import Replica
from pi.early import EARLY_KIND, encode_early
from pi.keys import name_of
from pi.store.machine import Machine
from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument, StateDamaged, StorageError, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.channels import PEER_CHANNEL
from pixiu.rpc.tls import peer_channel
from pixiu.wire.inbox_operations import ENTRY_KIND, GiveUp, encode
from pixiu.wire.v1 import pi_pb2
from pixiu.wire.v1.pi_pb2_grpc import PiStub

NOT_MARKED: Final = "pi_state_not_marked"
GIVEN_UP: Final = "pi_values_given_up"
ANSWER_S: Final = 0.5
"""Delay from the answer to an operator to the end of a process that begins again, seconds."""
ASK_AGAIN_S: Final = 300.0
"""Interval after which a replica that is broken as well is asked again, seconds: for the answer it reads its whole store."""
CHECK_S: Final = 3600.0
EARLY_POLL_S: Final = 0.05
KEYS_AT_ONCE: Final = 1000
"""Keys in one entry of the log."""
MAX_NAMED: Final = 1000
"""Limit of values named in the answer and in the audit. Policy: the rest is only counted."""


class Repairer:
    """Repairs one replica's state.

    Args:
        context: of the process.
        partition: of this replica.
        machine: its state.
        replica: its log.
        spawn: runs a task of the process.
    """

    def __init__(
        self,
        context: Context[Any],
        partition: int,
        machine: Machine,
        replica: Replica,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._context, self._partition, self._machine, self._replica, self._spawn = context, partition, machine, replica, spawn
        self._asking = asyncio.Lock()
        self._ask_at = 0.0
        self._giving_up = asyncio.Lock()
        self.alone = ""
        """Why the damage is not repaired; empty: it is, or there is none."""

    def _others(self) -> list[Node]:
        """Other replicas that have everything committed."""
        status = self._replica.status()
        in_sync = status.get("in_sync")
        members = set(in_sync) - {status["member"]} if isinstance(in_sync, list) else set()
        return [node for node in self._context.view.replicas("pi", self._partition) if hex_id(node.member) in members]

    async def whole_one(self) -> Node | None:
        """Another replica in sync that reports its whole state as undamaged."""
        for node in self._others():
            async with peer_channel(node.address, "pi", PEER_CHANNEL) as channel:
                stub: Any = PiStub(channel)
                try:
                    reply = await stub.Verify(pi_pb2.PiVerifyRequest(repair=False), timeout=CHECK_S)
                except grpc.aio.AioRpcError:
                    continue
            if not reply.damage:
                return node
        return None

    # --- damage

    def damaged(self, text: str) -> None:
        """Begin a repair: a value is broken."""
        if not self._others():
            self._stay("no other replica is in sync")
        elif not self._asking.locked() and time.monotonic() >= self._ask_at:
            self._spawn(self._repair(text))

    def _stay(self, why: str) -> None:
        self.alone = (
            f"{why}: start one that is undamaged, or give up what is lost with "
            f"`pixiu repair --role pi --partition {self._partition} --drop --reason TEXT`"
        )

    async def _repair(self, text: str) -> None:
        async with self._asking:
            if await self.whole_one() is not None:
                if self._mark(text) or (self._machine.stop.at and self._replica.is_leader):  # the other one leads then
                    self._end(text)
            else:
                self._ask_at = time.monotonic() + ASK_AGAIN_S
                self._stay("no other replica in sync is undamaged")

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
