"""What a Xiu decides: numbers, repeats, time, trimming; and that every replica decides the same."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.replication.model import CLOCK, Entry, EntryKind
from pixiu.ids import msg_id, msg_partition, msg_sequence, msg_type, snowflake
from pixiu.wire.record import Flag
from tests.support.effort import runs
from tests.xiu.parts import NOW_MS, NOW_US, MemoryStore, mail, store
from xiu.records.block import bounds
from xiu.state.keys import DERIVED, SNOWFLAKES
from xiu.state.retention import trim_to
from xiu.state.state import (
    DAY_US,
    LAST_COUNTER,
    MARK_BYTES,
    Decision,
    Head,
    Ruling,
    State,
    Verdict,
    XiuKind,
    trim_entry,
)

PARTITION = 3


class Replica:
    """A state over a store in memory."""

    def __init__(self, store_: MemoryStore | None = None) -> None:
        self.store = store_ or MemoryStore()
        self.state = State(PARTITION, self.store, self.store.head)

    def apply(self, *entries: Entry) -> list[Decision]:
        decisions = [self.state.decide(entry) for entry in entries]
        self.store.write(decisions)
        for decision in decisions:
            self.state.written(decision)
        return decisions


def noop(counter: int, epoch: int) -> Entry:
    return Entry(epoch, counter, int(EntryKind.NOOP), 0, b"")


def first(epoch: int, counter: int = 1) -> int:
    return epoch << 32 | counter


def test_sequences_are_dense_and_hold_the_epoch() -> None:
    one, two, _, three = Replica().apply(store(1, mail(1), mail(2)), store(2, mail(3)), noop(3, 5), store(4, mail(4), epoch=5))
    assert one.rulings == [Ruling(0, 2, Verdict.STORED, first(1))]
    assert two.rulings == [Ruling(0, 1, Verdict.STORED, first(1, 3))]
    assert three.rulings == [Ruling(0, 1, Verdict.STORED, first(5))]


def test_a_msgid_names_partition_type_and_sequence() -> None:
    made = msg_id(127, 255, first(0xFFFF, 7))
    assert made < 1 << 63
    assert (msg_partition(made), msg_type(made), msg_sequence(made)) == (127, 255, first(0xFFFF, 7))


def test_a_repeat_gets_the_same_msgid_and_another_crc_is_refused() -> None:
    replica = Replica()
    replica.apply(store(1, mail(1, type_=5), mail(2)))
    (again,) = replica.apply(store(2, mail(3), mail(1, type_=5), mail(2, b"other"), mail(4)))
    assert again.rulings == [
        Ruling(0, 1, Verdict.STORED, first(1, 3)),
        Ruling(1, 1, Verdict.SAME, msg_id(PARTITION, 5, first(1))),
        Ruling(2, 1, Verdict.ID_REUSED, 0),
        Ruling(3, 1, Verdict.STORED, first(1, 4)),
    ]
    assert again.block is not None
    assert again.block.records == mail(3) + mail(4)


def test_a_repeat_within_a_batch_and_of_what_is_not_written_yet() -> None:
    state = Replica().state
    state.decide(store(1, mail(1)))
    decision = state.decide(store(2, mail(2), mail(2), mail(1)))
    assert [ruling.verdict for ruling in decision.rulings] == [Verdict.STORED, Verdict.SAME, Verdict.SAME]


def test_what_was_decided_and_cut_off_is_forgotten() -> None:
    replica = Replica()
    replica.apply(store(1, mail(1)))
    lost = replica.state.decide(store(2, mail(2)))
    replica.state.forget(replica.store.head)
    _, again = replica.apply(noop(2, 2), store(3, mail(2), epoch=2))
    assert lost.rulings == [Ruling(0, 1, Verdict.STORED, first(1, 2))]
    assert again.rulings == [Ruling(0, 1, Verdict.STORED, first(2))]


def test_time_comes_from_entries_and_never_goes_back() -> None:
    day = 24 * 3_600_000
    old, ahead = mail(1, at_ms=NOW_MS - day - 1), mail(2, at_ms=NOW_MS + 60_001)
    edges = mail(3, at_ms=NOW_MS - day), mail(4, at_ms=NOW_MS + 60_000)
    (decision,) = Replica().apply(store(1, old, ahead, *edges))
    assert [ruling.verdict for ruling in decision.rulings] == [Verdict.TOO_OLD, Verdict.ID_AHEAD, Verdict.STORED]
    replica = Replica()
    _, back = replica.apply(store(1, mail(1)), store(2, old, at_us=NOW_US - DAY_US))
    assert [ruling.verdict for ruling in back.rulings] == [Verdict.TOO_OLD]
    assert back.head.clock_us == NOW_US


def test_a_stored_id_beyond_the_window_is_too_old_even_with_the_same_crc() -> None:
    replica = Replica()
    replica.apply(store(1, mail(1)))
    (decision,) = replica.apply(store(2, mail(1), at_us=NOW_US + DAY_US + 1_000_000))
    assert [ruling.verdict for ruling in decision.rulings] == [Verdict.TOO_OLD]


def test_derived_ids_have_a_key_space_and_a_window_of_their_own() -> None:
    replica = Replica()
    plain, derived = mail(1), mail(1, b"derived", flags=Flag.DERIVED_ID, at_ms=NOW_MS - 10 * 24 * 3_600_000)
    replica.apply(store(1, plain))
    (new,) = replica.apply(store(2, derived))
    assert [ruling.verdict for ruling in new.rulings] == [Verdict.STORED]
    (next_day,) = replica.apply(store(3, derived, at_us=NOW_US + DAY_US - 1))
    assert [ruling.verdict for ruling in next_day.rulings] == [Verdict.SAME]


def test_derived_ids_are_looked_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink's micro-batch, of another day and some of it again: one question to the store, as for other mail."""
    replica = Replica()
    asked: list[int] = []
    get_many = replica.store.get_many

    def counted(keys: list[bytes]) -> Sequence[bytes | None]:
        asked.append(len(keys))
        return get_many(keys)

    monkeypatch.setattr(replica.store, "get_many", counted)
    rows = [mail(number, b"%d" % number, flags=Flag.DERIVED_ID) for number in range(100)]
    replica.apply(store(1, *rows[:50]))
    (again,) = replica.apply(store(2, *rows, mail(200), rows[70], at_us=NOW_US + DAY_US - 1))
    assert [(ruling.count, ruling.verdict) for ruling in again.rulings][-2:] == [(51, Verdict.STORED), (1, Verdict.SAME)]
    assert [ruling.verdict for ruling in again.rulings[:50]] == [Verdict.SAME] * 50
    assert len(asked) == 2


def test_an_epoch_without_sequences_left_gives_none() -> None:
    replica = Replica()
    replica.state.forget(Head(last=first(1, LAST_COUNTER - 1)))
    decision = replica.state.decide(store(1, mail(1), mail(2)))
    assert [ruling.verdict for ruling in decision.rulings] == [Verdict.STORED, Verdict.NO_NUMBERS]
    beyond = Replica().state.decide(store(1, mail(1), epoch=1 << 16))
    assert [ruling.verdict for ruling in beyond.rulings] == [Verdict.NO_NUMBERS]


def test_trimming_ends_at_a_mark_and_forgets_old_ids() -> None:
    replica = Replica()
    big = b"x" * (MARK_BYTES // 2)
    replica.apply(*(store(number, mail(number, big)) for number in range(1, 8)))
    assert len(list(replica.store.marks())) == 4
    found = trim_to(replica.store.marks(), replica.store.head, NOW_US, 0, 2 * MARK_BYTES)
    assert found is not None
    sequence, before = found
    replica.apply(Entry(1, 8, int(XiuKind.TRIM), NOW_US + 2 * DAY_US, trim_entry(sequence, before)))
    head = replica.store.head
    assert head.floor == sequence == first(1, 3)
    assert head.stored_bytes - head.trimmed_bytes == sum(len(block.records) for block in replica.store.blocks())
    assert [block.first for block in replica.store.blocks()] == [first(1, number) for number in range(3, 8)]
    assert not [key for key in replica.store.rows if key[:1] == SNOWFLAKES]


def test_derived_ids_are_forgotten_by_the_day() -> None:
    replica = Replica()
    replica.apply(store(1, mail(1, flags=Flag.DERIVED_ID)))
    replica.apply(Entry(1, 2, int(XiuKind.TRIM), NOW_US + DAY_US, trim_entry(0, 0)))
    assert [key for key in replica.store.rows if key[:1] == DERIVED]
    replica.apply(Entry(1, 3, int(XiuKind.TRIM), NOW_US + 2 * DAY_US, trim_entry(0, 0)))
    assert not [key for key in replica.store.rows if key[:1] == DERIVED]


def test_age_trims_only_what_is_old() -> None:
    replica = Replica()
    minutes = [NOW_US + number * 60_000_000 for number in range(5)]
    replica.apply(*(store(number, mail(number), at_us=at) for number, at in enumerate(minutes, 1)))
    marks, head = list(replica.store.marks()), replica.store.head
    assert trim_to(marks, head, minutes[4], 120_000_000, 0) == (first(1, 2), len(mail(1)))
    assert trim_to(marks, head, minutes[4], 0, 0) is None
    assert trim_to(marks, head, minutes[4], 3_600_000_000, 0) is None


def test_a_broken_head_is_noticed() -> None:
    value = Head(clock_us=NOW_US, last=7).encode()
    assert Head.decode(value) == Head(clock_us=NOW_US, last=7)
    for bit in range(len(value) * 8):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Head.decode(bytes(flipped)) is None


def random_log(seed: int) -> list[Entry]:
    """Batches with repeats, reused and old IDs, epochs that change, and trims."""
    random = Random(seed)
    entries: list[Entry] = []
    epoch, at_us, sent = 1, NOW_US, [mail(0)]
    for counter in range(1, random.randint(2, 40)):
        at_us += random.choice((-1_000_000, 1000, 61_000_000, DAY_US // 3))
        roll = random.random()
        if roll < 0.1:
            epoch += random.randint(1, 3)
            entries.append(noop(counter, epoch))
        elif roll < 0.2:
            entries.append(Entry(epoch, counter, int(XiuKind.TRIM), at_us, trim_entry(first(epoch, random.randint(0, 30)), 0)))
        else:
            new = [
                mail(random.randrange(1024), random.randbytes(3), at_ms=at_us // 1000, flags=random.choice((0, 0, 32)))
                for _ in range(4)
            ]
            sent += new
            batch = random.choices([*new, random.choice(sent), random.choice(sent)], k=random.randint(1, 6))
            entries.append(store(counter, *batch, epoch=epoch, at_us=at_us))
    return entries


@settings(max_examples=runs("PIXIU_EXAMPLES", local=25, ci=150), deadline=None)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_a_replay_after_any_crash_and_in_any_portions_gives_the_same_state_and_answers(seed: int, data: st.DataObject) -> None:
    entries = random_log(seed)
    straight = Replica()
    expected = [straight.apply(entry)[0] for entry in entries]
    store_ = MemoryStore()
    replica = Replica(store_)
    while store_.head.applied.counter < len(entries):
        begin = store_.head.applied.counter
        end = data.draw(st.integers(begin + 1, len(entries)))
        for found, wanted in zip(replica.apply(*entries[begin:end]), expected[begin:end], strict=True):
            assert (found.rulings, found.block, found.puts, found.head) == (wanted.rulings, wanted.block, wanted.puts, wanted.head)
        event = data.draw(st.sampled_from(("nothing", "flush", "crash", "decide")))
        if event == "flush":
            store_.flush()
        elif event == "decide":  # a leader's decisions, which then are cut off
            for entry in entries[end : end + 3]:
                replica.state.decide(entry)
            replica.state.forget(store_.head)
        elif event == "crash" and data.draw(st.booleans()):
            store_.crash()
            replica = Replica(store_)
    assert store_.rows == straight.store.rows
    sequences = [number for block in straight.store.blocks() for number in range(block.first, block.last + 1)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("index", range(3))
def test_a_record_is_found_in_its_block(index: int) -> None:
    records = [mail(1, b"a"), mail(2, b"bb" * 50), mail(3, b"")]
    (decision,) = Replica().apply(store(1, *records))
    assert decision.block is not None
    begin, end = bounds(decision.block, first(1, index + 1))
    assert decision.block.records[begin:end] == records[index]


def test_snowflakes_of_the_far_past_do_not_break_the_bounds() -> None:
    (decision,) = Replica().apply(store(1, mail(1, at_ms=NOW_MS), at_us=1))
    assert [ruling.verdict for ruling in decision.rulings] == [Verdict.ID_AHEAD]
    assert snowflake(NOW_MS, 1, 1) > 0


def test_a_clock_that_is_years_ahead_is_set_back_and_mail_is_taken_again() -> None:
    replica = Replica()
    ahead_us = NOW_US + 10 * 365 * DAY_US
    replica.apply(store(1, mail(1)))
    (refused,) = replica.apply(store(2, mail(2), at_us=ahead_us), store(3, mail(3)))[1:]
    assert [ruling.verdict for ruling in refused.rulings] == [Verdict.TOO_OLD]
    replica.apply(Entry(1, 4, int(EntryKind.SET_CLOCK), NOW_US, CLOCK.pack(NOW_US)))
    assert replica.state.head.clock_us == NOW_US
    (stored, repeated) = replica.apply(store(5, mail(4)), store(6, mail(1)))
    assert [ruling.verdict for ruling in stored.rulings] == [Verdict.STORED]
    assert [ruling.verdict for ruling in repeated.rulings] == [Verdict.SAME]
    (later,) = replica.apply(Entry(1, 7, int(EntryKind.SET_CLOCK), NOW_US, CLOCK.pack(ahead_us)))
    assert later.head.clock_us == NOW_US, "only back"
    assert not replica.apply(Entry(1, 8, int(EntryKind.SET_CLOCK), NOW_US, b"no time"))[0].puts
