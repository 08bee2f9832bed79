"""The shells of `cluster.store.doubling.leader` and `.learner`: what a leader of Pi does in the doubling of its partition. What it
decides, and what entries make of its record, is production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pi.events as pe
from cluster.core.contract import END_OF_TURN
from cluster.replication.core import events as ev
from cluster.replication.model import Position
from cluster.store.doubling.copied import Record, note_body, rows_body
from cluster.store.doubling.learner import SILENT_S
from cluster.store.doubling.learning import Learning, Lesson, Work, check_pupil, hold_of_sweeps, progress_of, request_of, work_of
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Cut, Doubling, Step, cut_in
from cluster.store.doubling.steps import Act, EndTurn, Standing, status_of
from cluster.wire.v1 import doubling_pb2 as pb
from pi.doubling import of_child
from pi.keys import uin_of
from pi.store.digest import Digest
from pixiu.errors import PixiuError
from tests.sim.system.streams import Stream

if TYPE_CHECKING:
    from tests.sim.system.pi import PiProcess

POLL_S: Final = 0.02
LOOK_S: Final = 0.1
ROWS: Final = 20
"""In one message: more than one is needed."""


TOLD: Final = 7
"""Entries in one message."""
TOGETHER_S: Final = 0.2
"""A step waits so long for a request, and comes in its turn: as it does where messages come together."""


class Doubler:
    """Of one replica."""

    def __init__(self, process: PiProcess) -> None:
        self._process = process
        self._cut: Cut | None = None
        self._stream: Stream | None = None
        self._attempt = 0
        self._connecting = False
        self._heard: deque[pb.LearnReply] = deque()
        self._heard_at = 0.0
        self._writes: Generator[list[Command], bool, None] | None = None
        self._told: Record | None = None
        self._gone: set[Stream] = set()
        """Streams of children that are over."""
        self._moved_rows: dict[bytes, bytes] | None = None
        """Of a child: what it had when it opened."""
        self._due: deque[Callable[[], None]] = deque()
        """Steps that wait for a request to come in the same turn."""
        process.after(LOOK_S, self._look)

    @property
    def record(self) -> Record:
        """Of this replica's state."""
        return self._process.machine.state.copying.record

    @property
    def _leads(self) -> bool:
        return bool(self._process.core.epoch)

    @property
    def standing(self) -> Standing:
        """What it decides by."""
        cut = self._cut if self._cut is not None and self._cut.counter > self._process.machine.position.counter else None
        return Standing("pi", self._process.place.partition, self.record, self._process.view.laid_out("pi"), cut)

    def status(self) -> pb.DoublingStatus:
        """What the operator's tool is told."""
        return status_of(self.standing, self._process.machine.position.counter, progress_of(self.record, (0, 0)))

    # --- who leads

    def leading(self) -> None:
        """Before anything is taken: what this replica's log says."""
        replica = self._process.replica
        after = replica.machine.position.counter
        entries = replica.log.read(after, 1 << 20, 1 << 30) if after < replica.log.last.counter else ()
        self._cut = cut_in(entries)
        self.changed(always=True)

    def deposed(self) -> None:
        """It does not lead any more."""
        self._cut = None
        self._hang_up()
        self.changed(always=True)

    def opened(self) -> None:
        """A child is as its parent was at the cut."""
        self._moved_rows = self._process.machine.rows()

    def changed(self, *, always: bool = False) -> None:
        """Something was applied."""
        if always or self.record is not self._told:
            self._told = self.record
            cut = self.standing.cut
            self._process.step(pe.DoublingChanged(self.record, cut.doubling.partitions if cut is not None else 0))

    # --- the operator's steps

    def together(self, action: Callable[[], None]) -> None:
        """Do something in the turn of the next request, or some time later."""
        self._due.append(action)
        self._process.after(TOGETHER_S, self.requested)

    def requested(self) -> None:
        """A request came in this turn."""
        while self._due:
            self._due.popleft()()

    def take(self, steps: Callable[[Standing], tuple[Act, ...]]) -> bool:
        """Take an operator's steps; whether they are on their way, or done."""
        if not self._leads:
            return False
        try:
            acts = self._process.world.variant.acts(steps(self.standing))
        except PixiuError:
            return False
        for act in acts:
            if isinstance(act, EndTurn):
                self._process.step(END_OF_TURN)
            else:
                self._write([act.command])
        return True

    def _write(self, commands: list[Command], done: Callable[[bool], None] | None = None) -> None:
        """One write, if this replica leads. `done(whether its first command did something)` follows while it does."""

        def applied(answers: list[Any], copies: int) -> None:
            if done is not None:
                done(answers[0] == [[1]])

        payloads = [(DOUBLING_KIND, each.encode()) for each in commands]
        try:
            verdict = self._process.replica.submit(payloads, True, lambda: None, applied)
        except PixiuError:
            self._hang_up()
            return
        if commands[0].step is Step.SPLIT:
            self._cut = Cut(verdict.last, commands[0].doubling)
            self.changed(always=True)

    def _propose(self, step: Step, body: bytes = b"") -> None:
        self._write([Command(step, self.record.doubling, body)])

    # --- what takes long

    def _look(self) -> None:
        self._process.after(LOOK_S, self._look)
        if not self._leads:
            return
        if self._stream is not None and self._writes is None and self._process.world.now > self._heard_at + SILENT_S:
            self._hang_up()  # a parent that was deposed before it wrote the HOLD, say, has forgotten this child
        match work_of(self.record, self._process.view.laid_out("pi"), self._moved_rows is not None, self._cut is not None):
            case Work.LEARN if self._stream is None and not self._connecting:
                self._connect()
            case Work.DIGEST_HERE:
                self._note(self._process.machine.rows())
            case Work.DIGEST_CUT if self._moved_rows is not None:
                self._note(self._moved_rows)
            case Work.END:
                self._propose(Step.END)
            case Work.CLEAN:
                self._propose(Step.CLEAN)
            case Work.SETTLE if self.standing.cut is None:
                self._cut = None
                self.changed(always=True)

    def _note(self, rows: dict[bytes, bytes]) -> None:
        moves, digest = self.record.doubling.moves, Digest()
        digest.add([row for row in rows.items() if (uin := uin_of(row[0])) is not None and moves(uin)])
        self._propose(Step.NOTE, note_body(digest.total or 1, digest.rows, digest.size))

    # --- a child

    def _hang_up(self) -> None:
        self._attempt += 1
        stream, self._stream = self._stream, None
        self._connecting, self._writes = False, None
        self._heard.clear()
        if stream is not None:
            stream.leave()

    def _connect(self) -> None:
        process = self._process
        nodes = [node for node in process.view.of_role("pi") if node.partition == self.record.doubling.parent]
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
            stream.send(request_of(self.record))

        def lost() -> None:
            if attempt == self._attempt:
                self._hang_up()

        process.world.streams.call(process, process.world.rng.choice(nodes).address, "Learn", opened, lost)

    def _hear(self, attempt: int, reply: pb.LearnReply) -> None:
        if attempt == self._attempt:
            self._heard_at = self._process.world.now
            self._heard.append(reply)
            self._next()

    def _next(self) -> None:
        while self._writes is None and self._heard:
            learning = Learning(self._process.machine.state.copying)
            if learning.over:
                self._hang_up()
                return
            self._writes = learning.take(self._heard.popleft())
            self._go_on(None)

    def _go_on(self, done: bool | None) -> None:
        """What follows from what was heard. done: of the write before; None: there was none."""
        attempt, writes = self._attempt, self._writes
        assert writes is not None

        def written(well: bool) -> None:
            if attempt == self._attempt:
                self._go_on(well)
                self._next()

        try:
            commands = next(writes) if done is None else writes.send(done)
        except StopIteration:
            self._writes = None
        except PixiuError:
            self._hang_up()
        else:
            self._write(commands, written)

    # --- a parent

    def learn(self, stream: Stream) -> None:
        """Tell a child what moves."""
        stream.take = lambda request: self._asked(stream, request)
        stream.left = lambda: self._gone.add(stream)

    def _asked(self, stream: Stream, request: pb.LearnRequest) -> None:
        process = self._process
        doubling = Doubling(request.doubling, request.partitions, request.partition)
        try:
            check_pupil("pi", process.place.partition, self.record, process.view.laid_out("pi"), doubling)
        except PixiuError:
            stream.end()
            return
        if not self._leads:
            stream.end()
            return

        def held(_: bool) -> None:
            learned = Position(request.epoch, request.counter)
            lesson = process.world.variant.lesson(doubling, process.replica.log, learned, of_child)
            if not lesson.goes_on(process.machine.position.counter):
                lesson.after = self._snapshot(stream, doubling)
            self._follow(stream, lesson)

        self._write([hold_of_sweeps(doubling, process.machine.state.copying.now_s)], held)

    def _snapshot(self, stream: Stream, doubling: Doubling) -> int:
        machine = self._process.machine
        self._process.world.counts["snapshots for children"] += 1
        position, rows = machine.position, machine.rows()
        moved = [row for row in sorted(rows.items()) if (uin := uin_of(row[0])) is None or doubling.moves(uin)]
        epoch, counter = position
        stream.reply(pb.LearnReply(snapshot=True, epoch=epoch, counter=counter))
        for at in range(0, len(moved), ROWS):
            stream.reply(pb.LearnReply(rows=rows_body(position, moved[at : at + ROWS], last=False)))
        stream.reply(pb.LearnReply(rows=rows_body(position, [], last=True)))
        return counter

    def _follow(self, stream: Stream, lesson: Lesson) -> None:
        if stream in self._gone:
            return
        replica, machine = self._process.replica, self._process.machine
        if not self._leads:
            stream.end()
            return
        replica.step(ev.Pinned(f"child {lesson.doubling.partition}", lesson.after))
        try:
            reply = lesson.next(machine.position.counter, machine.position.counter, TOLD)
        except PixiuError:
            stream.end()
            return
        if reply.entries:
            stream.reply(reply)
        self._process.after(POLL_S, lambda: self._follow(stream, lesson))
