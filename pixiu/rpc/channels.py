"""gRPC channels shared by address, and what gRPC's errors mean in words."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Final

import grpc
import grpc.aio

from pixiu.errors import NotConnected, PixiuError

MESSAGE_BYTES: Final = 8 << 20
"""The largest gRPC message a client sends or takes: a batch, or a single record, with much to spare."""
CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # A peer whose machine vanished is noticed although nothing is being sent.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # The client's own back-off decides when to try again; gRPC's must not be slower.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""Options of a client's channels."""
PEER_CHANNEL: Final[tuple[tuple[str, int], ...]] = (
    # Without its own pool a new channel inherits the back-off of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    # `http_proxy` in the environment is meant for the world outside.
    ("grpc.enable_http_proxy", 0),
)
"""Options of channels between the processes of a cluster, and from an operator's commands to them."""
WRONG_ROLE: Final = "a gRPC server that does not serve this (UNIMPLEMENTED): is it the address of another role?"
STREAM_ERRORS: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""What reading or writing a stream raises when its other end is gone."""
AFTER_FORK: Final = (
    "this process was forked from one that had connected, and gRPC does not survive a fork: fork first, then connect"
)
REFUSED: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""Statuses that trying again does not change."""


def reason_of(error: BaseException | None) -> str:
    """Why a call failed, in a few words."""
    if error is None:
        return "the stream was closed by the other side"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, PixiuError):
        return str(error)
    if not isinstance(error, grpc.aio.AioRpcError):
        return f"{type(error).__name__}: {error}"
    details = error.details() or ""
    if "Connection refused" in details:
        return "connection refused: no process listens there"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return WRONG_ROLE
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return f"{error.code().name}: {details}"


@cache
def hold_grpc() -> int:
    """Keep grpcio's poller for the life of the process. Returns the process that did.

    Without it the last channel ends the poller's thread, which waits for ever when its wake-up socket is full after some
    hundred cancelled calls (grpc/grpc #40989).
    """
    grpc.aio.init_grpc_aio()
    return os.getpid()


class Channels:
    """One channel for each address that is in use; it is closed when its last user is gone.

    Raises `NotConnected` in a child of a process that used gRPC.
    """

    def __init__(self) -> None:
        if hold_grpc() != os.getpid():
            raise NotConnected(AFTER_FORK)
        self._channels: dict[str, tuple[grpc.aio.Channel, int]] = {}

    def acquire(self, address: str) -> grpc.aio.Channel:
        """The channel to an address; each call is paired with one of `release`."""
        channel, users = self._channels.get(address) or (grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), 0)
        self._channels[address] = (channel, users + 1)
        return channel

    async def release(self, address: str) -> None:
        """Give up one use of an address's channel."""
        channel, users = self._channels[address]
        if users > 1:
            self._channels[address] = (channel, users - 1)
            return
        del self._channels[address]
        await channel.close()

    async def close(self) -> None:
        """Close all of them, whoever uses them."""
        channels, self._channels = self._channels, {}
        for channel, _ in channels.values():
            await channel.close()
