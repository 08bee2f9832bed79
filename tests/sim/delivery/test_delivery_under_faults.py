"""Delivery of mail under random schedules of faults: nothing is lost, nothing is believed that is not so, and each fault
of the code is found.

PIXIU_DELIVERY_RUNS says how many seeds are played; `make sim` plays 10,000.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from relay.delivery import window
from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from tests.sim.delivery import faulty
from tests.sim.delivery.schedule import Verdict, run
from tests.support.effort import portion, runs

BLOCK = 20
BLOCKS = max(1, runs("PIXIU_DELIVERY_RUNS", local=BLOCK, ci=40) // BLOCK)
ENOUGH = {
    "received": 30_000, "received again": 2000, "sent again": 2000, "from notices": 600, "gap markers": 100, "gone": 400,
    "fenced": 100,
    "read refused": 20, "acknowledgement refused": 80, "session followed on a connection": 80,
    "delivery refused": 1, "asked what was written": 60,  # who asks first sends less under a session that is over
    "repeat dropped": 250, "notify elsewhere": 1000, "notify never sent": 150, "stream broken": 40,
    "relay killed": 25, "logins": 1500, "answers late": 300,
    "old acknowledgements": 250, "fault: kill gateway": 60, "fault: pause relay": 30, "fault: pi down": 60, "fault: xiu down": 60,
    "fault: herd": 60, "fault: silence": 60, "fault: trim": 60,
}  # fmt: skip
"""What 100 runs must have had at least; about half of what was counted when this was written."""
SEEDS = 60
"""A fault must show in one of so many runs."""


@cache
def block(number: int) -> tuple[Counter[str], tuple[Verdict, ...]]:
    """What happened in a block of runs, and the verdicts of those that broke something."""
    totals: Counter[str] = Counter()
    bad = []
    for seed in range(number * BLOCK, (number + 1) * BLOCK):
        verdict = run(seed)
        totals += verdict.counts
        if verdict.violations:
            bad.append(verdict)
    return totals, tuple(bad)


@pytest.mark.parametrize("number", range(BLOCKS))
def test_mail_arrives_under_faults(number: int) -> None:
    _, bad = block(number)
    assert not bad, [f"python -m tests.sim.delivery.schedule {verdict.seed}: {verdict.violations[:3]}" for verdict in bad[:5]]


@pytest.mark.skipif(BLOCKS < 2, reason="it takes two blocks of runs; continuous integration plays them in one turn of three")
def test_the_schedules_do_enough() -> None:
    totals = block(0)[0] + block(1)[0]
    too_few = {what: totals[what] for what, least in ENOUGH.items() if totals[what] < least * 2 * BLOCK / 100}
    assert not too_few, too_few


def test_mail_arrives_under_faults_through_a_window_of_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "WINDOW_BYTES", 2000)
    bad = {seed: verdict.violations[:3] for seed in range(BLOCK // 2) if (verdict := run(seed)).violations}
    assert not bad


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run(7), run(7)
    assert (first.trace, first.counts, first.healed_s) == (second.trace, second.counts, second.healed_s)
    assert first.trace != run(8).trace


FAULTS: dict[type[Session] | type[Deliveries], set[str]] = {
    faulty.IgnoresTheFence: {"sent after it was fenced", "stuck"},
    faulty.ReusesTokens: {"an entry was passed over", "another record than was stored"},
    faulty.SavesOnce: {"not acknowledged"},
    faulty.NoDirtyMark: {"not delivered"},
    faulty.WaitsForEver: {"stuck", "busy"},
    faulty.NoRewind: {"acknowledged, not delivered", "not delivered"},
    faulty.LogoutAcknowledges: {"acknowledged, not delivered"},
    faulty.NotYetIsGone: {"a gap where there is none"},
    faulty.NeverPolls: {"not delivered"},
    faulty.AcknowledgesBeyond: {"acknowledged beyond what was sent"},
    faulty.NoGapCheck: {"an entry was passed over"},
    faulty.NoWindow: {"window not kept"},
    faulty.TellsNoGap: {"dropped without a word"},
    faulty.MarksNothing: {"marked wrongly"},
}
FOUND_AT: dict[type[Session] | type[Deliveries], int] = {faulty.NeverPolls: 42}
"""A seed that found a fault which few find; it is played first."""


@pytest.mark.parametrize("fault", portion(FAULTS), ids=lambda fault: fault.__name__)
def test_a_fault_put_back_is_found(fault: type[Session] | type[Deliveries]) -> None:
    for seed in sorted(range(SEEDS), key=lambda seed: seed != FOUND_AT.get(fault)):
        verdict = run(seed, table=fault) if issubclass(fault, Deliveries) else run(seed, fault)
        if {what for what, _ in verdict.violations} & FAULTS[fault]:
            return
    pytest.fail(f"{SEEDS} runs saw nothing of it")


def test_it_is_found_when_sessions_have_no_numbers_of_their_own() -> None:
    missing = {"a cursor moved back", "not acknowledged"}
    for seed in range(SEEDS):
        missing -= {what for what, _ in run(seed, fencing=False).violations}
        if not missing:
            return
    pytest.fail(f"{SEEDS} runs saw nothing of {missing}")
