"""Each fault, put back behind its switch, is found by the simulation of a cluster. The list is `FAULTS`, and complete.

Source: DESIGN section 14; the faults are those of seed 004 (section 18 there) and those that a simplification would bring.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.sim.cluster import faults
from tests.sim.cluster.faults import Variant
from tests.sim.cluster.run import NO_FAULT, Load, report, shape_of

ROUTERS, BROKERS = "router", "broker"
SEEDS = 40
"""A fault must show in one of so many runs."""
LOAD = Load()
RESTLESS = Load(moves=60, messages=20, big_messages=0, user_messages=0, signals=400, scrambles=0, crashes=12, pauses=12)
"""Signals, and gateways that end while copies wait in processes that are stopped."""
HASTY = Load(moves=500, messages=500, scrambles=40, big_messages=0, signals=0, user_messages=0)
"""Feedback under way, and somebody who joins just then."""
TALK = Load(chat=300)
BIG = Load(big_messages=30, crashes=1)

FAULTS: dict[str, tuple[Variant, Load, str]] = {
    "relay data by GatewayMsgID": (Variant(devices=faults.NewestByMessage), TALK, "a relay left out the gateway where a user is"),
    "GatewayMsgIDs compared by gateway": (Variant(membership=faults.ByGateway), LOAD, "lacks"),
    "no tombstones": (Variant(membership=faults.WithoutTombstones), LOAD, "went back"),
    "no digest": (Variant(digests=False), LOAD, "lacks"),
    "feedback removes what is newer": (Variant(membership=faults.HastyFeedback), HASTY, "was removed although its gateway has it"),
    "a broker serves before its snapshot": (Variant(serve_before_snapshot=True), LOAD, "has taken no snapshot"),
    "signals forgotten at a restart": (Variant(keep_signals=False), RESTLESS, "a signal was delivered twice"),
    "VRoom copies deduped by SnowflakeID alone": (Variant(gateway=faults.DedupeBySnowflakeID), BIG, "did not deliver"),
    "old layout ignored: records dropped": (Variant(broker=faults.DeafBroker), LOAD, "whose room has moved"),
    "old layout ignored: nobody told": (Variant(broker=faults.SilentBroker), LOAD, "did not answer a stale sender"),
    "old layout ignored: joins dropped": (Variant(router=faults.GreedyRouter), LOAD, "no replica of its partition has"),
    "old layout ignored: messages go round": (Variant(router=faults.EndlessRouter), LOAD, "more datagrams than a run can have"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulation_finds_a_fault_that_is_put_back(name: str) -> None:
    variant, load, finds = FAULTS[name]
    seeds: Iterable[int] = range(SEEDS)
    if name.startswith("old layout"):
        doubles = ROUTERS if variant.router is not NO_FAULT.router else BROKERS
        seeds = [seed for seed in range(4 * SEEDS) if shape_of(seed).doubles == doubles]
    for seed in seeds:
        found, _ = report(seed, variant, load)
        if any(finds in text for text in found):
            return
    pytest.fail(f"no run of {SEEDS} found it")


@pytest.mark.parametrize("load", [RESTLESS, HASTY, BIG], ids=["restless", "hasty", "big"])
def test_the_same_runs_without_the_fault_find_nothing(load: Load) -> None:
    for seed in (1, 5, 12):
        assert report(seed, load=load)[0] == []
