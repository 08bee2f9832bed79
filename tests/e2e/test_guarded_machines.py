"""Three machines (network namespaces), guarded in every way: certificates of both sides, signed datagrams, logins and lists in a
ZooKeeper that speaks TLS alone, tokens of all clients. The sample is played and users mail each other, while an operator exchanges
everything that guards them, one machine after the other. Nothing is lost, no session of a process or client ends, and what was
before is taken no more. Only the key of tokens, which comes first, ends sessions: they come back with new tokens.

`PIXIU_GUARDED_ROUNDS=0` plays it in a minute, with nine processes or fewer; with more each machine runs every role, and everything
is exchanged so many times, one thing after the other (`make guarded`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import pixiu
from pixiu.client.connection_events import ConnectionEvent, ConnectionState
from pixiu.discovery.login import Login
from pixiu.discovery.node import Node
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import RegistryDenied
from pixiu.rpc import tls
from tests.history.checker import check, counts, report
from tests.history.record import History
from tests.history.violation import Limits
from tests.support.cluster import LAYOUT
from tests.support.guarded_machines import GuardedMachines, answers, guarded_machines
from tests.support.mail_history import Traffic
from tests.support.waiting import until
from tools.load.mqtt import MQTTClient
from tools.replay.options import ReplayOptions
from tools.replay.run import SAMPLE, SAMPLE_SPEED, LogChoice, Result, load_plan, replay

ROUNDS = int(os.environ.get("PIXIU_GUARDED_ROUNDS", "0"))
EVERY = ("xiu", "pi", "router", "relay", "broker", "gateway", "proxy")
BRIEF = {
    "separate": (("xiu", "router", "gateway"), ("pi", "broker", "proxy"), ("relay", "gateway", "proxy")),
    "nodes": (("xiu", "router", "relay", "broker", "gateway"), ("pi", "router", "relay", "broker", "proxy"), ("gateway", "proxy")),
}
ROLES = (EVERY,) * 3 if ROUNDS else BRIEF[LAYOUT]
ROOM = 77

pytestmark = [
    pytest.mark.timeout(600 + 300 * ROUNDS),
    pytest.mark.skipif(
        "PIXIU_GUARDED_ROUNDS" not in os.environ, reason="takes a minute: `make guarded`, or PIXIU_GUARDED_ROUNDS=0"
    ),
]


def test_nothing_is_lost_and_nobody_disconnected_while_everything_is_exchanged(tmp_path: Path) -> None:
    with guarded_machines(tmp_path, ROLES) as machines:
        asyncio.run(exchange_everything(machines, tmp_path))


def is_end(event: ConnectionEvent) -> bool:
    """True for a lost connection, except that of a publisher whose proxy learned late that the first token key is gone."""
    late = event.what == "publisher" and "the key that signed the token was removed" in event.reason
    return event.state is not ConnectionState.CONNECTED and not late


async def exchange_everything(machines: GuardedMachines, folder: Path) -> None:
    """The test, in a loop of its own: the fixture's processes are waited for without one."""
    history = History(path=folder / "history.jsonl")
    target = str(machines.registry)
    view = await machines.view()
    lost: list[str] = []
    events: list[ConnectionEvent] = []
    old_certificates, old_passwords = folder / "old", folder / "old-credentials"
    shutil.copytree(machines.own, old_certificates)
    shutil.copy(machines.own / "credentials", old_passwords)
    results: list[Result] = []
    exchanged = asyncio.Event()

    async def play() -> None:
        plan = load_plan(LogChoice(path=SAMPLE))
        while not results or not exchanged.is_set():
            results.append(await replay(target, plan, ReplayOptions(speed=SAMPLE_SPEED), token_of=machines.token_of))

    began = time.monotonic()
    async with (
        pixiu.connect(target, uin=8, token=lambda: machines.token_of(8), on_connection=events.append) as px,
        px.subscribe(room=ROOM) as messages,
        Traffic(target, history, 1, token_of=machines.token_of) as traffic,
    ):
        await px.room(ROOM).send(b"before")
        assert (await anext(messages)).payload == b"before"
        await traffic.more(50)
        events.clear()
        await machines.exchange_token_keys(view)
        await until(lambda: (ConnectionState.CONNECTED, "subscription") in {(e.state, e.what) for e in events}, "a new session")
        await px.room(ROOM).send(b"again")
        assert (await anext(messages)).payload == b"again"
        await traffic.more(50)
        gateways = [node for node in view.nodes if node.role == "gateway"]
        standing = [
            MQTTClient(
                node.mqtt_host, node.mqtt_port, f"standing-{node.replica}", "9", password=machines.token_of(9),
                on_disconnect=lambda error: lost.append(str(error)),
            )
            for node in gateways
        ]  # fmt: skip
        for client in standing:
            await client.connect()
        events.clear()  # those from here on are ends
        playing = asyncio.create_task(play())
        await traffic.more(50)
        for _ in range(max(ROUNDS, 1)):
            await machines.exchange_all(view, at_once=not ROUNDS)
            await traffic.more(50)
        exchanged.set()
        await playing
        await px.room(ROOM).send(b"after")
        assert (await anext(messages)).payload == b"after"
        assert (lost, [event for event in events if is_end(event)]) == ([], [])
        await traffic.settle()
    await machines.drop_datagram_keys(view)
    for client in standing:
        client.on_disconnect = None
        await client.close()
    history.close()
    after = await machines.view()
    assert {(node.endpoint, node.incarnation) for node in after.nodes} == {(node.endpoint, node.incarnation) for node in view.nodes}
    found = check(history, Limits(sends=50, deliveries=50, acknowledgements=50, faults=0))
    assert not found, report(history, found)
    for result in results:
        assert not result.verdict.broken, (result.verdict.broken, result.verdict.examples, result.why_broken, result.verdict)
        assert (result.verdict.lost, result.breaks, result.verdict.failed_logins) == (0, 0, 0), result.why_broken
    await old_are_refused(machines, after.nodes, old_certificates, old_passwords)
    print(
        f"{time.monotonic() - began:.0f} s: {len(machines.exchanged)} exchanges on machines; {len(results)} replays with "
        f"{sum(result.verdict.delivered for result in results)} deliveries, 0 lost, {sum(one.logins for one in results)} logins; "
        f"mail {dict(traffic.counts)}, {counts(history)}; 0 sessions ended"
    )


async def old_are_refused(machines: GuardedMachines, nodes: Sequence[Node], certificates: Path, passwords: Path) -> None:
    """What guarded the cluster before lets nobody in."""
    with pytest.raises(RegistryDenied, match="refuses the login"):
        await ZooKeeper(machines.registry, login=Login(passwords)).connect()
    now = tls.own()
    tls.use(tls.Tls(certificates, tls.OPERATOR))
    try:
        with pytest.raises(pixiu.RegistryUnavailable, match="TLS fails"):
            await ZooKeeper(machines.registry, connect_timeout_s=2.0).connect()
        assert not any([await answers(node) for node in nodes])
    finally:
        tls.use(now)
