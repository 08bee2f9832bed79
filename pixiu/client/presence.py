"""Presence of users: the client asks a proxy, which asks the relays.

Source: docs/memberships.md, "Devices and logins".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import grpc.aio

from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import MAX_ID, is_within
from pixiu.rpc.channels import REFUSED, Channels, reason_of, reply_of
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

MAX_UINS: Final = 1000
"""Limit of users in one query; more go in several."""
MAX_TRIES: Final = 3
"""Number of proxies that are asked before a query fails."""


class UserPresence(NamedTuple):
    """Presence of one user."""

    uin: int
    devices: int
    """Devices that are connected now; 0: the user is offline."""

    @property
    def online(self) -> bool:
        """True if at least one device is connected."""
        return self.devices > 0


async def query(channels: Channels, proxies: Sequence[str], uins: Sequence[int], timeout_s: float) -> list[UserPresence]:
    """Ask for users, in the order of `uins`. Raises `InvalidArgument`, and `Unavailable` when no proxy can answer."""
    for uin in uins:
        if not is_within(uin, 1, MAX_ID):
            raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin!r}")
    found: list[UserPresence] = []
    for start in range(0, len(uins), MAX_UINS):
        reply = await _ask(channels, proxies, wire_pb2.PresenceRequest(uins=uins[start : start + MAX_UINS]), timeout_s)
        found += [UserPresence(user.uin, user.devices) for user in reply.users]
    return found


async def _ask(
    channels: Channels, proxies: Sequence[str], request: wire_pb2.PresenceRequest, timeout_s: float
) -> wire_pb2.PresenceReply:
    failures: list[str] = []
    for address in proxies[:MAX_TRIES]:
        channel = channels.acquire(address)
        try:
            stub = wire_pb2_grpc.PresenceStub(channel)
            return await reply_of(stub.Query(request, timeout=timeout_s, metadata=channels.metadata()))
        except grpc.aio.AioRpcError as error:
            failures.append(f"{address}: {reason_of(error)}")
            if error.code() in REFUSED:
                break
        except StreamEnded as error:
            failures.append(f"{address}: {error}")
        finally:
            await channels.release(channel)
    raise Unavailable(f"no proxy could answer who is online ({'; '.join(failures) or 'the cluster has no proxy'}); try again")
