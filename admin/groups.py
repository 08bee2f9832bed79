"""Asks the leaders of groups, by gRPC at the cluster's ports.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from admin import entries
from admin import events as ev
from cluster.topics import entries as en
from cluster.wire.v1 import topic_group_pb2, topic_group_pb2_grpc
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument, LimitError, MalformedData, NotLeader
from pixiu.rpc.channels import Channels, reason_of
from pixiu.rpc.tls import Tls

ASK_S: Final = 10.0
"""Time limit of one question, seconds."""
MAX_TRIES: Final = 4
"""Replicas that are asked before the question fails; the core asks again."""
REFUSED: Final = frozenset({InvalidArgument.code, MalformedData.code, LimitError.code})
"""Codes of refusals that any leader would repeat."""

Reply = TypeVar("Reply", topic_group_pb2.GroupAnswer, topic_group_pb2.GroupLoad)


class Groups:
    """The leaders of all groups.

    Args:
        view: gives the newest view of the cluster.
        tls: this process's certificates; None: it has none.
    """

    def __init__(self, view: Callable[[], View], tls: Tls | None) -> None:
        self._view = view
        self._channels = Channels("topic", own=tls)
        self._leaders: dict[int, str] = {}
        """Group → address of the replica that answered last."""

    async def close(self) -> None:
        """Close all connections."""
        await self._channels.close()

    async def append(self, effect: ev.Append) -> ev.Appended:
        """Have an entry appended. A failure is part of the answer."""
        request = topic_group_pb2.GroupEntry(kind=effect.kind, payload=effect.payload)
        found = await self._ask(effect.group, lambda stub: stub.Append(request, timeout=ASK_S))
        if isinstance(found, str):
            return ev.Appended(effect.token, failure=found)
        try:
            if found.refusal.code:
                return ev.Appended(effect.token, False, found.refusal.text)
            writers = entries.writers_of(found.sealed) if effect.kind == en.SEAL and found.ok else ()
        except MalformedData as error:
            return ev.Appended(effect.token, failure=str(error))
        return ev.Appended(effect.token, found.ok, found.why, writers)

    async def load(self, group: int) -> ev.LoadRead:
        """Ask for the parts of a group."""
        request = topic_group_pb2.GroupLoadRequest()
        found = await self._ask(group, lambda stub: stub.Load(request, timeout=ASK_S))
        if isinstance(found, str) or found.refusal.code:
            return ev.LoadRead(group, None)
        parts = {
            part.part: ev.Load(
                part.sealed, part.first, part.end, part.stored_bytes, part.bytes_per_s, part.messages_per_s, part.members
            )
            for part in found.parts
        }
        return ev.LoadRead(group, parts, found.cpu)

    async def _ask(self, group: int, call: Callable[[Any], Awaitable[Reply]]) -> Reply | str:
        """Ask the leader; returns its reply, or the reason why there is none."""
        why, tried = "none of its replicas is running", list[str]()
        addresses: list[str] = self._addresses(group)
        while addresses and len(tried) < MAX_TRIES:
            address = addresses.pop(0)
            tried.append(address)
            found = await self._ask_one(address, call)
            if not isinstance(found, str) and (not found.refusal.code or found.refusal.code in REFUSED):
                self._leaders[group] = address
                return found
            if isinstance(found, str):
                why = f"{address}: {found}"
                continue
            why = f"{address}: {found.refusal.code} {found.refusal.text}"
            if found.refusal.code != NotLeader.code:
                return why
            leader: str = self._address_of(group, found.refusal.leader)
            if leader and leader not in tried:
                addresses = [leader, *(each for each in addresses if each != leader)]
        self._leaders.pop(group, None)
        return why

    async def _ask_one(self, address: str, call: Callable[[Any], Awaitable[Reply]]) -> Reply | str:
        channel = self._channels.acquire(address)
        try:
            return await call(topic_group_pb2_grpc.TopicGroupsStub(channel))
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            return reason_of(error)
        finally:
            await self._channels.release(channel)

    def _addresses(self, group: int) -> list[str]:
        """Replicas to ask: the one that answered last comes first."""
        found = [node.address for node in self._nodes(group)]
        known = self._leaders.get(group)
        return [known, *(each for each in found if each != known)] if known in found else found

    def _address_of(self, group: int, said: str) -> str:
        """Address at the cluster's port of a leader that is named by one of its addresses; empty: it is unknown."""
        return next((node.address for node in self._nodes(group) if said in (node.address, node.client_address)), "")

    def _nodes(self, group: int) -> tuple[Node, ...]:
        return self._view().replicas("topic", group)
