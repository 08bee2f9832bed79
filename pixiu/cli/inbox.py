"""`pixiu inbox`: what lies in a user's inbox, read from Pi and Xiu. Looking changes nothing: no device, no session.

Source: DESIGN sections 11 and 15.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import grpc.aio
import typer
from rich.markup import escape
from rich.table import Table

from pixiu.cli.output import DEFAULT_TARGET, AsJson, Target, console, guarded, print_json
from pixiu.client.channels import Channels, reason_of
from pixiu.client.message import Message, message_of
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper, parse_address
from pixiu.errors import InvalidArgument, MalformedData, NotServed, NotYet, Unavailable
from pixiu.ids import MAX_ID, msg_partition
from pixiu.record import HEADER_SIZE, MAX_RECORD_BYTES, SIZE_FIELD
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from pixiu.wire.v1.pi_pb2_grpc import PiStub
from pixiu.wire.v1.xiu_pb2_grpc import XiuStub

LANES: Final = (0, 1)
MAX_PAGE: Final = 1000
ASK_S: Final = 5.0
LEADER_S: Final = 20.0
"""How long a leader is looked for: a change of leaders takes about ten seconds."""
RETRY_S: Final = 0.2
NOT_YET_S: Final = 3.0
"""How long a Xiu is asked again for what it does not have yet."""
SHOWN_CHARACTERS: Final = 60


@dataclass(slots=True)
class Entry:
    """One entry of an inbox."""

    lane: int
    seq: int
    msg_id: int
    code: str = ""
    """Why the message cannot be shown; empty: it is here."""
    message: Message | None = None

    def expired(self, now_ms: int) -> bool:
        """Whether its lifetime is over."""
        message = self.message
        return message is not None and bool(message.lifetime_min) and message.sent_at_ms + message.lifetime_min * 60_000 < now_ms


@dataclass(slots=True)
class Lane:
    """A page of one lane of an inbox."""

    lane: int
    floor: int = 0
    gap: int = 0
    last: int = 0
    dropped: int = 0
    entries: list[Entry] = field(default_factory=list)


@guarded
def inbox(
    uin: Annotated[int, typer.Argument(help="Whose.", metavar="UIN")],
    lane: Annotated[int, typer.Option("--lane", min=-1, max=1, help="Only this lane: 0 first, 1 normal. Default: both.")] = -1,
    after: Annotated[int, typer.Option("--after", min=0, help="Only entries behind this InboxSeq.", metavar="SEQ")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=MAX_PAGE, help="Entries of each lane.")] = 50,
    peek: Annotated[bool, typer.Option("--peek/--no-peek", help="Read the messages too, and not only their numbers.")] = True,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """List what lies in a user's inbox, oldest first. Nothing is acknowledged by it."""
    if not 0 < uin <= MAX_ID:
        raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin}")
    lanes = asyncio.run(read_inbox(target, uin, LANES if lane < 0 else (lane,), after, count, peek=peek))
    if as_json:
        print_json({"uin": uin, "lanes": [lane_json(found) for found in lanes]})
        return
    out = console()
    entries = [entry for found in lanes for entry in found.entries]
    if entries:
        out.print(table(entries, time.time_ns() // 1_000_000))
    for found in lanes:
        shown = found.entries[-1].seq if found.entries else max(after, found.floor)
        if found.last > shown:
            out.print(f"lane {found.lane}: {found.last - shown} more: --lane {found.lane} --after {shown}", highlight=False)
        if found.dropped:
            text = f"lane {found.lane}: {found.dropped} were dropped unacknowledged, the newest of them number {found.gap}"
            out.print(f"[yellow]{text}[/]", highlight=False)
    if not entries:
        out.print(f"the inbox of {uin} holds nothing here", highlight=False)


def table(entries: Sequence[Entry], now_ms: int) -> Table:
    """For people."""
    shown = Table(box=None, pad_edge=False)
    for name in ("lane", "seq", "msg id", "sent", "sender", "bytes", "message"):
        shown.add_column(name, justify="right" if name in ("lane", "seq", "bytes") else "left")
    for entry in entries:
        message = entry.message
        if message is None:
            shown.add_row(str(entry.lane), str(entry.seq), f"{entry.msg_id:016x}", "", "", "", f"[dim]{entry.code}[/]")
            continue
        sent = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(message.sent_at_ms / 1000))
        text = message.payload[: 4 * SHOWN_CHARACTERS].decode(errors="backslashreplace")
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:SHOWN_CHARACTERS]
        note = "[yellow]expired[/] " if entry.expired(now_ms) else ""
        shown.add_row(
            str(entry.lane), str(entry.seq), f"{entry.msg_id:016x}", sent, str(message.sender or "service"),
            str(len(message.payload)), note + escape(text),
        )  # fmt: skip
    return shown


def lane_json(found: Lane) -> dict[str, object]:
    """A lane as JSON values; a payload that is not UTF-8 in hex."""
    entries: list[dict[str, object]] = []
    now_ms = time.time_ns() // 1_000_000
    for entry in found.entries:
        shown: dict[str, object] = {"seq": entry.seq, "msg_id": f"{entry.msg_id:016x}"}
        if entry.code:
            shown["code"] = entry.code
        if (message := entry.message) is not None:
            shown |= {"sender": message.sender, "sent_at_ms": message.sent_at_ms, "message_id": f"{message.message_id:016x}"}
            shown["expired"] = entry.expired(now_ms)
            try:
                shown["text"] = message.payload.decode()
            except UnicodeDecodeError:
                shown["hex"] = message.payload.hex()
        entries.append(shown)
    return {
        "lane": found.lane, "floor": found.floor, "last": found.last, "gap": found.gap, "dropped": found.dropped,
        "entries": entries,
    }  # fmt: skip


@asynccontextmanager
async def _view_of(target: str) -> AsyncIterator[Discovery]:
    if not target.startswith("zk://"):
        raise InvalidArgument(f"--target {target}: inboxes are found by the registry; give zk://HOST:PORT/ROOT")
    address = parse_address(target)
    zookeeper = ZooKeeper(address.hosts, connect_timeout_s=ASK_S)
    await zookeeper.connect()
    discovery = Discovery(zookeeper, address.root, lambda _view: None, roles=("pi", "xiu"))
    try:
        await discovery.start()
        yield discovery
    finally:
        await discovery.close()
        await zookeeper.close()


async def read_inbox(target: str, uin: int, lanes: Sequence[int], after: int, count: int, *, peek: bool) -> list[Lane]:
    """Pages of a user's inbox. Raises `NotServed`, `Unavailable`, `InvalidArgument`, `RegistryUnavailable`."""
    channels = Channels()
    try:
        async with _view_of(target) as discovery:
            reads = [pi_pb2.PiRead(uin=uin, lane=lane, start=after, num=min(count, MAX_PAGE), peek=True) for lane in lanes]
            replies = await _ask_pi(discovery, channels, uin, reads)
            found = [
                Lane(
                    lane, reply.floor, reply.gap, reply.last, reply.dropped,
                    [Entry(lane, seq, number) for seq, number in zip(reply.seqs, reply.msg_ids, strict=True)],
                )
                for lane, reply in zip(lanes, replies, strict=True)
            ]  # fmt: skip
            if peek:
                await _fetch(discovery, channels, [entry for lane in found for entry in lane.entries])
            return found
    finally:
        await channels.close()


def _addresses(view: View, role: str, partition: int) -> list[str]:
    return [node.address for node in view.replicas(role, partition)]


async def _ask_pi(
    discovery: Discovery, channels: Channels, uin: int, reads: Sequence[pi_pb2.PiRead]
) -> Sequence[pi_pb2.PiReadReply]:
    """The leader's answer, which only it may give."""
    view = discovery.view
    if "pi" not in view.layout.roles:
        raise NotServed("this cluster keeps no inboxes: `pixiu up --xius 1 --pis 1` has them")
    partition, end = uin % view.layout.partitions("pi"), time.monotonic() + LEADER_S
    why = "none is running"
    while True:
        for address in _addresses(discovery.view, "pi", partition):
            call: Any = PiStub(channels.acquire(address)).Exchange()
            try:
                async with asyncio.timeout(ASK_S):
                    await call.write(pi_pb2.PiRequest(request=1, reads=reads))
                    reply = await call.read()
                if isinstance(reply, pi_pb2.PiReply):
                    codes = {reply.code, *(each.code for each in reply.reads)} - {""}
                    if not codes:
                        return reply.reads
                    why = f"{address}: {', '.join(sorted(codes))} {reply.text}"
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                why = f"{address}: {reason_of(error)}"
            finally:
                call.cancel()
                await channels.release(address)
        if time.monotonic() > end:
            raise Unavailable(f"no leader of pi partition {partition} answers ({why}); `pixiu status` shows who leads")
        await asyncio.sleep(RETRY_S)


async def _fetch(discovery: Discovery, channels: Channels, entries: Sequence[Entry]) -> None:
    """Put the messages into the entries; what nobody can give has a code. A follower that is asked learns a moment later what is
    committed."""
    until = time.monotonic() + NOT_YET_S
    while entries:
        await _fetch_once(discovery, channels, entries)
        entries = [entry for entry in entries if entry.code == NotYet.code]
        if time.monotonic() > until:
            return
        if entries:
            await asyncio.sleep(RETRY_S)


async def _fetch_once(discovery: Discovery, channels: Channels, entries: Sequence[Entry]) -> None:
    partitions: dict[int, list[Entry]] = {}
    for entry in entries:
        partitions.setdefault(msg_partition(entry.msg_id), []).append(entry)
    for partition, wanted in partitions.items():
        addresses = _addresses(discovery.view, "xiu", partition)
        while wanted and addresses:
            reply = await _ask_xiu(channels, addresses, [entry.msg_id for entry in wanted[:MAX_PAGE]])
            if reply is None:
                break
            _take(wanted, reply)
            wanted = wanted[len(reply.codes) :]
        for entry in wanted:
            entry.code = Unavailable.code


async def _ask_xiu(channels: Channels, addresses: Sequence[str], msg_ids: Sequence[int]) -> xiu_pb2.FetchReply | None:
    for address in addresses:
        stub: Any = XiuStub(channels.acquire(address))
        try:
            reply: xiu_pb2.FetchReply = await stub.Fetch(xiu_pb2.FetchRequest(msg_ids=msg_ids), timeout=ASK_S)
            if reply.codes:
                return reply
        except grpc.aio.AioRpcError:
            continue
        finally:
            await channels.release(address)
    return None


def _records(batch: bytes) -> Iterator[bytes]:
    at = 0
    while at + SIZE_FIELD <= len(batch):
        size = int.from_bytes(batch[at : at + SIZE_FIELD], "little") + SIZE_FIELD
        if size > MAX_RECORD_BYTES or at + size > len(batch):
            return
        yield batch[at : at + size]
        at += size


def _take(entries: Sequence[Entry], reply: xiu_pb2.FetchReply) -> None:
    records = _records(reply.batch)
    for entry, code in zip(entries, reply.codes, strict=False):
        entry.code = code
        if not code:
            record = next(records, b"")
            try:
                if len(record) < HEADER_SIZE:
                    raise MalformedData("the record is cut off")
                entry.message = message_of(record)
            except MalformedData:
                entry.code = MalformedData.code
