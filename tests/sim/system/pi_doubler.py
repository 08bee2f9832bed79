"""The twins of `pi.doubling_leader` and `pi.learner`: a leader of Pi in the doubling of its partition,
The record, its rules and what entries make of it are production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pi.events as pe
from cluster.replication import events as ev
from cluster.replication.model import START, Position
from cluster.runtime.contract import END_OF_TURN
from pi.doubling import (
    DOUBLING_KIND,
    HOLD_S,
    Command,
    Doubling,
    Phase,
    Record,
    Step,
    follow_body,
    followed,
    hold_body,
    position_body,
    rows_body,
    split_in,
)
from pi.keys import uin_of
from pi.learner import SILENT_S
from pixiu.wire.v1 import pi_replicas_pb2 as pb
from tests.sim.system.streams import Stream

if TYPE_CHECKING:
    from tests.sim.system.pi import PiProcess

POLL_S: Final = 0.02
LOOK_S: Final = 0.1
ROWS: Final = 20
"""In one message: more than one is needed."""


class Doubler:
    """Of one replica."""

    def __init__(self, process: PiProcess) -> None:
        self._process = process
        self._appended = 0
        self._stream: Stream | None = None
        self._attempt = 0
        self._connecting = False
        self._heard: deque[pb.PiLearnReply] = deque()
        self._heard_at = 0.0
        self._busy = False
        self._told: Record | None = None
        self._gone: set[Stream] = set()
        """Streams of children that are over."""
        process.after(LOOK_S, self._look)

    @property
    def record(self) -> Record:
        """Of this replica's state."""
        return self._process.machine.state.doubled.record

    @property
    def _leads(self) -> bool:
        return bool(self._process.core.epoch)

    # --- who leads

    def leading(self) -> None:
        """Before anything is taken: what this replica's log says."""
        replica = self._process.replica
        after = replica.machine.position.counter
        entries = replica.log.read(after, 1 << 20, 1 << 30) if after < replica.log.last.counter else ()
        self._appended = split_in(entries)
        self.changed(always=True)

    def deposed(self) -> None:
        """It does not lead any more."""
        self._appended = 0
        self._hang_up()
        self.changed(always=True)

    def changed(self, *, always: bool = False) -> None:
        """Something was applied."""
        if always or self.record is not self._told:
            self._told = self.record
            self._process.step(pe.DoublingChanged(self.record, self._appended))

    def propose(
        self, step: Step, body: bytes = b"", doubling: Doubling | None = None, done: Callable[[bool], None] | None = None,
        then: tuple[Step, ...] = (),
    ) -> None:  # fmt: skip
        """A step, and others in the same write, if this replica leads. `done(whether it did something)` follows while it does."""
        command = Command(step, doubling or self.record.doubling, body)
        commands = [command, *(Command(each, command.doubling) for each in then)]
        if step is Step.SPLIT:
            self._process.step(END_OF_TURN)

        def applied(answers: list[Any], copies: int) -> None:
            if done is not None:
                done(answers[0] == [[1]])

        payloads = [(DOUBLING_KIND, each.encode()) for each in commands]
        verdict = self._process.replica.submit(payloads, True, lambda: None, applied)
        if isinstance(verdict, ev.Rejected):
            self._hang_up()
        elif step is Step.SPLIT:
            self._appended = command.doubling.partitions
            self.changed(always=True)

    def _look(self) -> None:
        self._process.after(LOOK_S, self._look)
        if not self._leads:
            return
        phase = self.record.phase
        if self._stream is not None and not self._busy and self._process.world.now > self._heard_at + SILENT_S:
            self._hang_up()  # a parent that was deposed before it wrote the HOLD, say, has forgotten this child
        if phase is Phase.LEARNING and self._stream is None and not self._connecting:
            self._connect()
        elif phase is Phase.CLEANING:
            self.propose(Step.CLEAN)
        elif phase is Phase.OPEN and self._process.view.count("pi") >= self.record.partitions:
            self.propose(Step.END)

    # --- a child

    def _hang_up(self) -> None:
        self._attempt += 1
        stream, self._stream = self._stream, None
        self._connecting = self._busy = False
        self._heard.clear()
        if stream is not None:
            stream.leave()

    def _connect(self) -> None:
        process, record = self._process, self.record
        nodes = [node for node in process.view.of_role("pi") if node.partition == record.doubling.parent]
        if not nodes:
            return
        self._attempt += 1
        attempt, self._connecting = self._attempt, True

        def opened(stream: Stream) -> None:
            if attempt != self._attempt:
                stream.leave()
                return
            self._connecting, self._stream, self._heard_at = False, stream, process.world.now
            stream.take_reply = lambda reply: self._hear(attempt, reply)
            stream.lost = lost
            learned = self.record.learned
            stream.send(
                pb.PiLearnRequest(
                    doubling=record.doubling.number,
                    partitions=record.doubling.partitions,
                    partition=record.doubling.partition,
                    epoch=learned.epoch,
                    counter=learned.counter,
                )
            )

        def lost() -> None:
            if attempt == self._attempt:
                self._hang_up()

        process.world.streams.call(process, process.world.rng.choice(nodes).address, "Learn", opened, lost)

    def _hear(self, attempt: int, reply: pb.PiLearnReply) -> None:
        if attempt == self._attempt:
            self._heard_at = self._process.world.now
            self._heard.append(reply)
            self._next()

    def _next(self) -> None:
        if self._busy or not self._heard:
            return
        reply = self._heard[0]
        attempt, self._busy = self._attempt, True
        step, body = Step.FOLLOW, reply.entries
        if reply.snapshot:
            step, body = Step.RESET, position_body(Position(reply.epoch, reply.counter))
        elif reply.rows:
            step, body = Step.ROWS, reply.rows

        def done(well: bool) -> None:
            if attempt != self._attempt:
                return
            if self._process.machine.state.doubled.whole:
                self.propose(Step.OPEN)
                self._hang_up()
            elif self.record.phase is not Phase.LEARNING:
                self._hang_up()
            elif step is Step.RESET and not self.record.emptied:
                self.propose(Step.DROP, done=done)
            elif not well or (step is Step.FOLLOW and self.record.learned == START):
                self._hang_up()
            else:
                self._busy = False
                self._heard.popleft()
                self._next()

        last = step is Step.FOLLOW and split_in(followed(body)) == self.record.doubling.partitions
        self.propose(step, body, done=done, then=(Step.OPEN,) if last else ())

    # --- a parent

    def learn(self, stream: Stream) -> None:
        """Tell a child what moves."""
        stream.take = lambda request: self._asked(stream, request)
        stream.left = lambda: self._gone.add(stream)

    def _asked(self, stream: Stream, request: pb.PiLearnRequest) -> None:
        doubling = Doubling(request.doubling, request.partitions, request.partition)
        if not self._leads or self.record.phase not in (Phase.NONE, Phase.SPLIT):
            stream.end()
            return

        def held(_: bool) -> None:
            log, machine = self._process.replica.log, self._process.machine
            learned = Position(request.epoch, request.counter)
            after = learned.counter
            kept = log.first.counter <= after <= machine.position.counter and log.epoch_at(after) == learned.epoch
            if learned == START or not kept:
                after = self._snapshot(stream, doubling)
            self._follow(stream, doubling, after)

        self.propose(Step.HOLD, hold_body(self._process.machine.state.inboxes.now_s + HOLD_S), doubling, held)

    def _snapshot(self, stream: Stream, doubling: Doubling) -> int:
        machine = self._process.machine
        self._process.world.counts["snapshots for children"] += 1
        position, rows = machine.position, machine.rows()
        moved = [row for row in sorted(rows.items()) if (uin := uin_of(row[0])) is None or doubling.moves(uin)]
        epoch, counter = position
        stream.reply(pb.PiLearnReply(snapshot=True, epoch=epoch, counter=counter))
        for at in range(0, len(moved), ROWS):
            stream.reply(pb.PiLearnReply(rows=rows_body(position, moved[at : at + ROWS], last=False)))
        stream.reply(pb.PiLearnReply(rows=rows_body(position, [], last=True)))
        return counter

    def _follow(self, stream: Stream, doubling: Doubling, after: int) -> None:
        if stream in self._gone:
            return
        replica, machine = self._process.replica, self._process.machine
        name = f"child {doubling.partition}"
        if not self._leads or after < replica.log.first.counter:
            stream.end()
            return
        replica.step(ev.Pinned(name, after))
        if after < machine.position.counter:
            entries = replica.log.read(after, min(7, machine.position.counter - after), 1 << 20)
            after = entries[-1].counter
            stream.reply(pb.PiLearnReply(entries=follow_body(entries, doubling)))
        self._process.after(POLL_S, lambda: self._follow(stream, doubling, after))
