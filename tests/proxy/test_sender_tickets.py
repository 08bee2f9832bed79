"""What a gateway publishes is passed on only for senders whose login ticket it has shown."""

from __future__ import annotations

import pytest

from cluster.trust.tickets import sign
from pixiu.ids import EndpointID
from pixiu.wire.record import KIND_AT, Flag, Kind, encode
from proxy.publishers import sender_tickets
from proxy.publishers.permits import NOT_SHOWN
from proxy.publishers.sender_tickets import SenderTickets

KEY, OTHER = b"k" * 32, b"o" * 32
NOW, RUN = 1_800_000_000, 9
ONE, TWO = EndpointID(30), EndpointID(31)


class Bench:
    def __init__(self) -> None:
        self.now = float(NOW)
        self.keys: tuple[bytes, ...] = (KEY,)
        self.table = SenderTickets(lambda: self.keys, lambda: self.now)

    def show(self, *uins: int, gateway: EndpointID = ONE, run: int = RUN, lasts_s: int = 600, key: bytes = KEY) -> list[int]:
        return self.table.show(gateway, run, [(uin, sign(key, uin, run, NOW + lasts_s)) for uin in uins])

    def passed(self, *senders: int, gateway: EndpointID = ONE) -> list[bool]:
        """Which of a batch's records pass."""
        records = [record(sender, number) for number, sender in enumerate(senders)]
        before, after = b"x" * 11, b"y" * 3
        data = before + b"".join(records) + after
        changed = self.table.permitted(gateway, data, len(before), len(data) - len(after), len(records))
        if changed is None:
            return [True] * len(senders)
        assert len(changed) == sum(map(len, records))
        found, at = [], 0
        for each in records:
            part = changed[at : at + len(each)]
            passes = part == each
            assert passes or part == each[:KIND_AT] + bytes((NOT_SHOWN,)) + each[KIND_AT + 1 :]
            found.append(passes)
            at += len(each)
        return found


def record(sender: int, number: int = 1) -> bytes:
    return encode(Kind.ROOM, 42, b"hello" * number, number + 1, sender=sender, flags=Flag.TO_ROOM)


def test_each_record_is_judged_by_its_sender_and_gateway() -> None:
    bench = Bench()
    assert bench.passed(7, 8) == [False, False], "it has shown nothing"
    assert bench.show(7, 8) == []
    assert bench.show(9, gateway=TWO, run=RUN + 1) == []
    assert bench.passed(7, 9, 8, 0, 7) == [True, False, True, False, True]
    assert bench.passed(9, 7, gateway=TWO) == [True, False]
    assert (bench.table.refused, len(bench.table)) == (5, 3)


def test_a_ticket_of_another_run_or_key_counts_for_nothing() -> None:
    bench = Bench()
    forged = [(7, sign(KEY, 7, RUN + 1, NOW + 600)), (8, sign(OTHER, 8, RUN, NOW + 600)), (9, b"")]
    assert bench.table.show(ONE, RUN, forged) == [7, 8, 9]
    assert bench.passed(7, 8, 9) == [False] * 3
    assert bench.table.void == 3


def test_a_gateway_that_was_started_again_shows_its_tickets_anew() -> None:
    bench = Bench()
    bench.show(7)
    bench.show(8, run=RUN + 1)
    assert bench.passed(7, 8) == [False, True]
    assert len(bench.table) == 1


def test_a_gateway_that_is_gone_for_long_is_forgotten() -> None:
    bench = Bench()
    bench.show(7)
    bench.now += 300
    assert bench.table.forget_gone({ONE: RUN}.get) == []
    bench.now += sender_tickets.GONE_S
    assert bench.table.forget_gone({ONE: RUN + 1}.get) == [], "it may be back in a moment"
    assert bench.passed(7) == [True]
    bench.now += 1
    assert bench.table.forget_gone(lambda _gateway: None) == [ONE]
    assert bench.passed(7) == [False]
    assert len(bench.table) == 0


def test_a_ticket_counts_until_it_ends_and_a_newer_one_for_longer() -> None:
    bench = Bench()
    bench.show(7, 8, lasts_s=60)
    bench.show(8, lasts_s=600)
    bench.show(8, lasts_s=60)
    bench.now += 60
    assert bench.table.look() == {}, "the gateway ends these sessions by itself"
    assert bench.passed(7, 8) == [False, True]


def test_a_removed_key_ends_its_tickets_and_the_gateway_is_told() -> None:
    bench = Bench()
    bench.keys = (KEY, OTHER)
    bench.show(7)
    bench.show(8, key=OTHER)
    assert bench.table.look() == {}
    bench.keys = (KEY,)
    assert bench.table.look() == {ONE: [8]}
    assert bench.passed(7, 8) == [True, False]
    assert bench.table.look() == {}


def test_tickets_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_tickets, "MAX_SENDERS", 2)
    bench = Bench()
    assert bench.show(7, 8, 9) == [9]
    assert bench.show(7, lasts_s=900) == [], "one that is there may be renewed"


@pytest.mark.parametrize("cut", [1, 39, 41])
def test_a_malformed_rest_is_left_to_the_core(cut: int) -> None:
    bench = Bench()
    bench.show(7)
    data = record(7) + record(7)[:-cut]
    assert bench.table.permitted(ONE, data, 0, len(data), 2) is None
    huge = b"\xff\xff\xff\xff" + record(8)[4:]
    assert bench.table.permitted(ONE, huge, 0, len(huge), 1) is None
    assert bench.table.permitted(ONE, b"", 0, 0, 3) is None
