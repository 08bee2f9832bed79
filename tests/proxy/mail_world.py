"""Senders, proxies' mail pipelines, and small models of Xiu and Pi, on a clock of their own: streams keep their order, and break.

A stream that breaks may have delivered any first part of what was written to it; another part may still come late. A leader
that changes has a new epoch; what it had answered stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.core.contract import END_OF_TURN, NEVER, TICK
from pixiu.client.mail.policy import MailTicket, mail_policy
from pixiu.client.options import ClientOptions
from pixiu.client.send.events import Batch, CloseStream, Failure, OpenStream, Outcome, Writable
from pixiu.client.send.events import Effect as SenderEffect
from pixiu.client.send.sender import Sender
from pixiu.errors import Refusal
from pixiu.ids import msg_id, msg_lane, snowflake
from pixiu.wire.inbox_operations import APPEND, U64, Appends, Code, Fanout, Operation, decode
from pixiu.wire.levels import Level, Triple
from pixiu.wire.record import Kind, encode, split
from proxy import mail_events as ev
from proxy.mail.pipeline import MailCore
from tests.support.simulation import Simulation

START_MS = 1_750_000_000_000


class World(Simulation):
    """Senders, proxies and models of stores; the same seed gives the same run."""

    def __init__(
        self, seed: int, xius: int = 2, pis: int = 2, proxies: int = 2, senders: int = 2, lossy: bool = True,
        mail: type[MailCore] = MailCore,
    ) -> None:  # fmt: skip
        super().__init__(seed, now=1000.0)
        self.lossy = lossy
        self.mail = mail
        self.xius = [XiuModel(self, partition) for partition in range(xius)]
        self.pis = [PiModel(self, partition, pis) for partition in range(pis)]
        self.layout_pis = pis
        self.proxies = [ProxyModel(self, number) for number in range(proxies)]
        self.senders = [SenderModel(self, number) for number in range(senders)]
        self.refused: dict[str, int] = {}
        """What the models refused, by code."""

    @property
    def counted(self) -> int:
        """Partitions of Xiu, as the layout has them."""
        return len(self.xius)

    def soon(self, what: Callable[[], None], least: float = 0.0005) -> None:
        """Do something after a random while."""
        self.after(least + self.rng.expovariate(400), what)

    def all_sent(self) -> bool:
        """Whether every sender knows what became of its mail."""
        return all(sender.done() for sender in self.senders)

    def refuse(self, code: str) -> None:
        """Count one."""
        self.refused[code] = self.refused.get(code, 0) + 1

    def inbox(self, uin: int, lane: int = 1) -> list[int]:
        """SnowflakeIDs in an inbox, in its order."""
        stored = {number: identity for xiu in self.xius for identity, (number, _) in xiu.stored.items()}
        serving = [pi for pi in self.pis if pi.serves(uin)]
        if not serving:  # its child is not open yet: its parent has what there is
            serving = [pi for pi in self.pis if (uin, lane) in pi.inboxes]
        model = serving[0]
        return [stored[number] for number in model.inboxes.get((uin, lane), [])]

    def double_pis(self) -> None:
        """Parents are split one by one; a child opens a while after its parent's cut; then each proxy hears of it in its time."""
        count = self.layout_pis
        for partition in range(count):
            self.pis.append(PiModel(self, partition + count, count, is_open=False))
        for partition in range(count):
            self.after(self.rng.uniform(0.0, 1.0), lambda partition=partition: self._split(self.pis[partition], count))

    def _split(self, parent: PiModel, count: int) -> None:
        parent.partitions = 2 * count
        child = self.pis[parent.partition + count]
        moved = {inbox: held for inbox, held in parent.inboxes.items() if inbox[0] % (2 * count) == child.partition}

        def opened() -> None:
            child.inboxes, child.partitions, child.is_open = moved, 2 * count, True
            if all(pi.is_open for pi in self.pis):
                self.layout_pis = 2 * count
                for proxy in self.proxies:
                    self.after(self.rng.uniform(0.0, 1.0), proxy.look)

        self.after(self.rng.choice((self.rng.uniform(0.0, 0.1), self.rng.uniform(0.0, 3.0))), opened)


class Pipe:
    """One direction of a stream: in order, until it breaks."""

    def __init__(self, world: World, deliver: Callable[[object], None]) -> None:
        self._world, self._deliver = world, deliver
        self._items: deque[object] = deque()
        self._busy = False
        self.broken = False

    def put(self, item: object) -> None:
        """Send something."""
        if not self.broken:
            self._items.append(item)
            self._next()

    def cut(self) -> None:
        """Break it: a first part of what is under way may still arrive, late."""
        self.broken = True
        keep = self._world.rng.randrange(len(self._items) + 1) if self._items else 0
        while len(self._items) > keep:
            self._items.pop()

    def _next(self) -> None:
        if self._items and not self._busy:
            self._busy = True
            self._world.after(self._world.rng.expovariate(300 if not self.broken else 3), self._arrive)

    def _arrive(self) -> None:
        self._busy = False
        if self._items:
            self._deliver(self._items.popleft())
        self._next()


class XiuModel:
    """A partition of Xiu: SnowflakeID → (MsgID, record)."""

    def __init__(self, world: World, partition: int) -> None:
        self._world, self.partition = world, partition
        self.epoch, self.leads = 1, True
        self.stored: dict[int, tuple[int, bytes]] = {}
        self._last = 0
        self.refusing = ""

    def take(self, link: int, request: ev.SendStore, put: Callable[[object], None]) -> None:
        """A request has come on a stream; the reply, if there is one, is given to `put`."""
        reply = self.answer(link, request)
        if reply is not None:
            put(reply)

    def answer(self, link: int, request: ev.SendStore) -> ev.Stored | None:
        """None: nobody answers."""
        if not self.leads:
            return None
        triple = Triple(1, self.epoch, self._last)
        refusal = self.refusing if self._world.rng.random() < 0.5 else ""
        if request.epoch not in (0, self.epoch):
            refusal = "STALE_STREAM"
        if refusal:
            self._world.refuse(refusal)
            runs = [ev.StoredRun(request.position, request.count, 0, 0, Refusal(refusal, "the model says so"))]
            return ev.Stored(self.partition, link, runs, triple, 1)
        runs = []
        for index, record in enumerate(split(request.data, request.count)):
            identity, key = int.from_bytes(record[16:24], "little"), int.from_bytes(record[24:32], "little")
            assert key % len(self._world.xius) == self.partition
            known = self.stored.get(identity)
            if known is None:
                self._last += 1
                sequence = self.epoch << 32 | self._last
                self.stored[identity] = (msg_id(self.partition, record[6], sequence), record)
                runs.append(ev.StoredRun(request.position + index, 1, sequence, 0))
            elif known[1][12:16] != record[12:16]:
                runs.append(ev.StoredRun(request.position + index, 1, 0, 0, Refusal("ID_REUSED", "another mail has this ID")))
            else:
                runs.append(ev.StoredRun(request.position + index, 1, 0, known[0]))
        return ev.Stored(self.partition, link, runs, triple, 2)


class PiModel:
    """A partition of Pi: inboxes, the highest generation of each writer, and streams of appends that ended."""

    def __init__(self, world: World, partition: int, partitions: int, *, is_open: bool = True) -> None:
        self._world, self.partition = world, partition
        self.partitions, self.is_open = partitions, is_open
        """Of Pi, as it answers; and whether it serves anybody."""
        self.epoch, self.leads = 1, True
        self.inboxes: dict[tuple[int, int], list[int]] = {}
        self._writers: dict[int, tuple[int, int]] = {}
        self._ended: dict[tuple[int, int], int] = {}
        self.refusing = ""
        self.full: set[int] = set()
        """UINs whose inboxes refuse."""

    def serves(self, uin: int) -> bool:
        """Whether it serves a user."""
        return self.is_open and uin % self.partitions == self.partition

    def answer(self, link: int, request: ev.SendAppend) -> ev.Appended | None:
        """None: nobody answers."""
        if not self.leads:
            return None
        triple = Triple(1, self.epoch, 0)
        operations = decode(request.operations)
        code = self.refusing if self._world.rng.random() < 0.5 else ""
        if not all(self.serves(uin) for operation in operations for _, uin in self._pairs(operation)):
            code = "WRONG_PARTITION"
        for operation in operations:
            assert isinstance(operation, Appends | Fanout)
            if self._ended.get((link, operation.writer.worker), -1) >= operation.writer.generation:
                code = "STALE_WRITER"
        if code:
            self._world.refuse(code)
            for operation in operations:
                assert isinstance(operation, Appends | Fanout)
                self._ended[link, operation.writer.worker] = operation.writer.generation
            partitions = self.partitions if code == "WRONG_PARTITION" else 0
            return ev.Appended(self.partition, link, request.request, [], Refusal(code, "the model says so"), triple, 0, partitions)
        results: list[int] = []
        for operation in operations:
            assert isinstance(operation, Appends | Fanout)
            results += self._append(operation)
        if request.level is not Level.REPLICATED:
            results = []
        return ev.Appended(self.partition, link, request.request, results, None, triple, 2)

    @staticmethod
    def _pairs(operation: Operation) -> list[tuple[int, int]]:
        if isinstance(operation, Appends):
            return list(APPEND.iter_unpack(operation.items))
        assert isinstance(operation, Fanout)
        return [(operation.msg_id, uin) for (uin,) in U64.iter_unpack(operation.receivers)]

    def _append(self, operation: Appends | Fanout) -> list[int]:
        pairs = self._pairs(operation)
        worker, generation, epoch = operation.writer
        known = self._writers.get(worker, (0, 0))
        if epoch != self.epoch or (known[0] == epoch and generation < known[1]):
            self._world.refuse("stale append")
            return [-Code.STALE_WRITER] * len(pairs)
        self._writers[worker] = (epoch, generation)
        results = []
        for number, uin in pairs:
            assert self.serves(uin)
            inbox = self.inboxes.setdefault((uin, msg_lane(number)), [])
            if number in inbox:
                results.append(inbox.index(number) + 1)
            elif uin in self.full:
                results.append(-Code.INBOX_FULL)
            else:
                inbox.append(number)
                results.append(len(inbox))
        return results


@dataclass
class _StoreStream:
    number: int
    there: Pipe
    back: Pipe


@dataclass
class _WriterStream:
    number: int
    sender: SenderModel
    stream: int
    there: Pipe
    back: Pipe


class ProxyModel:
    """A proxy: its pipeline, and streams to stores and from senders."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self.name = world, f"proxy-{number}"
        self.alive = True
        self._numbers = number * 1_000_000
        self.grown: list[tuple[int, int, int, int, bytes]] = []
        self.start()

    def start(self) -> None:
        """A new process."""
        self.alive = True
        self.core = self._world.mail(max_record_bytes=1 << 20, timeout_s=5.0)
        self.stores: dict[ev.Store, _StoreStream] = {}
        self._writers: dict[int, _WriterStream] = {}
        self._turn = False
        self._rings_at = NEVER
        self.look()

    def look(self) -> None:
        """What the layout says."""
        if self.alive:
            self.step(ev.StoresChanged(self._world.counted, self._world.layout_pis))

    def kill(self) -> None:
        """As kill -9 does."""
        self.alive = False
        for store in self.stores.values():
            store.there.cut()
            store.back.cut()
        for writer in list(self._writers.values()):
            self._world.soon(lambda writer=writer: writer.sender.died(writer.stream))  # type: ignore[misc]
        self._writers = {}

    def _set_timer(self, core: MailCore) -> None:
        """As the shell's: it rings at the earliest deadline that it was given."""
        deadline = max(core.next_deadline(), self._world.now + 0.001)
        if deadline < self._rings_at:
            self._rings_at = deadline
            self._world.after(deadline - self._world.now, lambda: self._ring(core, deadline))

    def _ring(self, core: MailCore, deadline: float) -> None:
        if core is self.core and self.alive and self._rings_at == deadline:
            self._rings_at = NEVER
            self.step(TICK)

    def step(self, event: ev.Event) -> None:
        """Give the core an event."""
        self._world.note(self.name.encode(), type(event).__name__.encode())
        self._perform(self.core.step(event, self._world.now))
        if not self._turn:
            self._turn = True
            self._world.after(0.0, self._end_turn, self.core)

    def _end_turn(self, core: MailCore) -> None:
        if core is self.core and self.alive:
            self._turn = False
            self._perform(self.core.step(END_OF_TURN, self._world.now))
            self._set_timer(core)

    def _perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ev.Answer | ev.EndWriter):
                writer = self._writers.get(effect.stream)
                if writer is not None:
                    writer.back.put(effect)
                    if isinstance(effect, ev.EndWriter):
                        del self._writers[effect.stream]
            elif isinstance(effect, ev.SendStore | ev.SendAppend):
                self.stores[ev.Store(isinstance(effect, ev.SendAppend), effect.partition)].there.put(effect)
            elif isinstance(effect, ev.Connect):
                self._connect(effect.store, self.core)
            elif isinstance(effect, ev.Disconnect):
                self._lost(effect.store, effect.link, tell=False)
            elif isinstance(effect, ev.InboxesGrew):
                self.grown += effect.items()

    def _connect(self, store: ev.Store, core: MailCore) -> None:
        if core is not self.core or not self.alive:
            return
        model = (self._world.pis if store.pi else self._world.xius)[store.partition]
        if not model.leads:
            self.step(ev.LinkDown(store, 0, "nobody leads"))
            self._world.after(0.2, lambda: self._connect(store, core))
            return
        self._numbers += 1
        number = self._numbers

        def back(reply: object) -> None:
            if core is self.core and self.alive:
                assert isinstance(reply, ev.Stored | ev.Appended)
                self.step(reply)

        replies = Pipe(self._world, back)

        def there(request: object) -> None:
            if isinstance(model, PiModel):
                assert isinstance(request, ev.SendAppend)
                reply = model.answer(number, request)
                if reply is not None:
                    replies.put(reply)
            else:
                assert isinstance(request, ev.SendStore)
                model.take(number, request, replies.put)

        self.stores[store] = _StoreStream(number, Pipe(self._world, there), replies)
        self.step(ev.LinkUp(store, number, model.epoch))

    def lose(self, store: ev.Store) -> None:
        """A stream to a store breaks."""
        if store in self.stores and self.alive:
            self._lost(store, self.stores[store].number, tell=True)

    def _lost(self, store: ev.Store, number: int, *, tell: bool) -> None:
        stream = self.stores.get(store)
        if stream is None or stream.number != number:
            return
        del self.stores[store]
        stream.there.cut()
        stream.back.cut()
        if tell:
            self.step(ev.LinkDown(store, number, "the stream broke"))
        core = self.core
        self._world.soon(lambda: self._connect(store, core))

    def open(self, sender: SenderModel, effect: OpenStream) -> Pipe:
        """A sender opens a stream."""
        self._numbers += 1
        number, core = self._numbers, self.core

        def there(item: object) -> None:
            if core is not self.core or not self.alive:
                return
            if isinstance(item, Batch):
                assert item.level is not None
                more = dict(item.receivers)
                self.step(ev.MailReceived(number, item.data, item.count, item.position, item.level, more))
            elif item is None:
                self._writers.pop(number, None)
                self.step(ev.WriterClosed(number))
            else:
                self.step(ev.WriterOpened(number, effect.worker, effect.generation))

        to, back = Pipe(self._world, there), Pipe(self._world, lambda item: sender.heard(effect.stream, item))
        self._writers[number] = _WriterStream(number, sender, effect.stream, to, back)
        to.put(effect)
        return to


@dataclass
class SenderModel:
    """A client: its core and its stream."""

    world: World
    number: int
    tickets: list[tuple[MailTicket, tuple[int, ...], int]] = field(default_factory=list)
    """(ticket, receivers, lane)"""

    def __post_init__(self) -> None:
        options = ClientOptions(batch_records=10, window_records=60, mail_timeout_s=120.0)
        names = [proxy.name for proxy in self.world.proxies]
        self.worker = self.number + 1
        policy = mail_policy(options, lambda: self.worker, lambda: START_MS / 1000 + self.world.now)
        self.core = Sender(policy, names, self.world.rng.random, self.number)
        self._pipe: Pipe | None = None
        self._stream = 0
        self._made = 0
        self.generations: list[int] = []
        self._tick()

    def send(self, *receivers: int, level: Level = Level.REPLICATED, lane: int = 1, identity: int = 0) -> MailTicket:
        """Offer a mail."""
        self._made += 1
        identity = identity or snowflake(START_MS + self._made, self.worker, 0)
        body = b"%d from %d" % (self._made, self.number)
        record = encode(Kind.MAIL, receivers[0], body, identity, type=lane << 6)
        ticket = MailTicket(record, identity, level, receivers[1:])
        self.tickets.append((ticket, receivers, lane))
        self._apply(self.core.offer(ticket, self.world.now))
        return ticket

    def done(self) -> bool:
        """Whether everything is resolved."""
        return not self.core.unresolved

    def died(self, stream: int) -> None:
        """The stream's proxy is gone."""
        self._apply(self.core.stream_died(stream, self.world.now, "the proxy died"))

    def heard(self, stream: int, item: object) -> None:
        """A reply."""
        now = self.world.now
        if isinstance(item, ev.Answer):
            outcomes = [
                Outcome(r.position, r.count, Failure(r.code, r.text) if r.code else None, r.copies, r.msg_ids, r.open)
                for r in item.results
            ]
            self._apply(self.core.reply(stream, now, outcomes=outcomes))
        elif isinstance(item, ev.EndWriter):
            self._apply(self.core.ended(stream, now, Failure(*item.why)))

    def _tick(self) -> None:
        due = self.core.next_deadline()
        if due is not None and due <= self.world.now:
            self._apply(self.core.tick(self.world.now))
        self.world.after(0.02, self._tick)

    def _apply(self, effects: list[SenderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenStream):
                self.generations.append(effect.generation)
                proxy = next(each for each in self.world.proxies if each.name == effect.address)
                self._stream = effect.stream
                if proxy.alive:
                    self._pipe = proxy.open(self, effect)
                    self._write(effect.stream)
                else:
                    self._pipe = None
                    self.world.soon(lambda stream=effect.stream: self.died(stream))  # type: ignore[misc]
            elif isinstance(effect, CloseStream):
                if self._pipe is not None and effect.stream == self._stream:
                    self._pipe.put(None)
                    self._pipe = None
            elif isinstance(effect, Writable):
                self._write(effect.stream)

    def _write(self, stream: int) -> None:
        while self._pipe is not None and stream == self._stream:
            batch = self.core.next_batch(stream, self.world.now)
            if batch is None:
                return
            self._pipe.put(batch)
