"""A sink's tasks against the state of a group: killed, repeated, two at a time, while parts are split and merged. No Java."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator, Sequence

import pytest

from cluster.replication.model import Entry
from cluster.topics import entries as en
from pipeline.topics.epochs import MAX_EPOCH, MAX_ROWS, Epoch, Mark, Outgoing, Row, Stored, writer_of
from pixiu.errors import Gone, InvalidArgument
from pixiu.placement.slots import SLOTS, Lineage, Part, Range, slot_of
from pixiu.wire.block import Stamp, parse
from tests.support.for_each import for_each
from topic.state.parts import Appended, Verdict
from topic.state.state import Sealed, State

TOPIC = 7
STEP = SLOTS // 8


class Group:
    """One group with all parts of a topic, and the bodies that it has by part."""

    def __init__(self, *bounds: int) -> None:
        cuts = [0, *bounds, SLOTS]
        self.bodies: dict[int, list[tuple[int, bytes]]] = {}
        self.state = State(self)
        self.lineage = Lineage.new([Range(low, high, 0) for low, high in itertools.pairwise(cuts)])
        self._counter = itertools.count(1)
        self._apply(en.TOPIC, en.TopicSettings(TOPIC, "orders").encode())
        self._open([])

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        found = parse(block)
        rows = self.bodies.setdefault(en.number_of(part), [])
        assert len(rows) == stamp.base
        rows += [(message.slot, message.body) for message in map(found.message, range(count))]

    def trim(self, part: int, first: int) -> None:
        raise AssertionError("nothing is trimmed here")

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        raise AssertionError("nothing is compacted here")

    def drop(self, part: int) -> None:
        raise AssertionError("nothing is dropped here")

    def _apply(self, kind: int, payload: bytes) -> object:
        return self.state.apply(Entry(1, next(self._counter), kind, 0, payload))

    def write(self, block: bytes) -> Appended:
        found = self._apply(en.BLOCK, en.encode_block(9, block))
        assert isinstance(found, Appended)
        return found

    def _open(self, seals: Sequence[object]) -> None:
        """Open the parts that are not there yet, with what their parents' seals had."""
        for part in self.lineage.open_parts():
            if en.part_id(TOPIC, part.number) not in self.state.parts:
                parents = [seal for seal in seals if isinstance(seal, Sealed) and en.number_of(seal.part) in part.parents]
                writers = [writer for seal in parents for writer in seal.writers]
                opening = en.Opening(en.part_id(TOPIC, part.number), part.low, part.high, part.parents, writers)
                self._apply(en.OPEN, opening.encode())

    def resize(self, rng: random.Random) -> None:
        parts = self.lineage.open_parts()
        at = rng.randrange(len(parts))
        chosen = parts[at : at + rng.randint(1, 2)]
        low, high = chosen[0].low // STEP, chosen[-1].high // STEP
        inner = sorted(rng.sample(range(low + 1, high), min(rng.randint(0, 2), high - low - 1)))
        cuts = [bound * STEP for bound in (low, *inner, high)]
        sealed = [part.number for part in chosen]
        answers = [self._apply(en.SEAL, en.encode_seal(en.part_id(TOPIC, number), ())) for number in sealed]
        self.lineage = self.lineage.resized(sealed, [Range(first, last, 0) for first, last in itertools.pairwise(cuts)])
        self._open(answers)

    def stored(self, writer: int) -> dict[int, Stored]:
        found = {}
        for number in (part.number for part in self.lineage.open_parts()):
            part = self.state.parts[en.part_id(TOPIC, number)]
            known = part.writers.get(writer)
            inherited = {before: progress for (before, each), (_, progress) in part.inherited.items() if each == writer}
            found[number] = Stored(known.position if known else 0, known.progress if known else 0, inherited)
        return found

    def all_bodies(self) -> list[bytes]:
        return [body for rows in self.bodies.values() for _, body in rows]


def task(group: Group, epoch: Epoch, batches: Sequence[Sequence[Row]]) -> Iterator[None]:
    """A task as the shell runs it; it may be left after every block, and another one may run in between."""
    for rows in batches:
        while True:
            assert epoch.learn(group.lineage.parts.values(), group.stored(WRITER))
            yield
            if (yield from sent(group, epoch.blocks(rows))):
                break
        epoch.confirmed()
    epoch.end()


def sent(group: Group, blocks: Sequence[Outgoing]) -> Generator[None, None, bool]:
    whole = True
    for each in blocks:
        whole = group.write(each.block).verdict is Verdict.STORED and whole
        yield
    return whole


WRITER = writer_of("q", 3)


def rows_of(rng: random.Random, epoch: int) -> list[list[Row]]:
    """Some batches of rows: with keys, slots or neither."""
    count = itertools.count()

    def row() -> Row:
        body = b"%d.%d" % (epoch, next(count))
        match rng.randrange(3):
            case 0:
                return Row(body * rng.choice((1, 1, 3000)), key=b"%d" % rng.randrange(20))
            case 1:
                return Row(body, slot=rng.randrange(8) * STEP)
            case _:
                return Row(body)

    return [[row() for _ in range(rng.randrange(30))] for _ in range(rng.randrange(5))]


@for_each("seed", range(60))
def test_each_row_is_stored_once_and_in_order(seed: int) -> None:
    rng, group = random.Random(seed), Group()
    everything: list[Row] = []
    for number in range(6):
        batches = rows_of(rng, number)
        everything += [row for rows in batches for row in rows]
        alive = [task(group, Epoch(TOPIC, WRITER, number), batches)]
        done = 0
        while not done or rng.random() < 0.3:  # repeated although it was complete: its commit was lost
            if not alive or rng.random() < 0.03:
                alive.append(task(group, Epoch(TOPIC, WRITER, number), batches))
            if rng.random() < 0.05 and len(group.lineage.parts) < 40:
                group.resize(rng)
            if rng.random() < 0.03:
                alive.pop(rng.randrange(len(alive)))
                continue
            running = rng.choice(alive)
            try:
                next(running)
            except StopIteration:
                alive.remove(running)
                done += 1
    assert sorted(group.all_bodies()) == sorted(row.body for row in everything)
    order = {row.body: at for at, row in enumerate(everything)}
    for rows in group.bodies.values():
        places = [order[body] for _, body in rows]
        assert places == sorted(places)


def run(group: Group, epoch: int, rows: Sequence[Row], stop_after: int = -1) -> None:
    steps = task(group, Epoch(TOPIC, WRITER, epoch), [rows])
    for number, _ in enumerate(steps):
        if number == stop_after:
            return


def plain(count: int, size: int = 50_000) -> list[Row]:
    return [Row(b"%05d" % number * (size // 5), slot=number % 8 * STEP) for number in range(count)]


def test_rows_that_differ_when_they_are_computed_again_are_noticed() -> None:
    group, rows = Group(), plain(20)
    run(group, 0, rows, stop_after=2)
    stored = len(group.all_bodies())
    assert 0 < stored < 20
    with pytest.raises(InvalidArgument, match=f"its first {stored} rows are not those that were written before"):
        run(group, 0, [rows[1], rows[0], *rows[2:]])
    with pytest.raises(InvalidArgument, match=f"{stored} rows were written, now it has {stored - 1}"):
        run(group, 0, rows[: stored - 1])
    run(group, 0, rows)
    assert group.all_bodies() == [row.body for row in rows]
    run(group, 1, rows[:3])
    run(group, 0, rows[:3])
    assert len(group.all_bodies()) == 23, "an epoch before one that is stored is"


def test_what_one_of_two_parents_had_is_not_taken_for_the_others() -> None:
    """The greatest progress of the parents would skip rows that only one of them got."""
    group = Group(SLOTS // 2)
    rows = [Row(b"low", slot=0), Row(b"high", slot=SLOTS - 1)]
    epoch = Epoch(TOPIC, WRITER, 0)
    assert epoch.learn(group.lineage.parts.values(), group.stored(WRITER))
    low, high = epoch.blocks(rows)
    assert (low.part, high.part) == (1, 2)
    group.write(high.block)
    stored = {3: Stored(0, 0, {2: parse(high.block).progress})}
    merged = Part(3, 0, SLOTS, 0, (1, 2))
    parts = [part._replace(sealed=True) for part in group.lineage.parts.values()]
    again = Epoch(TOPIC, WRITER, 0)
    assert again.learn([*parts, merged], stored)
    (left,) = again.blocks(rows)
    assert parse(left.block).message(0).body == b"low"
    assert again.learn([merged], stored), "part 2 was dropped"
    with pytest.raises(Gone, match="part 2 was dropped by retention, and rows of epoch 0 are in it"):
        again.blocks(rows)
    later = Epoch(TOPIC, WRITER, 1)
    assert later.learn([merged], stored)
    assert len(later.blocks(rows)) == 1, "an epoch that no part before has is written whole"


def test_a_topic_that_is_being_resized_is_asked_again() -> None:
    epoch = Epoch(TOPIC, WRITER, 0)
    parts = [Part(1, 0, SLOTS, 0, (), True), Part(2, 0, STEP, 0, (1,))]
    assert not epoch.learn(parts, {2: Stored(0, 0, {})}), "slots without a part"
    assert not epoch.learn([*parts, Part(3, STEP, SLOTS, 0, (1,))], {2: Stored(0, 0, {})}), "the group does not hold it yet"
    assert epoch.learn([*parts, Part(3, STEP, SLOTS, 0, (1,))], {2: Stored(0, 0, {}), 3: Stored(0, 0, {})})


def test_marks_and_slots() -> None:
    mark = Mark(MAX_EPOCH, MAX_ROWS, 255)
    assert Mark.of(mark.number) == mark
    assert mark.number < 1 << 64
    assert Mark.of(0).epoch == -1
    assert Mark(0, MAX_ROWS, 255).number < Mark(1, 1, 0).number
    assert writer_of("q", 1) != writer_of("q", 2)
    epoch = Epoch(TOPIC, WRITER, 0)
    assert epoch.slot(Row(b"", key=b"k", slot=5), 0) == 5
    assert epoch.slot(Row(b"", key=b"k"), 0) == slot_of(b"k")
    assert epoch.slot(Row(b""), 0) == epoch.slot(Row(b""), 999) != epoch.slot(Row(b""), 1000)
    with pytest.raises(InvalidArgument, match="begin with another checkpointLocation or query"):
        Epoch(TOPIC, WRITER, MAX_EPOCH + 1)
