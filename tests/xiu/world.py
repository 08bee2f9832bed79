"""A driver of a Xiu's core: writers' batches go in, what replication says is said, answers come out."""

from __future__ import annotations

from typing import TypeVar

from cluster.core.contract import Settle
from cluster.links.api import Outcome
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.model import Entry, EntryKind
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import Refusal
from pixiu.wire.levels import Level
from tests.xiu.parts import NOW_US, MemoryLog, MemoryStore, MemoryTable, mail
from xiu import events as ev
from xiu.core import Core, CoreSettings

T = TypeVar("T")
LIMIT = 1 << 20


class Xiu:
    """A core that leads epoch 3; `accept`, `persist` and `commit` say what replication says."""

    def __init__(self, lead: bool = True) -> None:
        self.log, self.store, self.table = MemoryLog(), MemoryStore(), MemoryTable()
        self.core = Core(CoreSettings(partition=1, max_record_bytes=LIMIT, keep_us=60_000_000), self.log, self.store, self.table)
        self.now, self.at_us = 10.0, NOW_US
        self.taken = True
        """Whether what was committed last is written."""
        self.core.step(ev.LayoutChanged(9, 4, ("a:1", "b:1", "c:1")), self.now)
        self.epoch = 3
        if lead:
            self.lead(3)

    def lead(self, epoch: int) -> list[ev.Effect]:
        self.log.entries.append(Entry(epoch, len(self.log.entries) + 1, int(EntryKind.NOOP), 0, b""))
        return self.elected(epoch) + self.commit()

    def elected(self, epoch: int) -> list[ev.Effect]:
        self.epoch = epoch
        return self.step(LeaderChanged(epoch))

    def deposed(self) -> list[ev.Effect]:
        return self.step(LeaderChanged(0, "b:1"))

    def step(self, event: ev.Event) -> list[ev.Effect]:
        return self.core.step(event, self.now)

    def send(
        self, *records: bytes, position: int = 1, level: Level = Level.REPLICATED, epoch: int = 0, count: int | None = None,
        at_us: int = NOW_US,
    ) -> list[ev.Effect]:  # fmt: skip
        count = len(records) if count is None else count
        self.at_us = at_us
        return self.step(ev.StoreReceived(7, position, level, epoch, b"".join(records), count))

    def trim(self, at_us: int) -> list[ev.Effect]:
        self.at_us = at_us
        return self.step(ev.TrimDue(at_us))

    def space(self, enough: bool) -> list[ev.Effect]:
        return self.step(ev.SpaceChanged(256 if enough else 255, 256))

    def accept(self, effects: list[ev.Effect]) -> list[ev.Effect]:
        proposal = only(effects, Propose)
        begin = len(self.log.entries) + 1
        for number, (kind, payload) in enumerate(proposal.payloads):
            self.log.entries.append(Entry(self.epoch, begin + number, kind, self.at_us, payload))
        return self.step(Accepted(proposal.token, self.epoch, begin, len(self.log.entries)))

    def refuse(self, effects: list[ev.Effect], why: Refusal) -> list[ev.Effect]:
        return self.step(Refused(only(effects, Propose).token, why))

    def persist(self) -> list[ev.Effect]:
        return self.step(Persisted(len(self.log.entries)))

    def commit(self, up_to: int | None = None, copies: int = 2) -> list[ev.Effect]:
        """Everything in the log is committed, or what is there up to a counter: what the store lacks of it is given to the core,
        as the applier does. Returns the effects but for what became of the entries: that is in `taken`."""
        entries = self.log.entries[self.store.head.applied.counter : up_to]
        if not entries:
            return []
        *effects, settled = self.step(Committed(entries[0].counter, entries, copies))
        assert isinstance(settled, Settle)
        self.taken = settled.outcome is Outcome.TAKEN
        assert self.taken is (self.store.head.applied.counter >= entries[-1].counter), "what is said of them is so"
        return effects


def only(effects: list[ev.Effect], kind: type[T]) -> T:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def user(number: int, body: bytes = b"body", **fields: int) -> bytes:
    return mail(number, body, key=5, **fields)


def results(effects: list[ev.Effect]) -> list[ev.Result]:
    """The results of the only answer."""
    return list(only(effects, ev.Answer).results)


def codes(effects: list[ev.Effect]) -> list[str]:
    return [result.code for result in results(effects)]


def first(counter: int, epoch: int = 3) -> int:
    return epoch << 32 | counter
