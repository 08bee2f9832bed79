"""Xiu's doubling: production cores of Xiu's leaders, proxies and senders; logs that lose with a leader what did not commit.

senders ─▶ proxies ─▶ partitions 0 to 3, of which the layout counts 1, then 2, then 4
                          ▲ entries of phases
                          └── a tool that asks again until a phase is reached
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cluster.core.contract import Settle
from cluster.replication.core.events import Accepted
from cluster.replication.model import Entry, EntryKind
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step, fence_body, reached, why_not
from cluster.store.events import Committed, LeaderChanged, Propose
from cluster.wire.v1.xiu_partitions_pb2 import AskRequest
from pixiu.discovery.view import RoleLayout
from pixiu.errors import PixiuError, Refusal
from pixiu.ids import hex_id, msg_id
from pixiu.wire.record import split
from proxy import mail_events as me
from tests.proxy.mail_world import START_MS, ProxyModel, World, XiuModel
from tests.xiu.parts import MemoryLog, MemoryStore, MemoryTable
from xiu import events as ev
from xiu.core import Core, CoreSettings
from xiu.doubling.answering import Answers, Known
from xiu.state.doubling import opening, parent_of
from xiu.state.state import Head

TOTAL = 4
"""Partitions, when all doublings are over."""
DOUBLINGS = (0xA1, 0xB2)
REACHED = {
    Step.BEGIN: Phase.LEARNING, Step.SPLIT: Phase.SPLIT, Step.OPEN: Phase.OPEN, Step.CLEAN: Phase.CLEANING, Step.END: Phase.NONE,
}  # fmt: skip
"""Where a step leads."""
LOST = 0.05
"""Of the questions to parents."""
LINGERS_S = (0.5, 3.0)
"""A leader that does not know of its successor answers children so long: half of the questions reach it."""


class Partition(XiuModel):
    """A partition of Xiu: one leader after the other, over a log. What was committed of it outlives a leader, and maybe more."""

    def __init__(self, world: DoublingWorld, partition: int) -> None:
        super().__init__(world, partition)
        self.world = world
        self.log = MemoryLog()
        self.committed = 0
        self.layout = 1
        self._life = 0
        self._former: tuple[Core, Head] | None = None
        """Who led before, if it lingers."""
        self._lingers_until = 0.0
        self.elected()

    def elected(self) -> None:
        """Another leader, which applies what is committed."""
        self.leads = True
        self._life += 1
        self._puts: dict[int, Callable[[object], None]] = {}
        self.store = MemoryStore()
        self.core = Core(CoreSettings(partition=self.partition, max_record_bytes=1 << 20), self.log, self.store, MemoryTable())
        self.step(ev.LayoutChanged(1, self.layout))
        if self.committed:
            self.step(Committed(1, self.log.entries[: self.committed], 2))
        self.append(int(EntryKind.NOOP), b"")
        self._first = self.log.last.counter
        self.step(LeaderChanged(self.epoch))

    @property
    def readable(self) -> bool:
        """Whether this leader knows what is committed."""
        return self.leads and self.committed >= self._first

    def crash(self) -> None:
        """The leader is gone, and what it did not commit may be."""
        if not self.leads:
            return
        self.leads = False
        self._life += 1
        self.epoch += 1
        self._former, self._lingers_until = (self.core, self.store.head), self.world.now + self.world.rng.uniform(*LINGERS_S)
        del self.log.entries[self.world.rng.randint(self.committed, len(self.log.entries)) :]
        self.world.after(self.world.rng.uniform(0.02, 2.0), self.elected)

    def append(self, kind: int, payload: bytes) -> None:
        """An entry, which commits some time."""
        at_us = int((START_MS / 1000 + self.world.now) * 1e6)
        self.log.entries.append(Entry(self.epoch, len(self.log.entries) + 1, kind, at_us, payload))
        life, counter = self._life, len(self.log.entries)
        self.world.after(self.world.rng.expovariate(30), lambda: self._commit(life, counter))

    def _commit(self, life: int, counter: int) -> None:
        if life == self._life and counter > self.committed:
            before, self.committed = self.committed, counter
            self.step(Committed(before + 1, self.log.entries[before:counter], 2))

    def take(self, link: int, request: me.SendStore, put: Callable[[object], None]) -> None:
        """See `XiuModel`."""
        if self.leads:
            self._puts[link] = put
            self.step(ev.StoreReceived(link, request.position, request.level, request.epoch, request.data, request.count))

    def step(self, event: ev.Event) -> None:
        """Give the core an event and do what it asks for."""
        for effect in self.core.step(event, self.world.now):
            match effect:
                case ev.Answer():
                    runs = [
                        me.StoredRun(
                            r.position, r.count, r.sequence, r.msg_id, Refusal(r.code, r.text) if r.code else None, r.partitions
                        )
                        for r in effect.results
                    ]
                    for result in effect.results:
                        if result.code:
                            self.world.refuse(result.code)
                    answer = me.Stored(self.partition, effect.stream, runs, effect.triple, effect.copies)
                    self._puts[effect.stream](answer)
                case Propose():
                    first = len(self.log.entries) + 1
                    for kind, payload in effect.payloads:
                        self.append(kind, payload)
                    self.step(Accepted(effect.token, self.epoch, first, len(self.log.entries)))
                case ev.AskParent():
                    self._ask(effect)
                case Settle():
                    pass
                case _:
                    raise AssertionError(f"a Xiu says {effect}")

    # --- what a child asks

    def _ask(self, effect: ev.AskParent) -> None:
        life = self._life

        def told(known: Known | None) -> None:
            if life == self._life:
                self.step(ev.ParentAnswered(effect.number, known, 1))

        parent = self.world.xius[parent_of(self.partition)]
        self.world.soon(lambda: parent.asked(self.partition, effect.wanted, lambda known: self.world.soon(lambda: told(known))))

    def asked(self, child: int, wanted: Sequence[tuple[int, bool]], answer: Callable[[Known | None], None]) -> None:
        """As `xiu.doubling.cuts` answers; `answer(None)`: it did not."""
        chance, core, head, lease = self.world.rng, self.core, self.store.head, self.readable
        if self._former is not None and self.world.now < self._lingers_until and chance.random() < 0.5:
            (core, head), lease = self._former, False
        elif not self.leads or chance.random() < LOST:
            answer(None)
            return
        snowflakes, derived = [one for one, _ in wanted], [at for at, (_, is_derived) in enumerate(wanted) if is_derived]
        layout = RoleLayout(self.layout, self.layout, 1, tuple(map(hex_id, DOUBLINGS[: self.layout.bit_length() - 1])))
        try:
            request = AskRequest(child=child, snowflakes=snowflakes, derived=derived)
            look = Answers().look(request, head, core, layout, lease)
        except PixiuError:
            answer(None)
            return
        if not look.above:
            answer(look.known if look.doubling else None)
            return

        def told(more: Known | None) -> None:
            if more is not None:
                look.reply(more)
            answer(look.known if more is not None else None)

        parent = self.world.xius[parent_of(self.partition)]
        self.world.soon(lambda: parent.asked(self.partition, look.asked(), lambda more: self.world.soon(lambda: told(more))))


class DoublingWorld(World):
    """One partition of Xiu that becomes four.

    early: a child opens when its parent has appended SPLIT, committed or not: a fault.
    """

    xius: list[Partition]  # type: ignore[assignment]

    def __init__(self, seed: int, *, early: bool = False) -> None:
        self._counted = 1
        self.early = early
        super().__init__(seed, xius=1)
        self.xius = [Partition(self, partition) for partition in range(TOTAL)]
        self._todo = [step for number, total in zip(DOUBLINGS, (2, 4), strict=True) for step in self._steps(number, total)]
        self.phases = len(self._todo)

    @staticmethod
    def _steps(number: int, total: int) -> Iterator[tuple[int, Command | None]]:
        """What the tool asks of which partition; None: the layout flips to so many."""
        children = [Doubling(number, total, partition) for partition in range(total // 2, total)]
        yield from ((child.partition, Command(Step.BEGIN, child)) for child in children)
        for child in children:
            yield child.parent, Command(Step.SPLIT, child, fence_body(0))
            yield child.partition, Command(Step.OPEN, child)
        yield total, None
        yield from ((child.parent, Command(Step.CLEAN, child)) for child in children)
        yield from ((child.partition, Command(Step.END, child)) for child in children)

    @property
    def counted(self) -> int:
        """See `World`."""
        return self._counted

    @property
    def doubled(self) -> bool:
        """Whether all is done."""
        return not self._todo

    def double(self) -> None:
        """The tool goes on, and so on: whether it was started again meanwhile is the same."""
        if not self._todo:
            return
        self.after(self.rng.expovariate(200 if self.rng.random() < 0.9 else 3), self.double)
        partition, command = self._todo[0]
        if command is None:
            self._flip(partition)
            self._todo.pop(0)
        elif self._advance(self.xius[partition], command):
            self._todo.pop(0)

    def _flip(self, total: int) -> None:
        self._counted = total
        for xiu in self.xius:
            self.after(self.rng.expovariate(5), self._tell, xiu)
        for proxy in self.proxies:
            self.after(self.rng.expovariate(5), self._tell_proxy, proxy)

    def _tell(self, xiu: Partition) -> None:
        xiu.layout = self._counted
        xiu.step(ev.LayoutChanged(2, self._counted))

    def _tell_proxy(self, proxy: ProxyModel) -> None:
        if proxy.alive:
            proxy.step(me.StoresChanged(self._counted, len(self.pis)))
            for parent in range(self._counted // 2):
                if self.rng.random() < 0.7:  # what was under way may come late, behind what is sent again to the child
                    proxy.lose(me.Store(False, parent))

    def _advance(self, xiu: Partition, command: Command) -> bool:
        if not xiu.readable:
            return False
        step, doubling = command.step, command.doubling
        if reached(xiu.store.head.doubling, doubling, REACHED[step]):
            return True
        if step is Step.OPEN:
            parent = self.xius[doubling.parent]
            if self.early and parent.leads:
                parent.core._decide_to(parent.log.last.counter)
            said = parent.core._state.head.doubling if self.early else parent.store.head.doubling
            if not (parent.readable or self.early) or said.doubling != doubling:
                return False
            command = command._replace(body=opening(said.split_at, said.split_us))
        try:
            if why_not(xiu.core.doubling(), command):
                return False  # it is appended already, and not committed
        except PixiuError:
            return False
        xiu.append(DOUBLING_KIND, command.encode())
        if step is Step.SPLIT and self.rng.random() < 0.4:
            self.after(self.rng.uniform(0.0, 0.1), self.crash, xiu)
        return self.early and step is Step.SPLIT

    def crash(self, xiu: Partition) -> None:
        """A leader is gone; proxies find out."""
        xiu.crash()
        for proxy in self.proxies:
            proxy.lose(me.Store(False, xiu.partition))

    def stored(self) -> dict[int, list[int]]:
        """SnowflakeID → every MsgID under which it is committed."""
        found: dict[int, list[int]] = {}
        for xiu in self.xius:
            for block in xiu.store.blocks():
                for at, record in enumerate(split(block.records, block.count)):
                    identity = int.from_bytes(record[16:24], "little")
                    found.setdefault(identity, []).append(msg_id(xiu.partition, record[6], block.first + at))
        return found
