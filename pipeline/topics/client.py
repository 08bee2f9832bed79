"""Client of one topic: its description from any proxy, blocks and positions from the leaders of its groups.

    proxy ──Describe──▶ parts, groups ──▶ leader of a group ──Read, Positions──▶ …        another leader: ask the proxy again

Blocking, for the threads and processes of Spark. Login and TLS come from the environment, as for any client.

Source: docs/topics.md; docs/pipeline.md, "Topics".
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import grpc

from pipeline.spark.registry import view_of
from pipeline.spark.replicas import ASK_S, FIRST_PAUSE_S, MAX_PAUSE_S
from pipeline.topics.columns import walk
from pipeline.topics.epochs import Stored
from pixiu.client.login import authorization
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import ProxyTarget, parse_target
from pixiu.errors import InvalidArgument, NotAllowed, NotAuthenticated, PixiuError, Unavailable, error_of_code
from pixiu.placement.slots import Part
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import CHANNEL_OPTIONS
from pixiu.rpc.client_tls import client_tls
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc, wire_pb2, wire_pb2_grpc

READ_BYTES: Final = 1 << 20
MAX_PROXIES: Final = 16
"""Proxies that are asked in one round."""
_FATAL: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: InvalidArgument,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.UNIMPLEMENTED: InvalidArgument,
}
"""Statuses for which asking again is useless."""
_NO_TOPICS: Final = "it does not serve topics: give zk://HOST:PORT/ROOT, or the client addresses of proxies"
Reply = TypeVar("Reply")


class Again(Exception):
    """Somebody else, or the same one later, may answer."""


class Known(NamedTuple):
    """Findings of one client, for another one in a task."""

    proxies: tuple[str, ...]
    description: bytes
    cluster: str


def error_of(error: grpc.RpcError, address: str) -> PixiuError | Again:
    """Translate a failed call."""
    status, details = error.code(), error.details() or ""
    code, colon, text = details.partition(": ")
    named = bool(colon and code.isupper() and " " not in code)
    why = text if named else details.splitlines()[0][:300] if details else status.name
    if status in _FATAL:
        why = _NO_TOPICS if status is grpc.StatusCode.UNIMPLEMENTED else why
        return error_of_code(code, f"{address}: {why}") if named else _FATAL[status](f"{address}: {why}")
    return Again(f"{address}: {'connection refused' if 'Connection refused' in details else why}")


class TopicClient:
    """One topic of a cluster: `with TopicClient(target, "orders") as topic`.

    Args:
        target: "zk://host:port/root", or "host:port,…" of proxies.
        name: of the topic.
        retry_s: time limit for finding who serves, seconds.
        known: of a client in the driver; spares the questions to the registry and to proxies.
        is_task: of a query that runs: it waits for proxies that do not listen now, as they may restart.
    """

    def __init__(
        self, target: str, name: str, retry_s: float = 60.0, known: Known | None = None, *, is_task: bool = False
    ) -> None:  # fmt: skip
        self._target, self.name, self._retry_s, self._is_task = target, name, retry_s, is_task
        self._proxies = known.proxies if known else ()
        self.cluster = known.cluster if known else ""
        """ID of the cluster, once a proxy has reported it."""
        self._described = topic_pb2.TopicDescription.FromString(known.description) if known else topic_pb2.TopicDescription()
        self._stale, self._described_at = known is None, 0.0
        self._channels: dict[str, grpc.Channel] = {}
        self._leaders: dict[int, str] = {}
        """Group → who answered last."""
        self._tls, self._login = client_tls(), authorization(None)

    @property
    def id(self) -> int:
        """The topic's ID."""
        return self._described.topic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def known(self, group: int) -> Known:
        """Findings that a task needs for reading a part of a group."""
        described = self._described
        groups = [each for each in described.groups if each.group == group]
        short = topic_pb2.TopicDescription(name=self.name, topic=described.topic, version=described.version, groups=groups)
        return Known(self._proxies, short.SerializeToString(), self.cluster)

    def channel(self, address: str) -> grpc.Channel:
        """A shared connection to a client port."""
        found = self._channels.get(address)
        if found is None:
            if self._tls is None:
                found = grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS))
            else:
                found = grpc.secure_channel(address, self._tls.channel_credentials(), options=list(CHANNEL_OPTIONS))
            self._channels[address] = found
        return found

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The login of a call."""
        said = self._login()
        return (("authorization", said),) if said else ()

    def patiently(self, call: Callable[[], Reply]) -> Reply:
        """Call until there is an answer. Raises what the call raises; Unavailable after the time limit, with the last reason."""
        until, backoff = time.monotonic() + self._retry_s, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        while True:
            try:
                return call()
            except Again as problem:
                pause = backoff.next_s()
                if time.monotonic() + pause > until:
                    raise Unavailable(
                        f"topic {self.name} was not served for {self._retry_s:g} s ({problem}); `pixiu status` shows who serves it"
                    ) from None
            self._stale = True
            time.sleep(pause)

    # --- proxies

    def describe(self, version: int = 0, max_age_s: float = 0.0) -> topic_pb2.TopicDescription:
        """The topic as it is now, or was at most so long ago; not older than a version. Raises InvalidArgument if there is none."""
        if self._stale or self._described.version < version or time.monotonic() - self._described_at >= max_age_s:
            self._described = self.patiently(lambda: self._describe(version))
            self._stale, self._described_at = False, time.monotonic()
        return self._described

    def _describe(self, version: int) -> topic_pb2.TopicDescription:
        request = topic_pb2.DescribeTopicRequest(name=self.name, newer_than=max(version - 1, 0))
        found = self._ask_proxies(
            lambda channel: topic_pb2_grpc.TopicsStub(channel).Describe(request, timeout=ASK_S, metadata=self.metadata())
        )
        if found.deleted_at_ms:
            raise InvalidArgument(f"topic {self.name} is deleted; `pixiu topic restore {self.name}` brings it back")
        if found.version < version:
            raise Again(f"a proxy knows version {found.version} of the topic, and version {version} was seen")
        return found

    def _ask_proxies(self, ask: Callable[[grpc.Channel], Reply]) -> Reply:
        problem: Exception = Again("no proxy is known")
        if not self._proxies or self._stale:
            self._find_proxies()
        for address in self._proxies[:MAX_PROXIES]:
            channel = self.channel(address)
            try:
                if not self.cluster:
                    stub: Any = wire_pb2_grpc.PublisherStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
                    self.cluster = stub.Cluster(wire_pb2.ClusterRequest(), timeout=ASK_S, metadata=self.metadata()).cluster
                return ask(channel)
            except grpc.RpcError as error:
                problem = error_of(error, address)
                if not isinstance(problem, Again):
                    raise problem from None
        raise problem

    def _find_proxies(self) -> None:
        target = parse_target(self._target)
        if not self.cluster and not self._is_task:
            check_reachable(self._target)  # nobody has answered yet: a wrong address, rather than a restart
        self._proxies = target.addresses if isinstance(target, ProxyTarget) else _registered(self._target)
        if not self._proxies:
            raise Again(f"no proxy is registered at {self._target}")

    # --- leaders

    def _ask_group(self, group: int, ask: Callable[[Any], Reply]) -> Reply:
        """Ask the leader of a group, wherever it is."""

        def once() -> Reply:
            problem: Exception = Again(f"no replica of topic group {group} is known")
            for address in self.addresses(group):
                try:
                    reply = ask(self._log(address))
                    self._leaders[group] = address
                    return reply
                except grpc.RpcError as error:
                    found = error_of(error, address)
                    if not isinstance(found, Again):
                        raise found from None
                    problem = found
            raise problem

        return self.patiently(once)

    def _log(self, address: str) -> Any:
        return topic_pb2_grpc.TopicLogStub(self.channel(address))  # type: ignore[no-untyped-call, unused-ignore]

    def addresses(self, group: int) -> list[str]:
        """The replicas of a group, the one that answered last first, else the leader if it is known; asks a proxy again if somebody
        did not answer."""
        if self._stale:
            self._described, self._stale = self._describe(self._described.version), False
            self._leaders.clear()
        found = next((list(each.addresses) for each in self._described.groups if each.group == group), [])
        return sorted(found, key=lambda address: address != self._leaders.get(group))

    def look(self, part: int, group: int) -> topic_pb2.TopicReadReply:
        """The bounds of a part."""
        request = topic_pb2.TopicReadRequest(topic=self.name, part=part, end=True)
        reply: topic_pb2.TopicReadReply = self._ask_group(
            group, lambda log: log.Read(request, timeout=ASK_S, metadata=self.metadata())
        )
        return reply

    def offset_at(self, part: int, group: int, time_us: int) -> int:
        """The offset of the first block that was appended at a time or later."""
        request = topic_pb2.TopicReadRequest(topic=self.name, part=part, time_us=time_us, max_bytes=1)
        reply: topic_pb2.TopicReadReply = self._ask_group(
            group, lambda log: log.Read(request, timeout=ASK_S, metadata=self.metadata())
        )
        return next((block.base for block in walk(reply.blocks)), reply.gap_low if reply.gap_high else reply.next)

    def read(self, part: int, group: int, begin: int, end: int) -> Iterator[topic_pb2.TopicReadReply]:
        """Yield the blocks of offsets [begin, end) with what is missing, in order. While one reply is taken, the next one is on its
        way. Raises Unavailable, and refusals of the leader."""
        ahead: Any = None
        try:
            while begin < end:
                reply = _taken(ahead, begin) if ahead is not None else None
                if reply is None:
                    reply = self._ask_group(group, partial(self._read, part, begin, end))
                begin, ahead = reply.next, None
                if begin < end and (addresses := self.addresses(group)):
                    ahead = self._log(addresses[0]).Read.future(self._from(part, begin), timeout=ASK_S, metadata=self.metadata())
                yield reply
        finally:
            if ahead is not None:
                ahead.cancel()

    def _from(self, part: int, begin: int) -> topic_pb2.TopicReadRequest:
        return topic_pb2.TopicReadRequest(topic=self.name, part=part, offset=begin, max_bytes=READ_BYTES)

    def _read(self, part: int, begin: int, end: int, log: Any) -> topic_pb2.TopicReadReply:
        reply: topic_pb2.TopicReadReply = log.Read(self._from(part, begin), timeout=ASK_S, metadata=self.metadata())
        if reply.next <= begin:
            raise Again(f"part {part} ends at offset {reply.committed_end} at its leader, and {end} was seen")
        return reply

    def positions(self, writer: int, parts: Iterable[Part]) -> dict[int, Stored]:
        """Ask for everything that a writer has stored in parts; those that their groups do not hold are left out."""
        by_group: dict[int, list[int]] = {}
        for part in parts:
            by_group.setdefault(part.group, []).append(part.number)
        found: dict[int, Stored] = {}
        for group, numbers in by_group.items():
            found.update(self._positions(writer, group, numbers))
        return found

    def _positions(self, writer: int, group: int, numbers: Sequence[int]) -> dict[int, Stored]:
        request = topic_pb2.WriterPositionsRequest(topic=self._described.topic, writer=writer, parts=numbers)
        reply: topic_pb2.WriterPositionsReply = self._ask_group(
            group, lambda log: log.Positions(request, timeout=ASK_S, metadata=self.metadata())
        )
        return {
            number: Stored(each.position, each.progress, {before.part: before.progress for before in each.inherited})
            for number, each in zip(numbers, reply.positions, strict=True)
            if each.here
        }


def _taken(ahead: Any, begin: int) -> topic_pb2.TopicReadReply | None:
    """A reply that was asked for before; None: ask again, patiently."""
    try:
        reply: topic_pb2.TopicReadReply = ahead.result()
    except grpc.RpcError:
        return None
    return reply if reply.next > begin else None


def parts_of(description: topic_pb2.TopicDescription) -> list[Part]:
    """The parts of a description that are open for use; `sealed` if they take no writes."""
    return [
        Part(each.number, each.low, each.high, each.group, tuple(each.parents), each.state == topic_pb2.PART_SEALED)
        for each in description.parts
        if each.state != topic_pb2.PART_OPENING
    ]


def _registered(target: str) -> tuple[str, ...]:
    """The client addresses of the proxies that the registry has. Raises RegistryUnavailable."""
    return tuple(dict.fromkeys(node.client_address for node in view_of(target).running("proxy")))
