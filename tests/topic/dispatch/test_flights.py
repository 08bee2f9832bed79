"""Ranges that members have, against one record for each message."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.contract import NEVER
from cluster.topics.entries import Dead, Deferred
from tests.support.effort import runs
from topic.dispatch import flights
from topic.dispatch.flights import Flights, Pending
from topic.events import Run

EXAMPLES = runs("PIXIU_TOPIC_EXAMPLES", local=100, ci=500)
TIMEOUT_S, ATTEMPTS = 10.0, 2
members, offsets = st.integers(1, 3), st.integers(0, 40)
ranges = st.tuples(offsets, st.integers(0, 12)).map(lambda found: (found[0], found[0] + found[1]))
steps = st.one_of(
    st.tuples(st.just("give"), members, st.lists(st.tuples(ranges, st.integers(1, 2)), max_size=4)),
    st.tuples(st.just("report"), members, st.lists(ranges, max_size=5), st.lists(offsets, max_size=3)),
    st.tuples(st.just("touch"), members, st.lists(offsets, max_size=5)),
    st.tuples(st.just("leave"), members),
    st.tuples(st.just("wait"), st.floats(0.0, 8.0)),
    st.tuples(st.just("refuse"), st.integers(0, 5)),
)


class Plain:
    """Message → (member, attempts, deadline)."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int, float]] = {}

    def take(self, found: list[int]) -> dict[int, tuple[int, int, float]]:
        return {offset: self.held.pop(offset) for offset in found}


def named(pending: Pending) -> set[int]:
    """Offsets of a settlement; of each message one fate."""
    found = [offset for low, high in pending.settlement.acknowledged for offset in range(low, high)]
    found += [each.offset for each in pending.settlement.deferred] + [each.offset for each in pending.settlement.dead]
    assert len(found) == len(set(found))
    assert set(found) == {offset for _, flight in pending.taken for offset in range(flight.low, flight.high)}
    return set(found)


@given(st.lists(steps, max_size=25))
@settings(max_examples=EXAMPLES, deadline=None)
def test_they_are_what_members_have(played: list[tuple[Any, ...]]) -> None:
    real, plain, now = Flights(7, 1, TIMEOUT_S, ATTEMPTS), Plain(), 0.0
    under_way = list[tuple[Pending, dict[int, tuple[int, int, float]]]]()

    def taken(found: list[Pending], expected: set[int]) -> None:
        assert set[int]().union(*map(named, found)) == expected
        for each in found:
            gone = named(each)
            before = plain.take(sorted(gone))
            under_way.append((each, before))
            for failed in each.settlement.deferred:
                assert failed.attempts == before[failed.offset][1] < ATTEMPTS
            assert all(dead.attempts == before[dead.offset][1] == ATTEMPTS for dead in each.settlement.dead)

    for what, *arguments in played:
        if what == "give":
            member, wanted = arguments
            busy = {*plain.held, *(offset for _, before in under_way for offset in before)}
            wanted_once = {
                offset: attempts for (low, high), attempts in wanted for offset in range(low, high) if offset not in busy
            }
            given_runs = [Run(offset, offset + 1, attempts) for offset, attempts in sorted(wanted_once.items())]
            if given_runs:
                real.give(member, given_runs, now)
                plain.held |= {run.low: (member, run.attempts, now + TIMEOUT_S) for run in given_runs}
        elif what == "report":
            member, acknowledged, refused = arguments
            own = {offset for offset, (whose, _, _) in plain.held.items() if whose == member}
            done = own & {offset for low, high in acknowledged for offset in range(low, high)}
            pending = real.settle(member, acknowledged, [(offset, 0.5) for offset in refused])
            taken([pending] if pending else [], done | own & set(refused))
            if pending:
                assert {offset for low, high in pending.settlement.acknowledged for offset in range(low, high)} == done
        elif what == "touch":
            member, some = arguments
            own = {offset for offset in some if plain.held.get(offset, (0,))[0] == member}
            assert real.touch(member, some, now) == len(own)
            plain.held |= {offset: (member, plain.held[offset][1], now + TIMEOUT_S) for offset in own}
        elif what == "leave":
            taken(real.leave(arguments[0]), {offset for offset, (whose, _, _) in plain.held.items() if whose == arguments[0]})
        elif what == "wait":
            now += arguments[0]
            taken(real.time_out(now), {offset for offset, (_, _, until) in plain.held.items() if until <= now})
        elif under_way:
            pending, before = under_way.pop(arguments[0] % len(under_way))
            for member, flight in pending.taken:
                real.refused(member, flight, max(flight.until, now))
            plain.held |= {offset: (member, attempts, max(until, now)) for offset, (member, attempts, until) in before.items()}
        assert real.in_flight == len(plain.held)
        assert real.counts() == {
            member: count for member in (1, 2, 3) if (count := sum(whose == member for whose, _, _ in plain.held.values()))
        }
        assert real.next_deadline() == min((until for _, _, until in plain.held.values()), default=NEVER)


def test_deadlines_that_no_longer_count_are_removed() -> None:
    real = Flights(7, 1, TIMEOUT_S, ATTEMPTS)
    real.give(1, [Run(0, 1, 1)], 0.0)
    for offset in range(1, 1000):
        real.give(2, [Run(offset, offset + 1, 1)], 1.0)
        real.settle(2, [(offset, offset + 1)], [])
    assert real._deadlines is not None
    assert len(real._deadlines) < 3 * flights.SLACK
    assert real.next_deadline() == TIMEOUT_S


def test_a_departure_is_told_by_several_entries_if_it_is_large(monkeypatch: Any) -> None:
    monkeypatch.setattr(flights, "MAX_SETTLED", 3)
    real = Flights(7, 1, TIMEOUT_S, ATTEMPTS)
    real.give(1, [Run(0, 4, 1), Run(6, 9, 2)], 0.0)
    first, second, third = (each.settlement for each in real.leave(1))
    assert first.deferred == [Deferred(offset, 0, 1) for offset in range(3)]
    assert (second.deferred, second.dead) == ([Deferred(3, 0, 1)], [Dead(6, 2, 2), Dead(7, 2, 2)])
    assert third.dead == [Dead(8, 2, 2)]
