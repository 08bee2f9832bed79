"""A Xiu's core: turns writers' batches into log entries, and log entries into stored records. Pure.

    writer ──▶ check ──▶ propose ──▶ accepted ──▶ decided: MsgIDs, into the table ──▶ answer "accepted"
                                     persisted ─────────────────────────────────────▶ answer "persisted"
                                     committed ──▶ written: RocksDB, one batch ─────▶ answer "replicated"

A leader decides when it appends, so that it can answer; decisions that do not commit are dropped when it is deposed. A MsgID
contains the leader's epoch, so that one that was reported and dropped is never assigned again.

Source: PiXiu §6.1.1; docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from cluster.core.contract import NEVER, NOT_TAKEN, TAKEN, EventTable, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.core.refusals import not_leader
from cluster.replication.model import Entry
from cluster.store.doubling.phases import counted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu import errors
from pixiu.errors import Refusal
from pixiu.ids import MSG_COUNTER_BITS
from pixiu.wire.levels import Level, Triple
from xiu import events as ev
from xiu.batches import Batch, Batches
from xiu.interfaces import Entries, Store, Table
from xiu.records.asking import Asked, Held, without
from xiu.records.batch import RecordRun, check
from xiu.records.block import Block
from xiu.state.doubling import Record, is_asked, parent_of
from xiu.state.restoring import Step
from xiu.state.restoring import encode as encode_restore
from xiu.state.restoring import problem_of as problem_of_restore
from xiu.state.retention import trim_below, trim_to
from xiu.state.state import STORE, Blocked, Decision, Head, Ruling, State, Verdict, XiuKind, store_entry, trim_entry

READ_ENTRIES: Final = 256
READ_BYTES: Final = 4 << 20
"""Limits of one read of the log."""
SLICE_BYTES: Final = 1 << 20
"""Part of the log that a new leader decides in one turn of the event loop, bytes, or `READ_ENTRIES`. Policy: until it has finished
it refuses with OVERLOADED."""
TO_BE_REPAIRED: Final = "the store is damaged and is to be repaired"
TOO_FEW: Final = "fewer than min_in_sync replicas have it"
CATCHING_UP: Final = "the new leader still reads its log; send again in a moment"
RETRY_MS: Final = 100
"""Time after which a writer refused with OVERLOADED may try again, milliseconds."""
RETRY_S: Final = 1.0
"""Pause after a full disk, seconds."""
RETRY_BUSY_S: Final = 0.02
RETRIES_BEFORE_REOPEN: Final = 3
"""With space on the disk again: RocksDB mostly recovers by itself."""
MAYBE_STORED: Final = Refusal(errors.Unavailable.code, "it may be stored already: send it again")
RULED: Final = {
    Verdict.ID_REUSED: Refusal(errors.IdReused.code, "another message has this SnowflakeID; give every message its own"),
    Verdict.TOO_OLD: Refusal(errors.IdTooOld.code, "the SnowflakeID is older than a day; whether it was stored before is unknown"),
    Verdict.ID_AHEAD: Refusal(errors.IdAhead.code, "the SnowflakeID is more than 60 s ahead of the store; correct the wrong clock"),
    Verdict.MOVED: Refusal(errors.WrongPartition.code, "the partition was split while this was on its way; send it again"),
    Verdict.NO_NUMBERS: Refusal(
        errors.Unavailable.code, "the leader has no MsgIDs left in its epoch; send again, the next leader has"
    ),
}
"""Refusal of a record by what was decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings of a Xiu's core."""

    partition: int
    max_record_bytes: int
    keep_us: int = 0
    """See `xiu.state.retention`."""
    keep_bytes: int = 0
    await_restore: bool = False
    """A partition that never stored anything accepts no mail before a restore has begun."""


@dataclass(slots=True)
class Counters:
    """Totals of a Xiu's core since the start."""

    records_in: int = 0
    stored: int = 0
    repeated: int = 0
    refused: int = 0
    moved: int = 0
    """Refused because they belong to another partition since a doubling."""
    asked: int = 0
    """SnowflakeIDs in questions to the parent."""
    batches_malformed: int = 0
    trims: int = 0
    cut_off: int = 0
    """Blocks that were accepted and did not commit."""
    writes_blocked: int = 0


class Core(EventTable[ev.Effect]):
    """The core of Xiu: turns writers' batches into log entries, and entries into blocks. `step` raises StorageError if the store is
    broken.

    Args:
        settings: of this core.
        log: of the partition, provided by replication.
        store: RocksDB, opened.
        table: on /dev/shm, recovered.
    """

    def __init__(self, settings: CoreSettings, log: Entries, store: Store, table: Table) -> None:
        super().__init__()
        self.settings = settings
        self.counters = Counters()
        self.epoch = 0
        """Epoch of this leader; 0: it does not lead."""
        self._leader = ""
        """Address of the leader if it is another replica, as far as known."""
        self.committed = store.head.applied.counter
        self.full = ""
        """Why writes are refused; empty: they are not."""
        self.damaged = ""
        """Damage of the store that was found and not repaired; empty: none."""
        self.stuck = False
        """Damage prevents a decision: nothing is decided before the store is repaired."""
        self._written = self.committed
        self._log, self._store, self._table = log, store, table
        self._state = State(settings.partition, store, store.head)
        self._decided: deque[Decision] = deque()
        """Decisions not written yet; bounded by replication's limit of uncommitted entries."""
        self._owed: list[Block] = []
        """Committed, but not in the store while that accepts no writes; in order."""
        self._catches_up = False
        """This leader has not decided all entries that were in its log when it took office."""
        self.layout_version, self._partitions = 0, 0
        self._addresses: tuple[str, ...] = ()
        self.copies = 0
        """Number of disks with everything committed; 0: fewer than `min_in_sync`."""
        self._batches = Batches()
        self._retry_at = 0.0
        """No write is tried before; 0: the last one succeeded."""
        self._retries = 0
        self.enough_space = True
        self.on(ev.StoreReceived, self._on_store)
        self.on(ev.LayoutChanged, self._on_layout)
        self.on(ev.SpaceChanged, self._on_space)
        self.on(ev.TrimDue, self._on_trim_due)
        self.on(ev.ParentAnswered, self._on_parent)
        self.on(LeaderChanged, self._on_leader)
        self.on(Accepted, self._on_accepted)
        self.on(Refused, self._on_refused)
        self.on(Persisted, self._on_persisted)
        self.on(Committed, self._on_committed)
        self.on(Tick, self._on_tick)

    def next_deadline(self) -> float:
        """Now while a new leader reads its log, else `NEVER`: after a full disk replication passes the entries again."""
        return -math.inf if self._catches_up else NEVER

    def replaced(self) -> None:
        """Adopt the state of the store and the log after a snapshot was loaded."""
        self._state.forget(self._store.head)
        self._decided.clear()
        self._owed = []
        self.damaged, self.stuck = "", False
        self.committed = self._written = self._store.head.applied.counter

    def rewound(self, now: float) -> None:
        """Adopt an earlier, undamaged state of the store: the log repeats what follows it."""
        self._state.forget(self._store.head)
        self._decided.clear()
        self.damaged, self.stuck = "", False
        # Only what had been written: replication passes and counts the rest.
        self._write(self._written, (), now)

    def catch_up(self, store: Store) -> bool:
        """Apply some of the following log entries to another store with an earlier state. Returns True if it has reached this
        core's store, as of the beginning of the call. Raises DiskFull; StoreDamaged if it is damaged as well."""
        after, target = store.head.applied.counter, self._store.head.applied.counter
        if after < target:
            state = State(self.settings.partition, store, store.head)
            entries = self._log.read(after, min(READ_ENTRIES, target - after), READ_BYTES)
            decisions = [state.decide(entry) for entry in entries]
            try:
                store.write(decisions)
            except Blocked as blocked:
                if blocked.full:
                    raise errors.DiskFull(str(blocked)) from blocked
        return store.head.applied.counter >= target

    def met_damage(self, text: str) -> None:
        """Note damage that the shell found in the store."""
        self.damaged = text

    def owed(self, sequence: int) -> Block | None:
        """The block that contains a sequence, if it is committed and the store has no space for it."""
        at = bisect_right(self._owed, sequence, key=lambda block: block.first)
        block = self._owed[at - 1] if at else None
        return block if block is not None and sequence <= block.last else None

    @property
    def why_not(self) -> str:
        """Reason why committed entries are not written now."""
        return self.damaged or self.full or "the store is busy"

    @property
    def waiting(self) -> int:
        """Number of decided entries that are not written."""
        return len(self._decided)

    @property
    def unanswered(self) -> int:
        """Number of batches whose writers wait."""
        return len(self._batches)

    # --- writers

    def _on_store(self, event: ev.StoreReceived, now: float, out: list[ev.Effect]) -> None:
        self.counters.records_in += event.count
        refusal = self._refusal(event)
        if refusal is not None:
            full = refusal.code == errors.DiskFull.code
            results = self._when_full(event, refusal) if full else [ev.refused(event.position, event.count, refusal)]
            self.counters.refused += sum(result.count for result in results if result.code)
            out.append(self._answer(event.stream, results))
            return
        self._decide_to(self._log.last.counter)
        settings, total = self.settings, self._counted
        if 0 < total <= settings.partition:
            parent = parent_of(settings.partition)
            where = (self._addresses[parent] if parent < len(self._addresses) else "") or "nobody now"
            text = (
                f"partition {settings.partition} is not open: its users belong to partition {parent} of {total}, served by {where}"
            )
            self.counters.refused += event.count
            elsewhere = Refusal(errors.WrongPartition.code, text)
            out.append(self._answer(event.stream, [ev.refused(event.position, event.count, elsewhere, total)]))
            return
        checked = check(event.data, event.count, settings.partition, total or 1, settings.max_record_bytes, self._addresses)
        if checked is None:
            self.counters.batches_malformed += 1
            out.append(ev.EndStream(event.stream, f"a batch of {len(event.data)} bytes is not {event.count} records end to end"))
            return
        results = [self._refused(event.position + index, why) for index, why in checked.refused]
        self.counters.refused += len(results)
        batch = Batch(
            event.stream, event.position, event.level, [(run.index, run.count) for run in checked.runs], results, list(results)
        )
        try:
            asked = self._to_ask(checked.runs)
        except errors.StoreDamaged as damage:
            self._stop_deciding(damage)
            out.append(self._answer(batch.stream, batch.unknown(errors.StoreDamaged.code, TO_BE_REPAIRED)))
            return
        if not asked and not self._batches.asking.waits(event.stream):
            self._propose(batch, checked.runs, out)
            return
        number = self._batches.new_token()
        self._batches.asking.add(number, Held(event.stream, batch, checked.runs, asked))
        if asked:
            self.counters.asked += len(asked)
            out.append(ev.AskParent(number, [(one.snowflake, one.derived) for one in asked]))

    def _refused(self, position: int, why: Refusal) -> ev.Result:
        moved = why.code == errors.WrongPartition.code
        self.counters.moved += moved
        return ev.refused(position, 1, why, self._counted if moved else 0)

    def _propose(self, batch: Batch, runs: Sequence[RecordRun], out: list[ev.Effect]) -> None:
        if not runs:
            out.append(self._answer(batch.stream, batch.results, batch.elsewhere))
            return
        batch.runs = [(run.index, run.count) for run in runs]
        payloads = [(STORE, store_entry(run.records, run.count)) for run in runs]
        out.append(Propose(self._batches.propose(batch), payloads, batch.level is Level.REPLICATED))

    # --- doubling

    @property
    def _counted(self) -> int:
        """Number of partitions by which this one assigns users, by its log up to the last entry, committed or not; 0: unknown."""
        return counted(self._state.head.doubling, self._partitions)

    def doubling(self) -> Record:
        """State of doublings by the log up to its last entry, committed or not. Raises NotLeader, Overloaded, StoreDamaged."""
        self._catch_up_now()
        if self.stuck:
            raise errors.StoreDamaged("the store is damaged and is to be repaired first")
        return self._state.head.doubling

    def _catch_up_now(self) -> None:
        """Decide all entries in the log, before an operator's entry. Raises NotLeader, Overloaded."""
        if not self.epoch:
            raise not_leader(self._leader)
        if self._catches_up:
            raise errors.Overloaded(CATCHING_UP, RETRY_MS)
        self._decide_to(self._log.last.counter)

    def known(self, wanted: Sequence[tuple[int, bool]]) -> list[tuple[int, int] | None]:
        """See `State.known`."""
        return self._state.known(wanted)

    def _to_ask(self, runs: Sequence[RecordRun]) -> list[Asked]:
        """The SnowflakeIDs of a batch that the parent must be asked for. Raises StoreDamaged."""
        head = self._state.head
        found: list[Asked] = []
        if head.doubling.cut_us:
            for run in runs:
                for index, snowflake, derived, crc in self._state.unknown(run.records, run.count):
                    if is_asked(head.doubling, head.clock_us, snowflake, derived):
                        found.append(Asked(run.index + index, snowflake, derived, crc))
        return found

    def _on_parent(self, event: ev.ParentAnswered, now: float, out: list[ev.Effect]) -> None:
        for held in self._batches.asking.answer(event.number, event.known, event.copies):
            batch, told = held.batch, [self._told(held, one) for one in held.asked]
            results = [result for result in told if result is not None]
            if any(result.msg_id for result in results):
                batch.elsewhere = held.copies
            batch.results += results
            batch.refused += results
            left_out = frozenset(one.index for one, result in zip(held.asked, told, strict=True) if result is not None)
            self._propose(batch, without(held.runs, left_out), out)

    def _told(self, held: Held[Batch], asked: Asked) -> ev.Result | None:
        """Answer for a record that does not reach the log; None: the parent does not have it."""
        position = held.batch.position + asked.index
        if held.known is None:
            self.counters.refused += 1
            text = f"partition {parent_of(self.settings.partition)}, which may have it, does not answer; send again later"
            return self._refused(position, Refusal(errors.Unavailable.code, text))
        known = held.known.get(asked.index)
        if known is None:
            return None
        msg_id, crc = known
        if crc == asked.crc:
            if not held.copies and held.batch.level is Level.REPLICATED:
                return self._refused(position, Refusal(errors.Unavailable.code, TOO_FEW))
            self.counters.repeated += 1
            return ev.Result(position, 1, "", msg_id=msg_id)
        self.counters.refused += 1
        return self._refused(position, RULED[Verdict.ID_REUSED])

    def _when_full(self, event: ev.StoreReceived, full: Refusal) -> list[ev.Result]:
        """Results for a batch while the disk is full: new records are refused. Stored ones are confirmed if they are on
        `min_in_sync` disks, since a writer that repeats them would take them for lost."""
        settings = self.settings
        checked = check(event.data, event.count, settings.partition, self._counted or 1, settings.max_record_bytes, self._addresses)
        if checked is None:
            return [ev.refused(event.position, event.count, full)]
        results = [self._refused(event.position + index, why) for index, why in checked.refused]
        for run in checked.runs:
            try:
                values = self._state.stored_already(store_entry(run.records, run.count))
                asked = {one.index for one in self._to_ask([run])}
            except errors.StoreDamaged:
                values, asked = [0] * run.count, set()
            for index, value in enumerate(values, run.index):
                position = event.position + index
                if value and (self.copies or event.level is not Level.REPLICATED):
                    self.counters.repeated += 1
                    results.append(ev.Result(position, 1, "", msg_id=value))
                elif value is None and index not in asked:
                    results.append(self._refused(position, full))
                else:
                    results.append(self._refused(position, MAYBE_STORED))
        return results

    def _refusal(self, event: ev.StoreReceived) -> Refusal | None:
        """Reason for refusing a whole batch."""
        if not self.epoch:
            return Refusal.of(not_leader(self._leader))
        if event.epoch not in (0, self.epoch):
            text = f"the leader is in epoch {self.epoch}: send again, in order, what is not confirmed"
            return Refusal(errors.StaleStream.code, text)
        if self.stuck:
            text = "the store is damaged and accepts nothing until it is repaired from another replica"
            return Refusal(errors.StoreDamaged.code, text)
        if self._catches_up:
            return Refusal(errors.Overloaded.code, CATCHING_UP, RETRY_MS)
        if self.full:
            return Refusal(errors.DiskFull.code, self.full)
        head = self._state.head
        if self.settings.await_restore and not head.last and not head.below:
            return Refusal(errors.Unavailable.code, "the partition waits to be restored (`xiu.await_restore`); send again later")
        if not self._table.has_space(len(event.data)):
            text = "the table is full of records that are not persisted yet; send again later"
            return Refusal(errors.Overloaded.code, text, RETRY_MS)
        return None

    def _answer(self, stream: int, results: Sequence[ev.Result], copies: int | None = None) -> ev.Answer:
        triple = Triple(self.layout_version, self.epoch, self.committed)
        return ev.Answer(stream, results, triple, self.copies if copies is None else copies)

    def _on_layout(self, event: ev.LayoutChanged, now: float, out: list[ev.Effect]) -> None:
        self.layout_version, self._partitions, self._addresses = event.version, event.partitions, event.addresses

    def _on_space(self, event: ev.SpaceChanged, now: float, out: list[ev.Effect]) -> None:
        self.enough_space = event.enough
        if not event.enough:
            self.full = (
                f"the disk has {event.free_mb} MiB free and keeps {event.reserve_mb} in reserve (`xiu.reserve_mb`): free some "
                "space; what is stored can be read"
            )
        elif not self._retry_at:
            self.full = ""

    # --- operators

    def restore_entry(self, step: Step, blocks: Sequence[Block] = ()) -> tuple[int, bytes]:
        """Return the entry (kind, payload) for a step of a restore; append it in this turn. Raises NotLeader, Overloaded,
        StoreDamaged, DiskFull, Unavailable, InvalidArgument."""
        self._catch_up_now()
        if self.stuck:
            raise errors.StoreDamaged("the store is damaged and is to be repaired first")
        if self.full:
            raise errors.DiskFull(self.full)
        head, below = self._state.head, 0
        if step is Step.BEGIN:
            below = head.below or self._lowest_stored(head)
        elif step is Step.BLOCKS and (problem := problem_of_restore(blocks, self.epoch, head)):
            raise errors.InvalidArgument(problem)
        return int(XiuKind.RESTORE), encode_restore(step, below, blocks)

    def trim_before(self, position: int) -> tuple[int, bytes] | None:
        """Return the entry (kind, payload) that trims records before a position; append it in this turn. None: there is nothing to
        trim. Raises NotLeader, StoreDamaged, Unavailable."""
        if not self.epoch:
            raise not_leader(self._leader)
        head = self._store.head
        if self.stuck:
            raise errors.StoreDamaged("the store is damaged and is to be repaired first")
        if head.below:
            raise errors.Unavailable("the partition is being restored; trim it when that has ended")
        found = trim_below(self._store.marks(), head, position)
        if found is None or found[0] <= (self._store.next_first(head.floor) or 0):
            return None
        return int(XiuKind.TRIM), trim_entry(*found)

    def _lowest_stored(self, head: Head) -> int:
        if not head.last:
            return self.epoch << MSG_COUNTER_BITS
        first = self._store.next_first(0)
        if first is None:
            raise errors.Unavailable("what is stored is not written yet, or all of it was trimmed; try again in a moment")
        return first

    # --- events of replication

    def _on_leader(self, event: LeaderChanged, now: float, out: list[ev.Effect]) -> None:
        self._leader = event.address
        if event.epoch == self.epoch:
            return
        if self.epoch:
            self._stop_leading(out)
        if event.epoch:
            self.epoch, self._catches_up = event.epoch, True
            self._on_tick(Tick(), now, out)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        """Decide some more of the log's entries, in a new leader."""
        if self._catches_up:
            last = self._log.last.counter
            self._decide_some(last, SLICE_BYTES)
            self._catches_up = not self.stuck and self._state.head.applied.counter < last

    def _stop_leading(self, out: list[ev.Effect]) -> None:
        """Unanswered entries may commit or not: writers ask the next leader, with the same IDs."""
        self.epoch, self._catches_up = 0, False
        for batch in self._batches.drop():
            out.append(self._answer(batch.stream, batch.unknown(errors.NotLeader.code, "the leader changed")))
        self._state.forget(self._store.head)
        self._decided.clear()
        self.counters.cut_off += self._table.dropped()

    def _on_accepted(self, event: Accepted, now: float, out: list[ev.Effect]) -> None:
        if not self._catches_up:
            self._decide_to(event.last)
        batch = self._batches.take(event.token)
        if batch is None:
            return
        if self.stuck:
            out.append(self._answer(batch.stream, batch.unknown(errors.StoreDamaged.code, TO_BE_REPAIRED)))
            return
        begin = event.first - self._decided[0].head.applied.counter
        decisions = [self._decided[begin + index] for index in range(event.last - event.first + 1)]
        for (index, _), decision in zip(batch.runs, decisions, strict=True):
            if self._add_results(batch, index, decision.rulings):
                out.append(ev.NeedEpoch())
        if batch.level is Level.ACCEPTED:
            out.append(self._answer(batch.stream, batch.results))
        else:
            self._batches.wait(batch, event.last)

    def _add_results(self, batch: Batch, begin: int, rulings: Sequence[Ruling]) -> bool:
        """Add the results of rulings; return True if the epoch has no numbers left."""
        used_up = False
        for ruling in rulings:
            position, count, verdict, value = batch.position + begin + ruling.index, ruling.count, ruling.verdict, ruling.value
            if verdict is Verdict.STORED:
                self.counters.stored += count
                batch.results.append(ev.Result(position, count, "", sequence=value))
            elif verdict is Verdict.SAME:
                self.counters.repeated += 1
                batch.results.append(ev.Result(position, 1, "", msg_id=value))
            else:
                self.counters.refused += 1
                used_up = used_up or verdict is Verdict.NO_NUMBERS
                batch.results.append(self._refused(position, RULED[verdict]))
        return used_up

    def _on_refused(self, event: Refused, now: float, out: list[ev.Effect]) -> None:
        batch = self._batches.take(event.token)
        if batch is None:
            return
        self.counters.refused += sum(count for _, count in batch.runs)
        results = [ev.refused(batch.position + index, count, event.refusal) for index, count in batch.runs]
        out.append(self._answer(batch.stream, [*batch.results, *results]))

    def _on_persisted(self, event: Persisted, now: float, out: list[ev.Effect]) -> None:
        out += [self._answer(batch.stream, batch.results) for batch in self._batches.persisted(event.counter)]

    def _on_committed(self, event: Committed, now: float, out: list[ev.Effect]) -> None:
        entries: Sequence[Entry] = event.values
        last = event.first + len(entries) - 1
        self.committed = max(self.committed, last)
        self.copies = event.copies
        for batch in self._batches.committed(last):
            if event.copies:
                copies = event.copies if batch.elsewhere is None else min(event.copies, batch.elsewhere)
                out.append(self._answer(batch.stream, batch.results, copies))
            else:
                out.append(self._answer(batch.stream, batch.unknown(errors.Unavailable.code, TOO_FEW)))
        if self._write(event.first - 1, entries, now):
            self._owed = []
            out.append(TAKEN)
            return
        if self.full:  # a store that was opened again may have gone back
            self._decide_to(last)
        committed = takewhile(lambda decision: decision.head.applied.counter <= last, self._decided)
        self._owed = [decision.block for decision in committed if decision.block is not None]
        out.append(NOT_TAKEN)

    # --- the state

    def _decide_to(self, counter: int) -> None:
        """Decide the log's entries up to a counter, unless damage prevents it."""
        while not self.stuck and self._state.head.applied.counter < counter:
            self._decide_some(counter, READ_BYTES)

    def _decide_some(self, counter: int, max_bytes: int) -> None:
        after = self._state.head.applied.counter
        if after < counter:
            self._decide(self._log.read(after, min(READ_ENTRIES, counter - after), max_bytes))

    def _decide(self, entries: Sequence[Entry]) -> None:
        try:
            decisions = [self._state.decide(entry) for entry in entries]
        except errors.StoreDamaged as damage:
            self._stop_deciding(damage)
            return
        self._decided.extend(decisions)
        blocks = [(decision.block, decision.puts[-1][1]) for decision in decisions if decision.block is not None]
        if blocks:
            self._table.put(blocks, persisted=False)

    def _stop_deciding(self, damage: errors.StoreDamaged) -> None:
        """Drop decisions that are not written: after the repair they are made again."""
        self.damaged, self.stuck = str(damage), True
        self._state.forget(self._store.head)
        self._decided.clear()

    def _is_stuck(self) -> bool:
        """Called through a method because writing changes it: mypyc assumes that an attribute keeps the value it was compared
        with."""
        return self.stuck

    def _write(self, before: int, entries: Sequence[Entry], now: float) -> bool:
        """Write these entries, and before them those up to `before` that a store that went back lacks. Returns True if all are
        written; False if the store cannot write now, or is damaged."""
        if self._is_stuck() or now < self._retry_at:
            return False
        try:
            if self._retries >= RETRIES_BEFORE_REOPEN and self.enough_space:
                self._store.reopen()
                self._retries = 0
                self._state.forget(self._store.head)
                self._decided.clear()
            while not self.stuck and (written := self._store.head.applied.counter) < before:
                self._write_entries(self._log.read(written, min(READ_ENTRIES, before - written), READ_BYTES))
            self._write_entries(entries)
        except Blocked as blocked:
            self.counters.writes_blocked += 1
            self._retry_at = now + (RETRY_S if blocked.full else RETRY_BUSY_S)
            if blocked.full:
                self._retries += 1
                self.full = str(blocked)
            return False
        if self.stuck:
            return False
        self._retry_at, self._retries = 0.0, 0
        if self.enough_space:
            self.full = ""
        if self.epoch and not self._catches_up:
            self._decide_to(self._log.last.counter)
        return True

    def _write_entries(self, entries: Sequence[Entry]) -> None:
        """Write the decisions on these entries, which follow what is in the store; decide those that are not decided."""
        if not self.stuck and len(self._decided) < len(entries):
            self._decide(entries[len(self._decided) :])
        if self.stuck or not entries:
            return
        decisions = list(islice(self._decided, len(entries)))
        assert decisions[-1].head.applied == entries[-1].position, "what was decided is of these entries"
        try:
            self._store.write(decisions)
        except errors.StoreDamaged as damage:
            self._stop_deciding(damage)
            return
        self._written = self._store.head.applied.counter
        floor, firsts = self._store.head.floor, []
        for decision in decisions:
            self._decided.popleft()
            self._state.written(decision)
            if decision.deletes:
                self._table.trim(floor)
            if decision.block is not None:
                firsts.append(decision.block.first)
        self._table.persisted(firsts)

    def _on_trim_due(self, event: ev.TrimDue, now: float, out: list[ev.Effect]) -> None:
        if not self.epoch or self.stuck or self._catches_up:
            return
        head = self._store.head
        try:
            settings, marks = self.settings, self._store.marks()
            found = trim_to(marks, head, event.at_us, settings.keep_us, settings.keep_bytes, event.keep_from)
        except errors.StoreDamaged as damage:
            self.damaged = str(damage)
            return
        if found is None:
            found = head.floor, head.trimmed_bytes
        else:
            self.counters.trims += 1
        out.append(Propose(self._batches.new_token(), [(int(XiuKind.TRIM), trim_entry(*found))], replicated=False))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        head = self._store.head
        return {
            "stored_bytes": head.stored_bytes - head.trimmed_bytes,
            "waiting_entries": len(self._decided),
            "damaged": int(bool(self.damaged)),
            "epoch": self.epoch,
            "committed": self.committed,
        }
