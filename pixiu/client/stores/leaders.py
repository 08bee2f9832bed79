"""Direct access to the durable stores, without proxies: leaders are found by the registry and by asking.

Source: docs/registry.md, docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc.aio

from pixiu.client.stores.pages import MAX_PAGE, InboxEntry, take
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import (
    ConfigurationError,
    DiskFull,
    Draining,
    InboxFull,
    InvalidArgument,
    LimitError,
    NotAllowed,
    NotLeader,
    NotServed,
    NotYet,
    OldSession,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    TooFewInSync,
    TooManyDevices,
    Unavailable,
    UnknownDevice,
    WrongPartition,
    error_of_code,
)
from pixiu.ids import msg_partition
from pixiu.placement.split import SplitPartitions
from pixiu.rpc.channels import TLS_ERRORS, Channels, reply_of
from pixiu.rpc.duplex import StreamEnded, ask
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.rpc.tls import TLS_DIR, own
from pixiu.wire.inbox_operations import Code
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from pixiu.wire.v1.pi_pb2_grpc import PiStub
from pixiu.wire.v1.xiu_pb2_grpc import XiuStub

ASK_S: Final = 5.0
LEADER_S: Final = 20.0
"""Time limit for finding a leader, seconds: a change of leaders takes about ten seconds."""
RETRY_S: Final = 0.2
NOT_YET_S: Final = 3.0
"""Time for which a Xiu is asked again for a message that it does not have yet, seconds."""
NEEDS_CERTIFICATE: Final = (
    f"inboxes are read at the cluster's ports, which require certificates: set {TLS_DIR} to the folder with operator.pem and "
    "ca.pem; users read their own inbox with a token, by px.inbox()"
)
_AGAIN: Final = frozenset(
    kind.code for kind in (NotLeader, WrongPartition, Unavailable, Draining, Overloaded, OutcomeUnknown, TooFewInSync)
)
"""Error codes after which the same request is repeated to the current leader."""
_REFUSALS: Final[dict[int, PixiuError]] = {
    Code.INBOX_FULL: InboxFull("the inbox is full"),
    Code.UNKNOWN_DEVICE: UnknownDevice("the user has no such device"),
    Code.OLD_SESSION: OldSession("another session of this device was opened meanwhile; try again"),
    Code.CURSOR_BEYOND_END: InvalidArgument("the inbox has no such entry yet"),
    Code.TOO_MANY_DEVICES: TooManyDevices("the user has eight devices, all of them seen recently; drop one first"),
    Code.INVALID_ARGUMENT: InvalidArgument("lane or range out of bounds"),
    Code.TOO_MANY_DELETIONS: LimitError("this inbox has 1,000 separate deletions; delete a larger range, or acknowledge first"),
    Code.DISK_FULL: DiskFull("the inboxes have no space for a new device; its operator must free some"),
}


def refusal(result: int) -> PixiuError:
    """Convert a negative result to its error."""
    known = _REFUSALS.get(-result)
    return InvalidArgument(f"Pi refused it with {result}") if known is None else type(known)(str(known))


class Stores:
    """A cluster's Pi and Xiu: `async with Stores("zk://…") as stores`.

    Args:
        target: "zk://host:port/root".
        leader_s: time limit for finding a leader, seconds.

    Raises `InvalidArgument` for another target; entering raises `RegistryUnavailable`.
    """

    def __init__(self, target: str, *, leader_s: float = LEADER_S) -> None:
        if not names_registry(target):
            raise InvalidArgument(f"--target {target}: inboxes are found through the registry; give zk://HOST:PORT/ROOT")
        self._address = parse_address(target)
        self._leader_s = leader_s
        self._channels = Channels(own=own())
        self._split = SplitPartitions()

    async def __aenter__(self) -> Self:
        self._zookeeper = ZooKeeper(self._address, connect_timeout_s=ASK_S)
        await self._zookeeper.connect()
        self._discovery = Discovery(self._zookeeper, self._address.root, lambda _view: None, roles=("pi", "xiu"))
        try:
            await self._discovery.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self._close()

    async def _close(self) -> None:
        await self._discovery.close()
        await self._zookeeper.close()
        await self._channels.close()

    async def read(self, uin: int, reads: Sequence[pi_pb2.PiRead]) -> Sequence[pi_pb2.PiReadReply]:
        """Read one user's inboxes from the leader. Raises `NotServed`, `Unavailable`, or the refusal of a read."""
        return (await self._ask(uin, pi_pb2.PiRequest(request=1, reads=reads))).reads

    async def change(self, uin: int, operations: bytes) -> list[int]:
        """Apply operations to one user's inboxes, on every replica in sync; returns a result for each item.

        They may be applied twice when a leader dies meanwhile. Raises `NotServed`, `Unavailable`, or the refusal of an item.
        """
        results = list((await self._ask(uin, pi_pb2.PiRequest(request=1, operations=operations))).results)
        for result in results:
            if result < 0:
                raise refusal(result)
        return results

    async def _ask(self, uin: int, request: pi_pb2.PiRequest) -> pi_pb2.PiReply:
        """Ask the leader, which alone may answer. Raises at once `ConfigurationError` if the cluster requires a certificate and
        there is none, and `NotAllowed` if the one given is not allowed."""
        end, why = time.monotonic() + self._leader_s, "none is running"
        while True:
            wait_s = 0.0
            view = self._discovery.view
            if "pi" not in view.layout.roles:
                raise NotServed("this cluster keeps no inboxes: `pixiu up --xius 1 --pis 1` has them")
            self._split.set_count(view.layout.partitions("pi"))
            partition = self._split.of(uin)
            for node in view.replicas("pi", partition):
                if node.tls and own() is None:
                    raise ConfigurationError(NEEDS_CERTIFICATE)
                reply = await self._ask_one(node.address, request)
                if isinstance(reply, pi_pb2.PiReply):
                    if reply.code == WrongPartition.code and self._moved(partition, reply):
                        break
                    codes = [code for code in (reply.code, *(each.code for each in reply.reads)) if code]
                    if not codes:
                        return reply
                    if codes[0] not in _AGAIN:
                        text = reply.text or f"pi at {node.address} refused it with {codes[0]}"
                        raise error_of_code(codes[0], text, reply.retry_after_ms)
                    reply = f"{', '.join(sorted(set(codes)))} {reply.text}"
                why = f"{node.address}: {reply}"
            else:
                wait_s = RETRY_S
            if time.monotonic() > end:
                raise Unavailable(f"no leader of pi partition {partition} answers ({why}); `pixiu status` shows who leads")
            await asyncio.sleep(wait_s)

    def _moved(self, partition: int, reply: pi_pb2.PiReply) -> bool:
        """True if a refusal of a user changed the known partitions: the partition was split, or its parent is not split."""
        if partition >= self._split.count:
            self._split.forget(partition)
            return False
        return self._split.learn(partition, reply.server.partitions)

    async def _ask_one(self, address: str, request: pi_pb2.PiRequest) -> pi_pb2.PiReply | str:
        """Ask one process; returns the answer, or the reason why there is none."""
        call: GrpcCall[pi_pb2.PiRequest, pi_pb2.PiReply] = GrpcCall.over(
            self._channels, address, lambda channel: PiStub(channel).Exchange(), "pi"
        )
        async with call:
            try:
                return await ask(call, request, ASK_S)
            except StreamEnded as ended:
                if str(ended).startswith(("PERMISSION_DENIED", "UNAUTHENTICATED")):
                    raise NotAllowed(f"pi at {address} refuses: {ended}") from None
                if str(ended) in TLS_ERRORS.values():
                    raise Unavailable(f"pi at {address}: {ended} ({TLS_DIR})") from None
                return str(ended)

    async def fetch(self, entries: Sequence[InboxEntry]) -> None:
        """Fetch the messages into the entries; an entry that nobody can serve gets a code. A follower is asked again, because it
        learns a moment later what is committed."""
        until = time.monotonic() + NOT_YET_S
        while entries:
            await self._fetch_once(entries)
            entries = [entry for entry in entries if entry.code == NotYet.code]
            if time.monotonic() > until:
                return
            if entries:
                await asyncio.sleep(RETRY_S)

    async def _fetch_once(self, entries: Sequence[InboxEntry]) -> None:
        partitions: dict[int, list[InboxEntry]] = {}
        for entry in entries:
            partitions.setdefault(msg_partition(entry.msg_id), []).append(entry)
        for partition, wanted in partitions.items():
            addresses = [node.address for node in self._discovery.view.replicas("xiu", partition)]
            while wanted and addresses:
                reply = await self._ask_xiu(addresses, [entry.msg_id for entry in wanted[:MAX_PAGE]])
                if reply is None:
                    break
                take(wanted, reply)
                wanted = wanted[len(reply.codes) :]
            for entry in wanted:
                entry.code = Unavailable.code

    async def _ask_xiu(self, addresses: Sequence[str], msg_ids: Sequence[int]) -> xiu_pb2.FetchReply | None:
        for address in addresses:
            channel = self._channels.acquire(address, "xiu")
            stub: Any = XiuStub(channel)
            try:
                reply: xiu_pb2.FetchReply = await reply_of(stub.Fetch(xiu_pb2.FetchRequest(msg_ids=msg_ids), timeout=ASK_S))
                if reply.codes:
                    return reply
            except grpc.aio.AioRpcError:
                continue
            finally:
                await self._channels.release(channel)
        return None
