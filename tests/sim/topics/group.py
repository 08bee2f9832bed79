"""A group: replicas of one log, simulated with all faults of replication, with a store and a core of topics on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.core.contract import END_OF_TURN, TICK
from cluster.replication.core import events as rep
from cluster.replication.core.states import State as Role
from cluster.replication.model import Entry
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from cluster.topics import entries as en
from pixiu.errors import DiskFailed, DiskFull, Overloaded, PixiuError, Refusal
from pixiu.wire.block import Block, Stamp
from tests.sim.power_cut.disk import Left
from tests.sim.replication.world import Node, World
from tests.sim.topics.disk import MemoryFiles, MemoryTable
from tests.sim.topics.history import Done, Dropped, Message, Opened, Resent, Sealed, Sought, Stored, Voided
from topic import events as ev
from topic.core import Core
from topic.state.channels import Changes
from topic.state.parts import Appended, Verdict
from topic.state.state import Done as Answer
from topic.state.state import Sealed as SealAnswer
from topic.state.state import State
from topic.storage.segment import Stored as StoredBlock
from topic.storage.store import LAST_KEY, Store

if TYPE_CHECKING:
    from tests.sim.topics.world import TopicWorld

TURN_S = 0.05
SEGMENT_BYTES = 600
BAD_FLUSHES = 0.02
"""Share of flushes that fail, beside those on a full disk."""


class Replica:
    """The store of one machine, and the core of the process that runs on it."""

    def __init__(self, group: Group, node: Node) -> None:
        self.group, self.node = group, node
        self.files, self.table = MemoryFiles(), MemoryTable()
        self.open()

    def open(self) -> None:
        """A process starts."""
        self.table.before = self.files.count
        self.store: Store = self.group.world.store_class(self.files, self.table, SEGMENT_BYTES)
        self.store.open()
        self.core: Core = self.group.world.core_class(self.store.state, self)

    def store_of(self, topic: en.TopicSettings) -> str:
        """See `Parts`."""
        return topic.store

    def may_deliver(self) -> bool:
        return self.node.core is not None and self.node.core.may_read(self.group.now)

    def blocks(self, part: int, low: int, high: int) -> Iterable[tuple[Stamp, Block]]:
        return self.store.blocks(part, low, high)

    def message_at(self, part: int, offset: int) -> Message | None:
        log = self.store.logs.get(part)
        found = log.read(offset, 1) if log else []
        if not found or not isinstance(found[0], StoredBlock):
            return None
        return decoded(found[0].block, offset - found[0].stamp.base)


class Group(World):
    """See the module. Its time is the world's."""

    def __init__(self, world: TopicWorld, number: int, seed: int) -> None:
        self.world, self.number = world, number
        super().__init__(seed)
        self.replicas = {node.member: Replica(self, node) for node in self.nodes}
        self._snapshots: dict[int, tuple[MemoryFiles, MemoryTable]] = {}
        self._seen = 0
        """Entries that history knows."""
        self.truth = State(self)
        """What the committed entries say."""
        self.answers: list[object] = []
        """Its answers, by counter - 1."""
        self.after(TURN_S, self._turn)

    # --- time is the world's

    @property
    def now(self) -> float:
        return self.world.now

    @now.setter
    def now(self, value: float) -> None:
        pass

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self.world.at(when, action, *arguments)

    def note(self, *happened: bytes) -> None:
        self.world.note(*happened)

    # --- as `Blocks` of `truth`

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        pass

    def trim(self, part: int, first: int) -> None:
        pass

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        pass

    def drop(self, part: int) -> None:
        pass

    # --- processes

    def start(self, node: Node) -> None:
        if node.core is not None:
            return
        replica = self.replicas[node.member]
        replica.open()
        assert replica.store.flushed == node.disk.flushed
        super().start(node)

    def stop(self, node: Node, power: bool) -> None:
        was_up = node.core is not None
        super().stop(node, power)
        replica = self.replicas[node.member]
        if power:
            replica.files = replica.files.cut(self.rng.choice((Left.NOTHING, Left.SOME, Left.ENDS)), self.rng)
        if was_up:
            self.world.broke(self, node)

    def leader(self) -> Node | None:
        """Who leads, and answers."""
        for node in self.nodes:
            if node.core is not None and node.core.state is Role.LEADING and self.now >= node.paused_until:
                return node
        return None

    # --- the core of topics

    def step(self, node: Node, event: ev.Event) -> None:
        """An event reaches the core of topics, unless its process is away."""
        if node.core is None:
            return
        replica = self.replicas[node.member]
        for effect in replica.core.step(event, self.now):
            if isinstance(effect, Propose):
                payloads = [(int(kind), payload) for kind, payload in effect.payloads]
                self.deliver(node, node.start, rep.Propose(effect.token, payloads, self.wall_us(node)))
            else:
                self.world.perform(self, node, effect)

    def request(self, node: Node, start: int, event: ev.Event) -> None:
        """An event and the end of its turn, if the process is still the same. One that hangs gets it when it goes on."""
        if node.start == start and node.core is not None and self.now < node.paused_until:
            self.at(node.paused_until, self.request, node, start, event)
        elif node.start == start and node.core is not None:
            if isinstance(event, ev.Requested) and event.kind == en.SEEK and self.replicas[node.member].core.epoch:
                channel, part, _ = en.decode_seek(event.payload)
                self.world.judge.take(Voided(channel, part))
            self.step(node, event)
            self.step(node, END_OF_TURN)

    def _turn(self) -> None:
        for node in self.nodes:
            if node.core is not None and self.now >= node.paused_until and self.replicas[node.member].core.epoch:
                self.step(node, TICK)
        self.after(TURN_S, self._turn)

    def client_turn(self) -> None:
        """Stores are flushed now and then; who writes is elsewhere."""
        rng = self.rng
        for node in self.nodes:
            if node.core is not None and self.now >= node.paused_until and rng.random() < 0.15:
                self.flush(node)
        self.after(rng.uniform(0.05, 0.4), self.client_turn)

    def flush(self, node: Node) -> None:
        """A flush, which fails anywhere now and then. Without space it is done again later; else the process ends, as it does."""
        rng, replica = self.rng, self.replicas[node.member]
        if not self.calm and (node.disk.full or rng.random() < BAD_FLUSHES):
            error: PixiuError = DiskFull("no space") if node.disk.full or rng.random() < 0.5 else DiskFailed("it broke")
            replica.files.fails = replica.files.operations + rng.randrange(8), error
        try:
            try:
                replica.store.flush()
            finally:
                replica.files.fails = None
        except DiskFull:
            self.counts["flushes without space"] += 1
        except DiskFailed:
            self.counts["failed flushes"] += 1
            node.disk.flushed = replica.store.flushed
            self.stop(node, power=False)
            self.after(rng.uniform(0.1, 1.0), self.start, node)
            return
        node.disk.flushed = replica.store.flushed
        self.deliver(node, node.start, rep.Flushed(node.disk.flushed))

    # --- what replication says

    def _do_Accepted(self, node: Node, effect: rep.Accepted) -> None:
        super()._do_Accepted(node, effect)
        self.step(node, effect)

    def _do_Rejected(self, node: Node, effect: rep.Rejected) -> None:
        super()._do_Rejected(node, effect)
        self.step(node, Refused(effect.token, Refusal.of(Overloaded("not now", 100))))

    def _do_Leading(self, node: Node, effect: rep.Leading) -> None:
        super()._do_Leading(node, effect)
        self.step(node, LeaderChanged(effect.epoch))

    def _do_Deposed(self, node: Node, effect: rep.Deposed) -> None:
        super()._do_Deposed(node, effect)
        self.step(node, LeaderChanged(0))
        self.world.broke(self, node)

    def _do_Committed(self, node: Node, effect: rep.Committed) -> None:
        super()._do_Committed(node, effect)
        self._tell()
        self.after(self.rng.choice((0.0, 0.001, 0.02, 0.2)), self._apply, node, node.start, effect.copies)

    def _apply(self, node: Node, start: int, copies: int) -> None:
        """The applier's turn: it may be late."""
        if node.start != start or node.core is None:
            return
        store = self.replicas[node.member].store
        first = store.state.applied + 1
        entries = self.history.log[first - 1 : node.applied]
        if entries:
            answers = store.apply(entries)
            for counter, answer in enumerate(answers, first):
                if answer != self.answers[counter - 1] and not isinstance(answer, Changes):
                    self.history.violation("replicas differ", f"{counter} on {node.member}: {answer}, {self.answers[counter - 1]}")
            self.step(node, Committed(first, answers, copies))
            if self.replicas[node.member].core.epoch and any(map(_deletes, entries)):
                for channel, part in self.truth.progress:  # what members had that have left is given again when it is restored
                    self.world.judge.take(Voided(channel, part))

    def check_end(self) -> None:
        """All replicas have the same rows, and the same blocks as far as they were checked when they were given."""
        rows = []
        for replica in self.replicas.values():
            self._apply(replica.node, replica.node.start, 0)
            replica.store.flush()
            rows.append({key: value for key, value in replica.table.rows.items() if key[:1] != LAST_KEY})
        if any(each != rows[0] for each in rows):
            self.history.violation("replicas differ", "in their rows")

    def _tell(self) -> None:
        """Committed entries become facts."""
        for entry in self.history.log[self._seen :]:
            ends = {part.part: part.end for part in self.truth.parts.values()}
            answer, take = self.truth.apply(entry), self.world.judge.take
            self.answers.append(answer)
            if isinstance(answer, Appended) and answer.verdict is Verdict.STORED:
                block = Block.checked(en.decode_block(entry.payload)[1])
                part = en.part_id(block.topic, block.part)
                take(Stored(part, ends[part], tuple(decoded(block, number) for number in range(block.count))))
            elif isinstance(answer, SealAnswer):
                take(Sealed(answer.part))
            elif entry.kind == en.OPEN:
                opening = en.Opening.decode(entry.payload)
                take(Opened(opening.part, tuple(en.part_id(1, parent) for parent in opening.parents)))
            elif entry.kind == en.SETTLE:
                found = en.Settlement.decode(entry.payload)
                offsets = [offset for low, high in found.acknowledged for offset in range(low, high)]
                self.world.count("dead letters", len(found.dead))
                dead, deferred = [each.offset for each in found.dead], [each.offset for each in found.deferred]
                take(Done(found.channel, found.part, (*offsets, *dead), tuple(deferred)))
            elif isinstance(answer, Answer) and answer.ok:
                self._tell_rare(entry, answer)
        self._seen = len(self.history.log)

    def _tell_rare(self, entry: Entry, answer: Answer) -> None:
        take = self.world.judge.take
        if entry.kind == en.SEEK:
            channel, part, offset = en.decode_seek(entry.payload)
            self.world.count("seeks")
            take(Sought(channel, part, offset))
        elif entry.kind == en.RESEND:
            channel, part, _ = en.decode_resend(entry.payload)
            self.world.count("resent", len(answer.offsets))
            take(Resent(channel, part, tuple(answer.offsets)))
        elif entry.kind == en.DROP and (part := en.decode_drop(entry.payload)) not in self.world.dropped:
            self.world.count("dropped")
            self.world.dropped.add(part)
            take(Dropped(part))
        elif _deletes(entry):
            self.world.count("deleted")

    def _do_SendSnapshot(self, node: Node, effect: rep.SendSnapshot) -> None:
        replica = self.replicas[node.member]
        self._apply(node, node.start, 0)
        node.disk.flushed = replica.store.flush()
        self._snapshots[node.applied] = replica.files.cut(Left.NOTHING, self.rng), replica.table.copy()
        super()._do_SendSnapshot(node, effect)

    def _do_InstallSnapshot(self, node: Node, effect: rep.InstallSnapshot) -> None:
        super()._do_InstallSnapshot(node, effect)
        files, table = self._snapshots[effect.position.counter]
        replica = self.replicas[node.member]
        replica.files, replica.table = files.cut(Left.NOTHING, self.rng), table.copy()
        replica.open()


def _deletes(entry: Entry) -> bool:
    return entry.kind == en.TOPIC and en.TopicSettings.decode(entry.payload).deleted


def body_of(message: Message) -> bytes:
    return b"%d %d %d" % message


def decoded(block: Block, number: int) -> Message:
    return Message(*map(int, block.message(number).body.split()))
