"""Three machines (network namespaces), guarded in every way, on a network that loses 1 % of all packets, those of TCP too, and
holds each of them back for up to 20 ms, so that they overtake each other. The log of a chat is played and users mail each other;
meanwhile one machine gets nothing from another one for 20 s, and later the other nothing from the one. No promise is broken.

`PIXIU_BAD_NETWORK=LOG` plays that log, `sample` for the one of the project (`make bad-network`). What was measured is printed.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.history.checker import check, counts, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.bad_network import BadNetwork, Impairment
from tests.support.guarded_machines import GuardedMachines, guarded_machines
from tests.support.mail_history import Traffic
from tools.load.payload import monotonic_us
from tools.load.verdict import Death
from tools.replay.options import ReplayOptions
from tools.replay.run import LogChoice, Result, load_plan, replay

LOG = os.environ.get("PIXIU_BAD_NETWORK", "")
SEED = int(os.environ.get("PIXIU_BAD_NETWORK_SEED", "1"))
EVERY = ("xiu", "pi", "router", "relay", "broker", "gateway", "proxy")
BAD = Impairment(lost=0.01, jitter_s=0.02)
ONE, OTHER = 1, 2
"""Machines, as the network counts them; 0 has the clients and ZooKeeper."""
CUT_S = 20.0
AFTER_S = 10.0
"""After a cut: until everybody knows again who is there, and what was sent meanwhile has come or not."""
PLAYED_S = 240.0
"""How long the log is made to last: longer than both cuts."""

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not LOG, reason="takes ten minutes: `make bad-network`, or PIXIU_BAD_NETWORK=sample"),
]


def test_no_promise_is_broken_by_a_bad_network(tmp_path: Path) -> None:
    with guarded_machines(tmp_path, (EVERY,) * 3, bad_by_seed=SEED) as machines:
        assert machines.network.bad is not None
        asyncio.run(play(machines, machines.network.bad, tmp_path))
    packets = machines.network.bad.counts
    print(f"packets {packets}")
    assert all(packets.values()), "nothing was lost, or cut, or overtaken"


async def play(machines: GuardedMachines, bad: BadNetwork, folder: Path) -> None:
    """The test, in a loop of its own: the fixture's processes are waited for without one."""
    history = History(path=folder / "history.jsonl")
    target = str(machines.registry)
    before = await machines.view()
    outages: list[Death] = []
    plan = load_plan(LogChoice(path=LOG))
    options = ReplayOptions(speed=max(plan.span_ms / 1000 / PLAYED_S, 1.0), join_timeout_s=120.0)
    bad.set(BAD)
    began = time.monotonic()
    async with Traffic(target, history, SEED, token_of=machines.token_of) as traffic:
        playing = asyncio.create_task(replay(target, plan, options, token_of=machines.token_of, outages=outages))
        await traffic.more(100)
        for path in ((ONE, OTHER), (OTHER, ONE)):
            name = f"machine {path[0]} to {path[1]}"
            outages.append(Death(name, "link", 0, 0, monotonic_us()))
            history.fault(Fault("cut", name))
            bad.set(replace(BAD, cut=(path,)))
            await asyncio.sleep(CUT_S)
            bad.set(BAD)
            history.fault(Fault("cut", name, heals=True))
            outages[-1].rejoin_us = monotonic_us() + int(AFTER_S * 1e6)
            await traffic.more(100)
        assert not playing.done(), "the log was over before the last cut"
        result = await playing
        await traffic.settle()
    history.close()
    print(told(result, outages))
    print(f"{time.monotonic() - began:.0f} s; mail {dict(traffic.counts)}, {counts(history)}")
    after = await machines.view()
    gone = {node.endpoint for node in before.nodes} - {node.endpoint for node in after.nodes}
    assert not gone, "a process has ended, or the registry believes so"
    found = check(history, Limits(sends=100, deliveries=100, acknowledgements=100, faults=2))
    assert not found, report(history, found)
    # A network that reorders datagrams may reorder what came in them: docs/promises.md.
    broken = [text for text in result.verdict.broken if not text.endswith("after a later message of the same sender and room")]
    assert not broken, (broken, result.verdict.examples, result.why_broken)
    assert result.verdict.failed_logins == 0
    assert result.verdict.delivered > 0.9 * result.verdict.expected


def told(result: Result, outages: list[Death]) -> str:
    """What became of the log's messages; for a person."""
    verdict = result.verdict
    causes = {cause: count for cause, count in verdict.causes.items() if count}
    by_outage = {outage.name: dict(outage.counts) for outage in outages}
    return (
        f"{result.seconds:.0f} s: {verdict.sent} messages, {verdict.delivered} of {verdict.expected} deliveries, lost {causes}, "
        f"in cuts {by_outage}, {verdict.out_of_order} after a later one, {verdict.repeated} repeated, {verdict.refused} refused "
        f"{verdict.refusals}, {verdict.unacknowledged} unacknowledged; p50 {verdict.latency_p50_ms:.0f} ms, p99 "
        f"{verdict.latency_p99_ms:.0f} ms; {result.logins} logins, {result.breaks} connections broke"
    )
