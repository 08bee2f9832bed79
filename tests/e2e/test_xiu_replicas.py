"""Two Xiu replicas of one partition as processes of their own, writers under way: their leader is killed again and again."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.repairs import repair
from tests.support.roles import Roles
from tests.support.stores import Mailer, equal_scans, figures, wait_in_sync

ROUNDS = int(os.environ.get("PIXIU_KILL_ROUNDS", "3"))
NAMES = ("xiu-a", "xiu-b")


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_a_leader_killed_again_and_again_loses_nothing_and_repeats_nothing(roles: Roles) -> None:
    await roles.layout(xiu=1)
    for name in NAMES:
        roles.start(name, partition=0)
    leader = await wait_in_sync(roles, *NAMES)
    alive = set(NAMES)
    mailer = Mailer(roles, alive)
    await mailer.more(200)
    times: list[float] = []
    for _ in range(ROUNDS):
        alive.discard(leader)
        epoch = mailer.epoch
        roles.send_signal(leader, signal.SIGKILL)
        times.append(await mailer.more(1, epoch))
        roles.start(leader, partition=0)
        alive.add(leader)
        leader = await wait_in_sync(roles, *NAMES)
    await mailer.more(200)
    await mailer.stop()
    scanned = await equal_scans(*await roles.running(*NAMES))
    said = figures("from a kill to the next acknowledgement", times)
    print(f"{said}; rounds {ROUNDS}, acknowledged {mailer.acknowledged}, stored {len(scanned)}")
    mailer.check(scanned)
    exit_code, compared = await repair(roles, "--role", "xiu")
    assert exit_code == 0, compared
    assert [(each["damaged"], each["differing"]) for each in compared["replicas"]] == [(0, 0), (0, 0)]
