"""gRPC service for the operator's tool that doubles a stored role: the leader of a partition takes it from phase to phase.

    Advance, TakeBack ─▶ `steps` ─▶ audit ─▶ `steps` again ─▶ log ─▶ replicated ─▶ Status

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from cluster.process.context import Context
from cluster.replication.proposals import Proposal
from cluster.replication.replica import Replica
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Cut, Doubling, Phase, Record, reached
from cluster.store.doubling.steps import Act, EndTurn, Standing, problem_of, status_of, steps_back, steps_to
from cluster.wire.v1 import doubling_pb2, doubling_pb2_grpc
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import hex_id
from pixiu.placement.partition import is_partition_count

ADVANCED: Final = "doubling_advanced"
TAKEN_BACK: Final = "doubling_taken_back"
MAX_TEXT: Final = 512
"""Characters of an operator's name or reason."""
PHASES: Final = frozenset(doubling_pb2.DoublingPhase.values()) - {doubling_pb2.DOUBLING_NONE}
Request = doubling_pb2.DoublingAdvanceRequest | doubling_pb2.DoublingTakeBackRequest


def phase_samples(phase: int) -> dict[str, int]:
    """Samples for metrics by name: 1 for the partition's phase, 0 for the others."""
    return {name.removeprefix("DOUBLING_").lower(): int(number == phase) for name, number in doubling_pb2.DoublingPhase.items()}


class DoublingService(doubling_pb2_grpc.DoublingServicer):
    """The gRPC service `pixiu.v1.Doubling` of one replica. A role derives from it, and supplies `record` and what else it needs.

    Args:
        context: of the process; the role's options have `partition`.
        replica: its log.
    """

    def __init__(self, context: Context[Any], replica: Replica) -> None:
        self._context, self._replica = context, replica
        self._role, self._partition = context.role, context.options.partition
        self._lock = asyncio.Lock()
        doubling_pb2_grpc.add_DoublingServicer_to_server(self, context.server)

    # --- what a role supplies

    @property
    def record(self) -> Record:
        """State of the doubling, as committed here."""
        raise NotImplementedError

    def _pending(self) -> Cut | None:
        """The last SPLIT in this leader's log that is not in the record. Raises PixiuError if this replica does not know yet."""
        raise NotImplementedError

    def _end_turn(self) -> None:
        """Put the callers' requests of this turn into the log, if the order of the log does not decide about them anyway."""

    def _submit(self, command: Command) -> Proposal:
        """Append a command; from the append of a SPLIT on moved keys are refused. Raises as `Replica.submit`."""
        return self._replica.submit([(DOUBLING_KIND, command.encode())])

    async def _opening(self, doubling: Doubling) -> bytes:
        """Return the body of OPEN. Raises PixiuError if the child cannot open yet."""
        return b""

    async def _progress(self) -> doubling_pb2.DoublingStatus:
        """Return the role's own fields of the status."""
        return doubling_pb2.DoublingStatus()

    # --- what is known

    @property
    def _layout(self) -> RoleLayout:
        return self._context.view.layout.roles.get(self._role, RoleLayout(1, 1))

    @property
    def _standing(self) -> Standing:
        return Standing(self._role, self._partition, self.record, self._layout, self._pending())

    @property
    def problem(self) -> str:
        """A problem that an operator must solve; "" if there is none."""
        return problem_of(self._role, self.record, self._layout)

    # --- the service

    async def Status(
        self, request: doubling_pb2.DoublingStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Report the phase of the partition."""
        return await self._status()

    async def Advance(
        self, request: doubling_pb2.DoublingAdvanceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Advance to a phase."""
        if request.phase not in PHASES:
            raise InvalidArgument("a doubling goes on to a phase that is not NONE")
        self._check(request)
        await self.advance(request)
        return await self._status()

    async def TakeBack(
        self, request: doubling_pb2.DoublingTakeBackRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> doubling_pb2.DoublingStatus:
        """Keep a parent whole, whatever was sent to split it."""
        self._check(request)
        await self._take(
            TAKEN_BACK, request, Phase.NONE, lambda now: steps_back(now, request), lambda last: self.record.fence >= last
        )
        return await self._status()

    async def _status(self) -> doubling_pb2.DoublingStatus:
        self._replica.check_leader()
        progress = await self._progress()
        status = status_of(self._standing, self._replica.committed, progress)
        if not self._replica.lease_valid():
            raise Unavailable(
                "this replica cannot tell yet whether it still leads and has applied everything; try again in a moment"
            )
        return status

    def _check(self, request: Request) -> None:
        if not request.doubling or not is_partition_count(request.partitions):
            raise InvalidArgument("a doubling has an ID, and a power of two of partitions")
        if not 0 < len(request.operator) <= MAX_TEXT:
            raise InvalidArgument(f"operator has 1 to {MAX_TEXT} characters")
        self._replica.check_leader()

    async def advance(self, request: doubling_pb2.DoublingAdvanceRequest) -> None:
        """Take the partition to a phase; does nothing if it is there, or past it. Raises PixiuError."""
        wanted, now = Phase(int(request.phase)), self._standing
        doubling = now.doubling(request.doubling, request.partitions)
        opens = steps_to(now, request) and wanted is Phase.OPEN
        opening = await self._opening(doubling) if opens else b""
        await self._take(
            ADVANCED, request, wanted, lambda now: steps_to(now, request, opening),
            lambda _: reached(self.record, doubling, wanted),
        )  # fmt: skip

    async def _take(
        self,
        event: str,
        request: Request,
        wanted: Phase,
        steps: Callable[[Standing], tuple[Act, ...]],
        done: Callable[[int], bool],
    ) -> None:
        """Take an operator's steps, if any. They are decided again before they are written, and the state decides about each.

        done: called with the counter of the last step; returns whether the state shows it.
        """
        async with self._lock:
            if not steps(self._standing):
                return
            what = {"doubling": hex_id(request.doubling), "partitions": request.partitions, "phase": wanted.name}
            audit = functools.partial(self._replica.audit, request.operator, "doubling", what)
            if wanted is not Phase.OPEN:  # moved users wait for OPEN; it follows from a SPLIT, which was audited
                await asyncio.to_thread(audit)
            last = 0
            for act in steps(self._standing):
                if isinstance(act, EndTurn):
                    self._end_turn()
                    continue
                proposal = self._submit(act.command)
                await proposal.replicated()
                last = proposal.last
            if wanted is Phase.OPEN:
                await asyncio.to_thread(audit)
            if not done(last):
                raise Unavailable("the partition took another step meanwhile; look at its status, and ask again")
            self._context.log.info(event, operator=request.operator, **what)
