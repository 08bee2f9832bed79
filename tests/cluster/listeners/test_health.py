"""gRPC's health service as clients, who need no login for it, may use it."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cluster.core.turn import Turn
from cluster.listeners.health import MAX_NAME
from cluster.listeners.request_limits import MAX_WAIT_S, NO_LOGIN_PER_S, REFUSED_AFTER_S, NoLogin, ParseInTurn
from cluster.listeners.server import Server
from cluster.settings.options import ClusterOptions
from tests.support.waiting import until

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


async def test_who_leaves_takes_no_word_from_those_who_watch_the_same() -> None:
    server = Server(ClusterOptions(), reflection=False)
    port = server.listen("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        leaves, stays = watch(health_pb2.HealthCheckRequest()), watch(health_pb2.HealthCheckRequest())
        assert [(await call.read()).status for call in (leaves, stays)] == [NOT_SERVING] * 2
        leaves.cancel()
        calls: Any = server._health
        await until(lambda: leaves.done() and len(calls._changed._waiters) == 1, "the end of the call at the server")
        await server.set_serving(True)
        assert (await stays.read()).status == SERVING
    await server.grpc.stop(0)


async def test_a_name_that_no_service_has_is_short_or_refused() -> None:
    server = Server(ClusterOptions(), reflection=False)
    port = server.listen("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Watch(health_pb2.HealthCheckRequest(service="x" * MAX_NAME)).read()).status == UNKNOWN
        long = health_pb2.HealthCheckRequest(service="x" * (MAX_NAME + 1))
        for asked in (stub.Check(long), stub.Watch(long).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.grpc.stop(0)


async def test_refused_calls_are_freed_without_the_garbage_collector() -> None:
    server = Server(ClusterOptions(), reflection=False)
    port = server.listen("127.0.0.1:0")
    await server.start()

    def calls() -> int:
        return sum(type(one) is cygrpc._ServicerContext for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = calls()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            long = health_pb2.HealthCheckRequest(service="x" * (MAX_NAME + 1))
            for _ in range(9):
                for asked in (stub.Check(long), stub.Watch(long).read()):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await asked
        await server.grpc.stop(0)
        assert calls() - before <= 2, "aborted calls stay in memory"
    finally:
        gc.enable()


async def test_an_address_has_a_rate_of_requests_without_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    class Refused(Exception):
        pass

    async def abort(_code: grpc.StatusCode, text: str) -> None:
        raise Refused(text)

    monkeypatch.setattr("cluster.listeners.request_limits.asyncio.sleep", sleep)
    admission, now = NoLogin(lambda: 1000.0), int(NO_LOGIN_PER_S)
    flood: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.7:41000", abort=abort)
    for _ in range(now):
        await admission.admit(flood)
    assert waits == [], "a second's requests are answered at once"
    with pytest.raises(Refused, match="an address has 50 requests a second"):
        for _ in range(1000):
            await admission.admit(flood)
    assert REFUSED_AFTER_S <= waits.pop() <= 2 * REFUSED_AFTER_S
    assert max(waits) <= MAX_WAIT_S + 1 / NO_LOGIN_PER_S
    assert len(waits) == pytest.approx(MAX_WAIT_S * NO_LOGIN_PER_S, abs=3)
    waits.clear()
    await admission.admit(SimpleNamespace(peer=lambda: "ipv4:10.0.0.8:41000", abort=abort))
    assert waits == [], "another address does not wait"


async def test_methods_that_do_not_exist_count_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted = []

    async def admit(_self: NoLogin, context: Any) -> None:
        admitted.append(context.peer())

    monkeypatch.setattr(NoLogin, "admit", admit)
    turn = Turn(time.monotonic, asyncio.get_running_loop().call_soon)
    server = Server(ClusterOptions(), reflection=False, interceptors=[ParseInTurn(turn)])
    port = server.listen("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        raw: Any = channel
        calls = [make("/pixiu.v1.Nothing/Ask")(b"x") for make in (raw.unary_unary, raw.unary_stream)]
        calls.append(raw.stream_stream("/pixiu.v1.Nothing/Ask")())
        assert [await call.code() for call in calls] == [grpc.StatusCode.UNIMPLEMENTED] * 3
    assert len(admitted) == 3
    await server.grpc.stop(0)
