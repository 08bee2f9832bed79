"""Restoring what a partition has lost: the same MsgIDs again, below everything new, on every replica alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.replication.model import Entry
from cluster.store.events import Committed
from pixiu.errors import Gone, InvalidArgument, MalformedData, NotLeader, NotYet, Unavailable
from pixiu.ids import msg_id
from pixiu.wire.record import Flag
from tests.xiu.parts import NOW_MS, NOW_US, NoTable
from tests.xiu.world import Xiu, codes, first, results, user
from xiu.core import CoreSettings
from xiu.export.export import check_restored
from xiu.records.block import Block
from xiu.state.restoring import Step, check_records, decode, encode
from xiu.state.state import DAY_US, Head, XiuKind
from xiu.store.reading import Reading

EARLIER_US = NOW_US - 5_000_000
LONG_AGO_MS = NOW_MS - 3 * 24 * 3_600_000


def reading_of(xiu: Xiu) -> Reading:
    return Reading(1, cast(Any, xiu.store), NoTable())


def block(sequence: int, *records: bytes, at_us: int = EARLIER_US) -> Block:
    return Block(sequence, len(records), at_us, b"".join(records))


def take(xiu: Xiu, step: Step, *blocks: Block, at_us: int = NOW_US) -> Head:
    """One step, as the service takes it; the head after its commit."""
    kind, payload = xiu.core.restore_entry(step, blocks)
    xiu.log.entries.append(Entry(xiu.epoch, len(xiu.log.entries) + 1, kind, at_us, payload))
    xiu.commit()
    return xiu.store.head


def stored(xiu: Xiu, record: bytes) -> list[str]:
    effects = xiu.accept(xiu.send(record))
    return codes(effects + xiu.commit())


def lost_and_restored() -> Xiu:
    """Epoch 1 ended with three messages, epoch 2 with two; all were lost, and are back."""
    xiu = Xiu()
    take(xiu, Step.BEGIN)
    take(xiu, Step.BLOCKS, block(first(1, 1), user(1), user(2)), block(first(3, 1), user(3)))
    take(xiu, Step.BLOCKS, block(first(1, 2), user(4), user(5), at_us=EARLIER_US + 1))
    return xiu


def test_an_entry_is_what_was_encoded() -> None:
    blocks = [block(7, user(1)), block(9, user(2), user(3))]
    assert decode(encode(Step.BLOCKS, 0, blocks)) == (Step.BLOCKS, 0, blocks)
    assert decode(encode(Step.BEGIN, 1 << 47)) == (Step.BEGIN, 1 << 47, [])


def test_messages_are_back_under_their_msgids_and_new_ones_follow_above() -> None:
    xiu = lost_and_restored()
    reading = reading_of(xiu)
    sequences = [first(1, 1), first(2, 1), first(3, 1), first(1, 2), first(2, 2)]
    wanted = list(zip(sequences, map(user, range(1, 6)), strict=True))
    found = reading.fetch([msg_id(1, record[6], sequence) for sequence, record in wanted])
    assert [(each.code, each.record) for each in found] == [("", record) for _, record in wanted]
    assert [each.at_us for each in xiu.store.blocks()] == [EARLIER_US, EARLIER_US, EARLIER_US + 1]
    take(xiu, Step.END)
    new = results(xiu.accept(xiu.send(user(6))) + xiu.commit())
    assert [each.sequence for each in new] == [first(1, 3)]


def test_a_restore_goes_below_what_came_meanwhile() -> None:
    xiu = Xiu()
    assert stored(xiu, user(9)) == [""]
    assert take(xiu, Step.BEGIN).below == first(1, 3)
    assert stored(xiu, user(10)) == [""], "new mail is taken all the time"
    head = take(xiu, Step.BLOCKS, block(first(1, 1), user(1)))
    assert (head.restored, head.last, head.floor) == (first(1, 1), first(2, 3), first(1, 1))
    head = take(xiu, Step.END)
    assert (head.restored, head.below, head.last) == (0, 0, first(2, 3))
    assert [each.first for each in xiu.store.blocks()] == [first(1, 1), first(1, 3), first(2, 3)]


def test_what_a_restore_may_bring_is_not_yet_there_and_then_gone() -> None:
    xiu = Xiu()
    stored(xiu, user(9))
    reading, lost = reading_of(xiu), msg_id(1, 64, first(2, 1))
    assert reading.fetch([lost])[0].code == Gone.code
    take(xiu, Step.BEGIN)
    assert reading.fetch([lost])[0].code == NotYet.code
    with pytest.raises(NotYet, match="restored"):
        check_restored(0, first(2, 3), xiu.store.head)
    check_restored(first(1, 3), first(2, 3), xiu.store.head)  # what came since the loss is all there
    take(xiu, Step.BLOCKS, block(first(1, 1), user(1)))
    check_restored(0, first(2, 1), xiu.store.head)
    assert reading.fetch([lost])[0].code == NotYet.code
    take(xiu, Step.END)
    assert reading.fetch([lost])[0].code == Gone.code
    check_restored(0, first(2, 3), xiu.store.head)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (block(first(5, 1), user(1)), "missing"),
        (block(first(3, 1), user(1)), "not between"),
        (block(first(2, 2), user(1)), "missing"),
        (block(first(1, 3), user(1)), "only those before the leader's"),
        (block(first(9, 4), user(1)), "only those before the leader's"),
        (block(first(4, 1), user(1), at_us=NOW_US + DAY_US), "to be stored yet"),
        (block((2 << 32) - 1, user(1), user(2)), "epoch"),
    ],
)
def test_what_does_not_follow_is_refused(wrong: Block, text: str) -> None:
    xiu = Xiu()
    take(xiu, Step.BEGIN)
    before = take(xiu, Step.BLOCKS, block(first(1, 1), user(1), user(2), user(3)))
    with pytest.raises(InvalidArgument, match=text):
        xiu.core.restore_entry(Step.BLOCKS, [wrong])
    xiu.log.entries.append(Entry(3, len(xiu.log.entries) + 1, int(XiuKind.RESTORE), NOW_US, encode(Step.BLOCKS, 0, [wrong])))
    xiu.commit()
    assert xiu.store.head == replace(before, applied=xiu.store.head.applied), "in the log it changes nothing either"


def test_nothing_is_restored_before_the_beginning_or_by_a_follower() -> None:
    xiu = Xiu()
    with pytest.raises(InvalidArgument, match="begin one"):
        xiu.core.restore_entry(Step.BLOCKS, [block(first(1, 1), user(1))])
    xiu.deposed()
    with pytest.raises(NotLeader):
        xiu.core.restore_entry(Step.BEGIN)


def test_a_restore_goes_on_under_another_leader() -> None:
    xiu = Xiu()
    take(xiu, Step.BEGIN)
    take(xiu, Step.BLOCKS, block(first(1, 1), user(1)))
    xiu.deposed()
    xiu.lead(4)
    head = take(xiu, Step.BEGIN)
    assert (head.restored, head.below) == (first(1, 1), first(0, 3)), "it is the one that was begun"
    assert take(xiu, Step.BLOCKS, block(first(2, 1), user(2))).restored == first(2, 1)


def test_a_writer_that_sends_again_gets_the_restored_msgid() -> None:
    xiu = Xiu()
    old, derived = user(2, at_ms=LONG_AGO_MS), user(77, flags=Flag.DERIVED_ID)
    again = user(3)
    stored(xiu, again)  # its writer was told nothing before the loss, and sent it once more
    take(xiu, Step.BEGIN)
    take(xiu, Step.BLOCKS, block(first(1, 1), user(1), old, again, derived))
    (one,) = results(xiu.accept(xiu.send(user(1))) + xiu.commit())
    assert one.msg_id == msg_id(1, user(1)[6], first(1, 1))
    (two,) = results(xiu.accept(xiu.send(derived)) + xiu.commit())
    assert two.msg_id == msg_id(1, derived[6], first(4, 1))
    (three,) = results(xiu.accept(xiu.send(again)) + xiu.commit())
    assert three.msg_id == msg_id(1, again[6], first(1, 3))
    assert stored(xiu, old) == ["TOO_OLD"]


def test_replicas_decide_the_same_and_keep_it() -> None:
    xiu = lost_and_restored()
    other = Xiu(lead=False)
    other.log.entries += xiu.log.entries
    other.step(Committed(1, other.log.entries, 2))
    assert other.store.rows == xiu.store.rows
    assert Head.decode(xiu.store.head.encode()) == xiu.store.head
    assert len(take(xiu, Step.END).encode()) == len(Head().encode()), "who never restored has the head that it always had"


def test_restored_messages_are_trimmed_by_their_age() -> None:
    xiu = Xiu()
    stored(xiu, user(9))
    take(xiu, Step.BEGIN)
    take(xiu, Step.BLOCKS, block(first(1, 1), user(1), at_us=NOW_US - 300_000_000))
    take(xiu, Step.BLOCKS, block(first(2, 1), user(2), at_us=NOW_US - 200_000_000))
    take(xiu, Step.END)
    assert [mark[0] for mark in xiu.store.marks()] == [first(1, 1), first(2, 1), first(1, 3)]
    xiu.accept(xiu.trim(NOW_US))
    xiu.commit()
    assert xiu.store.head.floor == first(2, 1), "up to the last mark that is older than a minute"
    assert [each.first for each in xiu.store.blocks()] == [first(2, 1), first(1, 3)]


def test_a_partition_that_waits_to_be_restored_takes_nothing() -> None:
    xiu = Xiu()
    xiu.core.settings = CoreSettings(partition=1, max_record_bytes=1 << 20, await_restore=True)
    assert codes(xiu.send(user(1))) == [Unavailable.code]
    take(xiu, Step.BEGIN)
    assert stored(xiu, user(1)) == [""]


def test_what_comes_from_outside_is_checked() -> None:
    check_records([block(1, user(1), user(2))], 1)
    broken = bytearray(user(1))
    broken[-1] ^= 1
    for wrong in ([], [Block(1, 2, 0, user(1))], [Block(1, 0, 0, b"")], [Block(1, 1, 0, bytes(broken))]):
        with pytest.raises(MalformedData):
            check_records(wrong, 1)
