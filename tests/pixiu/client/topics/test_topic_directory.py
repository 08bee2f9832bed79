"""Questions to proxies: which are asked again at the next one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from pixiu.client.options import ClientOptions
from pixiu.client.topics.topic_directory import TopicDirectory
from pixiu.errors import OutcomeUnknown
from pixiu.rpc.channels import Channels


@pytest.mark.parametrize(("changes", "asked"), [(False, 2), (True, 1)])
def test_a_change_whose_outcome_is_unknown_is_not_made_again(changes: bool, asked: int) -> None:
    async def play() -> None:
        channels, calls = Channels("proxy"), list[float]()
        cluster: Any = SimpleNamespace(map=SimpleNamespace(proxies=["127.0.0.1:1", "127.0.0.1:2"]))
        directory = TopicDirectory(channels, cluster, ClientOptions(), lambda: 0.5)

        async def call(_: Any, seconds: float) -> str:
            calls.append(seconds)
            if len(calls) == 1:
                raise grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "it is recorded")
            return "there is one already"

        try:
            if changes:
                with pytest.raises(OutcomeUnknown, match="it is recorded"):
                    await directory.ask(call, "orders", changes=True)
            else:
                assert await directory.ask(call, "orders")
        finally:
            await channels.close()
        assert len(calls) == asked

    asyncio.run(play())
