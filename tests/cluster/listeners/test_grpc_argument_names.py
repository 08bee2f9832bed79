"""gRPC ignores an argument whose name it does not know, without a word: every name that is set must be one of its own."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from cluster.listeners.server import server_options
from cluster.settings.options import ClusterOptions
from pixiu.rpc.channels import CHANNEL_OPTIONS, PEER_CHANNEL

NAMES = sorted({name for name, _ in (*server_options(ClusterOptions(), of_clients=True), *CHANNEL_OPTIONS, *PEER_CHANNEL)})


@pytest.mark.parametrize("name", NAMES)
def test_grpc_knows_the_argument(name: str) -> None:
    (library,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    assert name.encode() in library.read_bytes()
