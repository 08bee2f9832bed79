"""Entries in chunks do what entries with a value and an index each did: against dicts, for random operations."""

from __future__ import annotations

import random

import pytest

from cluster.replication.model import Entry
from pi.inboxes.chunk import ENTRY_BYTES, Chunk
from pi.inboxes.unwritten import Store
from pi.keys import CHUNK_ENTRIES, chunk_key, seal
from pi.state import State
from pi.store.digest import Digest
from pixiu.errors import StateDamaged
from pixiu.wire.inbox_operations import (
    DELETE,
    ENTRY_KIND,
    TRIM,
    USER_DEVICE,
    Clock,
    Deletes,
    Limits,
    OpenSessions,
    Operation,
    Trims,
    encode,
)
from tests.pi.memory import HOUR, START_S, MemoryStore, Replica, at_us, entries_in
from tests.support.effort import runs
from tests.support.for_each import for_each
from tests.support.pi import acknowledges, appends, message

SEEDS = runs("PIXIU_PI_SEEDS", local=10, ci=30)
UINS = (7, 8, 9)
LIMITS = Limits(dedupe_s=3 * HOUR, age_s=40 * HOUR, device_age_s=900 * HOUR)


class Reference:
    """One inbox: an entry is a dict's item, and so is its index."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, int]] = {}
        self.index: dict[int, int] = {}
        self.last = self.floor = self.base = 0
        self.deleted: set[int] = set()

    def append(self, msg_id: int, now_s: int) -> int:
        if msg_id in self.index:
            return self.index[msg_id]
        self.last += 1
        self.entries[self.last], self.index[msg_id] = (msg_id, now_s), self.last
        return self.last

    def move(self, floor: int, base: int, now_s: int) -> None:
        """What the state did: it may not have taken anything too early."""
        assert self.floor <= floor <= self.last
        assert self.base <= base <= floor
        for seq in range(self.base + 1, base + 1):
            msg_id, at_s = self.entries.pop(seq)
            assert at_s <= now_s - LIMITS.dedupe_s
            del self.index[msg_id]
        self.floor, self.base = floor, base

    def shown(self) -> list[tuple[int, int]]:
        return [(seq, msg_id) for seq, (msg_id, _) in self.entries.items() if seq > self.floor and seq not in self.deleted]


class Run:
    """One seed: a state that is written, evicted and opened again at any time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.references = {uin: Reference() for uin in UINS}
        self.store: Store = MemoryStore()
        self.state = State(self.store, max_heads=2, max_users=2)
        self.log: list[Entry] = []
        self.now_s = START_S
        self.sent: list[int] = []
        self.late: list[int] = []
        self.counters = [0, 0, 0]

    def message(self) -> int:
        """A new one, one that was overtaken by others, or one that was sent before, however long ago."""
        chance = self.chance
        kind = chance.random()
        if self.sent and kind < 0.15:
            return chance.choice(self.sent if kind < 0.05 else self.sent[-40:])
        if self.late and kind < 0.3:
            found = self.late.pop(chance.randrange(len(self.late)))
        else:
            found = self._next()
            if chance.random() < 0.1:
                self.late.append(found)
                found = self._next()
        self.sent.append(found)
        return found

    def _next(self) -> int:
        partition = self.chance.choice((0, 0, 0, 0, 1, 2))
        self.counters[partition] += self.chance.randrange(1, 4)
        return partition << 56 | message(self.counters[partition])

    def operation(self) -> tuple[Operation, list[int] | None]:
        """Something to do, and its results where the reference says them."""
        chance, uin, kind = self.chance, self.chance.choice(UINS), self.chance.random()
        reference = self.references[uin]
        if kind < 0.55:
            pairs = [(self.message(), chance.choice((uin, chance.choice(UINS)))) for _ in range(chance.choice((1, 3, 20, 40)))]
            return appends(1, *pairs), [self.references[whose].append(msg_id, self.now_s) for msg_id, whose in pairs]
        if kind < 0.75:
            return acknowledges(uin, 1, chance.randrange(reference.last + 1), chance.getrandbits(3) if kind < 0.6 else 0), None
        if kind < 0.8:
            return Trims(TRIM.pack(uin, 1, chance.randrange(reference.last + 2))), None
        if kind < 0.88:
            first = chance.randrange(1, reference.last + 2)
            last = first + chance.choice((0, 2, 50))
            taken = {seq for seq in range(first, last + 1) if reference.floor < seq <= reference.last} - reference.deleted
            reference.deleted |= taken
            return Deletes(DELETE.pack(uin, 1, first, last)), [len(taken)]
        return Clock(LIMITS), None

    def step(self) -> None:
        self.now_s += self.chance.choice((0, 0, 60, HOUR // 2, 2 * HOUR))
        operation, wanted = self.operation()
        entry = Entry(1, len(self.log) + 1, ENTRY_KIND, at_us(self.now_s), encode([operation]))
        self.log.append(entry)
        ((found,),) = self.state.apply([entry])
        assert wanted is None or found == wanted
        for uin, reference in self.references.items():
            head = self.state.inboxes.head(uin, 1)
            assert head.last == reference.last
            reference.move(head.floor, head.base, self.now_s)

    def look(self) -> None:
        """At everything that can be read, and everything that is stored."""
        chance = self.chance
        for uin, reference in self.references.items():
            shown, seq = reference.shown(), chance.randrange(1, reference.last + 3)
            assert self.state.peek(uin, 1, 0, 1000).entries == shown
            assert self.state.peek(uin, 1, seq, 9).entries == [each for each in shown if each[0] > seq][:9]
            assert self.state.peek(uin, 1, 0, 9, seq).entries == [each for each in shown[::-1] if each[0] < seq][:9]
            for msg_id in chance.sample(self.sent, min(len(self.sent), 9)):
                assert self.state.inboxes.number_of(uin, 1, msg_id) == reference.index.get(msg_id, 0)

    def write(self) -> None:
        """A transaction, or one that fails; or a process that ends before it, or after."""
        fate = self.chance.random()
        changes = self.state.freeze()
        if fate < 0.2:
            self.state.table.refused()
            return
        if fate < 0.8:
            self.store.write(changes)
        if fate < 0.6:
            self.state.table.thawed()
        else:
            self.state = State(self.store, max_heads=2, max_users=2)
            self.state.apply(self.log[self.state.applied.counter :])

    def stored(self) -> dict[bytes, bytes]:
        self.store.write(self.state.freeze())
        self.state.table.thawed()
        return dict(self.store.scan(b"", b"\xff"))


@pytest.mark.sim
@for_each("seed", range(SEEDS))
def test_chunks_answer_as_a_dict_of_entries_and_an_index_would(seed: int) -> None:
    run = Run(seed)
    opened = Entry(1, 1, ENTRY_KIND, at_us(START_S), encode([OpenSessions(b"".join(USER_DEVICE.pack(uin, 0) for uin in UINS))]))
    run.log.append(opened)
    run.state.apply([opened])
    for number in range(250):
        run.step()
        if number % 5 == 0 and run.sent:
            run.look()
        if run.chance.random() < 0.1:
            run.write()
    values = run.stored()
    wanted = {(uin, 1, seq): entry for uin, each in run.references.items() for seq, entry in each.entries.items()}
    assert entries_in(values) == wanted
    assert max(each.last for each in run.references.values()) > 5 * CHUNK_ENTRIES
    assert min(each.base for each in run.references.values()) > CHUNK_ENTRIES
    other = MemoryStore()
    state = State(other)
    state.apply(run.log)
    other.write(state.freeze())
    assert other.values == values


class CountingStore(MemoryStore):
    """Counts look-ups of chunks."""

    found = 0

    def get(self, key: bytes) -> bytes | None:
        self.found += key[:1] == b"K"
        return super().get(key)


def test_a_message_that_was_overtaken_is_searched_as_far_back_as_it_was_overtaken() -> None:
    store = CountingStore()
    replica = Replica(store)
    for begin in range(0, 100 * CHUNK_ENTRIES, CHUNK_ENTRIES):
        numbers = [number for number in range(begin, begin + CHUNK_ENTRIES) if number not in (95 * CHUNK_ENTRIES, 7)]
        replica.apply(appends(1, *((message(number + 1), 7) for number in numbers)))
    replica.flush()
    replica.restart()
    last = replica.state.inboxes.head(7, 1).last
    for number, most in ((95 * CHUNK_ENTRIES + 1, 7), (8, 101)):
        before = store.found
        assert replica.apply(appends(1, (message(number), 7))) == [[last + 1]]
        assert store.found - before <= most
        last += 1
    before = store.found
    assert replica.apply(appends(1, (message(99 * CHUNK_ENTRIES + 1), 7))) == [[99 * CHUNK_ENTRIES - 1]], "a repeat"
    assert store.found - before <= 2


# --- the chunk itself


def chunk_of(first: int, *msg_ids: int) -> Chunk:
    chunk = Chunk(first)
    for msg_id in msg_ids:
        chunk.append(msg_id, 5)
    return chunk


@pytest.mark.parametrize("first", [CHUNK_ENTRIES + 1, CHUNK_ENTRIES + 9, 2 * CHUNK_ENTRIES])
def test_a_chunk_is_decoded_as_it_was(first: int) -> None:
    chunk = chunk_of(first, *range(10, 10 + 2 * CHUNK_ENTRIES - first + 1))
    chunk.before = {3: 1 << 48, 0: 0}
    key = chunk_key(7, 1, first)
    found = Chunk.decode(2 * CHUNK_ENTRIES, key, chunk.encode(key))
    assert (found.first, found.last, found.number) == (first, 2 * CHUNK_ENTRIES, 1)
    assert (list(found), found.before, found.damage) == (list(chunk), chunk.before, "")
    assert found.at(2 * CHUNK_ENTRIES) == (10 + 2 * CHUNK_ENTRIES - first, 5)
    for outside in (first - 1, 2 * CHUNK_ENTRIES + 1):
        with pytest.raises(IndexError):
            found.at(outside)


def test_a_msgid_is_found_where_an_entry_begins_and_nowhere_else() -> None:
    times = 0x0102_0304
    chunk = Chunk(1)
    chunk.append(0x0506_0708_0000_0000, times)
    chunk.append(0x090A_0B0C, 0)
    across = int.from_bytes(bytes(chunk.entries[4:12]), "little")
    assert chunk.find(across) == 0
    chunk.append(across, 0)
    assert [chunk.find(msg_id) for msg_id in (0x0506_0708_0000_0000, 0x090A_0B0C, across, 1)] == [1, 2, 3, 0]
    chunk.cut(2)
    assert (chunk.first, chunk.last, chunk.find(across), chunk.find(0x090A_0B0C)) == (3, 3, 3, 0)


def test_what_is_broken_stays_broken_with_what_comes_behind_it() -> None:
    key = chunk_key(7, 1, 1)
    value = bytearray(chunk_of(1, 5, 6).encode(key))
    value[-1] ^= 1
    for _ in range(3):
        chunk = Chunk.decode(2, key, bytes(value))
        assert "entries 1 to" in chunk.damage
        for look in (lambda each=chunk: each.at(1), lambda each=chunk: each.find(5), lambda each=chunk: list(each)):
            with pytest.raises(StateDamaged, match="entries 1 to"):
                look()
        chunk.append(7, 5)
        value = bytearray(chunk.encode(key))
    assert len(value) == 2 + 5 * ENTRY_BYTES + 4


def test_digests_see_every_entry() -> None:
    key = chunk_key(7, 1, 1)
    values = [chunk_of(1, 5, 6).encode(key), chunk_of(1, 5, 7).encode(key), chunk_of(2, 5, 6).encode(key), seal(key, b"\0\0")]
    sums = []
    for value in values:
        digest = Digest()
        digest.add([(key, value)])
        sums.append(digest.total)
    assert len(set(sums)) == 4
