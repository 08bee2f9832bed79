"""What a relay asks Pi, and what the answers of Pi and Xiu mean."""

from __future__ import annotations

from typing import Any

from cluster.wire.v1 import delivery_pb2
from pixiu.wire import inbox_operations as op
from pixiu.wire.inbox_operations import MAX_READ_ENTRIES
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as ev
from relay.mail.answers import ReadItem, listings_of, notices_of, numbers_of, read_requests, reads_of, records_of

ASKED = ev.Asked(7, 2, 40)
RECORD = (44).to_bytes(4, "little") + bytes(44)


def test_reads_are_split_where_pi_would_cut_them_off() -> None:
    items: list[ReadItem] = [(ev.Asked(uin, 1, uin), 5, [ev.Read(lane, None, 64) for lane in range(4)]) for uin in range(1, 401)]
    requests = list(read_requests(items))
    assert [item for part in requests for item in part] == items
    assert len(requests) > 1
    for part in requests:
        assert len(reads_of(part)) <= 64, "in a turn of Pi's event loop, perhaps from the disk"
        assert sum(read.num for read in reads_of(part)) <= MAX_READ_ENTRIES
    assert list(read_requests([])) == []


def test_a_read_without_a_start_is_of_what_is_not_acknowledged() -> None:
    whole, after = reads_of([(ASKED, 30, [ev.Read(0, None, 64), ev.Read(1, 0, 10)])])
    assert not whole.HasField("start")
    assert after.HasField("start")
    assert (whole.uin, whole.device, whole.session, after.lane, after.num) == (7, 2, 30, 1, 10)


def test_listings() -> None:
    items: list[ReadItem] = [
        (ASKED, 30, [ev.Read(0, 4, 64)]),
        (ev.Asked(8, 1, 41), 31, [ev.Read(0, None, 64), ev.Read(1, None, 64)]),
    ]
    good = pi_pb2.PiReadReply(seqs=[5, 6], msg_ids=[50, 60], floor=1, gap=0, last=6, up_to=4)
    reply = pi_pb2.PiReply(reads=[good, pi_pb2.PiReadReply(code="UNAVAILABLE"), pi_pb2.PiReadReply(code="OLD_SESSION")])
    assert listings_of(items, reply) == [(ASKED, [ev.Listing([(5, 50), (6, 60)], 1, 0, 6, 4)]), (items[1][0], ev.Failure.FENCED)]
    refused = pi_pb2.PiReply(reads=[good, good, pi_pb2.PiReadReply(code="UNKNOWN_DEVICE")])
    assert listings_of(items, refused)[1] == (items[1][0], ev.Failure.REFUSED)
    damaged = pi_pb2.PiReply(reads=[good, good, pi_pb2.PiReadReply(code="STATE_DAMAGED")])
    assert listings_of(items, damaged)[1] == (items[1][0], ev.Failure.LATER)
    later = [(asked, ev.Failure.LATER) for asked, _, _ in items]
    assert listings_of(items, None) == later
    assert listings_of(items, pi_pb2.PiReply(reads=[good])) == later


def test_results() -> None:
    reply = pi_pb2.PiReply(results=[12, 0, -op.Code.OLD_SESSION, -op.Code.UNKNOWN_DEVICE, -op.Code.CURSOR_BEYOND_END])
    assert numbers_of(5, reply) == [12, 0, ev.Failure.FENCED, ev.Failure.REFUSED, ev.Failure.REFUSED]
    assert numbers_of(2, None) == [ev.Failure.LATER] * 2
    assert numbers_of(2, reply) == [ev.Failure.LATER] * 2


def test_records_and_why_there_are_none() -> None:
    found = {1: ("", b"one"), 2: ("NOT_YET", b""), 3: ("GONE", b""), 4: ("STORE_DAMAGED", b""), 5: ("WRONG_PARTITION", b"")}
    found[7] = ("OVERLOADED", b"")
    ((asked, answers),) = records_of([(ASKED, [1, 2, 3, 4, 5, 6, 7])], found)
    assert asked == ASKED
    assert answers == [b"one", ev.Missing.NOT_YET, ev.Missing.GONE, *[ev.Missing.LATER] * 3, ev.Missing.FULL]


def test_notices_are_taken_apart_and_malformed_ones_are_not_believed() -> None:
    batch = delivery_pb2.NoticeBatch(
        number=1, uins=[7, 8], seqs=[1, 0], msg_ids=[1 << 54, 9], sizes=[len(RECORD), 0], records=RECORD
    )
    found = notices_of(batch)
    assert found is not None
    assert found == [ev.Notice(7, 1, 1, [1 << 54], [RECORD]), ev.Notice(8, 0, 0, [9], [b""])]
    for wrong in ({"seqs": [1]}, {"sizes": [len(RECORD), 1]}, {"records": b"\xff" * len(RECORD)}, {"uins": range(4097)}):
        broken = delivery_pb2.NoticeBatch.FromString(batch.SerializeToString())
        for name, value in wrong.items():
            broken.ClearField(name)  # type: ignore[arg-type]
            broken.MergeFrom(delivery_pb2.NoticeBatch(**{name: value}))  # type: ignore[arg-type]
        assert notices_of(broken) is None


def test_the_records_of_a_batch_are_copied_once_however_many_notices_it_has() -> None:
    copies: list[int] = []

    class Counted:
        """A batch as protobuf has it, which makes a copy of its bytes whenever they are asked for."""

        uins, seqs, msg_ids, sizes = [7] * 100, range(1, 101), [1 << 54] * 100, [len(RECORD)] * 100

        @property
        def records(self) -> bytes:
            copies.append(1)
            return RECORD * 100

    batch: Any = Counted()
    notices = notices_of(batch)
    assert notices is not None
    assert [len(notice.msg_ids) for notice in notices] == [100]
    assert len(copies) == 1


def test_what_follows_each_other_in_a_lane_is_one_notice_whatever_lies_between() -> None:
    normal, urgent = 1 << 54, 5
    told = [
        (7, 4, normal),
        (8, 1, normal),
        (7, 5, normal + 1),
        (7, 9, urgent),
        (7, 7, normal + 2),
        (8, 0, 6),
        (8, 0, 7),
        (7, 8, normal + 3),
    ]
    batch = delivery_pb2.NoticeBatch(number=1, sizes=[0] * len(told))
    for uin, seq, msg_id in told:
        batch.uins.append(uin)
        batch.seqs.append(seq)
        batch.msg_ids.append(msg_id)
    assert [(each.uin, each.lane, each.first, list(each.msg_ids)) for each in notices_of(batch) or ()] == [
        (7, 1, 4, [normal, normal + 1]),
        (8, 1, 1, [normal]),
        (7, 0, 9, [urgent]),
        (7, 1, 7, [normal + 2, normal + 3]),
        (8, 0, 0, [6]),
        (8, 0, 0, [7]),
    ]
