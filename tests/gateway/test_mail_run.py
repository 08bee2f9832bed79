"""Which mails of a relay's batch go together, and what becomes of a part of them."""

from __future__ import annotations

from gateway.mail.run import read_runs
from pixiu.wire.envelope import ENVELOPE_SIZE, FLAGS_AT, GAP, REDELIVERED, Delivery, encode
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of
from tests.gateway.world import mails_of, runs_of


def mail(seq: int, *, uin: int = 7, session: int = 1, device: int = 3, lane: int = 1, flags: int = 0) -> Delivery:
    record = b"" if flags & GAP else record_of(Kind.MAIL, uin, b"mail %d" % seq, 100 + seq)
    return Delivery(1000 + seq, seq, uin, session, device, lane, flags, record)


def test_what_is_under_consecutive_numbers_in_one_place_goes_together() -> None:
    one = [mail(5), mail(6), mail(7)]
    others = [
        mail(8, uin=8),
        mail(9, lane=0),
        mail(10, lane=0, session=2),
        mail(11, lane=0, session=2, device=4),
        mail(13),
        mail(12),
    ]
    again = [mail(13, flags=REDELIVERED), mail(14, flags=REDELIVERED)]
    runs = runs_of([*one, *others, *again])
    assert [(run.first, run.count) for run in runs] == [(5, 3), (8, 1), (9, 1), (10, 1), (11, 1), (13, 1), (12, 1), (13, 2)]
    assert mails_of(runs) == [*one, *others, *again]
    assert runs[0].bodies == [b"mail 5", b"mail 6", b"mail 7"]
    assert (runs[0].last, runs[0].uin, runs[0].device, runs[0].session, runs[0].lane) == (7, 7, 3, 1, 1)
    assert [run.redelivered for run in runs] == [False] * 7 + [True]


def test_a_marker_and_a_damaged_mail_are_alone() -> None:
    damaged = mail(7)._replace(record=mail(7).record[:-1] + b"?")
    runs = runs_of([mail(5), mail(6, flags=GAP), damaged, mail(8), mail(9, flags=GAP)._replace(msg_id=0)])
    assert [(run.first, run.count, run.gap, run.damaged, run.dropped) for run in runs] == [
        (5, 1, False, False, False),
        (6, 1, True, False, False),
        (7, 1, False, True, False),
        (8, 1, False, False, False),
        (9, 1, True, False, True),
    ]


def test_a_part_of_a_run_has_its_own_bytes_and_bodies() -> None:
    (run,) = runs_of([mail(seq) for seq in range(5, 15)])
    assert run.part(0, 10) is run
    for begin, end in ((0, 1), (0, 4), (3, 7), (9, 10)):
        part = run.part(begin, end)
        assert (part.first, part.count) == (5 + begin, end - begin)
        assert mails_of([part]) == [mail(seq) for seq in range(5 + begin, 5 + end)]
        assert part.bodies == [b"mail %d" % seq for seq in range(5 + begin, 5 + end)]
        assert mails_of([part.part(part.count - 1, part.count)]) == [mail(4 + end)]


def test_marking_it_as_sent_before_changes_one_byte_of_each() -> None:
    plain = b"".join(encode(*mail(seq, flags=4)) for seq in (5, 6))
    (run,) = read_runs(plain, 2)
    marked = run.marked()
    second = len(encode(*mail(5)))
    assert [at for at in range(len(plain)) if marked.data[at] != plain[at]] == [FLAGS_AT, second + FLAGS_AT]
    assert {one.flags for one in mails_of([marked])} == {4 | REDELIVERED} == {marked.flags}
    assert run.data == plain
    assert len(marked.part(1, 2).data) == second
    assert second > ENVELOPE_SIZE
