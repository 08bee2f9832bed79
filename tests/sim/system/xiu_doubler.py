"""The shell of `xiu.doubling.answering` and `cluster.store.doubling.steps`: a leader of Xiu in the doubling of its partition, and
what a child asks its parent. What is decided, what entries make of it and what is answered is production.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import xiu.events as xe
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Cut, Phase, Step
from cluster.store.doubling.steps import Act, Standing, Write, is_home, status_of, steps_back, steps_to
from cluster.wire.v1 import doubling_pb2
from cluster.wire.v1 import xiu_partitions_pb2 as pb
from pixiu.errors import PixiuError
from tests.sim.system.base import unary
from tests.sim.system.streams import Stream
from xiu.doubling.answering import Answers, Known, Wanted, check_question
from xiu.doubling.cuts import ASK_S, CALL_S
from xiu.service import OPEN_POLL_S
from xiu.state.doubling import Record, opening, parent_of

if TYPE_CHECKING:
    from tests.sim.system.xiu import XiuProcess

Told = Callable[[pb.AskReply | None], None]


class XiuDoubler:
    """Of one replica."""

    def __init__(self, process: XiuProcess) -> None:
        self._process = process
        process.after(OPEN_POLL_S, self._look)

    @property
    def record(self) -> Record:
        """Of what is committed here."""
        return self._process.store.head.doubling

    def _standing(self) -> Standing:
        """What it decides by. Raises PixiuError if this replica does not know yet what stands in its log."""
        ahead, place = self._process.core.doubling(), self._process.place
        splits = ahead.phase is Phase.SPLIT and ahead.doubling != self.record.doubling
        cut = Cut(ahead.split_at, ahead.doubling) if splits else None
        return Standing("xiu", place.partition, self.record, self._process.view.laid_out("xiu"), cut)

    def _look(self) -> None:
        self._process.after(OPEN_POLL_S, self._look)
        number, partitions, _ = self.record.doubling
        if self._process.core.epoch and self.record.phase is Phase.LEARNING:
            self.advance(doubling_pb2.DoublingAdvanceRequest(
                doubling=number, partitions=partitions, phase=doubling_pb2.DOUBLING_OPEN
            ))  # fmt: skip
        if is_home(self.record, self._process.view.laid_out("xiu")):
            self._take(lambda _: (Write(Command(Step.END, self.record.doubling)),))

    def status(self) -> doubling_pb2.DoublingStatus | None:
        """What the operator's tool is told; None: this replica does not know yet what stands in its log."""
        try:
            return status_of(self._standing(), self._process.core.committed, doubling_pb2.DoublingStatus())
        except PixiuError:
            return None

    def take_back(self, request: doubling_pb2.DoublingTakeBackRequest) -> None:
        """Keep a parent whole, if this replica leads."""
        self._take(lambda now: steps_back(now, request))

    def advance(self, request: doubling_pb2.DoublingAdvanceRequest) -> None:
        """Take the partition to a phase, if this replica leads."""
        if request.phase != doubling_pb2.DOUBLING_OPEN:
            self._take(lambda now: steps_to(now, request))
            return

        def told(said: pb.AskReply | None) -> None:
            if said is not None and said.doubling == request.doubling and said.split_at:
                self._take(lambda now: steps_to(now, request, opening(said.split_at, said.split_us)))

        self._ask_parent([], told)

    def _take(self, steps: Callable[[Standing], tuple[Act, ...]]) -> None:
        try:
            for act in steps(self._standing()):
                if isinstance(act, Write):
                    payload = DOUBLING_KIND, act.command.encode()
                    self._process.replica.submit([payload], True, lambda: None, lambda *_: None)
        except PixiuError:
            return  # it does not lead, or somebody else took the step

    # --- a child asks

    def ask(self, effect: xe.AskParent) -> None:
        """The core's question; it is answered in any case."""

        def told(said: pb.AskReply | None) -> None:
            known: Known | None = None
            if said is not None and said.doubling:
                known = _known(said)
            self._process.step(xe.ParentAnswered(effect.number, known, said.copies if said is not None else 0))

        self._ask_parent(effect.wanted, told)

    def _ask_parent(self, wanted: Wanted, told: Told) -> None:
        """Ask every replica that runs, one after the other, until one answers; `told(None)` when none does in time."""
        process = self._process
        parent, over = parent_of(process.place.partition), [False]
        nodes = [node for node in process.view.running("xiu") if node.partition == parent]
        request = pb.AskRequest(
            child=process.place.partition,
            snowflakes=[one for one, _ in wanted],
            derived=[at for at, (_, derived) in enumerate(wanted) if derived],
        )

        def finish(said: pb.AskReply | None) -> None:
            if not over[0]:
                over[0] = True
                told(said)

        def ask(at: int) -> None:
            if at >= len(nodes):
                finish(None)
                return
            unary(
                process, nodes[at].address, "Ask", request, CALL_S, lambda said: finish(said) if said is not None else ask(at + 1)
            )

        process.after(ASK_S, lambda: finish(None))
        ask(0)

    # --- a parent answers

    def asked(self, stream: Stream) -> None:
        """What is known here of SnowflakeIDs of a child; the stream ends where that is not known."""
        stream.take = lambda request: self._answer(stream, request)

    def _answer(self, stream: Stream, request: pb.AskRequest) -> None:
        process = self._process
        try:
            check_question(process.place.partition, request)
            head, layout, sure = process.store.head, process.view.laid_out("xiu"), process.replica.may_read()
            look = Answers().look(request, head, process.core, layout, sure)
        except PixiuError:
            stream.end()
            return
        if not process.core.epoch:
            stream.end()
            return

        def told(said: pb.AskReply | None) -> None:
            if said is None or not said.doubling:
                stream.end()
            else:
                stream.reply(look.reply(_known(said), said.copies))

        if look.above:
            self._ask_parent(look.asked(), told)
        else:
            stream.reply(look.reply([]))


def _known(said: pb.AskReply) -> Known:
    return [(msg_id, crc) if msg_id else None for msg_id, crc in zip(said.msg_ids, said.crcs, strict=True)]
