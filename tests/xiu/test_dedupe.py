"""Dedupe by runs against the simplest dedupe there is, a row for each record; and what runs are, one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.replication.model import CLOCK, Entry, EntryKind
from cluster.store.doubling import phases
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, fence_body
from pixiu.ids import MAX_MSG_EPOCH, SNOWFLAKE_EPOCH_MS, msg_id, snowflake, snowflake_time_ms
from pixiu.wire.record import Flag, Kind, encode, split
from tests.support.effort import runs
from tests.xiu.parts import NOW_US, MemoryStore, store
from xiu.records.block import Block
from xiu.state import dedupe, doubling, restoring
from xiu.state.dedupe import MAX_MARKS, Dedupe, Window, WorkerRun, WrittenRun, place_of, run_of_row, runs_before
from xiu.state.doubling import NO_RECORD, Record
from xiu.state.keys import KEY, RUNS, SNOWFLAKES
from xiu.state.restoring import Step
from xiu.state.state import (
    DAY_US,
    DEDUPE_WINDOW_MS,
    LAST_COUNTER,
    MAX_AHEAD_MS,
    Decision,
    Head,
    State,
    Verdict,
    XiuKind,
    trim_entry,
)
from xiu.store.store import Store

PARTITION = 1
EPOCH = 3
SPAN_MS = 1 << 22
DOUBLING = Doubling(0xA1, 4, 3)
SPLIT = Command(phases.Step.SPLIT, DOUBLING, fence_body(0)).encode()
SET_BACK_MS = 3 * DAY_US // 1000

Known = tuple[int, int]
Answer = tuple[Verdict, int]
"""What a record got; STORED: under this MsgID, else as in `Ruling`."""


class Former:
    """Dedupe as it was: what is stored under each SnowflakeID, and for each day under each derived one."""

    def __init__(self, last: int) -> None:
        self.rows: dict[tuple[int, int], Known] = {}
        """(-1 or the day, ID)."""
        self.clock_us = 0
        self.last = last
        self.doubling = NO_RECORD
        self.restored = Head(last=last)

    @property
    def now_ms(self) -> int:
        return self.clock_us // 1000

    def known(self, id_: int, derived: bool) -> Known | None:
        day = self.clock_us // DAY_US
        if derived:
            return self.rows.get((day, id_)) or self.rows.get((day - 1, id_))
        return self.rows.get((-1, id_))

    def apply(self, entry: Entry) -> list[Answer]:
        self.clock_us = max(self.clock_us, entry.at_us)
        if entry.kind == EntryKind.SET_CLOCK:
            self.clock_us = min(self.clock_us, CLOCK.unpack(entry.payload)[0])
        elif entry.kind == XiuKind.TRIM:
            day = self.clock_us // DAY_US
            oldest = max(self.now_ms - SNOWFLAKE_EPOCH_MS - DEDUPE_WINDOW_MS, 0) << 22
            self.rows = {key: known for key, known in self.rows.items() if (key[1] >= oldest if key[0] < 0 else key[0] >= day - 1)}
        elif entry.kind == DOUBLING_KIND:
            self.doubling = doubling.after(self.doubling, Command.decode(entry.payload), entry.counter, self.clock_us)
        elif entry.kind == XiuKind.RESTORE:
            self._restore(entry)
        elif entry.kind == XiuKind.STORE:
            count = int.from_bytes(entry.payload[:4], "little")
            return [self._store(entry.epoch, record) for record in split(entry.payload[4:], count)]
        return []

    def _store(self, epoch: int, record: bytes) -> Answer:
        flags, type_, crc, id_, user = struct.unpack_from("<5xBB5xIQQ", record)
        derived, time_ms = bool(flags & Flag.DERIVED_ID), snowflake_time_ms(id_)
        if not doubling.takes(self.doubling, PARTITION, user):
            return Verdict.MOVED, 0
        if not derived and time_ms < self.now_ms - DEDUPE_WINDOW_MS:
            return Verdict.TOO_OLD, 0
        if not derived and time_ms > self.now_ms + MAX_AHEAD_MS:
            return Verdict.ID_AHEAD, 0
        known = self.known(id_, derived)
        if known is not None:
            return (Verdict.SAME, known[0]) if known[1] == crc else (Verdict.ID_REUSED, 0)
        sequence = max(self.last, epoch << 32) + 1
        if epoch > MAX_MSG_EPOCH or sequence & 0xFFFF_FFFF > LAST_COUNTER or sequence >> 32 != epoch:
            return Verdict.NO_NUMBERS, 0
        self.last = sequence
        self.rows[self.clock_us // DAY_US if derived else -1, id_] = msg_id(PARTITION, type_, sequence), crc
        return Verdict.STORED, msg_id(PARTITION, type_, sequence)

    def _restore(self, entry: Entry) -> None:
        step, below, blocks = restoring.decode(entry.payload)
        head = replace(self.restored, clock_us=self.clock_us)
        if step is Step.BEGIN and not head.below:
            self.restored = replace(head, restored=0, below=below)
        elif step is Step.END:
            self.restored = replace(head, restored=0, below=0)
        elif step is Step.BLOCKS and not restoring.problem_of(blocks, entry.epoch, head):
            for block in blocks:
                day, today = block.at_us // DAY_US, self.clock_us // DAY_US
                for place, record in enumerate(split(block.records, block.count)):
                    flags, type_, crc, id_ = struct.unpack_from("<5xBB5xIQ", record)
                    derived = bool(flags & Flag.DERIVED_ID)
                    key = (day if derived else -1), id_
                    wanted = day >= today - 1 if derived else snowflake_time_ms(id_) >= self.now_ms - DEDUPE_WINDOW_MS
                    if wanted and key not in self.rows:
                        self.rows[key] = msg_id(PARTITION, type_, block.first + place), crc
            self.restored = replace(head, restored=blocks[-1].last)


def answers(entry: Entry, decision: Decision) -> list[Answer]:
    """What each record got, of consecutive rulings that leave nobody out."""
    found: list[Answer] = []
    records = split(entry.payload[4:], int.from_bytes(entry.payload[:4], "little")) if entry.kind == XiuKind.STORE else []
    kept: list[bytes] = []
    for ruling in decision.rulings:
        assert ruling.index == len(found)
        for at in range(ruling.count):
            stored = ruling.verdict is Verdict.STORED
            type_ = records[len(found)][6]
            kept += [records[len(found)]] if stored else []
            found.append((ruling.verdict, msg_id(PARTITION, type_, ruling.value + at) if stored else ruling.value))
    assert (decision.block.records if decision.block is not None else b"") == b"".join(kept)
    return found


class Writers:
    """Workers whose streams send rising IDs, not all in the order in which they were made, and what of it was sent before."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.sent: list[list[bytes]] = []
        """Batches."""
        self.worker_of_stream = [random.choice((0, 1, 4095)) for _ in range(random.randint(1, 4))]
        self.waiting: list[list[bytes]] = [[] for _ in self.worker_of_stream]

    def record(self, id_: int, *, derived: bool = False) -> bytes:
        random = self.random
        user = random.choice((1, 5, 5, 9)) if random.random() < 0.9 else 2
        type_ = 64 if random.random() < 0.9 else 65
        return encode(Kind.MAIL, user, random.randbytes(2), id_, flags=Flag.DERIVED_ID if derived else 0, type=type_)

    def window(self, now_ms: int) -> list[bytes]:
        """What a stream has next."""
        random = self.random
        stream = random.randrange(len(self.waiting))
        worker, many = self.worker_of_stream[stream], random.randint(1, 8)
        waiting = self.waiting[stream]
        for _ in range(many):
            sequence = random.choice((random.randrange(12), random.randrange(1024)))
            time_ms = now_ms + random.choice((0, 0, 1, 2, random.randint(-5, 5), -SPAN_MS, MAX_AHEAD_MS))
            waiting.append(self.record(snowflake(time_ms, worker, sequence)))
        waiting.sort(key=lambda record: int.from_bytes(record[16:24], "little"))
        taken = random.choice((many, len(waiting)))
        self.waiting[stream] = waiting[taken:]
        return waiting[:taken]

    def batch(self, now_ms: int) -> list[bytes]:
        random = self.random
        made = [self.window(now_ms) for _ in range(random.randint(1, 3))]
        records = [record for window in made for record in window]
        if random.random() < 0.3:
            random.shuffle(records)
        roll = random.random()
        if roll < 0.2 and self.sent:
            records = list(random.choice(self.sent))
        elif roll < 0.4 and self.sent:  # other borders
            joined = [record for batch in self.sent[-3:] for record in batch]
            begin = random.randrange(len(joined))
            records = joined[begin : begin + random.randint(1, 20)] + records
        if random.random() < 0.3:
            strange = [
                self.record(random.randrange(30), derived=True),
                self.record(snowflake(now_ms - DEDUPE_WINDOW_MS - random.randint(-1, 1), 1, 0)),
                self.record(snowflake(now_ms + MAX_AHEAD_MS + random.randint(0, 1), 1, 0)),
                self.record(int.from_bytes(random.choice(records)[16:24], "little")),
                random.choice(records),
            ]
            for record in random.choices(strange, k=3):
                records.insert(random.randint(0, len(records)), record)
        self.sent.append(records)
        return records


def random_log(random: Random, last: int) -> list[Entry]:
    """Entries of all kinds."""
    entries: list[Entry] = []
    writers, epoch, at_us = Writers(random), EPOCH, NOW_US
    split_at = random.choice((0, 15))
    restore = random.random() < 0.3
    back_at, restored = random.choice((0, 0, 25)), last if last else EPOCH << 32

    def add(kind: int, payload: bytes, now_us: int) -> None:
        entries.append(Entry(epoch, len(entries) + 1, kind, now_us, payload))

    while len(entries) < 40:
        at = len(entries) + 1
        at_us += random.choice((0, 1000, 5000, 61_000_000, SPAN_MS * 1000, DAY_US // 3 if random.random() < 0.1 else 0))
        now_ms = at_us // 1000
        if at == split_at:
            add(DOUBLING_KIND, SPLIT, at_us)
        elif restore and at == 5:
            add(XiuKind.RESTORE, restoring.encode(Step.BEGIN, restored), at_us)
        elif restore and at in (10, 20):
            records = writers.batch(now_ms)
            block = Block((at // 10) << 32 | 1, len(records), NOW_US - 1000 + at, b"".join(records))
            add(XiuKind.RESTORE, restoring.encode(Step.BLOCKS, 0, [block]), at_us)
        elif restore and at == 22:
            add(XiuKind.RESTORE, restoring.encode(Step.END), at_us)
        elif back_at and at == back_at - 2:
            add(XiuKind.TRIM, trim_entry(0, 0), at_us + SET_BACK_MS * 1000)
        elif at == back_at:
            add(EntryKind.SET_CLOCK, CLOCK.pack(at_us), at_us)
        elif random.random() < 0.08:
            epoch += 1
            add(EntryKind.NOOP, b"", 0)
        elif random.random() < 0.08:
            add(XiuKind.TRIM, trim_entry(0, 0), at_us)
        else:
            records = writers.batch(now_ms)
            entries.append(store(at, *records, epoch=epoch, at_us=at_us))
    return entries


class Replica:
    """A state over a store: the leader's decides ahead of what is written."""

    def __init__(self, head: Head, random: Random) -> None:
        self.store, self.random = MemoryStore(head), random
        self.state = State(PARTITION, self.store, self.store.head)
        self.waiting: list[tuple[Entry, Decision]] = []

    def decide(self, entry: Entry) -> list[Answer]:
        decision = self.state.decide(entry)
        self.waiting.append((entry, decision))
        return answers(entry, decision)

    def write(self, count: int) -> None:
        written, self.waiting = [decision for _, decision in self.waiting[:count]], self.waiting[count:]
        self.store.write(written)
        for decision in written:
            self.state.written(decision)

    def lose_the_office(self) -> list[Entry]:
        """What was decided and not written is forgotten; it is to be decided again."""
        entries = [entry for entry, _ in self.waiting]
        self.waiting = []
        self.state.forget(self.store.head)
        return entries

    def restart(self) -> list[Entry]:
        entries = self.lose_the_office()
        self.state = State(PARTITION, self.store, self.store.head)
        return entries


def everything_sent(entries: Sequence[Entry]) -> list[tuple[int, bool]]:
    found: dict[tuple[int, bool], None] = {}
    for entry in entries:
        if entry.kind == XiuKind.STORE:
            for record in split(entry.payload[4:], int.from_bytes(entry.payload[:4], "little")):
                found[int.from_bytes(record[16:24], "little"), bool(record[5] & Flag.DERIVED_ID)] = None
    return list(found)


def assert_runs_are_apart(rows: dict[bytes, bytes]) -> None:
    """Runs of a span do not overlap, and each ID is held once."""
    held = [run for key, value in sorted(rows.items()) if (run := run_of_row(key, value)) is not None]
    assert len(held) == sum(key[:1] == RUNS for key in rows)
    for run in held:
        assert all(before < low for before, low in pairwise(run.lows))
        assert all(before < offset for before, offset in pairwise(run.offsets))
    for before, run in pairwise(held):
        assert before.span != run.span or before.lows[-1] < run.lows[0]
    in_runs = {run.span << 32 | low for run in held for low in run.lows}
    assert not in_runs & {place_of(KEY.unpack(key)[1]) for key in rows if key[:1] == SNOWFLAKES}


@settings(max_examples=runs("PIXIU_EXAMPLES", local=15, ci=600), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_runs_decide_what_a_row_for_each_record_decided(seed: int) -> None:
    random = Random(seed)
    last = random.choice((0, 0, 0, EPOCH << 32 | LAST_COUNTER - random.randint(0, 60)))
    head = Head(last=last)
    entries = random_log(random, last)
    former = Former(last)
    expected = [former.apply(entry) for entry in entries]
    follower, leader = Replica(head, random), Replica(head, random)
    for entry, wanted in zip(entries, expected, strict=True):
        assert follower.decide(entry) == wanted
        follower.write(1)
    todo = list(enumerate(entries))
    while todo:
        at, entry = todo.pop(0)
        assert leader.decide(entry) == expected[at]
        roll = random.random()
        if entry.kind in (XiuKind.TRIM, EntryKind.SET_CLOCK):  # rows that go are seen until that is written
            leader.write(len(leader.waiting))
        elif roll < 0.2:
            leader.write(random.randint(0, len(leader.waiting)))
        elif roll < 0.35:
            again = leader.lose_the_office() if roll < 0.28 else leader.restart()
            todo = [(each.counter - 1, each) for each in again] + todo
    leader.write(len(leader.waiting))
    assert leader.store.rows == follower.store.rows
    wanted_ids = everything_sent(entries)
    assert_runs_are_apart(follower.store.rows)
    assert follower.state.known(wanted_ids) == [former.known(*each) for each in wanted_ids]
    assert leader.restart() == []
    assert leader.state.known(wanted_ids) == [former.known(*each) for each in wanted_ids]


def decided(replica: Replica, *entries: Entry) -> list[list[Verdict]]:
    """Without writing anything."""
    return [[verdict for verdict, _ in replica.decide(entry)] for entry in entries]


def plain(number: int, *, at_ms: int = NOW_US // 1000, worker: int = 1, type_: int = 64) -> bytes:
    return encode(Kind.MAIL, 1, b"", snowflake(at_ms, worker, number), type=type_)


def made() -> Replica:
    return Replica(Head(), Random(0))


def test_the_record_of_today_is_found_before_one_of_yesterday_that_a_restore_has_not_written_yet() -> None:
    replica, now_us = made(), (NOW_US // DAY_US + 1) * DAY_US
    mail = encode(Kind.MAIL, 1, b"", 27, flags=Flag.DERIVED_ID, type=64)
    (first,) = replica.decide(store(1, mail, epoch=EPOCH, at_us=now_us))
    replica.write(1)
    steps = restoring.encode(Step.BEGIN, EPOCH << 32), restoring.encode(Step.BLOCKS, 0, [Block(1 << 32 | 1, 1, now_us - 1, mail)])
    for counter, step in enumerate(steps, 2):
        replica.decide(Entry(EPOCH, counter, XiuKind.RESTORE, now_us, step))
    assert replica.decide(store(4, mail, epoch=EPOCH, at_us=now_us)) == [(Verdict.SAME, first[1])]


def kept(rows: dict[bytes, bytes], space: bytes) -> list[bytes]:
    return [key for key in sorted(rows) if key[:1] == space]


@pytest.mark.parametrize("sequence", [0, 1, 1023])
@pytest.mark.parametrize("worker", [0, 1, 4095])
@pytest.mark.parametrize("ms", [0, 1, SPAN_MS - 1, SPAN_MS, (1 << 41) - 1])
def test_a_place_is_the_id_with_its_worker_before_the_time_within_the_span(ms: int, worker: int, sequence: int) -> None:
    place = place_of(snowflake(SNOWFLAKE_EPOCH_MS + ms, worker, sequence))
    assert place == (ms // SPAN_MS) << 44 | worker << 32 | (ms % SPAN_MS) << 10 | sequence
    assert place < 1 << 63
    assert runs_before(ms) <= place < runs_before(ms) + (1 << 44)


def test_a_window_of_one_writer_is_one_row_without_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = made()
    decided(replica, store(1, plain(1)))

    def nothing(_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(replica.store, "get_many", nothing)
    monkeypatch.setattr(replica.store, "row_before", nothing)
    assert decided(replica, store(2, *(plain(number) for number in range(2, 1000)))) == [[Verdict.STORED] * 998]
    replica.write(2)
    assert [run_of_row(key, replica.store.rows[key]) is not None for key in kept(replica.store.rows, RUNS)] == [True, True]
    assert len(kept(replica.store.rows, SNOWFLAKES)) == 0
    row = replica.store.rows[kept(replica.store.rows, RUNS)[1]]
    assert len(row) <= 8 * 998 + 12


def test_writers_who_take_turns_have_a_row_each() -> None:
    replica = made()
    records = [plain(number // 10, worker=number % 10) for number in range(1000)]
    decided(replica, store(1, *records))
    replica.write(1)
    assert len(kept(replica.store.rows, RUNS)) == 10
    wanted = [(int.from_bytes(record[16:24], "little"), False) for record in records]
    assert replica.state.known(wanted) == [
        (msg_id(PARTITION, 64, 1 << 32 | at), int.from_bytes(record[12:16], "little")) for at, record in enumerate(records, 1)
    ]


def test_a_run_ends_with_its_type_and_its_span() -> None:
    replica = made()
    end_ms = SNOWFLAKE_EPOCH_MS + (NOW_US // 1000 - SNOWFLAKE_EPOCH_MS) // SPAN_MS * SPAN_MS
    records = [plain(1), plain(2, type_=65), plain(3), plain(1, at_ms=end_ms - 1, worker=2), plain(1, at_ms=end_ms, worker=2)]
    assert decided(replica, store(1, *records, *records)) == [[Verdict.STORED] * 5 + [Verdict.SAME] * 5]
    replica.write(1)
    assert len(kept(replica.store.rows, RUNS)) == 5


def test_what_is_not_above_the_run_before_has_a_row_of_its_own() -> None:
    replica = made()
    decided(replica, store(1, plain(5), plain(7)), store(2, plain(6), plain(4), plain(8)))
    replica.write(2)
    assert len(kept(replica.store.rows, RUNS)) == 2
    assert kept(replica.store.rows, SNOWFLAKES) == [KEY.pack(SNOWFLAKES, snowflake(NOW_US // 1000, 1, number)) for number in (4, 6)]
    assert decided(replica, store(3, *map(plain, range(4, 9)))) == [[Verdict.SAME] * 5]


def test_what_is_kept_in_memory_of_written_runs_is_bounded_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = made()
    decided(replica, store(1, plain(1)))
    monkeypatch.setattr("xiu.state.dedupe.MAX_MARKS", 2)
    decided(replica, store(2, *(plain(1, worker=worker) for worker in range(2, 9))))
    assert len(replica.state._dedupe._marks) <= MAX_MARKS
    assert decided(replica, store(3, plain(1), plain(2))) == [[Verdict.SAME, Verdict.STORED]], "the run is not written yet"
    replica.write(3)
    assert decided(replica, store(4, *(plain(1, worker=worker) for worker in range(1, 9)))) == [[Verdict.SAME] * 8]


def test_ids_that_a_trim_has_forgotten_are_new_when_the_clock_is_set_back_whether_it_is_written_or_not() -> None:
    """A leader decides before the trim is written, a follower behind it."""
    leader, follower = made(), made()
    entries = [
        store(1, plain(1)),
        Entry(1, 2, int(XiuKind.TRIM), NOW_US + 2 * DAY_US, trim_entry(0, 0)),
        Entry(1, 3, int(EntryKind.SET_CLOCK), NOW_US, CLOCK.pack(NOW_US)),
        store(4, plain(1), plain(2)),
        store(5, plain(1), plain(2), plain(3)),
    ]
    found = [[Verdict.STORED], [], [], [Verdict.STORED] * 2, [Verdict.SAME] * 2 + [Verdict.STORED]]
    assert decided(leader, *entries) == found
    for entry, wanted in zip(entries, found, strict=True):
        assert decided(follower, entry) == [wanted]
        follower.write(1)
    leader.write(5)
    assert leader.store.rows == follower.store.rows


def test_runs_go_by_whole_spans() -> None:
    replica = made()
    begin_ms = SNOWFLAKE_EPOCH_MS + (NOW_US // 1000 - SNOWFLAKE_EPOCH_MS) // SPAN_MS * SPAN_MS
    decided(replica, store(1, plain(1, at_ms=begin_ms), plain(1, at_ms=NOW_US // 1000)))
    replica.write(1)
    later_us = (begin_ms + DEDUPE_WINDOW_MS + SPAN_MS) * 1000
    decided(replica, Entry(1, 2, int(XiuKind.TRIM), later_us - 1, trim_entry(0, 0)))
    replica.write(1)
    assert len(kept(replica.store.rows, RUNS)) == 1
    decided(replica, Entry(1, 3, int(XiuKind.TRIM), later_us, trim_entry(0, 0)))
    replica.write(1)
    assert len(kept(replica.store.rows, RUNS)) == 0


def test_a_head_is_read_as_it_was_written_and_a_broken_one_is_noticed() -> None:
    for head in (
        Head(), Head(runs_from=7, forgotten=1 << 62), Head(runs_from=2, below=9),
        Head(runs_from=2, doubling=Record(Phase.SPLIT, DOUBLING, 3, 4)),
        Head(runs_from=2, below=9, doubling=Record(Phase.SPLIT, DOUBLING, 3, 4)),
    ):  # fmt: skip
        value = head.encode()
        assert Head.decode(value) == head
        for bit in range(len(value) * 8):
            flipped = bytearray(value)
            flipped[bit // 8] ^= 1 << bit % 8
            assert Head.decode(bytes(flipped)) is None


def test_what_is_no_run_is_not_taken_for_one() -> None:
    run = WorkerRun(5, [3, 9], [1, 2], 77, [0, 4])
    key, value = run.row()
    found = run_of_row(key, value)
    assert found is not None
    assert (found.span, found.lows, found.crcs, found.find(9)) == (5, [3, 9], [1, 2], (81, 2))
    wrong = [(b"s" + key[1:], value), (key + b"x", value), (key[:-1] + b"x", value), (key, b""), (key, value[:8] + bytes(4))]
    wrong += [(key, value[:cut]) for cut in range(len(value)) if cut != len(value) - 4]
    for row in wrong:
        assert run_of_row(*row) is None


def batches(count: int) -> Iterator[list[bytes]]:
    """Of three workers, each with rising IDs."""
    for at in range(count):
        yield [plain(at * 4 + number, worker=worker) for number in range(4) for worker in (1, 2, 3)]


def test_rocksdb_finds_what_was_written_before_and_after_a_start(tmp_path: Path) -> None:
    found = Store(tmp_path)
    state = State(PARTITION, found, found.head)
    for counter, records in enumerate(batches(40), 1):
        decision = state.decide(store(counter, *records))
        found.write([decision])
        state.written(decision)
        if counter == 20:
            found.flush()
    found.close()
    again = Store(tmp_path)
    state = State(PARTITION, again, again.head)
    for counter, records in enumerate(batches(40), 41):
        decision = state.decide(store(counter, *records[1:], plain(counter * 4, worker=4)))
        assert [ruling.verdict for ruling in decision.rulings] == [Verdict.SAME] * 11 + [Verdict.STORED]
        assert decision.rulings[0].value == msg_id(PARTITION, 64, 1 << 32 | (counter - 41) * 12 + 2)
    again.close()


def test_a_store_without_rows_before_a_key_says_so(tmp_path: Path) -> None:
    found = Store(tmp_path)
    assert found.row_before(KEY.pack(RUNS, 0)) is None
    found.close()


@given(st.sets(st.integers(0, 60), min_size=1), st.booleans())
def test_a_written_run_is_searched_as_it_lies(lows: set[int], gaps: bool) -> None:
    ordered = sorted(lows)
    offsets = [3 * at if gaps else at for at in range(len(ordered))]
    run = WorkerRun(7, ordered, [low * 11 for low in ordered], 1000, offsets)
    written = WrittenRun(run.row()[1])
    assert (written.first, written.last) == (ordered[0], ordered[-1])
    assert [written.find(low) for low in range(62)] == [run.find(low) for low in range(62)]


def behind(low: int) -> int:
    """A SnowflakeID of one span: its time and sequence there."""
    return (1 << 22 | low >> 10) << 22 | 5 << 10 | low & 1023


class TwoRuns:
    """What was written: two long runs of one span, far from each other."""

    def __init__(self) -> None:
        span = place_of(behind(0)) >> 32
        self.rows = [
            WorkerRun(span, list(range(first, first + 4000)), [0] * 4000, 1, list(range(4000))).row() for first in (10_000, 90_000)
        ]

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        return [None] * len(keys)

    def row_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        return next((row for row in reversed(self.rows) if row[0] <= key), None)


def test_ids_that_go_back_between_two_long_runs_have_none_of_them_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a thousand such IDs unpacked a thousand runs of four thousand, in one turn of a Xiu's event loop."""
    unpacked: list[bytes] = []

    def noted(key: bytes, value: bytes) -> WorkerRun | None:
        unpacked.append(key)
        return run_of_row(key, value)

    monkeypatch.setattr(dedupe, "run_of_row", noted)
    known = Dedupe(TwoRuns())
    wanted = [behind(low) for at in range(500) for low in (20_000 + at, 90_000 + at)]
    assert [found is not None for found in known.find([(one, False) for one in wanted], Window(0, 1 << 63, 0, 1, 0))] == [
        False,
        True,
    ] * 500
    assert len(unpacked) <= 2
