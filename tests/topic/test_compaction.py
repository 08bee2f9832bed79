"""Compaction against a dictionary: the last message of each key stays under its offset, on every replica, through crashes."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.topics import entries as en
from pixiu.errors import MalformedData
from pixiu.wire import block
from tests.sim.power_cut.disk import Left
from tests.sim.topics.disk import MemoryFiles, MemoryTable
from tests.topic.builders import CHANNEL, PART, TOPIC, Log
from topic.compaction import Compaction
from topic.state.state import Done
from topic.storage.compacting import write_copy
from topic.storage.cutting import clipped, cut, joined, messages_of
from topic.storage.keys import digest_of
from topic.storage.segment import Stored

KEPT_S = 100
KEYS = [b"a", b"b", b"c", b"d", b"e" * 4096]


class Replica(Log):
    """A store of a topic that is compacted."""

    def __init__(self, files: MemoryFiles | None = None, table: MemoryTable | None = None, segment_bytes: int = 600) -> None:
        super().__init__(files, table, segment_bytes)
        self.segment_bytes = segment_bytes

    def topic(self, **fields: Any) -> object:
        return super().topic(compact=KEPT_S, **fields)

    def compact(self) -> None:
        """Do what the entries have named, as the machine does after a flush."""
        store = self.store
        while (job := next(store.compacting.jobs(store.logs), None)) is not None:
            size = write_copy(store.files, job)
            assert size >= 0
            assert store.take_copy(job, size)
            store.files.sync_folder(job.log.folder)
            store.compacting.forget(job.part, job.segment.base, job.segment.end)
        store.flush()

    def messages(self, part: int = PART) -> dict[int, block.Message]:
        """Everything that a reader gets, by offset."""
        log, at, found = self.store.log_of(part), 0, dict[int, block.Message]()
        while at < log.end:
            for each in log.read(at, 1 << 20):
                assert isinstance(each, Stored), each
                assert each.stamp.base == at or not found
                at = each.stamp.base + each.block.count
                if not each.block.flags & block.Flag.HOLE:
                    found |= {each.stamp.base + number: each.block.message(number) for number in range(each.block.count)}
        return found


class Group:
    """A leader and a follower whose files have other bounds, and a dictionary."""

    def __init__(self) -> None:
        self.replicas = [Replica(segment_bytes=600), Replica(segment_bytes=1500)]
        self.core = SimpleNamespace(epoch=1)
        self.model: dict[bytes, tuple[int, block.Message]] = {}
        self.all: dict[int, block.Message] = {}
        self.position, self.us = 1, 1_000_000
        for each in self.replicas:
            each.open_part()
            each.channel()
        self.compaction = Compaction(self, roll_bytes=1)  # type: ignore[arg-type]

    @property
    def store(self) -> Any:
        return self.replicas[0].store

    async def request(self, kind: int, payload: bytes, force: bool = False) -> object:
        en.check(kind, payload)
        return self.apply(kind, payload)

    def apply(self, kind: int, payload: bytes) -> object:
        (answer, *others) = [each.apply(kind, payload, self.us) for each in self.replicas]
        assert others == [answer] * len(others)
        return answer

    def write(self, *messages: block.Message) -> None:
        base = self.store.state.parts[PART].end
        data = block.encode(messages, topic=TOPIC, part=1, writer=5, first=self.position)
        self.apply(en.BLOCK, en.encode_block(42, data))
        self.position += len(messages)
        for offset, message in enumerate(messages, base):
            read = self.all[offset] = message._replace(headers=list(message.headers))
            if message.key is not None:
                self.model[message.key] = offset, read

    def look(self) -> None:
        asyncio.run(self.compaction.look())

    def check(self, replica: Replica) -> None:
        found = replica.messages()
        assert found.items() <= self.all.items()
        replayed = {message.key: (offset, message) for offset, message in sorted(found.items()) if message.key is not None}
        for key, (offset, message) in self.model.items():
            last = replica.store.keys.last(PART, digest_of(key))
            if message.body:
                assert replayed[key] == (offset, message)
                assert last == (offset, False)
            else:  # it may be forgotten
                assert replayed.get(key, (offset, message)) == (offset, message)
                assert last in ((offset, True), None)
        assert {offset for offset, each in self.all.items() if each.key is None} <= found.keys()


def drawn(rng: random.Random) -> block.Message:
    key = rng.choice([*KEYS[:4], *KEYS[:4], KEYS[4], None])
    headers = [("h", b"v")] if rng.random() < 0.3 else []
    return block.Message(rng.choice((b"", b"x", b"body" * 9)), 1, key, headers, tag="t" if rng.random() < 0.2 else None)


@pytest.mark.parametrize("seed", range(12))
def test_the_last_message_of_each_key_stays_and_others_go_on_every_replica(seed: int) -> None:
    rng = random.Random(seed)
    group = Group()
    for _ in range(60):
        group.us += rng.randrange(20_000_000)
        match rng.choice(("write", "write", "write", "flush", "look", "compact", "restart")):
            case "write":
                group.write(*(drawn(rng) for _ in range(rng.randint(1, 6))))
            case "flush":
                rng.choice(group.replicas).store.flush()
            case "look":
                group.replicas[0].store.flush()
                group.compaction._seen.clear()
                group.look()
            case "compact":
                each = rng.choice(group.replicas)
                each.store.flush()
                each.compact()
            case _:
                at = rng.randrange(2)
                old = group.replicas[at]
                old.store.flush()
                group.replicas[at] = Replica(old.files, old.table, old.segment_bytes)
        for each in group.replicas:
            group.check(each)
    group.write(*(block.Message(b"end", 1, key) for key in KEYS))
    for _ in range(2):
        for each in group.replicas:
            each.store.flush()
        group.us += 1_000_000_000
        group.compaction._seen.clear()
        group.look()
        group.write(block.Message(b"more", 1))
    for each in group.replicas:
        each.store.flush()
        each.compact()
        group.check(each)
        last = group.all.keys() & {offset for offset, _ in group.model.values()}
        plain = {offset for offset, message in group.all.items() if message.key is None}
        assert each.messages().keys() <= last | plain | set(
            range(each.store.logs[PART].segments[-1].base, each.store.logs[PART].end)
        )
    keys = [{row: value for row, value in each.table.rows.items() if row[:1] not in b"\1\2"} for each in group.replicas]
    assert keys[0] == keys[1]


def test_a_tombstone_goes_after_its_time_and_its_key_is_forgotten() -> None:
    group = Group()
    group.write(block.Message(b"x", 1, b"a"), block.Message(b"", 1, b"a"), block.Message(b"y", 1, b"b"))
    group.store.flush()
    group.look()
    group.write(block.Message(b"z", 1, b"c"))
    group.store.flush()
    group.compaction._seen.clear()
    group.look()
    group.replicas[1].store.flush()
    group.replicas[1].compact()  # it has all of them in the file that is written
    group.write(block.Message(b"z", 1))
    for each in group.replicas:
        each.store.flush()
        each.compact()
        assert list(each.messages()) == [1, 2, 3, 4]
        assert each.store.keys.last(PART, digest_of(b"a")) == (1, True)
    group.us += (KEPT_S + 1) * 1_000_000
    group.apply(en.BEGIN, b"")  # the log's clock goes on
    group.look()
    for each in group.replicas:
        each.store.flush()
        each.compact()
        assert list(each.messages()) == [2, 3, 4]
        assert each.store.keys.last(PART, digest_of(b"a")) is None
    assert group.compaction.removed == 2


def test_a_part_with_parents_keeps_its_tombstones() -> None:
    group = Group()
    for each in group.replicas:
        each.open_part(2, parents=[1])
    child = en.part_id(TOPIC, 2)
    data = block.encode(
        [block.Message(b"x", 1, b"a"), block.Message(b"", 1, b"a")], topic=TOPIC, part=2, writer=5, first=1
    )  # fmt: skip
    group.apply(en.BLOCK, en.encode_block(42, data))
    group.store.flush()
    group.look()
    group.us += 10 * KEPT_S * 1_000_000
    group.apply(en.BLOCK, en.encode_block(42, block.encode([block.Message(b"y", 1)], topic=TOPIC, part=2, writer=5, first=3)))
    group.store.flush()
    group.look()
    group.replicas[0].compact()
    assert list(group.replicas[0].messages(child)) == [1, 2]


def test_a_part_with_parents_remembers_keys_that_retention_has_dropped() -> None:
    group, child = Group(), en.part_id(TOPIC, 2)
    replica = group.replicas[0]
    replica.open_part(2, parents=[1])
    for number in range(10):
        data = block.encode([block.Message(b"x" * 200, 1, b"%d" % number)], topic=TOPIC, part=2, writer=5, first=number + 1)
        replica.apply(en.BLOCK, en.encode_block(42, data))
    replica.store.flush()
    replica.apply(en.TRIM, en.encode_trim(child, 5))
    again = replica.reopened()
    assert again.store.keys.last(child, digest_of(b"0")) == (0, False)


def test_what_is_removed_counts_as_acknowledged_also_of_what_waits_and_of_dead_letters() -> None:
    group = Group()
    group.write(*(block.Message(b"x", 1, b"a") for _ in range(6)))
    settlement = en.Settlement(CHANNEL, PART, [(3, 4)], [en.Deferred(1, 5, 1)], [en.Dead(2, 16, 1)])
    group.apply(en.SETTLE, settlement.encode())
    assert group.apply(en.COMPACT, en.Compaction(PART, [(0, 3), (4, 5)]).encode()) == Done(True)
    for each in group.replicas:
        progress = each.store.state.progress[CHANNEL, PART]
        assert (progress.acks.floor, progress.waiting, progress.dead, progress.lost) == (5, {}, {}, 0)
        again = each.reopened()
        assert again.store.state.progress[CHANNEL, PART].acks.floor == 5
        assert again.store.state.parts[PART].flags & block.Flag.HOLE


@pytest.mark.parametrize("left", Left)
def test_a_crash_at_any_operation_loses_nothing(left: Left) -> None:
    class Dark(Exception):
        """The power goes."""

    class Fragile(MemoryFiles):
        dark_at = -1

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "operations" and value == self.dark_at:
                raise Dark

    def prepared() -> tuple[Replica, list[Any]]:
        rng, replica, position = random.Random(5), Replica(Fragile()), 1
        replica.open_part()
        for _ in range(12):
            found = [drawn(rng) for _ in range(4)]
            data = block.encode(found, topic=TOPIC, part=1, writer=5, first=position)
            replica.apply(en.BLOCK, en.encode_block(42, data))
            position += 4
            replica.store.flush()
        last = {message.key: offset for offset, message in replica.messages().items()}
        gone = [(at, at + 1) for at, message in replica.messages().items() if message.key and last[message.key] != at]
        replica.apply(en.COMPACT, en.Compaction(PART, joined(gone)).encode())
        replica.store.flush()
        return replica, list(replica.entries)

    reference, entries = prepared()
    begin = reference.files.operations
    closed = reference.store.logs[PART].segments[-1].base
    reference.compact()
    expected = reference.messages()
    for dark_at in range(begin + 1, reference.files.operations + 1):
        replica, _ = prepared()
        files = replica.files
        assert isinstance(files, Fragile)
        files.dark_at = dark_at
        with pytest.raises(Dark):
            replica.compact()
        rng = random.Random(dark_at)
        after = Replica(files.cut(left, rng), replica.table)
        after.store.apply(entries[after.store.flushed :])
        assert expected.items() <= after.messages().items()
        after.store.flush()
        after.compact()
        assert {at: each for at, each in after.messages().items() if at < closed} == {
            at: each for at, each in expected.items() if at < closed
        }
        assert not [name for name in after.files.names("parts/1-1") if not name.endswith(".seg")]


def test_a_dropped_part_and_a_trimmed_one_leave_no_rows() -> None:
    group = Group()
    for number in range(30):
        group.write(block.Message(b"x" * 100, 1, b"%d" % number))
    group.store.flush()
    replica = group.replicas[0]
    first = replica.store.logs[PART].segments[1].base
    replica.apply(en.TRIM, en.encode_trim(PART, first))
    replica.store.flush()
    assert sum(row[:1] == b"\3" for row in replica.table.rows) == 30 - first
    replica.apply(en.SEAL, en.encode_seal(PART, ()))
    replica.apply(en.DROP, en.encode_drop(PART))
    assert replica.store.keys.last(PART, digest_of(b"29")) is None
    replica.store.flush()
    assert not [row for row in replica.table.rows if row[:1] in b"\2\3"]


def test_cutting_keeps_offsets_and_joins_holes() -> None:
    rng = random.Random(2)
    for _ in range(100):
        stored, messages, base = list[Stored](), list[block.Message](), 10
        for _ in range(rng.randint(1, 4)):
            found = [drawn(rng) for _ in range(rng.randint(1, 5))]
            data = block.encode(found, topic=1, part=1, writer=5, first=1 + len(messages))
            stamp = block.Stamp(base + len(messages), 5 + len(messages), 42)
            whole = block.stamped(data, stamp)
            stored.append(Stored(*block.parse_stored(whole), whole))
            messages += found
        end = base + len(messages)
        low = rng.randrange(base, end)
        gone = joined((low, rng.randint(low, end)) for low in [rng.randrange(base, end) for _ in range(3)])
        once = list(cut(stored, gone))
        twice = list(cut(once, [(low, min(low + 2, end))]))
        for pieces in (once, twice):
            at, before = base, False
            for each in pieces:
                assert block.parse_stored(each.data)[0] == each.stamp
                is_hole = bool(each.block.flags & block.Flag.HOLE)
                assert (each.stamp.base, is_hole and before) == (at, False)
                if not is_hole:
                    assert [each.block.message(number) for number in range(each.block.count)] == (
                        messages[at - base : at - base + each.block.count]
                    )
                    assert each.block.first == at - base + 1
                at, before = at + each.block.count, is_hole
            assert at == end
        kept = [
            at
            for each in once
            if not each.block.flags & block.Flag.HOLE
            for at in range(each.stamp.base, each.stamp.base + each.block.count)
        ]
        assert kept == [at for at in range(base, end) if not any(low <= at < high for low, high in gone)]
        assert clipped(once, low, end)[0].stamp.base == low
    assert messages_of(stored[0], stored[0].stamp.base, stored[0].stamp.base + stored[0].block.count) is stored[0]


def test_writers_may_send_no_hole_and_a_damaged_one_is_found() -> None:
    data = block.hole(1, 2, 5)
    with pytest.raises(MalformedData):
        block.parse(data)
    whole = block.stamped(data, block.Stamp(7, 8, 0))
    stamp, found = block.parse_stored(whole)
    assert (stamp, found.count, found.flags) == ((7, 8, 0), 5, block.Flag.HOLE)
    for at in range(len(whole)):
        damaged = whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :]
        with pytest.raises(MalformedData):
            block.parse_stored(damaged)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x" * 11,
        en.Compaction(PART, [(3, 3)]).encode(),
        en.Compaction(PART, [(3, 5), (5, 6)]).encode(),
        en.Compaction(PART, [(0, 1)], [b"short"]).encode(),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedData):
        en.check(en.COMPACT, payload)
    group = Group()
    answer = group.apply(en.COMPACT, en.Compaction(PART, [(0, 1)]).encode())
    assert isinstance(answer, Done)
    assert not answer.ok
