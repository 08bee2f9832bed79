"""The checker of histories: content with every correct one, and each thing that can be wrong is found, by its rule alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from tests.history.applied import applied
from tests.history.checker import check, counts, report
from tests.history.forgeries import FORGERIES, LIMITS, Forged
from tests.history.model import play
from tests.history.record import History
from tests.history.survey import Survey
from tests.history.violation import Limits, Rule
from tests.support.effort import runs

CORRECT = runs("PIXIU_HISTORY_RUNS", local=40, ci=100)
FORGED = runs("PIXIU_HISTORY_RUNS", local=2, ci=6)
LONG = runs("PIXIU_HISTORY_STEPS", local=8_000, ci=40_000)
ODDITIES = {
    "unknown", "unknown, stored", "stored after the time-out", "sent again", "refused", "lost below replicated",
    "repeated on the wire", "lost on the wire", "another run", "acknowledgement unknown",
    "expired, with a gap", "trimmed", "joined later", "dropped",
}  # fmt: skip
"""What may happen, and must pass."""
WAYS = [pytest.param(rule, forge, id=f"{rule.name}-{forge.__name__}") for rule, forges in FORGERIES.items() for forge in forges]


@cache
def surveyed(seed: int) -> Survey:
    return Survey(play(seed).history.events, LIMITS)


@pytest.mark.slow
def test_every_correct_history_passes() -> None:
    happened: Counter[str] = Counter()
    for seed in range(CORRECT):
        run = play(seed)
        happened += run.happened
        violations = check(run.history, LIMITS)
        assert not violations, f"seed {seed}\n{report(run.history, violations)}"
    assert {name for name, times in happened.items() if times >= CORRECT // 10} >= ODDITIES


def test_the_same_seed_plays_the_same() -> None:
    assert [event.line() for event in play(3).history.events] == [event.line() for event in play(3).history.events]


@pytest.mark.parametrize(("rule", "forge"), WAYS)
def test_a_forged_history_is_found_by_its_rule(rule: Rule, forge: Callable[[Forged], None]) -> None:
    for seed in range(FORGED):
        forged = Forged(surveyed(seed), Random(seed))
        forge(forged)
        history = History(events=forged.events)
        violations = check(history, LIMITS)
        found = {violation.rule for violation in violations}
        assert found == {rule}, f"seed {seed}\n{report(history, violations)}"
        assert all(violation.lines for violation in violations), "a person finds the events"


def test_every_rule_is_forged() -> None:
    assert {*FORGERIES, Rule.TOO_LITTLE} == set(Rule)


@pytest.mark.parametrize("what", ["sends", "deliveries", "acknowledgements", "faults"])
def test_a_history_with_too_little_in_it_fails(what: str) -> None:
    run = play(1)
    happened = counts(run.history)
    just_enough = replace(Limits(**happened), window=LIMITS.window)
    assert not check(run.history, just_enough)
    violations = check(run.history, replace(just_enough, **{what: happened[what] + 1}))
    assert [violation.rule for violation in violations] == [Rule.TOO_LITTLE]


def test_an_empty_history_fails() -> None:
    assert {violation.rule for violation in check(History(), Limits())} == {Rule.TOO_LITTLE}


@pytest.mark.slow
def test_a_long_history_is_checked_to_its_end() -> None:
    run = play(5, steps=LONG, users=40)
    assert sum(event.kind == "invoke" for event in run.history.events) >= LONG // 4
    assert not check(run.history, LIMITS)


def test_what_each_rule_looked_at_is_counted() -> None:
    everything: Counter[Rule] = Counter()
    for seed in range(5):
        everything.update(applied(play(seed).history))
    assert all(everything[rule] for rule in Rule), everything
    assert not any(number for rule, number in applied(History()).items() if rule is not Rule.TOO_LITTLE)


def test_a_report_names_the_events() -> None:
    forged = Forged(surveyed(1), Random(1))
    FORGERIES[Rule.ONCE][0](forged)
    history = History(events=forged.events)
    violations = check(history, LIMITS)
    text = report(history, violations)
    assert text.startswith("1 × ONCE\nONCE (an application gets a message once): app-")
    for line in violations[0].lines:
        assert f"line {line}: {history.events[line - 1].line()}" in text
