"""Framed streams that a test opens, to a process of a cluster without keys."""

from __future__ import annotations

from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import STORE
from pixiu.discovery.node import Node
from pixiu.wire.v1 import xiu_pb2


def framed_of(role: str, endpoint: int = 1) -> Framed:
    """What opens the streams of a process of this role."""
    return Framed(role, endpoint, lambda _role: None, 8 << 20)


def store_call(node: Node) -> FramedCall[xiu_pb2.StoreRequest, xiu_pb2.StoreReply]:
    """A writer's stream to a Xiu."""
    return framed_of("proxy").call(node, STORE, xiu_pb2.StoreReply.FromString)
