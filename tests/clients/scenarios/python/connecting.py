"""Scenarios of connecting, TLS, logins, events and presence."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pixiu
from tests.clients.scenarios.python.play import Play, check, closed_port, fails, same, scenario, take, until

MANY = 1_000
"""More descriptors than a driver has open."""
LEFT_S = 5.0
"""Time in which a closed client ends everything; a server that found a connection idle would end it later."""


def known(px: pixiu.Client) -> tuple[list[str], list[str]]:
    """The proxies and gateways that a client knows."""
    return sorted(px.cluster().proxies), sorted(px.cluster().gateways)


def held() -> Mapping[str, int]:
    """How many tasks, timers, threads and sockets there are."""
    loop = asyncio.get_running_loop()
    links = (Path(f"/proc/self/fd/{number}") for number in range(MANY))
    return {
        "tasks": len(asyncio.all_tasks()),
        "timers": sum(not timer.cancelled() for timer in vars(loop)["_scheduled"]),
        "threads": threading.active_count(),
        "sockets": sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links),
    }


async def send_and_get(play: Play, **options: object) -> None:
    """What is sent to a room comes."""
    px, subscription = await play.pair(**options)
    await px.room(play.seed).send(b"hello")
    same([each.payload for each in await take(subscription, 1)], [b"hello"], "messages")


@scenario("connect/proxies")
async def proxies(play: Play) -> None:
    whole = await play.connect()
    one = await play.connect(whole.cluster().proxies[0])
    check(bool(one.cluster().gateways), "it knows no gateway")
    same(known(one), known(whole), "the cluster")


@scenario("connect/registry")
async def registry(play: Play) -> None:
    check(play.target.startswith("zk://"), "the harness gave no zk:// target")
    whole = await play.connect()
    same(known(await play.connect(whole.cluster().proxies[0])), known(whole), "the cluster")


@scenario("connect/dead_address_first")
async def dead_address_first(play: Play) -> None:
    proxy = (await play.connect()).cluster().proxies[0]
    px = await play.connect(f"{closed_port()},{proxy}")
    await px.room(play.seed).send(b"hello")


@scenario("connect/unreachable")
async def unreachable(play: Play) -> None:
    addresses = [closed_port(), closed_port()]
    error = await fails(pixiu.Unreachable, lambda: play.connect(",".join(addresses), connect_timeout_s=1.0))
    check(all(each in str(error) for each in addresses), f"{error} does not name the addresses")


@scenario("connect/bad_target")
async def bad_target(play: Play) -> None:
    for target in ("http://x", "host", "host:0"):
        await fails(pixiu.InvalidArgument, lambda target=target: play.connect(target))  # type: ignore[misc]


@scenario("connect/closed")
async def closed(play: Play) -> None:
    px = await play.connect()
    await px.close()
    await fails(pixiu.NotConnected, lambda: px.room(play.seed).send(b"late"))
    await fails(pixiu.NotConnected, lambda: play.subscribe(px))


@scenario("connect/nothing_left")
async def nothing_left(play: Play) -> None:
    async with pixiu.connect(play.target):  # gRPC's own threads and sockets stay from here on
        pass
    before = held()
    async with pixiu.connect(play.target, uin=play.seed, client="left") as px:
        subscription, inbox = await play.subscribe(px), px.inbox()
        await inbox.ready()
        await px.room(play.seed).send(b"hello")
        await take(subscription, 1)
        await px.user(play.seed).mail(b"hello")
        (await take(inbox, 1))[0].acknowledge()

    def left() -> list[str]:
        now = held()
        own = {"timers": 2}  # of the wait: its limit, and its pause
        return [kind for kind in now if now[kind] > before[kind] + own.get(kind, 0)]

    await until(lambda: not left(), "the end of everything", LEFT_S)


@scenario("presence/online")
async def online(play: Play) -> None:
    px = await play.user(1)
    await play.subscribe(px, chat=True)
    found = await px.presence([play.seed + 1, play.seed + 2])
    same([(each.online, each.devices) for each in found], [(True, 1), (False, 0)], "presence")


@scenario("events/states")
async def states(play: Play) -> None:
    found: list[pixiu.ConnectionState] = []

    def note(event: pixiu.ConnectionEvent) -> None:
        if event.what == "subscription":
            found.append(event.state)

    _, subscription = await play.pair(on_connection=note)
    await subscription.close()
    same(found, [pixiu.ConnectionState.CONNECTED, pixiu.ConnectionState.CLOSED], "states")


@scenario("secure/tls_and_token")
async def tls_and_token(play: Play) -> None:
    await send_and_get(play)


@scenario("secure/wrong_token")
async def wrong_token(play: Play) -> None:
    await fails(pixiu.NotAuthenticated, lambda: play.connect(token="wrong"))


@scenario("secure/no_tls")
async def no_tls(play: Play) -> None:
    await fails(pixiu.Unreachable, lambda: play.connect(ca="", connect_timeout_s=2.0))


@scenario("secure/token_function")
async def token_function(play: Play) -> None:
    asked = 0

    def token() -> str:
        nonlocal asked
        asked += 1
        return os.environ["PIXIU_TOKEN"]

    await send_and_get(play, token=token)
    check(asked > 0, "it was not asked")
