"""Calls that a handler refuses: the error that it raises is the call's status, and nothing of the call stays in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.listeners.refused_calls import RefusedCalls
from pixiu.errors import DiskFull, NotLeader
from tests.support.waiting import until


class Held:
    """Part of a handler's frame."""


@pytest.mark.parametrize("method", ["One", "Many"])
async def test_an_error_is_the_status_of_its_call(method: str) -> None:
    frames: list[weakref.ref[Held]] = []

    async def one(request: bytes, _context: Any) -> bytes:
        held = Held()
        frames.append(weakref.ref(held))
        raise NotLeader("another one leads", "host:1")

    async def many(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        held = Held()
        frames.append(weakref.ref(held))
        yield request
        raise DiskFull("free some")

    server = grpc.aio.server(interceptors=[RefusedCalls()])
    handlers: dict[str, Any] = {"One": grpc.unary_unary_rpc_method_handler(one), "Many": grpc.unary_stream_rpc_method_handler(many)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            found: list[bytes] = []
            one_call: Any = channel.unary_unary("/Test/One")
            many_calls: Any = channel.unary_stream("/Test/Many")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                if method == "One":
                    await one_call(b"x")
                async for reply in many_calls(b"x"):
                    found.append(reply)
        await until(lambda: [frame() for frame in frames] == [None], "the end of the call at the server")
    finally:
        gc.enable()
        await server.stop(None)
    if method == "One":
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "NOT_LEADER: another one leads",
        )
    else:
        assert (found, refused.value.details()) == ([b"x"], "DISK_FULL: free some")
