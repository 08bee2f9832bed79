"""The `Presence` service of a proxy: asks one relay of each partition, and joins their answers.

Source: docs/promises.md, docs/operations.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import enter
from cluster.access.rules import PRESENCE, of_user
from cluster.core.turn import Turn
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, Overloaded, PixiuError, Unavailable
from pixiu.placement.partition import rendezvous_order
from pixiu.rpc.channels import Channels, reason_of
from pixiu.rpc.status import GRPC_STATUS
from pixiu.rpc.tls import Tls
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

MAX_QUERY: Final = 1000
"""UINs in one query."""
ASK_TIMEOUT_S: Final = 2.0
MAX_TRIES: Final = 2
"""Replicas of a partition that are asked before the query fails."""
MAX_QUERIES: Final = 100
"""Queries at one time. Policy: a further one waits for its turn."""
MAX_OF_LOGIN: Final = 8
"""Queries of one login at one time, including those that wait. Policy: a further one is refused."""
CHECKED_AT_ONCE: Final = 100
"""UINs of a query that are checked in one piece of a turn, one or two milliseconds."""
QUERY_BYTES: Final = 40
"""Bytes that a UIN counts in a login's quota, like a record without a body."""


class PresenceService(wire_pb2_grpc.PresenceServicer):
    """Serves `pixiu.v1.Presence` for all users.

    Args:
        view: gives the newest view of the cluster.
        turn: in which queries are checked.
        guard: authenticates callers; None: nobody has to log in.
        tls: this process's certificates; None: it has none.
    """

    def __init__(self, view: Callable[[], View], turn: Turn, guard: LoginGuard | None = None, tls: Tls | None = None) -> None:
        self._view, self._turn, self._guard = view, turn, guard
        self._channels = Channels("relay", own=tls)
        self._slots = asyncio.Semaphore(MAX_QUERIES)
        self._of_login: Counter[str] = Counter()
        """User name → queries in progress."""

    async def close(self) -> None:
        """Close the connections to relays."""
        await self._channels.close()

    async def Query(self, request: wire_pb2.PresenceRequest, context: grpc.aio.ServicerContext[Any, Any]) -> wire_pb2.PresenceReply:
        """Answer which users are online."""
        try:
            if len(request.uins) > MAX_QUERY:
                raise InvalidArgument(f"a query names at most {MAX_QUERY} users; send several")
            access = await enter(self._guard, context, "", lambda _: None)
            uins = list(dict.fromkeys(request.uins))
            if access is None:
                found = await self._in_turn(uins)
            else:
                found = await self._of(access, uins)
        except PixiuError as error:
            await context.abort(GRPC_STATUS[error.code], str(error))
        return wire_pb2.PresenceReply(users=[wire_pb2.UserPresence(uin=uin, devices=found.get(uin, 0)) for uin in request.uins])

    async def _of(self, access: LoginSession, uins: list[int]) -> dict[int, int]:
        """Answer a login's query: UINs are charged like messages."""
        user = access.identity.user
        try:
            if self._of_login[user] >= MAX_OF_LOGIN:
                raise Overloaded(
                    f"this login has {MAX_OF_LOGIN} queries under way; wait for one before the next", retry_after_ms=1_000
                )
            self._of_login[user] += 1
            try:
                if access.spend(len(uins), QUERY_BYTES * len(uins)):
                    await access.hold()
                if access.asks:
                    for uin in uins:
                        access.foresee(PRESENCE, of_user(uin))
                    await access.ask()
                for first in range(0, len(uins), CHECKED_AT_ONCE):
                    piece = uins[first : first + CHECKED_AT_ONCE]
                    await self._turn.run(partial(_require, access, piece), QUERY_BYTES * len(piece))
                return await self._in_turn(uins)
            finally:
                self._of_login[user] -= 1
                if not self._of_login[user]:
                    del self._of_login[user]
        finally:
            access.close()

    async def _in_turn(self, uins: list[int]) -> dict[int, int]:
        async with self._slots:
            return await self._answer(uins)

    async def _answer(self, uins: list[int]) -> dict[int, int]:
        view = self._view()
        if "relay" not in view.layout.roles:
            raise Unavailable("this cluster has no relays, so presence is unknown: `pixiu up --relays 2` has them")
        partitions = view.layout.partitions("relay")
        wanted: dict[int, list[int]] = {}
        for uin in uins:
            wanted.setdefault(uin % partitions, []).append(uin)
        parts = await asyncio.gather(*(self._ask(view, partition, part) for partition, part in wanted.items()))
        return {user.uin: user.devices for part in parts for user in part.users}

    async def _ask(self, view: View, partition: int, uins: list[int]) -> wire_pb2.PresenceReply:
        nodes: dict[int, Node] = {node.endpoint: node for node in view.replicas("relay", partition)}
        failures: list[str] = []
        # The replica that gets messages to the first of the users, which their gateways inform first.
        for endpoint in rendezvous_order(uins[0], list(nodes))[:MAX_TRIES]:
            address = nodes[endpoint].address
            channel = self._channels.acquire(address)
            stub = wire_pb2_grpc.PresenceStub(channel)
            try:
                return await stub.Query(wire_pb2.PresenceRequest(uins=uins), timeout=ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                failures.append(f"{address}: {reason_of(error)}")
            finally:
                await self._channels.release(channel)
        why = "; ".join(failures) or "none is running"
        raise Unavailable(f"no relay of partition {partition} answers ({why}); `pixiu status` shows which are missing")


def _require(access: LoginSession, uins: list[int]) -> None:
    for uin in uins:
        access.require(PRESENCE, of_user(uin))
