"""Messages from Xiu by MsgID, over gRPC, for many who ask at once."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from cluster.rpc import xiu_fetcher
from cluster.rpc.xiu_fetcher import FULL, Fetcher
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID, msg_id
from pixiu.rpc.channels import Channels
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from tests.relay.mail_world import Xiu

LARGE = 60_000
REPLY_BYTES = 2 * LARGE + 1000


class SmallReplies(Xiu):
    """Answers end before so many bytes are there, as a real Xiu's."""

    async def Fetch(self, request: xiu_pb2.FetchRequest, context: Any) -> xiu_pb2.FetchReply:
        """At least one answer."""
        took, self.most = 0, 0
        for each in request.msg_ids:
            took += len(self.records.get(each, b""))
            if took > REPLY_BYTES and self.most:
                break
            self.most += 1
        return await super().Fetch(request, context)


async def test_those_who_ask_for_little_get_it_beside_those_who_ask_for_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xiu_fetcher, "MAX_BYTES", 10 * LARGE)
    monkeypatch.setattr(xiu_fetcher, "SHARE_BYTES", 2 * LARGE, raising=False)
    new_xiu: Any = SmallReplies
    xiu = new_xiu()
    counter = 0

    def stored(count: int, size: int) -> list[int]:
        nonlocal counter
        ids: list[int] = [msg_id(0, 64, counter + number) for number in range(1, count + 1)]
        for number in ids:
            counter += 1
            xiu.records[number] = encode(Kind.MAIL, 7, b"m" * size, counter, type=64)
        return ids

    large, small, other = stored(30, LARGE), stored(20, 10), stored(20, 10)
    server = grpc.aio.server()
    xiu_pb2_grpc.add_XiuServicer_to_server(xiu, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = Node("xiu", 0, 0, NodeState.RUNNING, "127.0.0.1", port, 0, EndpointID(201), 1, "", "", 0, instance=1)
    view, channels = View(Layout(1, {"xiu": RoleLayout(1)}), (node,)), Channels()
    try:
        found = await Fetcher(lambda: view, channels).fetch([large, small, [*other, large[0]]], 30.0)
    finally:
        await channels.close()
        await server.stop(None)
    for number in [*small, *other, large[0], large[1]]:
        assert found[number] == ("", xiu.records[number])
    given = [number for number in large if not found[number][0]]
    assert given == large[: len(given)], "in order"
    assert len(given) <= 4, "a share, and what came in one answer with its end"
    assert {found[number] for number in large[len(given) :]} == {(FULL, b"")}
