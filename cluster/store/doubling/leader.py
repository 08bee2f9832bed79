"""A leader's part in a doubling that copies: takes the operator's steps, and continues those that take long.

    parent   Advance(SPLIT) ─▶ SPLIT, appended ─▶ moved keys are refused ─▶ digest ─▶ Advance(CLEANING) ─▶ CLEAN …
    child    Advance(LEARNING) ─▶ BEGIN ─▶ `learner` … ─▶ OPEN ─▶ digest

`steps` and `learning` decide, and every decision is in the log, so that the next leader continues from there.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

from cluster.process.context import Context
from cluster.replication.proposals import Proposal
from cluster.replication.replica import Replica
from cluster.store.doubling.copied import Record, note_body
from cluster.store.doubling.learner import Learner, Teacher
from cluster.store.doubling.learning import Work, progress_of, work_of
from cluster.store.doubling.machine import CopiedMachine
from cluster.store.doubling.phases import Command, Cut, Phase, Step, cut_in
from cluster.store.doubling.service import DoublingService
from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.errors import PixiuError
from pixiu.rpc.backoff import Backoff

INTERRUPTED: Final = "doubling_interrupted"
MAX_UNWRITTEN: Final = 5000
"""Limit of changes that wait for a transaction while moved values are deleted: each search looks through them."""
CLEAN_PAUSE_S: Final = 0.002
UNWRITTEN_POLL_S: Final = 0.05
SETTLE_POLL_S: Final = 0.02
LOG_ENTRIES: Final = 4096
LOG_BYTES: Final = 1 << 20


class CopyingLeader(DoublingService):
    """Serves and runs the doubling of one replica's partition.

    Args:
        context: of the process; the role's options have `partition`.
        machine: its state.
        replica: its log.
        end_turn: puts the callers' requests of this turn into the log.
        changed: called with the record, and the partitions by a SPLIT that is in this leader's log but not in the state.
    """

    def __init__(
        self,
        context: Context[Any],
        machine: CopiedMachine[Any],
        replica: Replica,
        end_turn: Callable[[], None],
        changed: Callable[[Record, int], None],
    ) -> None:
        super().__init__(context, replica)
        self._machine, self._turn_ends, self._changed = machine, end_turn, changed
        self._cut: Cut | None = None
        """The last SPLIT in this leader's log, until the state shows its outcome."""
        self._task: asyncio.Task[None] | None = None
        self._teacher = Teacher(context, machine, replica)
        machine.on_doubling = self._record_changed

    @property
    def record(self) -> Record:
        """State of the doubling, as this replica knows it."""
        return self._machine.copying.record

    def _pending(self) -> Cut | None:
        return self._cut if self._cut is not None and self._cut.counter > self._machine.applied else None

    def _end_turn(self) -> None:
        self._turn_ends()

    def _submit(self, command: Command) -> Proposal:
        proposal = super()._submit(command)
        if command.step is Step.SPLIT:
            self._cut = Cut(proposal.last, command.doubling)
            self._record_changed()
        return proposal

    async def _progress(self) -> pb.DoublingStatus:
        return progress_of(self.record, self._machine.stored)

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
        cut = self._pending()
        self._changed(self.record, cut.doubling.partitions if cut is not None else 0)
        self.look()

    def look(self) -> None:
        """Continue pending work after a change of the record or the layout."""
        idle = self._task is None or self._task.done()
        if idle and self._replica.is_leader and self._next() is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="doubling")

    def _stop(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def close(self) -> None:
        """Stop work in progress; the next leader continues it."""
        self._teacher.close()
        if (task := self._stop()) is not None:
            await asyncio.gather(task, return_exceptions=True)

    # --- work that takes long

    def _next(self) -> Callable[[], Any] | None:
        """The work pending in this phase."""
        match work_of(self.record, self._layout, self._machine.cut is not None, self._cut is not None):
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
        return await self._submit(Command(step, self.record.doubling, body)).replicated() == [[[1]]]

    async def _settle(self) -> None:
        while self._pending() is not None:
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
        try:
            await self._note(view)
        finally:
            if self._machine.cut is view:
                self._machine.close_cut()

    async def _note(self, view: Any) -> None:
        digest = await self._machine.digest(view, self._machine.copying.movers(self.record.doubling))
        await self.propose(Step.NOTE, note_body(digest.total or 1, digest.rows, digest.size))

    async def _end(self) -> None:
        await self.propose(Step.END)

    async def _clean(self) -> None:
        while self.record.phase is Phase.CLEANING:
            while self._machine.unwritten > MAX_UNWRITTEN:
                await asyncio.sleep(UNWRITTEN_POLL_S)
            await self.propose(Step.CLEAN)
            await asyncio.sleep(CLEAN_PAUSE_S)
