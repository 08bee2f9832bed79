"""A driver of a Pi's core: requests go in, what replication says is said, replies and proposals come out."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.contract import END_OF_TURN, TICK
from cluster.replication.core.events import Accepted, Persisted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pi import events as ev
from pi.core import Core
from pi.state import Read, ReadRefusal, Results
from pixiu.errors import Refusal, StateDamaged
from pixiu.wire.inbox_operations import Code, Limits, Operation, encode
from pixiu.wire.levels import Level


class Shelf:
    """Answers reads by the device's number."""

    lease = True

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}
        """(MsgID, UIN) → the InboxSeq of what is stored; -1: it cannot be read."""

    def stored(self, msg_id: int, uin: int) -> int:
        number = self.numbers.get((msg_id, uin), 0)
        if number < 0:
            raise StateDamaged("broken")
        return number

    space = True

    def may_grow(self) -> bool:
        return self.space

    def may_read(self) -> bool:
        return self.lease

    def read(self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, *_: object) -> Read:
        if number == 1:
            raise ReadRefusal(Code.OLD_SESSION)
        if number == 2:
            raise StateDamaged("broken")
        return Read([(4, 44)], 3, 2, 4, 2, 0)


class Pi:
    """Partition 1 of 2 (0: no layout is known), which leads in `epoch`; 0: another replica leads.

    What the core asks for is kept in `proposals`; every call answers with the replies of its step.
    """

    def __init__(self, epoch: int = 5, partitions: int = 2) -> None:
        self.shelf = Shelf()
        self.core = Core(partition=1, inboxes=self.shelf, limits=Limits(cap=9), clock_interval_s=10.0)
        self.proposals: list[Propose] = []
        self.now = 1.0
        self.epoch = epoch
        if partitions:
            self.step(ev.LayoutChanged(3, partitions, {0: "there:1"}))
        self.lead(epoch)

    def step(self, event: ev.Event) -> list[ev.Reply]:
        replies: list[ev.Reply] = []
        for effect in self.core.step(event, self.now):
            if isinstance(effect, Propose):
                self.proposals.append(effect)
            else:
                replies.append(effect)
        return replies

    def lead(self, epoch: int) -> list[ev.Reply]:
        """Whether this replica leads, or another one."""
        self.epoch = epoch
        return self.step(LeaderChanged(epoch, "here:1" if epoch else "other:1"))

    def ask(
        self, *operations: Operation, raw: bytes = b"", request: int = 1, stream: int = 1, level: Level = Level.REPLICATED,
        reads: int = 0,
    ) -> list[ev.Reply]:  # fmt: skip
        """A request; `reads` of as many devices."""
        wanted = [ev.ReadRequest(7, device, 1, 1, None, 10) for device in range(reads)]
        return self.step(ev.Requested(stream, request, raw or encode(operations), level, wanted))

    def code(self, *operations: Operation, raw: bytes = b"", stream: int = 1) -> str:
        """With what code a request is refused; empty: it is under way."""
        return "".join(reply.code for reply in self.ask(*operations, raw=raw, stream=stream))

    def closed(self, stream: int) -> None:
        self.step(ev.StreamClosed(stream))

    def turn(self) -> Propose | None:
        """The turn ends: what is to go into the log."""
        before = len(self.proposals)
        assert not self.step(END_OF_TURN)
        return self.proposals[-1] if len(self.proposals) > before else None

    def tick(self) -> Propose | None:
        """The timer rings: what is to go into the log."""
        before = len(self.proposals)
        assert not self.step(TICK)
        return self.proposals[-1] if len(self.proposals) > before else None

    def accept(self, counter: int) -> list[ev.Reply]:
        """What was proposed last is in the log."""
        return self.step(Accepted(self.proposals[-1].token, self.epoch, counter, counter))

    def reject(self, code: str, text: str) -> list[ev.Reply]:
        return self.step(Refused(self.proposals[-1].token, Refusal(code, text)))

    def persist(self, counter: int) -> list[ev.Reply]:
        return self.step(Persisted(counter))

    def apply(self, counter: int, results: Sequence[Results], copies: int = 1) -> list[ev.Reply]:
        return self.step(Committed(counter, [results], copies))


def body(proposal: Propose) -> bytes:
    """Its only payload."""
    ((_, payload),) = proposal.payloads
    return payload
