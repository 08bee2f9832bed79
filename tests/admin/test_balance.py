"""Moves by load: groups become even, however they begin, and then nothing moves any more."""

from __future__ import annotations

import random

import pytest

from admin.balance import HYSTERESIS, GroupLoad, Move, OpenPart, emptied, plan
from admin.placement import MAX_GROUP_PARTS
from tests.support.for_each import for_each


def group(cpu: float, *rates: float, first: int = 1, stored: int = 0) -> GroupLoad:
    parts = [OpenPart("orders", number, rate) for number, rate in enumerate(rates, first)]
    return GroupLoad.measured(cpu, stored or len(parts), parts)


def ways(moves: list[Move]) -> list[tuple[int, int, int]]:
    return [(move.part, move.source, move.target) for move in moves]


def test_the_part_that_evens_two_groups_out_moves() -> None:
    groups = {0: group(0.8, 5e6, 2e6, 1e6), 1: group(0.1, 1e6, first=9)}
    assert ways(plan(groups)) == [(2, 0, 1), (3, 0, 1)]
    assert not plan(groups)


def test_a_new_group_gets_its_share_of_parts_without_any_load() -> None:
    groups = {0: group(0.0, *[0.0] * 6), 1: group(0.0, *[0.0] * 6, first=7), 2: group(0.0)}
    moves = plan(groups)
    assert [len(each.parts) for each in groups.values()] == [4, 4, 4]
    assert {move.target for move in moves} == {2}


def test_a_part_that_would_make_the_other_group_the_heavier_one_stays() -> None:
    assert not plan({0: group(0.9, 1e7), 1: group(0.05, 1e5, first=9)})


@pytest.mark.parametrize("cpu", [0.50, 0.59])
def test_groups_that_differ_by_less_than_a_fifth_are_left_alone(cpu: float) -> None:
    assert not plan({0: group(cpu, *[1e4] * 50), 1: group(0.5, *[1e4] * 50, first=60)})


def test_groups_with_little_load_and_those_that_rest_give_nothing() -> None:
    def groups() -> dict[int, GroupLoad]:
        return {0: group(0.08, 1e6, 1e6), 1: group(0.0), 2: group(0.0)}

    assert not plan(groups(), least=100)
    assert not plan(groups(), resting={0})
    assert ways(plan(groups(), resting={1})) == [(2, 0, 2)]
    assert len(plan(groups(), most=1)) == 1


def test_a_full_group_gets_nothing() -> None:
    groups = {0: group(0.4, *[1e6] * 4), 1: group(0.0, stored=MAX_GROUP_PARTS)}
    assert not plan(groups)
    assert not emptied(groups, 0)


def test_a_group_is_emptied_onto_the_others() -> None:
    groups = {0: group(0.4, 3e6, 2e6, 1e6), 1: group(0.2, 1e6, first=9), 2: group(0.1, 1e6, first=19)}
    assert ways(emptied(groups, 0)) == [(1, 0, 2), (2, 0, 1), (3, 0, 2)]
    assert not groups[0].parts


@for_each("seed", range(200))
def test_moves_end_and_none_is_undone_though_measurements_are_off(seed: int) -> None:
    """One move after each measurement, each of which is off by up to 3 %."""
    rng = random.Random(seed)
    rates = {number: rng.choice((0.0, 1e3, 1e5)) + rng.expovariate(1e-6) for number in range(1, rng.randint(2, 40))}
    count = rng.randint(2, 6)
    where = {number: rng.randrange(rng.randint(1, count)) for number in rates}
    been: dict[int, set[int]] = {number: {at} for number, at in where.items()}

    def off(value: float) -> float:
        return value * rng.uniform(0.97, 1.03)

    quiet = moves = 0
    while quiet < 30:
        groups = {}
        for number in range(count):
            mine = [part for part, at in where.items() if at == number]
            cpu = sum(rates[part] for part in mine) / 1e7
            groups[number] = GroupLoad.measured(off(cpu), len(mine), [OpenPart("t", part, off(rates[part])) for part in mine])
        found = plan(groups, most=1)
        quiet = 0 if found else quiet + 1
        for move in found:
            moves += 1
            where[move.part] = move.target
            assert move.target not in been[move.part], (moves, move)
            been[move.part].add(move.target)
    assert moves <= len(rates)
    loads = sorted(sum(rates[part] / 1e4 + 1 for part, at in where.items() if at == number) for number in range(count))
    heaviest = max(range(count), key=lambda number: sum(rates[part] for part, at in where.items() if at == number))
    smallest = min(rates[part] for part, at in where.items() if at == heaviest)
    assert loads[-1] <= 1.2 * HYSTERESIS * loads[0] or loads[0] + smallest / 1e4 + 1 >= 0.8 * (loads[-1] - smallest / 1e4 - 1)
