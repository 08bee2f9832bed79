"""Options of gRPC channels between the processes of a cluster, and from an operator's commands to them."""

from __future__ import annotations

from typing import Final

PEER_CHANNEL: Final[tuple[tuple[str, int], ...]] = (
    # Without its own pool a new channel inherits the back-off of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    # `http_proxy` in the environment is meant for the world outside.
    ("grpc.enable_http_proxy", 0),
)
