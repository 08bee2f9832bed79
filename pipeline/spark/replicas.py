"""Client of Xiu's and Pi's replicas for exports: found through the registry or through one another, tried in turn.

    read ──▶ replica 1 ── part, part ── dead ──▶ replica 2, from where the last part ended ──▶ … ──▶ end

Blocking, for the threads and processes of Spark.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
import pyarrow as pa

from pipeline.spark.registry import view_of
from pipeline.spark.schema import arrow_schema
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import ProxyTarget, parse_target
from pixiu.discovery.view import Layout
from pixiu.errors import (
    Draining,
    InvalidArgument,
    MalformedData,
    NotLeader,
    NotServed,
    NotYet,
    Overloaded,
    PixiuError,
    StateDamaged,
    StoreDamaged,
    Unavailable,
    error_of_code,
)
from pixiu.rpc.channels import CHANNEL_OPTIONS
from pixiu.rpc.tls import blocking_peer_channel, own
from pixiu.wire.export_tables import Columns
from pixiu.wire.v1 import export_pb2, export_pb2_grpc

ASK_S: Final = 10.0
STREAM_S: Final = 60.0
"""Time limit of a stream, seconds; then it continues at another replica. It detects a server that hangs."""
QUEUE_S: Final = 3600.0
"""Policy: time for which a task waits for its turn at replicas with as many readers as they allow, whatever `retrySeconds` is;
streams of other readers end after a minute at the latest."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
MAX_PARTITIONS: Final = 128
MESSAGE_BYTES: Final = 64 << 20
AGAIN: Final = frozenset(
    kind.code for kind in (Draining, NotYet, Overloaded, Unavailable, StoreDamaged, StateDamaged)
)  # fmt: skip
"""Codes for which another replica, or the same one later, may answer differently."""
_LOST: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED,
     grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)  # fmt: skip
LOG: Final = logging.getLogger("pixiu.pipeline")
Addresses = dict[int, tuple[str, ...]]
"""Partition → addresses of its replicas."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that one task reads from a Xiu or a Pi."""

    partition: int
    table: str
    columns: Columns
    users: tuple[int, ...] = ()
    begin: int = 0
    end: int = 0
    """After the last position; for a Xiu."""
    applied: int = 0
    """The log entry that the rows must include; for a Pi."""


def error_of(error: grpc.RpcError, address: str) -> PixiuError:
    """Translate a failed call; `code` shows if a retry may help."""
    status, details = error.code(), error.details() or ""
    code, colon, text = details.partition(": ")
    if colon and code.isupper() and " " not in code:
        return error_of_code(code, f"{address}: {text}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(f"{address} is neither a Xiu nor a Pi that exports: give zk://HOST:PORT/ROOT, or addresses of Xius")
    if status in _LOST:
        why = "connection refused" if "refused" in details else details.splitlines()[0][:200] if details else status.name
        return Unavailable(f"{address}: {why}")
    return error_of_code(status.name, f"{address}: {details}")


class Replicas:
    """The replicas of one role of a cluster: `with Replicas(target, "xiu") as replicas`.

    Args:
        target: "zk://host:port/root", or "host:port,…" of some of them, which name the others.
        role: xiu or pi.
        known: addresses found before, in a task.
        retry_s: time limit for finding one that serves.
    """

    def __init__(self, target: str, role: str, known: Addresses | None = None, retry_s: float = 60.0) -> None:
        self._target, self._role, self._retry_s = target, role, retry_s
        self.addresses: Addresses = dict(known or {})
        self.count = 0
        """Number of the role's partitions, by the layout."""
        self.cluster = ""
        """ID of the cluster, once the registry or a replica has reported it."""
        self.doubling = False
        """True if the role's partitions are being doubled, by the registry; without a registry it stays False."""
        self._found_at, self._is_task = 0.0, known is not None
        self._channels: dict[str, grpc.Channel] = {}
        self.leaders: set[str] = set()
        """Addresses of replicas that led when last asked."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _stub(self, address: str) -> export_pb2_grpc.ExportStub:
        channel = self._channels.get(address)
        if channel is None:
            options = [(key, value) for key, value in CHANNEL_OPTIONS if "message_length" not in key]
            limits = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.enable_http_proxy", 0)]
            channel = self._channels[address] = blocking_peer_channel(address, self._role, own(), [*options, *limits])
        return export_pb2_grpc.ExportStub(channel)

    # --- finding replicas

    def find(self, max_age_s: float = 0.0) -> int:
        """Find all replicas, unless found recently; return the number of partitions. Raises Unavailable, NotServed,
        RegistryUnavailable."""
        if self.count and time.monotonic() - self._found_at < max_age_s:
            return self.count
        target = parse_target(self._target)
        if isinstance(target, ProxyTarget):
            self._find_by_asking(target.addresses)
        else:
            if not self.count and not self._is_task:
                check_reachable(self._target)  # a wrong address is said at once; a task waits, as for a restart
            layout, self.addresses = _registered(self._target, self._role)
            wanted = layout.roles[self._role]
            self.count, self.doubling, self.cluster = wanted.n, wanted.next > wanted.n, layout.cluster
        missing = [partition for partition in range(self.count) if not self.addresses.get(partition)]
        if missing:
            raise Unavailable(f"no replica of {self._role} partition {missing[0]} is running; `pixiu status` shows who is")
        self._found_at = time.monotonic()
        return self.count

    def _find_by_asking(self, addresses: Sequence[str]) -> None:
        problem: PixiuError | None = None
        for address in addresses:
            try:
                reply = self._stub(address).Bounds(export_pb2.BoundsRequest(), timeout=ASK_S)
            except grpc.RpcError as error:
                problem = error_of(error, address)
                continue
            if reply.role != self._role:
                problem = InvalidArgument(f"{address} is a {reply.role}; this table is of {self._role}: give zk://HOST:PORT/ROOT")
                continue
            found: dict[int, list[str]] = {reply.partition: [address]}
            for each in reply.replicas:
                known = found.setdefault(each.partition, [])
                if each.address not in known:
                    known.append(each.address)
            self.count = min(reply.partitions, MAX_PARTITIONS)
            self.addresses = {partition: tuple(known) for partition, known in found.items()}
            return
        assert problem is not None, "a target names at least one address"
        raise problem

    # --- questions

    def bounds(
        self, partition: int, begin: int = 0, end: int = 0, limit: int = 0, at_us: int = 0, *, limit_bytes: int = 0,
        sizes: bool = False,
    ) -> export_pb2.BoundsReply:  # fmt: skip
        """Return a partition's bounds of positions: of all replicas that answer, the most advanced one's. The arguments are those
        of `export.proto`. Raises Unavailable."""
        request = export_pb2.BoundsRequest(
            begin=begin, end=end, limit=limit, at_us=at_us, limit_bytes=limit_bytes, sizes=sizes
        )  # fmt: skip
        until, pause = time.monotonic() + self._retry_s, FIRST_PAUSE_S
        while True:
            replies, problem = self._ask_all(partition, request)
            if replies:
                self.cluster = replies[0].cluster
                return max(replies, key=lambda reply: (reply.end, reply.applied, reply.leads))
            self._wait_or_raise(partition, problem, until, pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _ask_all(self, partition: int, request: export_pb2.BoundsRequest) -> tuple[list[export_pb2.BoundsReply], PixiuError]:
        """Ask all replicas of a partition at once; return their answers until the leader's, as none is ahead of it, and the last
        error."""
        replies: list[export_pb2.BoundsReply] = []
        problem: PixiuError = Unavailable(f"no replica of {self._role} partition {partition} is known")
        answered: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls: dict[Any, str] = {}
        for address in self.addresses.get(partition, ()):
            call = self._stub(address).Bounds.future(request, timeout=ASK_S)
            calls[call] = address
            call.add_done_callback(answered.put)
        for _ in calls:
            call = answered.get()
            try:
                reply = call.result()
            except grpc.RpcError as error:
                problem = error_of(error, calls[call])
                continue
            replies.append(reply)
            if reply.leads:
                self.leaders = self.leaders - set(calls.values()) | {calls[call]}
                break
        for call in calls:
            call.cancel()
        return replies, problem

    def _wait_or_raise(self, partition: int, problem: PixiuError, until: float, pause: float) -> None:
        """Pause before another try, or raise the problem."""
        if problem.code not in AGAIN or time.monotonic() + pause > until:
            if problem.code == Unavailable.code:
                raise Unavailable(
                    f"{self._role} partition {partition} did not answer for {self._retry_s:g} s ({problem}); "
                    "`pixiu status` shows who serves it"
                )
            raise problem
        time.sleep(pause * (0.5 + 0.5 * random.random()))
        with contextlib.suppress(PixiuError):
            self.find()

    def hold(self, partition: int, reader: str, position: int) -> None:
        """Report to every replica of a partition that a reader needs records from a position on. Raises PixiuError if none accepts
        it, rather another one than NotLeader."""
        problem: PixiuError = Unavailable(f"no replica of {self._role} partition {partition} is known")
        taken = False
        for address in self.addresses.get(partition, ()):
            try:
                self._stub(address).Hold(export_pb2.HoldRequest(reader=reader, position=position), timeout=ASK_S)
                taken = True
            except grpc.RpcError as error:
                said = error_of(error, address)
                problem = problem if said.code == NotLeader.code else said
        if not taken:
            raise problem

    # --- rows

    def _in_turn(self, partition: int) -> list[str]:
        """Addresses with followers first: leaders have more work."""
        return sorted(self.addresses.get(partition, ()), key=lambda address: address in self.leaders)

    def read(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yield record batches in order, each row once, even if replicas fail. Raises Gone, Unavailable, StoreDamaged, and other
        refusals of replicas."""
        schema, wanted = arrow_schema(rows.columns), [name for name, _ in rows.columns]
        position, after = rows.begin, b""
        until, pause = time.monotonic() + self._retry_s, FIRST_PAUSE_S
        queue_until = time.monotonic() + QUEUE_S
        last, tries = rows.end > 0 and position >= rows.end, 0
        while not last:
            full = False
            problem: PixiuError = Unavailable(f"no replica of {self._role} partition {rows.partition} is known")
            for address in self._in_turn(rows.partition):
                request = export_pb2.RowsOfRequest(
                    table=rows.table,
                    columns=wanted,
                    users=rows.users,
                    begin=position,
                    end=rows.end,
                    after=after,
                    applied=rows.applied,
                )
                call = self._stub(address).Rows(request, timeout=STREAM_S)
                try:
                    for reply in call:
                        if reply.schema:
                            _check_schema(reply.schema, schema, address)
                        if reply.batch:
                            yield pa.ipc.read_record_batch(pa.py_buffer(reply.batch), schema)
                        position, after = reply.next, reply.after
                        until, pause = time.monotonic() + self._retry_s, FIRST_PAUSE_S
                        queue_until = time.monotonic() + QUEUE_S
                    last = True
                    break
                except grpc.RpcError as error:
                    problem, tries = error_of(error, address), tries + 1
                    if problem.code not in AGAIN:
                        raise problem from None
                    LOG.warning(
                        "%s partition %d: %s; read on elsewhere from position %d, try %d",
                        self._role, rows.partition, problem, position, tries,
                    )  # fmt: skip
                    full = full or problem.code == Overloaded.code
                finally:
                    call.cancel()
            if full:  # a replica serves, but other readers are before this task
                until = max(until, min(time.monotonic() + self._retry_s + MAX_PAUSE_S, queue_until))
            if not last:
                self._wait_or_raise(rows.partition, problem, until, pause)
                pause = min(2 * pause, MAX_PAUSE_S)


def _check_schema(found: bytes, wanted: pa.Schema, address: str) -> None:
    if not pa.ipc.read_schema(pa.py_buffer(found)).equals(wanted):
        raise MalformedData(f"{address} sends other columns than this program knows: give servers and Spark the same Pixiu version")


def _registered(target: str, role: str) -> tuple[Layout, Addresses]:
    """Read the layout and a role's running replicas from the registry. Raises RegistryUnavailable, NotServed."""
    view = view_of(target)
    if role not in view.layout.roles:
        raise NotServed(f"the cluster at {target} has no {role}: `pixiu up --xius 1 --pis 1` has them")
    found = {partition: view.replicas(role, partition) for partition in range(MAX_PARTITIONS)}
    return view.layout, {partition: tuple(node.address for node in nodes) for partition, nodes in found.items() if nodes}
