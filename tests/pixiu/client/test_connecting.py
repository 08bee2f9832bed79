"""Targets, options, what is said when nobody answers, and how the client learns where the cluster is."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import pixiu
from cluster.listeners.server import MAX_STREAMS_OF_CLIENT
from pixiu.client.directory import ProxyDirectory
from pixiu.client.options import ClientOptions, OptionOverrides
from pixiu.discovery.target import ProxyTarget, RegistryAddress, parse_target
from pixiu.errors import ConfigurationError, InvalidArgument, NotConnected, NotSent, Unavailable
from pixiu.rpc.channels import MAX_USERS, Channels

Until = Callable[[Callable[[], object]], Awaitable[None]]


def test_targets() -> None:
    assert parse_target("10.0.0.1:7000, proxy:7001") == ProxyTarget(("10.0.0.1:7000", "proxy:7001"))
    assert parse_target("[::1]:7000") == ProxyTarget(("[::1]:7000",))
    assert parse_target("zk://a:2181,b:2182/pixiu/one/") == RegistryAddress("a:2181,b:2182", "/pixiu/one")
    assert parse_target("zk://a:2181") == RegistryAddress("a:2181", "/pubsub")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("", "names no address"),
        ("localhost", "'localhost' in the target 'localhost' is not 'host:port'"),
        ("a:1,b:99999", "'b:99999'.*1 to 65535"),
        ("a:0", "1 to 65535"),
        ("::1:7000", "brackets"),
        ("http://a:1", "unknown scheme.*zk://"),
        ("zk://", "example"),
        ("zk://a:port/x", "port"),
    ],
)
def test_a_wrong_target_is_refused_with_what_to_write(target: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        pixiu.connect(target)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"publish_timeout_s": 0}, "publish_timeout_s = 0"),
        ({"backoff_s": 9.0}, "max_backoff_s"),
        ({"queue_bytes": 10}, "queue_bytes = 10: at least max_record_bytes"),
        ({"max_record_bytes": 1 << 21}, "max_record_bytes"),
        ({"batch_bytes": 1 << 30}, "batch_bytes"),
        ({"connect_timeout_s": "1"}, "connect_timeout_s = '1': it must be a number"),
        ({"device": "phone"}, "device = 'phone': it must be an integer"),
        ({"device_class": 3}, "device_class = 3: it must be text"),
        ({"queue_records": True}, "queue_records = True: it must be an integer"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        pixiu.connect("a:1", **options)


def test_every_option_is_a_keyword_of_connect_with_the_same_type() -> None:
    hints = get_type_hints(ClientOptions)
    assert get_type_hints(OptionOverrides) == {field.name: hints[field.name] for field in fields(ClientOptions)}


def test_names_and_uins_are_bounded() -> None:
    with pytest.raises(InvalidArgument, match="128 bytes"):
        pixiu.connect("a:1", client="x" * 129)
    with pytest.raises(InvalidArgument, match="UIN"):
        pixiu.connect("a:1", uin=1 << 63)
    client = pixiu.connect("a:1")
    with pytest.raises(InvalidArgument, match=r"a RoomID is from 1 to .* not 'lobby'"):
        client.room("lobby")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"a UIN is from 1 to .* not 7\.5"):
        client.user(7.5)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_when_no_proxy_answers_each_address_and_its_reason_is_named(cluster: Any) -> None:
    await cluster.start(proxies=1, gateways=1)
    (dead,), (gateway,) = cluster.proxies, cluster.gateways
    await dead.kill()
    with pytest.raises(Unavailable) as caught:
        await pixiu.connect(f"{dead.address},{gateway.address}", connect_timeout_s=5.0).open()
    text = str(caught.value)
    assert f"{dead.address}: connection refused" in text
    assert f"{gateway.address}: a gRPC server that does not serve this" in text
    assert "pixiu up" in text


@pytest.mark.slow
async def test_a_reason_that_is_known_is_told_although_the_last_round_had_no_time(cluster: Any) -> None:
    await cluster.start()
    (dead,) = cluster.proxies
    await dead.kill()
    # The first round is over, and the loop wakes up from its back-off when all time is.
    asyncio.get_running_loop().call_later(0.5, time.sleep, 2.0)
    with pytest.raises(Unavailable, match=f"{dead.address}: connection refused"):
        await pixiu.connect(dead.address, connect_timeout_s=2.0, backoff_s=1.0).open()


async def test_a_reason_that_is_known_is_told_although_the_last_round_was_cut_short() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    channels = Channels()
    directory = ProxyDirectory((address,), ClientOptions(), channels, lambda _: None)
    now = asyncio.get_running_loop().time
    known = {address: "connection refused: no process listens there"}
    assert await directory._ask(now() + 0.2, known) == known
    assert await directory._ask(now() + 0.2, {}) == {address: "no answer in time"}
    await channels.close()
    silent.close()


async def test_processes_of_another_role_are_not_waited_for(cluster: Any) -> None:
    await cluster.start(proxies=1, gateways=1)
    (gateway,) = cluster.gateways
    with pytest.raises(pixiu.Unreachable, match=r"no proxy answered \(.*is it the address of another role"):
        await pixiu.connect(gateway.address, connect_timeout_s=3600.0).open()


async def test_a_cluster_that_comes_up_in_time_is_waited_for(cluster: Any, until: Until) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    await proxy.kill()
    px = pixiu.connect(proxy.address, connect_timeout_s=15.0)
    await proxy.start()
    async with px:
        await px.room(1).send(b"x")
        with pytest.raises(NotConnected, match="open already"):
            await px.open()


@pytest.mark.slow
async def test_zookeeper_that_does_not_answer_is_named(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    await proxy.kill()
    with pytest.raises(pixiu.RegistryUnavailable, match=proxy.address):
        await pixiu.connect(f"zk://{proxy.address}/pubsub", connect_timeout_s=0.5).open()


async def test_use_outside_of_the_context_says_what_to_write() -> None:
    px = pixiu.connect("127.0.0.1:1")
    for use in (lambda: px.subscribe(room=1), px.cluster, lambda: px.room(1).send_soon(b"x")):
        with pytest.raises(NotConnected, match="async with"):
            use()
    with pytest.raises(NotConnected, match="async with"):
        await px.room(1).send(b"x")
    with pytest.raises(NotConnected, match="async with"):
        await px.flush()
    await px.close()


async def test_the_map_is_refreshed_in_intervals_and_new_proxies_are_used(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    first, second = cluster.proxies
    cluster.hidden.add(second.address)
    async with pixiu.connect(first.address, refresh_interval_s=0.05) as px:
        assert px.cluster().proxies == (first.address,)
        await px.room(1).send(b"to the only one")
        cluster.hidden.clear()
        await until(lambda: len(px.cluster().proxies) == 2)
        await px.room(1).send(b"to the new one")
    assert first.payloads() == [b"to the only one"]
    assert second.payloads() == [b"to the new one"]


async def test_the_map_is_refreshed_when_a_connection_fails(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    first, second = cluster.proxies
    cluster.hidden.add(second.address)
    async with pixiu.connect(f"{first.address},{second.address}") as px:
        await px.room(2).send(b"1")
        cluster.hidden = {first.address}
        await first.kill()
        await px.room(2).send(b"2")
        assert px.cluster().proxies == (second.address,)
    assert second.payloads() == [b"2"]


@pytest.mark.slow
async def test_the_last_map_is_kept_when_no_proxy_answers_or_knows_any(cluster: Any, until: Until) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, refresh_interval_s=0.05) as px:
        cluster.hidden.add(cluster.target)
        asked = cluster.asked
        await until(lambda: cluster.asked > asked + 1)
        assert px.cluster().proxies == (cluster.target,)


@pytest.mark.process
def test_importing_pixiu_loads_neither_grpc_nor_kazoo() -> None:
    code = "import sys, pixiu; print([name for name in ('grpc', 'kazoo', 'pixiu.client') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_every_public_name_can_be_used() -> None:
    assert all(getattr(pixiu, name) is not None for name in pixiu.__all__)
    assert dir(pixiu) == sorted(pixiu.__all__)  # what a REPL completes, and help() describes
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pixiu.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", range(8))
async def test_closing_while_the_map_is_asked_for_ends(cluster: Any, steps: int) -> None:
    await cluster.start()
    channels = Channels()
    directory = ProxyDirectory((cluster.target,), ClientOptions(), channels, lambda _: None)
    await directory.start()
    for _ in range(5):
        await asyncio.sleep(0)  # until it waits
    directory.refresh()
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await directory.close()
    await channels.close()


async def test_the_target_comes_from_the_environment_and_options_from_an_object(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.start()
    monkeypatch.delenv("PIXIU_TARGET", raising=False)
    for connect in (pixiu.connect, pixiu.connect_sync):
        with pytest.raises(ConfigurationError, match="PIXIU_TARGET"):
            connect()
    monkeypatch.setenv("PIXIU_TARGET", cluster.target)
    shared = pixiu.ClientOptions(queue_records=7, join_timeout_s=1.0)
    async with pixiu.connect(options=shared, join_timeout_s=2.0) as px:
        assert (px.options.queue_records, px.options.join_timeout_s) == (7, 2.0)
        await px.room(1).send(b"x")
    with pytest.raises(ConfigurationError, match="queue_records"):
        pixiu.connect(options=pixiu.ClientOptions(queue_records=0))


class Tokens:
    """Gives the token of now, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.failures = self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise OSError("the token service does not answer")
        return "token"


async def test_a_token_function_that_fails_is_asked_again(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    tokens = Tokens()
    async with pixiu.connect(cluster.target, uin=7, token=tokens, backoff_s=0.01, max_backoff_s=0.05) as px:
        for send in (lambda: px.room(1).send(b"hello"), lambda: px.user(7).mail(b"hi"), lambda: px.room(2).send(b"again")):
            tokens.failures = 2
            await send()
        tokens.failures = 2
        async with px.subscribe(rooms=[42]):
            await until(lambda: cluster.gateways[0].joined() == {42})
        tokens.failures = 100
        with pytest.raises(
            Unavailable, match="the function that gives the token failed: OSError: the token service does not answer"
        ):
            await px.presence([7], timeout_s=1.0)
    assert [record.body for record in cluster.proxies[0].records] == [b"hello", b"again"]
    assert [record.body for record in cluster.proxies[0].mailer.records] == [b"hi"]


@pytest.mark.slow
async def test_a_token_function_that_fails_for_long_fails_messages_and_not_the_client(cluster: Any) -> None:
    await cluster.start()
    tokens = Tokens()
    async with pixiu.connect(cluster.target, token=tokens, publish_timeout_s=2.0, backoff_s=0.01, max_backoff_s=0.05) as px:
        tokens.failures = 1 << 30
        with pytest.raises(NotSent):
            await px.room(1).send(b"hello")
        assert tokens.asked > 2
        tokens.failures = 0
        await px.room(1).send(b"hello")


async def test_a_channel_may_be_given_up_after_all_were_closed() -> None:
    channels = Channels()
    channel = channels.acquire("127.0.0.1:1")
    await channels.close()
    await channels.release(channel)


async def test_no_connection_has_more_calls_than_a_listener_takes() -> None:
    channels, taken = Channels(), []
    for _ in range(3 * MAX_USERS):
        taken.append(channels.acquire("127.0.0.1:1"))
    assert set(Counter(taken).values()) == {MAX_USERS}
    assert len({channels.acquire("127.0.0.1:2", "xiu") for _ in range(3 * MAX_USERS)}) == 1, "processes have a higher limit"
    for channel in taken:
        await channels.release(channel)
    await channels.close()
    assert MAX_USERS < MAX_STREAMS_OF_CLIENT
