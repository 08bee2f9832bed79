"""What a leader does for the doubling of its partition: it takes the operator's steps, and goes on with those that take long.

    parent   Advance(SPLIT) ─▶ SPLIT, appended ─▶ moved keys are refused ─▶ digest ─▶ Advance(CLEANING) ─▶ CLEAN …
    child    Advance(LEARNING) ─▶ BEGIN ─▶ `pi.learner` … ─▶ OPEN ─▶ digest

Everything that was decided is in the log, so that the next leader goes on with it.

Source: docs/doubling.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

from cluster.replication.replica import Replica
from cluster.runtime.context import Context
from pi.doubling import DOUBLING_KIND, Command, Doubling, Phase, Record, Step, note_body, split_in
from pi.keys import uin_of
from pi.learner import Learner
from pi.machine import Machine
from pi.view import View
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, NotYet, PixiuError, Unavailable
from pixiu.ids import hex_id
from pixiu.rpc.backoff import Backoff
from pixiu.wire.levels import Level
from pixiu.wire.v1 import doubling_pb2 as pb

ADVANCED: Final = "pi_doubling_advanced"
INTERRUPTED: Final = "pi_doubling_interrupted"
MAX_UNWRITTEN: Final = 5000
"""Changes that may wait for a transaction before some more of what moved is deleted: a search looks through them."""
CLEAN_PAUSE_S: Final = 0.002
UNWRITTEN_POLL_S: Final = 0.05
LOG_ENTRIES: Final = 4096
LOG_BYTES: Final = 1 << 20


class DoublingLeader:
    """Runs the doubling of one replica's partition.

    Args:
        context: of the process.
        partition: of this replica.
        machine: its state.
        replica: its log.
        end_turn: puts what callers have asked for into the log.
        changed: called with the record, and the partitions by a SPLIT that is in this leader's log and not in the state.
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
        self._appended = 0
        self._task: asyncio.Task[None] | None = None
        self._steps = asyncio.Lock()
        machine.on_doubling = self._record_changed

    @property
    def record(self) -> Record:
        """Where the doubling stands, by this replica's state."""
        return self._machine.state.doubled.record

    @property
    def _layout(self) -> RoleLayout:
        return self._context.view.layout.roles.get("pi", RoleLayout(1, 1))

    # --- who leads

    def leading(self) -> None:
        """This replica leads: it decides from its log what it refuses, before it takes anything."""
        self._appended, after = 0, self._machine.applied
        log = self._replica.log
        while after < log.last.counter:
            entries = log.read(after, LOG_ENTRIES, LOG_BYTES)
            self._appended = split_in(entries) or self._appended
            after = entries[-1].counter
        self._record_changed()

    def deposed(self) -> None:
        """It does not lead any more."""
        self._appended = 0
        self._stop()
        self._record_changed()

    def _record_changed(self) -> None:
        self._changed(self.record, self._appended)
        self.look()

    def look(self) -> None:
        """Go on with what is to be done: the record or the layout has changed."""
        idle = self._task is None or self._task.done()
        if idle and self._replica.is_leader and self._next() is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="pi-doubling")

    def _stop(self) -> asyncio.Task[None] | None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    async def close(self) -> None:
        """End what is under way; the next leader goes on with it."""
        if (task := self._stop()) is not None:
            await asyncio.gather(task, return_exceptions=True)

    # --- what takes long

    def _next(self) -> Callable[[], Any] | None:
        """What is to be done in this phase."""
        record = self.record
        match record.phase:
            case Phase.LEARNING:
                return Learner(self._context, self._machine, self._replica).run
            case Phase.SPLIT if not record.digest:
                return self._digest_here
            case Phase.OPEN if not record.digest and self._machine.cut is not None:
                return self._digest_cut
            case Phase.OPEN if self._layout.n >= record.partitions:
                return self._end
            case Phase.CLEANING:
                return self._clean
            case _:
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
        except Exception as error:  # a bug: without this task the doubling would stand still, and nobody know why
            self._context.crash(error)

    async def propose(self, step: Step, body: bytes = b"") -> bool:
        """Write a step of the doubling under way. Whether it did something. Raises as `Replica.propose`."""
        return await self._write(Command(step, self.record.doubling, body))

    async def _write(self, command: Command) -> bool:
        written = await self._replica.propose([(DOUBLING_KIND, command.encode())])
        return written.answers == [[[1]]]

    async def _digest_here(self) -> None:
        """What moved changes no more in a parent that is split: any view will do."""
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
        """The layout says what this child serves: its doubling is over."""
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
        record = self.record
        partitions = record.partitions // 2 if record.phase is Phase.LEARNING else record.partitions
        keys, size = record.keys, record.size
        if record.phase is Phase.NONE:  # how much there is to learn from
            keys, size = self._machine.store.entries, self._machine.store.bytes_used
        return pb.DoublingStatus(
            doubling=record.doubling.number,
            partitions=partitions,
            phase=pb.DoublingPhase.ValueType(record.phase),
            committed=self._replica.committed,
            split_at=record.split_at,
            learned=record.learned.counter,
            keys=keys,
            bytes=size,
            digest=record.digest,
        )

    async def advance_doubling(self, request: pb.DoublingAdvanceRequest) -> None:
        """See `cluster.replication.doubling.Doubled`. Raises InvalidArgument, NotYet, Unavailable, or as `Replica.propose`."""
        partitions = request.partitions
        if partitions < 2 or self._partition >= partitions:
            raise InvalidArgument(f"partition {self._partition} has no part in doubling {request.doubling:016x} to {partitions}")
        is_child = self._partition >= partitions // 2
        doubling = Doubling(request.doubling, partitions, self._partition if is_child else self._partition + partitions // 2)
        wanted = Phase(int(request.phase))
        async with self._steps:
            if not self._reached(wanted, doubling):
                self._check_layout(doubling, over=wanted is Phase.CLEANING)
                what = {"doubling": hex_id(doubling.number), "partitions": partitions, "phase": wanted.name}
                await asyncio.to_thread(self._replica.audit, request.operator, "doubling", what)
                await (self._advance_child(wanted, doubling) if is_child else self._advance_parent(wanted, doubling))
                self._context.log.info(ADVANCED, operator=request.operator, **what)

    def _reached(self, wanted: Phase, doubling: Doubling) -> bool:
        """Whether this phase, or a later one, is reached."""
        record = self.record
        if record.doubling != doubling:
            return False
        is_child = self._partition == doubling.partition
        order = (Phase.LEARNING, Phase.OPEN, Phase.NONE) if is_child else (Phase.SPLIT, Phase.CLEANING, Phase.NONE)
        if wanted not in order:
            raise InvalidArgument(f"{'a child' if is_child else 'a parent'} has no phase {wanted.name}")
        return order.index(wanted) <= order.index(record.phase)

    def _check_layout(self, doubling: Doubling, *, over: bool) -> None:
        """The registry must name the doubling, and where something goes, have ended it. Raises Unavailable."""
        layout = self._layout
        if hex_id(doubling.number) not in layout.doublings or doubling.partitions not in (layout.n, layout.next):
            raise Unavailable(f"the layout as it is known here does not name doubling {doubling.number:016x} of pi; retry")
        if over and layout.n < doubling.partitions:
            raise Unavailable(f"the layout as it is known here has {layout.n} partitions of pi, not {doubling.partitions}; retry")

    async def _advance_child(self, wanted: Phase, doubling: Doubling) -> None:
        if wanted is Phase.LEARNING:
            done = await self._write(Command(Step.BEGIN, doubling))
        elif self.record.doubling != doubling:
            raise InvalidArgument(f"partition {self._partition} has not begun to learn; advance it to LEARNING first")
        else:  # OPEN: `_reached` has refused any other phase
            record = self.record
            if not record.whole:
                cut = f"the cut at {record.split_at}" if record.split_at else "the cut, which is not made"
                raise NotYet(f"partition {self._partition} has learned up to {record.learned.counter} of {cut}")
            done = await self.propose(Step.OPEN) or self.record.phase is Phase.OPEN
        if not done:
            raise InvalidArgument(f"partition {self._partition} is {self.record.phase.name}: it cannot go on to {wanted.name}")

    async def _advance_parent(self, wanted: Phase, doubling: Doubling) -> None:
        if wanted is Phase.SPLIT:
            done = await self._split(doubling)
        elif wanted is Phase.CLEANING and self.record.doubling == doubling:
            done = await self._write(Command(Step.CLEAN, doubling))
        else:
            done = False
        if not done:
            raise InvalidArgument(f"partition {self._partition} is {self.record.phase.name}: it cannot go on to {wanted.name}")

    async def _split(self, doubling: Doubling) -> bool:
        """The cut: what came before it in this turn stands before it in the log, and nothing that moves behind it."""
        self._end_turn()
        proposal = self._replica.submit([(DOUBLING_KIND, Command(Step.SPLIT, doubling).encode())])
        self._appended = doubling.partitions
        self._changed(self.record, self._appended)
        return (await proposal.reached(Level.REPLICATED)).answers == [[[1]]]
