"""A child that learns from its parent ends with the parent's values of the users that move, byte for byte, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterable

from cluster.replication.model import CLOCK, START, Entry, EntryKind, Position
from cluster.store.doubling.copied import HOLD_S, Record, follow_body, hold_body, note_body, position_body, rows_body
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step, fence_body
from pi.doubling import of_child
from pi.keys import uin_of
from pi.state import State
from pixiu.wire.inbox_operations import (
    CLEAR,
    DELETE,
    ENTRY_KIND,
    TRIM,
    U64,
    USER_DEVICE,
    AddDevice,
    Clears,
    Clock,
    Deletes,
    DropDevices,
    Fanout,
    Limits,
    Note,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    decode,
    encode,
)
from tests.pi.memory import HOUR, MemoryStore, Replica, at_us
from tests.support.effort import runs
from tests.support.for_each import for_each
from tests.support.pi import acknowledges, appends, message

SEEDS = runs("PIXIU_PI_SEEDS", local=8, ci=30)
DOUBLING = Doubling(99, 4, 3)
USERS = (1, 3, 5, 7, 9, 11)
"""Of partition 1 of 2; 3, 7 and 11 move to partition 3 of 4."""


class Partition(Replica):
    """A state and its log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []

    def append(self, kind: int, payload: bytes) -> list[list[int]]:
        entry = Entry(self.epoch, self.state.applied.counter + 1, kind, at_us(self.now_s), payload)
        self.log.append(entry)
        return self.state.apply([entry])[0]

    def apply(self, *operations: Operation) -> list[list[int]]:
        return self.append(ENTRY_KIND, encode(operations))

    def step(self, step: Step, body: bytes = b"") -> bool:
        body = body or (fence_body(self.record.fence) if step is Step.SPLIT else b"")
        ((done,),) = self.append(DOUBLING_KIND, Command(step, DOUBLING, body).encode())
        return bool(done)

    @property
    def record(self) -> Record:
        return self.state.copying.record

    def rows(self) -> dict[bytes, bytes]:
        """All values, as they would be stored."""
        found = dict(self.store.values)  # type: ignore[attr-defined]
        for key, value in self.state.unstored().items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        return found

    def users(self, moved: bool) -> dict[bytes, bytes]:
        return {key: value for key, value in self.rows().items() if (uin := uin_of(key)) is not None and (uin % 4 == 3) is moved}

    def replay(self) -> None:
        """The process was killed: the log brings the state forward again."""
        self.restart()
        self.state.apply(self.log[self.state.applied.counter :])


class World:
    """A parent with traffic, and its child."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parent, self.child = Partition(), Partition()
        self.child.epoch = 7
        self.number = 0

    def traffic(self, times: int, users: Iterable[int] = USERS) -> None:
        users = tuple(users)
        choice = self.random.choice
        for _ in range(times):
            self.parent.now_s += self.random.choice((0.1, 1, 60, HOUR))
            uin, lane = choice(users), choice((0, 1))
            self.number += 1
            msg_id = message(choice((self.number, max(self.number - 3, 1))), lane)
            writer = Writer(choice((1, 2)), choice((1, 2, 3)), self.parent.epoch)
            session = self.parent.state.inboxes.user(uin).sessions
            last = self.parent.state.inboxes.head(uin, lane).last
            operation: Operation = choice((
                appends(self.parent.epoch, (msg_id, uin), (msg_id + (1 << 20), choice(users)), generation=writer.generation),
                Fanout(writer, msg_id, b"".join(U64.pack(each) for each in users)),
                acknowledges(uin, session, self.random.randint(0, last), lane=lane),
                OpenSessions(USER_DEVICE.pack(uin, 0)),
                AddDevice(uin, b"device%d" % choice((1, 2))),
                DropDevices(USER_DEVICE.pack(uin, choice((0, 1)))),
                Trims(TRIM.pack(uin, lane, self.random.randint(0, last + 1))),
                Deletes(DELETE.pack(uin, lane, self.random.randint(1, last + 1), last + 1)),
                Note(uin, choice((0, 2)), choice((1, 2, 3)), choice((b"", b"short", bytes(5000)))),
                Clears(b"".join(CLEAR.pack(each, choice((2, 3))) for each in (uin, choice(users)))),
                Clock(Limits(cap=5, dedupe_s=2 * HOUR, age_s=9 * HOUR, device_age_s=3 * HOUR)),
            ))  # fmt: skip
            self.parent.apply(operation)
        if self.random.random() < 0.3:
            self.parent.flush()
        if self.random.random() < 0.3:
            self.parent.epoch += 1
        if self.random.random() < 0.05:
            self.parent.append(int(EntryKind.SET_CLOCK), CLOCK.pack(at_us(self.parent.now_s - HOUR)))
            self.parent.now_s -= HOUR

    def hold(self) -> None:
        until = self.parent.state.inboxes.now_s + HOLD_S
        assert self.parent.step(Step.HOLD, hold_body(until))

    def snapshot(self, *, to_the_end: bool = True) -> None:
        """The child takes all that moves anew."""
        self.hold()
        position = self.parent.state.applied
        assert self.child.step(Step.RESET, position_body(position))
        rows = [
            (key, value) for key, value in sorted(self.parent.rows().items())
            if (uin := uin_of(key)) is None or DOUBLING.moves(uin)
        ]  # fmt: skip
        while not self.child.record.emptied:
            assert self.child.step(Step.DROP)
        self.maybe_killed()
        middle = self.random.randrange(len(rows) + 1)
        assert self.child.step(Step.ROWS, rows_body(position, rows[:middle], last=False))
        self.maybe_killed()
        if to_the_end:
            assert self.child.step(Step.ROWS, rows_body(position, rows[middle:], last=True))
            assert self.child.record.learned == position

    def follow(self) -> None:
        """The child takes what its parent has written since; again, where its sweeps went on."""
        while self.child.record.learned.counter < len(self.parent.log) and not self.child.record.whole:
            learned = self.child.record.learned.counter
            if not learned:
                self.snapshot()
                continue
            entries = self.parent.log[max(learned - self.random.randrange(3), 0) : learned + self.random.randint(1, 5)]
            self.child.step(Step.FOLLOW, follow_body(entries, DOUBLING, of_child))
            self.child.apply(Clock(Limits(cap=1)))  # its own leader's: nothing to a child that learns
            self.maybe_killed()

    def maybe_killed(self) -> None:
        if self.random.random() < 0.1:
            self.child.flush()
        if self.random.random() < 0.1:
            self.child.replay()


@for_each("seed", range(SEEDS))
def test_a_child_has_what_its_parent_had_at_the_cut(seed: int) -> None:
    world = World(seed)
    parent, child = world.parent, world.child
    world.traffic(40)
    assert child.step(Step.BEGIN)
    assert not child.step(Step.BEGIN)
    if seed % 3 == 0:
        world.snapshot(to_the_end=False)
    world.snapshot()
    for _ in range(5):
        world.traffic(8)
        world.follow()
    world.traffic(8)
    if seed % 2:
        assert not child.step(Step.OPEN), "it has not learned the cut"
    world.hold()
    assert parent.step(Step.SPLIT)
    cut = parent.users(moved=True)
    world.traffic(8, (1, 5, 9))
    assert not child.step(Step.OPEN)
    world.follow()
    assert child.record.whole
    assert child.users(moved=True) == cut
    assert not child.users(moved=False)
    assert child.state.inboxes.limits == parent.state.inboxes.limits
    assert child.step(Step.OPEN)
    child.now_s = parent.now_s
    child.apply(Clock(Limits()))
    assert child.state.inboxes.limits == Limits()
    # The parent's sweeps go on, and what moved is as it was until it goes.
    for _ in range(3):
        parent.now_s += 20 * HOUR
        parent.apply(Clock(Limits(cap=5, dedupe_s=2 * HOUR, age_s=9 * HOUR, device_age_s=3 * HOUR)))
    assert parent.users(moved=True) == cut
    assert parent.step(Step.NOTE, note_body(5, len(cut), 100))
    stays = parent.users(moved=False)
    twin = Replica(MemoryStore())
    while parent.record.phase is not Phase.NONE:
        assert parent.step(Step.CLEAN)
        if world.random.random() < 0.2:
            parent.flush()
        if world.random.random() < 0.2:
            parent.replay()
    assert not parent.users(moved=True)
    assert parent.users(moved=False) == stays
    assert not parent.step(Step.CLEAN)
    assert child.step(Step.END)
    assert (child.record.phase, child.record.partitions) == (Phase.NONE, 4)
    twin.state = State(twin.store, max_heads=100, max_users=100)
    twin.state.apply(parent.log)
    assert dict(twin.state.freeze()).items() >= parent.rows().items(), "another replica has the same"


def test_a_child_learns_again_when_its_parents_sweeps_went_on() -> None:
    world = World(1)
    world.traffic(20)
    assert world.child.step(Step.BEGIN)
    world.snapshot()
    world.parent.now_s += HOLD_S + 1
    world.parent.apply(Clock(Limits()))
    entries = world.parent.log[world.child.record.learned.counter :]
    assert world.child.step(Step.FOLLOW, follow_body(entries, DOUBLING, of_child))
    assert world.child.record.learned == START
    assert not world.child.step(Step.FOLLOW, follow_body(entries, DOUBLING, of_child))


def test_entries_of_another_doubling_or_of_an_older_snapshot_do_nothing() -> None:
    world = World(2)
    world.traffic(20)
    child = world.child
    assert child.step(Step.BEGIN)
    world.snapshot()
    other = Command(Step.RESET, Doubling(98, 4, 3), position_body(START)).encode()
    assert child.append(DOUBLING_KIND, other) == [[0]]
    assert not child.step(Step.ROWS, rows_body(Position(1, 1), [], last=True))
    before = child.record.learned
    world.traffic(3)
    gap = world.parent.log[before.counter + 1 :]
    child.step(Step.FOLLOW, follow_body(gap, DOUBLING, of_child))
    assert child.record.learned == before
    assert child.append(DOUBLING_KIND, b"\xff") == []
    assert child.state.damaged_entries == 1


def test_a_parent_is_split_once_and_a_partition_with_a_past_is_nobodys_child() -> None:
    parent = Partition()
    assert parent.step(Step.SPLIT)
    assert not parent.step(Step.SPLIT)
    assert not parent.step(Step.BEGIN)
    while parent.record.phase is not Phase.NONE:
        assert parent.step(Step.CLEAN)
    assert not parent.step(Step.SPLIT)
    assert parent.append(DOUBLING_KIND, Command(Step.BEGIN, Doubling(100, 8, 5)).encode()) == [[0]]
    assert parent.append(DOUBLING_KIND, Command(Step.SPLIT, Doubling(100, 8, 5), fence_body(0)).encode()) == [[1]]
    assert parent.record.partitions == 8


def test_a_split_from_before_it_was_taken_back_does_nothing_on_either_side() -> None:
    world = World(3)
    world.traffic(20)
    parent, child = world.parent, world.child
    assert child.step(Step.BEGIN)
    world.snapshot()
    assert parent.step(Step.TAKE_BACK)
    fence = parent.record.fence
    assert fence == parent.state.applied.counter
    assert not parent.step(Step.SPLIT, fence_body(0))
    world.follow()
    assert (child.record.fence, child.record.split_at, child.record.whole) == (fence, 0, False)
    world.snapshot()
    assert child.record.fence == fence
    assert parent.step(Step.SPLIT)
    world.follow()
    assert child.record.whole
    assert child.step(Step.OPEN)
    assert not parent.step(Step.TAKE_BACK), "it is split"


def test_what_of_an_entry_concerns_a_child() -> None:
    writer = Writer(1, 1, 1)
    told = encode([
        appends(1, (message(1), 3), (message(2), 5)), Fanout(writer, message(3), U64.pack(1) + U64.pack(7)), AddDevice(5, b"x"),
        AddDevice(7, b"y"), acknowledges(1, 1, 1), Clock(Limits()), OpenSessions(b""),
    ])  # fmt: skip
    assert decode(of_child(ENTRY_KIND, told, DOUBLING)) == [
        appends(1, (message(1), 3)), Fanout(writer, message(3), U64.pack(7)), AddDevice(7, b"y"), Clock(Limits()),
    ]  # fmt: skip
    nothing = encode([appends(1, (message(1), 5))])
    assert decode(of_child(ENTRY_KIND, nothing, DOUBLING)) == [appends(1)], "which of a writer's streams is the newest"
    assert of_child(ENTRY_KIND, b"\xff", DOUBLING) == b"\xff"


def test_a_record_is_stored_as_it_is() -> None:
    record = Record(
        Phase.CLEANING, DOUBLING, 6, 11, Position(2, 3), Position(4, 5), True, 7, 8, 9, 10, b"place"
    )  # fmt: skip
    assert Record.decode(record.encode()) == record
