"""Each fault, put back into a production core, is found by the simulation of the whole system. The list is `FAULTS`.

Source: docs/simulation.md, "The whole system".
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.cluster.faults import GreedyRouter
from tests.sim.delivery.faulty import LogoutAcknowledges, NoGapCheck, NoRewind, NoWindow
from tests.sim.system import faults
from tests.sim.system.faults import SystemVariant
from tests.sim.system.run import report, shape_of
from tests.support.effort import portion

SEEDS = 25
"""A fault must show in one of so many runs."""

FAULTS: dict[str, tuple[SystemVariant, str]] = {
    "a proxy confirms before Pi has it": (SystemVariant(mail=faults.ConfirmsWhatIsStored), "Pi does not have it"),
    "a relay saves a cursor beyond what was acknowledged": (
        SystemVariant(session=LogoutAcknowledges),
        "is saved beyond what it acknowledged",
    ),
    "a gateway drops a redelivery": (SystemVariant(gateway=faults.DropsRedeliveries), " in lane "),
    "two relays deliver, and nobody is fenced": (
        SystemVariant(mail_devices=faults.OwnsEverybody, state=faults.OneSession),
        "two relays deliver under one session",
    ),
    "two relays take themselves for the owner": (
        SystemVariant(mail_devices=faults.OwnsEverybody),
        "not served by one relay each",
    ),
    "a relay sends everything at once": (SystemVariant(session=NoWindow), "beyond the window"),
    "a relay does not send again what a stream lost": (SystemVariant(session=NoRewind), " in lane "),
    "a relay sends a notice's mail whatever is missing before it": (SystemVariant(session=NoGapCheck), " in lane "),
    "a router confirms what nobody has": (SystemVariant(router=faults.ConfirmsUnheard), "does not know a confirmed change"),
    "a parent of Pi takes what moved beside its child": (SystemVariant(pi=faults.WritesTwice), "InboxSeq is given twice"),
    "a child of Pi opens before it has learned everything": (SystemVariant(state=faults.OpensEarly), "InboxSeq is given twice"),
    "a child of Pi begins without cursors": (SystemVariant(state=faults.LearnsNoCursors), "acknowledged before a session began"),
    "a router confirms what it does not pass on": (SystemVariant(router=GreedyRouter), "no replica of its partition has"),
}


@pytest.mark.parametrize("name", portion(FAULTS))
def test_the_simulation_finds_a_fault_that_is_put_back(name: str) -> None:
    variant, finds = FAULTS[name]
    seeds: Sequence[int] = range(SEEDS)
    if variant.router is GreedyRouter:
        seeds = [seed for seed in range(4 * SEEDS) if shape_of(seed).doubles == "router"]
    elif "of Pi" in name:
        seeds = [seed for seed in range(3 * SEEDS) if shape_of(seed).doubles_pi]
    for seed in seeds:
        found, _ = report(seed, variant)
        if any(finds in text for text in found):
            return
    pytest.fail(f"no run of {SEEDS} found it")
