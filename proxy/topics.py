"""The `Topics` service of a proxy: describes topics from the registry, and passes changes on to the leading admin.

    client ──Describe, List──▶ proxy ──▶ registry (at most once a second for a topic, and after a change)
           ──Change─────────▶ proxy ──▶ leading admin, found by its lease

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.logins import enter
from cluster.access.rules import CHANNEL, OF_TOPICS, TOPICS
from cluster.process.context import Context
from cluster.replication.peers.wire import decode_state
from cluster.topics.describe import description_of, error_of
from cluster.wire.v1 import admin_pb2, admin_pb2_grpc
from pixiu.discovery import paths
from pixiu.discovery.node import json_object, text
from pixiu.discovery.operations import NoNode, WatchEvent
from pixiu.discovery.topics import PartState, TopicNode, check_name, read_topic, topic_names
from pixiu.errors import (
    InvalidArgument,
    LimitError,
    MalformedData,
    NotAllowed,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    RegistryUnavailable,
    RemoteError,
    Unavailable,
    UnknownTopic,
)
from pixiu.rpc.channels import Channels, reason_of
from pixiu.rpc.status import GRPC_STATUS
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc

CACHED_S: Final = 1.0
"""Time for which what was read is used, seconds."""
MAX_CACHED: Final = 1_000
"""Topics that are remembered. Policy: the one that was read first is forgotten."""
NEWER_S: Final = 3.0
"""Time for which a caller waits for a newer version, seconds; then it gets what there is."""
POLL_S: Final = 0.5
"""Longest wait for the registry's watch; then a topic is read again all the same."""
MAX_WAITING: Final = 1_000
"""Callers that wait for a newer version. Policy: a further one gets what there is."""
MAX_LISTED: Final = 1_000
"""Topics in one reply."""
LISTED_AT_ONCE: Final = 32
"""Topics of a list that are read at once."""
MAX_LISTS: Final = 4
"""Lists that are made at a time. Policy: a further one waits for its turn."""
MAX_CHANGES: Final = 100
"""Changes under way through this proxy. Policy: a further one is refused."""
FIND_S: Final = 15.0
"""Time for finding the leading admin, seconds: its lease ends with its session."""
CHANGE_S: Final = 50.0
"""Time limit of one change at the admin, seconds."""
PLAN_S: Final = 15.0
"""Time limit of a plan at the admin, which asks all groups for their load, seconds."""
RETRY_S: Final = 0.3
MAX_LEASE_BYTES: Final = 1_024

Found = TypeVar("Found")
Reply = TypeVar("Reply", admin_pb2.AdminAnswer, admin_pb2.AdminPlan)


@dataclass(slots=True)
class _Read:
    """Something that is read for everybody who asks within `CACHED_S`."""

    began: float
    task: asyncio.Future[Any]
    last: list[Any]
    """The latest result, if there was one."""


class Cache:
    """Results of the latest reads, by key. One read serves all who ask meanwhile, and for `CACHED_S`, unless there was nothing: it
    may have been created by another proxy. Without the registry the last result stays."""

    def __init__(self) -> None:
        self._reads: dict[object, _Read] = {}

    async def get(self, key: object, read: Callable[[], Awaitable[Found]], not_before: float = float("-inf")) -> Found:
        """Result of the last read, or of a new one that begins not earlier than this (monotonic seconds)."""
        now = time.monotonic()
        found = self._reads.get(key)
        if found is None or found.began < max(now - CACHED_S, not_before) or _in_vain(found.task):
            while len(self._reads) >= MAX_CACHED:
                del self._reads[next(iter(self._reads))]
            last = found.last if found is not None else []
            self._reads.pop(key, None)
            found = self._reads[key] = _Read(now, asyncio.ensure_future(read()), last)
            found.task.add_done_callback(_in_vain)  # looks at its error, also when all who asked have gone
        try:
            result: Found = await asyncio.shield(found.task)
        except RegistryUnavailable:
            if not found.last:
                raise
            result = found.last[0]
        found.last = [result]
        return result

    def forget(self, *keys: object) -> None:
        """Read these again when they are asked for."""
        for key in keys:
            if key in self._reads:
                self._reads[key].began = float("-inf")


def _in_vain(task: asyncio.Future[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or task.result() is None)


class TopicsService(topic_pb2_grpc.TopicsServicer):
    """Serves `pixiu.v1.Topics` at the clients' port.

    Args:
        context: of the proxy.
        guard: authenticates callers; None: nobody has to log in.
    """

    def __init__(self, context: Context[Any], guard: LoginGuard | None) -> None:
        self._context, self._guard = context, guard
        self._cache = Cache()
        self._channels = Channels("admin", own=context.tls)
        self._waiting = self._changing = 0
        self._lists = asyncio.Semaphore(MAX_LISTS)
        self._changed: dict[str, asyncio.Future[None]] = {}
        """Topic → done at its next change; one that somebody has waited for stays until then."""

    async def close(self) -> None:
        """Close the connections to admins."""
        await self._channels.close()

    # --- the service

    async def Describe(self, request: topic_pb2.DescribeTopicRequest, context: Any) -> topic_pb2.TopicDescription:
        """Describe one topic."""
        return await self._answer(context, lambda access: self._describe(access, request))

    async def List(self, request: topic_pb2.ListTopicsRequest, context: Any) -> topic_pb2.ListTopicsReply:
        """Describe topics by name."""
        return await self._answer(context, lambda access: self._list(access, request))

    async def Change(self, request: topic_pb2.TopicChange, context: Any) -> topic_pb2.TopicDescription:
        """Have the leading admin change a topic."""
        caller = str(context.peer())
        return await self._answer(context, lambda access: self._change(access, request, caller))

    async def Plan(self, request: topic_pb2.PlanTopicsRequest, context: Any) -> topic_pb2.TopicPlan:
        """Have the leading admin say which parts should move."""
        return await self._answer(context, lambda access: self._plan(access, request))

    async def _answer(self, context: Any, answer: Callable[[LoginSession | None], Awaitable[Found]]) -> Found:
        try:
            access = await enter(self._guard, context, "", lambda _: None)
            try:
                return await answer(access)
            finally:
                if access is not None:
                    access.close()
        except PixiuError as error:
            # A limit that only a change of the cluster lifts is no overload, after which callers try again.
            full = error.code == LimitError.code
            await context.abort(grpc.StatusCode.OUT_OF_RANGE if full else GRPC_STATUS[error.code], str(error))
            raise

    # --- describing

    async def _describe(
        self, access: LoginSession | None, request: topic_pb2.DescribeTopicRequest
    ) -> topic_pb2.TopicDescription:  # fmt: skip
        name = check_name(request.name)
        if access is not None and not await _may_see(access, name):
            raise NotAllowed(f"this login may do nothing with a topic {name}; `pixiu acl test` says which rule decides")
        until = time.monotonic() + NEWER_S
        node, found = await self._described(name)
        if answers(node, request.newer_than) or self._waiting >= MAX_WAITING:
            return self._usable(node, found)
        self._waiting += 1
        try:
            while True:
                changed = await self._watch(name)
                node, found = await self._described(name, time.monotonic())
                left_s = until - time.monotonic()
                if answers(node, request.newer_than) or left_s <= 0:
                    break
                await asyncio.wait([changed], timeout=min(left_s, POLL_S))
        finally:
            self._waiting -= 1
        return self._usable(node, found)

    async def _watch(self, name: str) -> asyncio.Future[None]:
        """A future that is done once a topic's node changes; all who wait for it share a watch."""
        changed = self._changed.get(name)
        if changed is None:
            changed = self._changed[name] = asyncio.get_running_loop().create_future()
            own = changed

            def on_change(_: object) -> None:
                if self._changed.get(name) is own:
                    del self._changed[name]
                if not own.done():
                    own.set_result(None)

            try:
                await self._context.zookeeper.exists(paths.topic(self._context.root, name), on_change)
            except RemoteError:
                self._changed.pop(name, None)  # it is read again after a while
        return changed

    @staticmethod
    def _usable(node: TopicNode, found: topic_pb2.TopicDescription) -> topic_pb2.TopicDescription:
        if not _usable(node):
            raise Unavailable(f"topic {node.name} is being created; `pixiu topic show {node.name}` shows when it is done")
        return found

    async def _described(self, name: str, not_before: float = float("-inf")) -> tuple[TopicNode, topic_pb2.TopicDescription]:
        """A topic with its groups. Raises `UnknownTopic`, `RegistryUnavailable`."""
        found = await self._cache.get(("topic", name), partial(self._read, name), not_before)
        if found is None:
            raise UnknownTopic(f"there is no topic {name}; `pixiu topic create {name}` makes it")
        return found

    async def _read(self, name: str) -> tuple[TopicNode, topic_pb2.TopicDescription] | None:
        try:
            found = await read_topic(self._context.zookeeper, self._context.root, name, self._topic_changed)
        except MalformedData as error:
            raise Unavailable(f"topic {name} cannot be read from the registry: {error}") from None
        return None if found is None else (found[0], await self._with_groups(found[0]))

    def _topic_changed(self, event: WatchEvent) -> None:
        """Forget a topic: the next caller may know of the change, which another proxy may have made."""
        self._cache.forget(("topic", event.path.rpartition("/")[2]))

    def _names_changed(self, _event: WatchEvent) -> None:
        self._cache.forget("names")

    async def _with_groups(self, node: TopicNode) -> topic_pb2.TopicDescription:
        made = description_of(node)
        groups = node.groups
        leaders = await asyncio.gather(*(self._cache.get(("leader", group), partial(self._leader, group)) for group in groups))
        for group, leader in zip(groups, leaders, strict=True):
            made.groups.append(topic_pb2.TopicGroup(group=group, addresses=self._addresses(group, leader)))
        return made

    def _addresses(self, group: int, leader: int) -> list[str]:
        nodes = [node for node in self._context.view.replicas("topic", group) if node.client_port]
        nodes.sort(key=lambda node: node.member != leader)
        return [node.client_address for node in nodes]

    async def _leader(self, group: int) -> int:
        """The member that leads a group; 0: it is not known."""
        try:
            data, _ = await self._context.zookeeper.get(paths.partition_state(self._context.root, "topic", group))
            return int(decode_state(data).leader)
        except (RemoteError, InvalidArgument):
            return 0

    async def _list(self, access: LoginSession | None, request: topic_pb2.ListTopicsRequest) -> topic_pb2.ListTopicsReply:
        limit = min(request.limit or MAX_LISTED, MAX_LISTED)
        async with self._lists:
            every = await self._cache.get(
                "names", lambda: topic_names(self._context.zookeeper, self._context.root, self._names_changed)
            )
            names = [name for name in every if name.startswith(request.prefix) and name > request.after]
            reply = topic_pb2.ListTopicsReply()
            for first in range(0, len(names), LISTED_AT_ONCE):
                piece = names[first : first + LISTED_AT_ONCE]
                if access is not None:
                    piece = [name for name in piece if await _may_see(access, name)]
                for node in await asyncio.gather(*map(self._node, piece)):
                    if node is None or (node.deleted_at_ms and not request.deleted):
                        continue
                    if len(reply.topics) >= limit:
                        reply.more = True
                        return reply
                    reply.topics.append(description_of(node))
        return reply

    async def _node(self, name: str) -> TopicNode | None:
        """A topic of a list; None: it is gone, or cannot be read. It is not remembered: a list would push out what is in use."""
        try:
            found = await read_topic(self._context.zookeeper, self._context.root, name)
        except MalformedData:
            return None
        return None if found is None else found[0]

    # --- changing

    async def _change(
        self, access: LoginSession | None, request: topic_pb2.TopicChange, caller: str
    ) -> topic_pb2.TopicDescription:  # fmt: skip
        name = check_name(request.name)
        action = CHANNEL if request.WhichOneof("change") in ("set_channel", "remove_channel") else TOPICS
        if access is not None:
            await _require(access, action, name)
            caller = access.identity.user
        if self._changing >= MAX_CHANGES:
            raise Overloaded(f"{MAX_CHANGES} changes of topics are under way through this proxy", retry_after_ms=1_000)
        self._changing += 1
        try:
            change = admin_pb2.AdminChange(change=request, caller=caller)
            made = (await self._ask(partial(self._ask_to_change, change=change))).topic
        finally:
            self._changing -= 1
            self._cache.forget(("topic", name), "names")
        groups = sorted({part.group for part in made.parts})
        for group in groups:
            leader = await self._cache.get(("leader", group), partial(self._leader, group))
            made.groups.append(topic_pb2.TopicGroup(group=group, addresses=self._addresses(group, leader)))
        return made

    async def _plan(self, access: LoginSession | None, request: topic_pb2.PlanTopicsRequest) -> topic_pb2.TopicPlan:
        if access is not None:
            access.require_session()
        plan: topic_pb2.TopicPlan = (await self._ask(partial(self._ask_for_plan, request=request))).plan
        if access is None:
            return plan
        names = sorted({move.topic for move in plan.moves})
        allowed = {name for name in names if await _may_change(access, name)}
        moves = [move for move in plan.moves if move.topic in allowed]
        return topic_pb2.TopicPlan(moves=moves, groups=plan.groups)

    async def _ask(self, call: Callable[[str], Awaitable[Reply | str]]) -> Reply:
        """Ask the leading admin; look for it meanwhile. Raises its refusal, `Unavailable`, `OutcomeUnknown`."""
        until, said = time.monotonic() + FIND_S, ""
        while True:
            address = said or await self._admin()
            why, said = "nobody leads", ""
            if address:
                answer = await call(address)
                if not isinstance(answer, str):
                    if answer.refusal.code != NotLeader.code:
                        if answer.refusal.code:
                            raise error_of(answer.refusal)
                        return answer
                    said = answer.refusal.leader if answer.refusal.leader != address else ""
                    answer = answer.refusal.text
                why = f"{address}: {answer}"
            if not self._context.view.running("admin"):
                raise Unavailable("no admin is running, so topics cannot be changed now; `pixiu status` shows them")
            if time.monotonic() >= until:
                raise Unavailable(f"no admin leads ({why}), so topics cannot be changed now; `pixiu status` shows them")
            if not said:
                await asyncio.sleep(RETRY_S)

    async def _ask_for_plan(self, address: str, request: topic_pb2.PlanTopicsRequest) -> admin_pb2.AdminPlan | str:
        """Ask one admin; returns its answer, or the reason why it gave none."""
        channel = self._channels.acquire(address)
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        try:
            answer: admin_pb2.AdminPlan = await stub.Plan(request, timeout=PLAN_S)
            return answer
        except grpc.aio.AioRpcError as error:
            return reason_of(error)
        finally:
            await self._channels.release(channel)

    async def _ask_to_change(self, address: str, change: admin_pb2.AdminChange) -> admin_pb2.AdminAnswer | str:
        """Ask one admin; returns its answer, or the reason why it was not reached. Raises `OutcomeUnknown`."""
        channel = self._channels.acquire(address)
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        try:
            answer: admin_pb2.AdminAnswer = await stub.Change(change, timeout=CHANGE_S)
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or ""):
                return reason_of(error)
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                return reason_of(error)
            raise OutcomeUnknown(
                f"the admin at {address} gave no answer ({reason_of(error)}), so whether topic {change.change.name} is changed is "
                f"unknown; `pixiu topic show {change.change.name}` shows it"
            ) from None
        finally:
            await self._channels.release(channel)

    async def _admin(self) -> str:
        """Address of the leading admin by its lease; empty: nobody leads."""
        try:
            data, _ = await self._context.zookeeper.get(paths.admin_lease(self._context.root))
            return text(json_object(data, MAX_LEASE_BYTES, "the admin's lease"), "address")
        except (NoNode, MalformedData):
            return ""


def answers(node: TopicNode, newer_than: int) -> bool:
    """True if this is what a caller waits for that knows a version. While parts are being sealed their children are not open yet,
    and the next version has them: the caller would only ask again."""
    moves = newer_than and node.version == newer_than + 1 and any(part.state is PartState.SEALING for part in node.parts)
    return node.version > newer_than and not moves and _usable(node)


def _usable(node: TopicNode) -> bool:
    return any(part.state is not PartState.OPENING for part in node.parts)


async def _may_see(access: LoginSession, name: str) -> bool:
    """True if a login may do anything with a topic: then it may see where it is."""
    await _foresee(access, OF_TOPICS, name)
    permissions = access.permissions
    allowed = any(permissions.allows(action, name) for action in OF_TOPICS)
    if not allowed:
        access.require_session()
    return allowed


async def _may_change(access: LoginSession, name: str) -> bool:
    await _foresee(access, (TOPICS,), name)
    return access.permissions.allows(TOPICS, name)


async def _require(access: LoginSession, action: str, name: str) -> None:
    await _foresee(access, (action,), name)
    access.require(action, name)


async def _foresee(access: LoginSession, actions: Iterable[str], name: str) -> None:
    """Ask the callbacks that decide about these actions, if any."""
    if access.asks:
        for action in actions:
            access.foresee(action, name)
        if access.must_ask:
            await access.ask()
