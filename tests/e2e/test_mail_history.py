"""Mail between users who come and go, while everything breaks in turn, and what the checker says of it.

Datagrams are lost all the time (5 %). The kinds of faults are those of tests/support/mail_faults.py: each round has every kind
once, in an order that follows from the seed; the next one begins when the cluster is whole again and mail has flowed. In the suite
it is a round of a few kinds. `make mail` has all of them, with a file system for each replica of a store and a library in front
of libc's (so it needs root and `cc`), for `PIXIU_MAIL_MINUTES` (10) or longer until each kind was there once; `PIXIU_MAIL_SEED`
gives the seed of a run that is to be repeated. The history is kept in the test's folder; what happened is printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import login as logins
from tests.history.applied import applied
from tests.history.checker import check, counts, report
from tests.history.record import History
from tests.history.violation import Limits
from tests.support.cluster import running_cluster
from tests.support.cuts import CutNetwork
from tests.support.disks import small_disk
from tests.support.interposed import Interposed
from tests.support.lossy import Faults
from tests.support.mail_faults import BRIEF, DISK, KINDS, SESSION_MS, STORES, World, rounds
from tests.support.mail_history import REFUSED_BYTES, Traffic

MINUTES = float(os.environ.get("PIXIU_MAIL_MINUTES", "0"))
LONG = MINUTES > 0
SEED = int(os.environ.get("PIXIU_MAIL_SEED") or (random.SystemRandom().randrange(1_000_000) if LONG else 1))
CONFIRMED_S = 8.0 if LONG else 30.0
"""A mail that is not confirmed by then is sent again, as another call: many a fault takes longer."""
PACE_S = 0.08 if LONG else 0.04
INBOX_CAP = 800
"""Of a lane: in a long run the inboxes of who is away all the time reach it, and no others."""
PARTITIONS, REPLICAS = 2 if LONG else 1, 2
SHAPE = [
    "--proxies=2", "--gateways=2", "--relays=1", "--relay-replicas=2", "--brokers=1", "--broker-replicas=1", "--routers=1",
    "--router-replicas=2", f"--xius={PARTITIONS}", f"--xiu-replicas={REPLICAS}", f"--pis={PARTITIONS}", f"--pi-replicas={REPLICAS}",
    "--set", f"cluster.max_record_bytes={REFUSED_BYTES}", "--set", f"pi.inbox_cap={INBOX_CAP}",
    "--set", "xiu.table_mb=8", "--set", "xiu.reserve_mb=0",
    *(part for role in STORES for part in ("--set", f"{role}.session_timeout_ms={SESSION_MS}")),
]  # fmt: skip

pytestmark = pytest.mark.timeout(600 + 180 * MINUTES)


@contextlib.contextmanager
def own_disks(folder: Path) -> Iterator[dict[str, Path]]:
    """File systems for the data of every store's replica, where `pixiu up` has it; none in the suite."""
    with contextlib.ExitStack() as stack:
        names = [f"{role}-{p}-{n}" for role in STORES for p in range(PARTITIONS) for n in range(REPLICAS)] if LONG else []
        (folder / "run").mkdir()
        yield {name: stack.enter_context(small_disk(folder / "run" / name, DISK)) for name in names}


@contextlib.contextmanager
def leading_to(server: EmbeddedZooKeeper, network: CutNetwork) -> Iterator[str]:
    """The registry's address in the network; who goes there has the logins, too."""
    hosts = f"127.0.0.1:{network.registry_port}"
    link = logins.leave(hosts, server.credentials)
    try:
        yield f"zk://{hosts}/pubsub"
    finally:
        if link is not None:
            link.unlink(missing_ok=True)


async def test_every_mail_arrives_once_whatever_breaks(tmp_path: Path) -> None:
    print(f"\nPIXIU_MAIL_SEED={SEED}", flush=True)
    history = History(path=tmp_path / "history.jsonl")
    with own_disks(tmp_path) as disks, EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        direct = f"zk://{server.address}/pubsub"
        network = CutNetwork(direct, SEED, server.port)
        network.start()
        interposed = Interposed(tmp_path) if LONG else None
        try:
            with (
                leading_to(server, network) as registry,
                running_cluster(
                    tmp_path,
                    "--registry",
                    registry,
                    *SHAPE,
                    *network.settings(),
                    "--set",
                    f"xiu.table_dir={tmp_path}",
                    environment=interposed.environment if interposed else None,
                ) as cluster,
            ):
                world = World(cluster, server, network, history, random.Random(SEED), disks, interposed)
                await world.whole()
                with network.faults(Faults(lost=0.05)):
                    async with Traffic(
                        direct, history, SEED, everything=True, confirmed_s=CONFIRMED_S, pace_s=PACE_S, sleeper=LONG
                    ) as traffic:
                        await traffic.more(200)
                        await break_all(world, traffic)
                        await traffic.settle()
        finally:
            network.stop()
    history.close()
    faults = sum(world.counts.values())
    print(f"{dict(traffic.counts)}; {counts(history)}; stopped by cuts: {network.stopped}")
    print(f"{faults} faults: {dict(sorted(world.counts.items()))}")
    looked_at = {rule.name: number for rule, number in applied(history).items()}
    print(f"looked at by rule: {looked_at}")
    limits = Limits(sends=30 * faults, deliveries=50 * faults, acknowledgements=50 * faults, faults=faults, inbox_cap=INBOX_CAP)
    found = check(history, limits)
    assert not found, f"seed {SEED}\n{report(history, found)}"
    # The brief form has one cut, and on a busy machine its network may not find out in time whose connection it should cut.
    assert network.stopped["chunks of streams"] or not LONG, "cuts cut no stream"
    if LONG:
        assert network.stopped["datagrams"], "no datagram was cut"
        assert all(looked_at.values()), f"a rule looked at nothing: {looked_at}"


async def break_all(world: World, traffic: Traffic) -> None:
    """One after the other, the next when the cluster is whole again and mail has flowed meanwhile."""
    began = time.monotonic()
    kinds = KINDS if LONG else BRIEF
    for number, kind in enumerate(rounds(kinds, world.random)):
        if number >= len(kinds) and time.monotonic() - began >= 60 * MINUTES:
            break
        start = time.monotonic()
        broken = await world.broken(kind)
        lasts = asyncio.create_task(asyncio.sleep(world.random.uniform(*broken.lasts_s)))
        try:
            await lasts
        finally:
            await world.healed(kind, broken)
        await traffic.more(100)
        said = f"{start - began:.0f} s: {kind.name}: {', '.join(broken.targets)}; {time.monotonic() - start:.0f} s"
        print(f"{said}; {dict(traffic.counts)}", flush=True)
