"""A leader's part in the doubling of its partition: takes the operator's steps, and continues those that take long.

    parent   Advance(SPLIT) ─▶ SPLIT, appended ─▶ moved keys are refused ─▶ digest ─▶ Advance(CLEANING) ─▶ CLEAN …
    child    Advance(LEARNING) ─▶ BEGIN ─▶ `pi.handover.learner` … ─▶ OPEN ─▶ digest

`pi.doubling.steps` decides, and every decision is in the log, so that the next leader continues from there.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.wire.v1 import doubling_pb2 as pb
from pi.doubling.phases import DOUBLING_KIND, Command, Cut, Phase, Record, Step, cut_in, note_body
from pi.doubling.steps import Act, EndTurn, Standing, Work, problem_of, status_of, steps_back, steps_to, work_of
from pi.handover.learner import Learner
from pi.keys import uin_of
from pi.store.machine import Machine
from pi.store.view import View
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, PixiuError
from pixiu.ids import hex_id
from pixiu.rpc.backoff import Backoff

ADVANCED: Final = "pi_doubling_advanced"
TAKEN_BACK: Final = "pi_doubling_taken_back"
INTERRUPTED: Final = "pi_doubling_interrupted"
MAX_UNWRITTEN: Final = 5000
"""Limit of changes that wait for a transaction while moved values are deleted: each search looks through them."""
CLEAN_PAUSE_S: Final = 0.002
UNWRITTEN_POLL_S: Final = 0.05
SETTLE_POLL_S: Final = 0.02
LOG_ENTRIES: Final = 4096
LOG_BYTES: Final = 1 << 20


class DoublingLeader:
    """Runs the doubling of one replica's partition.

    Args:
        context: of the process.
        partition: of this replica.
        machine: its state.
        replica: its log.
        end_turn: puts the callers' requests of this turn into the log.
        changed: called with the record, and the partitions by a SPLIT that is in this leader's log but not in the state.
    """

    def __init__(
        self,
        context: Context[Any],
        partition: int,
        machine: Machine,
        replica: Replica,
        end_turn: Callable[[], None],
        changed: Callable[[Record, int], None],
    ) -> None:
        self._context, self._partition, self._machine, self._replica = context, partition, machine, replica
        self._end_turn, self._changed = end_turn, changed
        self._cut: Cut | None = None
        """The last SPLIT in this leader's log, until the state shows its outcome."""
        self._task: asyncio.Task[None] | None = None
        self._steps = asyncio.Lock()
        machine.on_doubling = self._record_changed

    @property
    def record(self) -> Record:
        """State of the doubling, as this replica knows it."""
        return self._machine.state.doubled.record

    @property
    def _layout(self) -> RoleLayout:
        return self._context.view.layout.roles.get("pi", RoleLayout(1, 1))

    @property
    def _standing(self) -> Standing:
        cut = self._cut if self._cut is not None and self._cut.counter > self._machine.applied else None
        return Standing(self._partition, self.record, self._layout, cut)

    @property
    def problem(self) -> str:
        """A problem that an operator must solve; "" if there is none."""
        return problem_of(self._standing)

    # --- the leader

    def leading(self) -> None:
        """This replica leads: it reads from its log what it must refuse before it takes requests."""
        self._cut, after = None, self._machine.applied
        log = self._replica.log
        while after < log.last.counter:
            entries = log.read(after, LOG_ENTRIES, LOG_BYTES)
            self._cut = cut_in(entries) or self._cut
            after = entries[-1].counter
        self._record_changed()

    def deposed(self) -> None:
        """This replica no longer leads."""
        self._cut = None
        self._stop()
        self._record_changed()

    def _record_changed(self) -> None:
        cut = self._standing.cut
        self._changed(self.record, cut.doubling.partitions if cut is not None else 0)
        self.look()

    def look(self) -> None:
        """Continue pending work after a change of the record or the layout."""
        idle = self._task is None or self._task.done()
        if idle and self._replica.is_leader and self._next() is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pi-doubling")

    def _stop(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def close(self) -> None:
        """Stop work in progress; the next leader continues it."""
        if (task := self._stop()) is not None:
            await asyncio.gather(task, return_exceptions=True)

    # --- work that takes long

    def _next(self) -> Callable[[], Any] | None:
        """The work pending in this phase."""
        match work_of(self._standing, self._machine.cut is not None, self._cut is not None):
            case Work.LEARN:
                return Learner(self._context, self._machine, self._replica).run
            case Work.DIGEST_HERE:
                return self._digest_here
            case Work.DIGEST_CUT:
                return self._digest_cut
            case Work.END:
                return self._end
            case Work.CLEAN:
                return self._clean
            case Work.SETTLE:
                return self._settle
            case None:
                return None

    async def _run(self) -> None:
        backoff = Backoff(0.05, 1.0, random.random)
        try:
            while self._replica.is_leader and (work := self._next()) is not None:
                try:
                    await work()
                    backoff.reset()
                except PixiuError as problem:
                    self._context.log.warning(INTERRUPTED, phase=self.record.phase.name, error=str(problem), code=problem.code)
                    await asyncio.sleep(backoff.next_s())
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug: without this task the doubling would stop silently
            self._context.crash(error)

    async def propose(self, step: Step, body: bytes = b"") -> bool:
        """Write a step of the current doubling; return True if it had an effect. Raises as `Replica.propose`."""
        return await self._write(Command(step, self.record.doubling, body))

    async def _write(self, command: Command) -> bool:
        return await self._replica.propose([(DOUBLING_KIND, command.encode())]) == [[[1]]]

    async def _settle(self) -> None:
        while self._standing.cut is not None:
            await asyncio.sleep(SETTLE_POLL_S)
        self._cut = None
        self._changed(self.record, 0)

    async def _digest_here(self) -> None:
        view = self._machine.view()
        try:
            await self._note(view)
        finally:
            view.close()

    async def _digest_cut(self) -> None:
        view = self._machine.cut
        assert view is not None
        try:
            await self._note(view)
        finally:
            if self._machine.cut is view:
                self._machine.cut = None
                view.close()

    async def _note(self, view: View) -> None:
        doubling = self.record.doubling

        def moves(key: bytes) -> bool:
            uin = uin_of(key)
            return uin is not None and doubling.moves(uin)

        digest = await self._machine.digest(view, moves)
        await self.propose(Step.NOTE, note_body(digest.total or 1, digest.rows, digest.size))

    async def _end(self) -> None:
        await self.propose(Step.END)

    async def _clean(self) -> None:
        while self.record.phase is Phase.CLEANING:
            while self._machine.state.unwritten > MAX_UNWRITTEN:
                await asyncio.sleep(UNWRITTEN_POLL_S)
            await self.propose(Step.CLEAN)
            await asyncio.sleep(CLEAN_PAUSE_S)

    # --- the operator's steps

    async def doubling_status(self) -> pb.DoublingStatus:
        """See `cluster.replication.doubling.Doubled`."""
        stored = self._machine.store.entries, self._machine.store.bytes_used
        return status_of(self._standing, self._replica.committed, stored)

    async def advance_doubling(self, request: pb.DoublingAdvanceRequest) -> None:
        """See `cluster.replication.doubling.Doubled`. Raises InvalidArgument, NotYet, Unavailable, or as `Replica.propose`."""
        wanted = Phase(int(request.phase)).name
        await self._take(ADVANCED, request, wanted, lambda now: steps_to(now, request))

    async def take_back_doubling(self, request: pb.DoublingTakeBackRequest) -> None:
        """See `cluster.replication.doubling.Doubled`. Raises InvalidArgument, Unavailable, or as `Replica.propose`."""
        await self._take(TAKEN_BACK, request, Phase.NONE.name, lambda now: steps_back(now, request))

    async def _take(
        self,
        event: str,
        request: pb.DoublingAdvanceRequest | pb.DoublingTakeBackRequest,
        wanted: str,
        steps: Callable[[Standing], tuple[Act, ...]],
    ) -> None:
        """Take an operator's steps, if any. They are decided again before they are written."""
        async with self._steps:
            if not steps(self._standing):
                return
            what = {"doubling": hex_id(request.doubling), "partitions": request.partitions, "phase": wanted}
            await asyncio.to_thread(self._replica.audit, request.operator, "doubling", what)
            for act in steps(self._standing):
                if isinstance(act, EndTurn):
                    self._end_turn()
                elif not await self._carry_out(act.command) and (event is TAKEN_BACK or steps(self._standing)):
                    raise InvalidArgument(f"partition {self._partition} is {self.record.phase.name}: it cannot go on to {wanted}")
            self._context.log.info(event, operator=request.operator, **what)

    async def _carry_out(self, command: Command) -> bool:
        """Write a command; return True if it had an effect."""
        proposal = self._replica.submit([(DOUBLING_KIND, command.encode())])
        if command.step is Step.SPLIT:
            self._cut = Cut(proposal.last, command.doubling)
            self._record_changed()
        return await proposal.replicated() == [[[1]]]
