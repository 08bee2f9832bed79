"""gRPC channels shared by address, and gRPC's errors in words."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

import grpc
import grpc.aio

from pixiu.errors import NotConnected, PixiuError
from pixiu.rpc.client_tls import ClientTls
from pixiu.rpc.duplex import StreamEnded
from pixiu.rpc.tls import Tls, generation, peer_channel

MAX_LOANS: Final = 16
"""Limit of proofs kept. Policy: the oldest one is dropped."""
MESSAGE_BYTES: Final = 8 << 20
"""Limit of a gRPC message that a client sends or takes, bytes: a batch, or a single record, with much to spare."""
CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Notice a peer whose machine vanished even when nothing is being sent.
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
    # Without its own pool a new channel inherits the back-off of the previous one.
    ("grpc.use_local_subchannel_pool", 1),
    # `http_proxy` in the environment is meant for external traffic.
    ("grpc.enable_http_proxy", 0),
)
"""Options of channels between the processes of a cluster, and from an operator's commands to them."""
MAX_USERS: Final = 24
"""Users of one connection to a listener for clients, which takes 32 calls at a time of each (`cluster.listeners.server`)."""
WRONG_ROLE: Final = "a gRPC server that does not serve this (UNIMPLEMENTED): is it the address of another role?"
STREAM_ERRORS: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)
"""Exceptions of reading or writing a stream when its other end is gone."""
AFTER_FORK: Final = (
    "this process was forked from one that had connected, and gRPC does not survive a fork: fork first, then connect"
)
TLS_ERRORS: Final = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the trusted authority (PIXIU_CA), or has expired",
    "Hostname Verification Check failed": "its certificate is not for this address (`pixiu pki issue --host` adds it)",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: leave ca and PIXIU_CA out",
}
"""gRPC's texts for failed handshakes → explanations."""
BROKEN: Final = ("Socket closed", "Connection reset by peer", "Broken pipe")
"""gRPC's texts for a connection that ended without a status from the other side."""
CLOSED_AT_ONCE: Final = (
    "it closed the connection at once: does it speak TLS, or require a certificate (PIXIU_CA, PIXIU_CERTIFICATE)?"
)
PROCESS_ENDED: Final = "the process ended, or the connection to it broke"
REFUSED: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""Statuses for which trying again is useless."""
Reply = TypeVar("Reply")
ErrorT = TypeVar("ErrorT", bound=BaseException)


def reason_of(error: BaseException | None, *, answered: bool = False) -> str:
    """Describe the failure of a call in a few words. `answered`: the other side had answered it before, so the handshake
    succeeded."""
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
    for sign, meaning in TLS_ERRORS.items():
        if sign in details and not answered:
            return meaning
    if error.code() is grpc.StatusCode.UNAVAILABLE and any(sign in details for sign in BROKEN):
        return PROCESS_ENDED if answered else CLOSED_AT_ONCE
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return WRONG_ROLE
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return f"{error.code().name}: {details}"


def without_frames(error: ErrorT) -> ErrorT:
    """Take its traceback from an error of a call.

    gRPC keeps the connection of a closed channel while anything refers to one of its calls, as the frames of a traceback do, and
    errors last: as the context of what a user gets, or in a cancelled task.
    """
    error.__context__ = None
    return error.with_traceback(None)


async def reply_of(call: Awaitable[Reply]) -> Reply:
    """Wait for the reply to a call. Raises its errors `without_frames`."""
    try:
        return await call
    except (asyncio.CancelledError, *STREAM_ERRORS) as error:
        raise without_frames(error) from None
    finally:
        del call  # this frame is in the new traceback


@cache
def hold_grpc() -> int:
    """Keep grpcio's poller for the life of the process. Returns the process that did so.

    Without it the last channel ends the poller's thread, which waits for ever when its wake-up socket is full after some
    hundred cancelled calls (grpc/grpc #40989).
    """
    grpc.aio.init_grpc_aio()
    return os.getpid()


class Loans:
    """Proofs of the worker numbers that a client was lent, to present on each stream that it publishes on."""

    def __init__(self) -> None:
        self._proofs: dict[tuple[int, int], bytes] = {}
        self.version = 0
        """Increased by each new proof; 0: there is none."""

    def add(self, worker: int, from_ms: int, proof: bytes) -> None:
        """Add the proof of a number that was lent or extended; an empty proof is ignored."""
        if not proof:
            return
        self._proofs.pop((worker, from_ms), None)
        if len(self._proofs) >= MAX_LOANS:
            del self._proofs[next(iter(self._proofs))]
        self._proofs[worker, from_ms] = proof
        self.version += 1

    def all(self) -> list[bytes]:
        """All proofs, the newest last. Proofs of numbers no longer used are included, because messages with them may be sent
        again."""
        return list(self._proofs.values())


@dataclass(slots=True)
class _Shared:
    address: str
    generation: int
    users: int = 0


class Channels:
    """Shared channels to the addresses in use, each closed when its last user releases it. A connection to a listener for clients
    has at most `MAX_USERS`: the listener takes no more calls at a time of one connection, and further ones would wait unnoticed.

    Args:
        role: the processes' role, for channels to their cluster listeners; empty: the listeners for clients.
        authorization: returns the value of that name for the metadata of each call; None or an empty value: none is sent.
        tls: TLS of the listeners for clients; None: they do not use TLS.
        own: the caller's certificates at cluster listeners; None: it has none.

    Raises `NotConnected` in a child of a process that used gRPC.
    """

    def __init__(
        self,
        role: str = "",
        authorization: Callable[[], str] | None = None,
        tls: ClientTls | None = None,
        own: Tls | None = None,
    ) -> None:
        self._role, self._authorization, self._tls, self._own = role, authorization, tls, own
        if hold_grpc() != os.getpid():
            raise NotConnected(AFTER_FORK)
        self.loans = Loans()
        """Proofs that message IDs are the caller's own."""
        self._newest: dict[str, grpc.aio.Channel] = {}
        self._open: dict[grpc.aio.Channel, _Shared] = {}
        """Also full ones, and those with earlier certificates of the caller."""

    @property
    def generation(self) -> int:
        """Generation of the caller's certificates, see `pixiu.rpc.tls.generation`."""
        return generation(self._own)

    def acquire(self, address: str, role: str | None = None) -> grpc.aio.Channel:
        """Get a channel to an address; each call is paired with one of `release`. `role`: overrides the role of the channels."""
        wanted = self._role if role is None else role
        channel, newest = self._newest.get(address), self.generation if wanted else self._tls.newest() if self._tls else 0
        shared = None if channel is None else self._open[channel]
        if channel is None or shared is None or shared.generation != newest or (not wanted and shared.users >= MAX_USERS):
            channel = self._newest[address] = self._channel(address, wanted)
            shared = self._open[channel] = _Shared(address, newest)
        shared.users += 1
        return channel

    def _channel(self, address: str, role: str) -> grpc.aio.Channel:
        if role:
            return peer_channel(address, role, self._own, CHANNEL_OPTIONS)
        if self._tls is not None:
            return grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Make the metadata of a call: the login. Raises `StreamEnded` when the token function fails; it is called again for the
        next call."""
        try:
            said = self._authorization() if self._authorization is not None else ""
        except Exception as error:
            raise StreamEnded(f"the function that gives the token failed: {type(error).__name__}: {error}") from error
        return (("authorization", said),) if said else None

    async def release(self, channel: grpc.aio.Channel) -> None:
        """Release one use of a channel. After `close` it does nothing."""
        shared = self._open.get(channel)
        if shared is None:
            return
        shared.users -= 1
        if not shared.users:
            del self._open[channel]
            if self._newest.get(shared.address) is channel:
                del self._newest[shared.address]
            await channel.close()

    async def close(self) -> None:
        """Close all channels, even those in use."""
        channels = list(self._open)
        self._open.clear()
        self._newest.clear()
        for channel in channels:
            await channel.close()
