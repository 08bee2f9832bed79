"""Pi goes from one partition to two, and on to four, while mail is sent and read, and while leaders are killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from cluster.wire.v1 import doubling_pb2 as pb
from tests.history.checker import check, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.doubling import call
from tests.support.mail_history import Traffic
from tests.support.pi_doubling import PiDoubling
from tests.support.roles import Roles
from tests.support.stores import leader_of, wait_in_sync
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
USERS = tuple(range(8001, 8009))
PACE_S = 0.02
"""Between two mails: as fast as they can they leave the doubling no CPU."""
OTHERS = ("xiu-0", "proxy-0", "relay-0", "gateway-0", "router-0", "broker-0")


async def start_all(roles: Roles, *pis: str) -> None:
    """One of each other role, and partition 0 of Pi."""
    await roles.layout(proxy=1, gateway=1, relay=1, router=1, broker=1, xiu=1, pi=1)
    for name in OTHERS:
        roles.start(name, partition=-1 if name.startswith(("proxy", "gateway")) else 0)
    start_pi(roles, 0, *pis)
    await wait_in_sync(roles, *pis)
    await roles.running(*OTHERS)


def start_pi(roles: Roles, partition: int, *names: str) -> None:
    for name in names:
        roles.start(name, partition=partition, flush_interval_s=0.1, clock_interval_s=0.5)


async def test_nothing_is_lost_when_leaders_are_killed_in_a_doubling(roles: Roles, tmp_path: Path) -> None:
    history = History(path=tmp_path / "history.jsonl")
    names: dict[int, tuple[str, ...]] = {0: ("pi-a", "pi-b"), 1: ("pi-c", "pi-d")}
    await start_all(roles, *names[0])
    began = time.monotonic()
    async with Traffic(roles.target(), history, seed=3, users=6, pace_s=2 * PACE_S) as traffic:
        await traffic.more(200)
        doubling = PiDoubling(roles, names)
        await doubling.begin()
        start_pi(roles, 1, *names[1])
        await wait_in_sync(roles, *names[1])
        await doubling.advance(1, pb.DOUBLING_LEARNING)
        await kill_leader(roles, history, 1, *names[1])
        await doubling.learn()
        await traffic.more(50)
        await doubling.advance(0, pb.DOUBLING_SPLIT)
        await kill_leader(roles, history, 0, *names[0])
        await doubling.cut()
        await traffic.more(100)
        await kill_leader(roles, history, 1, *names[1])
        await traffic.more(50)
        await doubling.commit()
        await doubling.advance(0, pb.DOUBLING_CLEANING)
        await kill_leader(roles, history, 0, *names[0])
        await doubling.clean()
        await traffic.more(100)
        await traffic.settle()
    history.close()
    print(f"{time.monotonic() - began:.0f} s; {dict(traffic.counts)}")
    found = check(history, Limits(sends=200, deliveries=500, acknowledgements=500, faults=4))
    assert not found, report(history, found)


async def kill_leader(roles: Roles, history: History, partition: int, *names: str) -> None:
    """Kill who leads, once both are in sync, and start it again."""
    leader = await wait_in_sync(roles, *names)
    history.fault(Fault("kill", leader))
    await roles.kill(leader)
    start_pi(roles, partition, leader)

    async def led() -> bool:
        return bool(await leader_of(roles, *names))

    await until(led, f"partition {partition} has a leader")
    history.fault(Fault("kill", leader, heals=True))


async def test_a_request_that_cannot_be_is_refused_in_words(roles: Roles) -> None:
    await start_all(roles, "pi-0")
    node = await roles.node("pi-0")
    assert node is not None
    sound: dict[str, Any] = {"doubling": 7, "partitions": 2, "phase": pb.DOUBLING_SPLIT, "operator": "a test"}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"phase": 9}, "goes on to a phase"),
        ({"phase": pb.DOUBLING_NONE}, "goes on to a phase"),
        ({"operator": "x" * 513}, "characters"),
    ]
    for change, text in changes:
        with pytest.raises(grpc.aio.AioRpcError, match=f"INVALID_ARGUMENT.*{text}"):
            await call(node.address, pb.DoublingAdvanceRequest(**sound | change))
