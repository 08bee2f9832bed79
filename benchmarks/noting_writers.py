"""Writers of a Xiu and a Pi for benchmarks that break something meanwhile. They note what was acknowledged; afterwards it is asked
what of it is missing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from pixiu.ids import msg_id, snowflake
from pixiu.wire.inbox_operations import APPEND, USER_DEVICE, Appends, OpenSessions, Writer, encode
from pixiu.wire.record import Kind, split
from pixiu.wire.record import decode as decode_record
from pixiu.wire.record import encode as encode_record
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2, xiu_pb2_grpc

BATCH: Final = 20
BODY_BYTES: Final = 300
LANE: Final = 1
ANY: Final = 0
PAGE: Final = 1000
LEVELS: Final = (xiu_pb2.StoreLevel.PERSISTED, xiu_pb2.StoreLevel.REPLICATED)
LOST: Final = (grpc.aio.AioRpcError, asyncio.InvalidStateError, EOFError, TimeoutError, KeyError)
"""A stream that ended, or nobody to ask."""
PI_LEVELS: Final = (pi_pb2.PiLevel.PI_LEVEL_PERSISTED, pi_pb2.PiLevel.PI_LEVEL_REPLICATED)
ANSWER_S: Final = 20.0
PAUSE_S: Final = 0.05


def run(*command: str) -> str:
    """A command of the system. Raises RuntimeError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@dataclass
class Noted:
    """What was acknowledged."""

    stored: dict[int, tuple[int, int]] = field(default_factory=dict)
    """MsgID → writer and its number, which are in the record."""
    listed: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of each user: MsgID → InboxSeq; `ANY` at level persisted, whose answers have none."""
    appended: int = 0
    times: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each request: when it was acknowledged, how long after it was sent first, and how many records it had."""
    refused: dict[str, int] = field(default_factory=dict)
    """By code, and connections that ended."""

    def took(self, since: float, count: int) -> None:
        """A request is acknowledged that was sent first at `since`."""
        now = time.monotonic()
        self.times.append((now, now - since, count))

    def refuse(self, code: str) -> None:
        """Count one."""
        self.refused[code] = self.refused.get(code, 0) + 1


@contextlib.asynccontextmanager
async def call_of(stub: type, address: str, method: str) -> Any:
    """A stream of a channel of its own."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = getattr(stub(channel), method)()
        try:
            yield call
        finally:
            call.cancel()


async def ask(call: Any, request: Any) -> Any:
    """One request and its answer. Raises TimeoutError, EOFError, AioRpcError."""
    async with asyncio.timeout(ANSWER_S):
        await call.write(request)
        reply = await call.read()
    if reply is grpc.aio.EOF:
        raise EOFError
    return reply


async def write_mail(writer: int, addresses: dict[str, str], noted: Noted, levels: Sequence[int] = LEVELS) -> None:
    """Store batch after batch, for ever; one that is not acknowledged comes again with the same SnowflakeIDs."""
    numbers = itertools.count()
    batch: list[tuple[int, bytes]] = []
    since = 0.0
    while True:
        try:
            async with call_of(xiu_pb2_grpc.XiuStub, addresses["xiu"], "Store") as call:
                position = 1
                while True:
                    if not batch:
                        now_ms, since = time.time_ns() // 1_000_000, time.monotonic()
                        for number in itertools.islice(numbers, BATCH):
                            body = b"%d %d %s" % (writer, number, b"x" * BODY_BYTES)
                            batch.append((number, encode_record(Kind.MAIL, 4, body, snowflake(now_ms, writer, number % 1024))))
                    level = levels[batch[0][0] // BATCH % len(levels)]
                    sent = b"".join(record for _, record in batch)
                    request = xiu_pb2.StoreRequest(batch=sent, count=len(batch), position=position, level=level)  # type: ignore[arg-type]
                    answered, made = 0, dict[int, int]()
                    await call.write(request)
                    while answered < len(batch):
                        async with asyncio.timeout(ANSWER_S):
                            reply = await call.read()
                        if reply is grpc.aio.EOF:
                            raise EOFError
                        for result in reply.results:
                            answered += result.count
                            if result.code:
                                noted.refuse(result.code)
                                continue
                            for index in range(result.count):
                                at = result.position - position + index
                                made[at] = result.msg_id or msg_id(0, batch[at][1][6], result.sequence + index)
                    position += len(batch)
                    for at, identity in made.items():
                        noted.stored[identity] = writer, batch[at][0]
                    batch = [each for at, each in enumerate(batch) if at not in made]
                    if batch:
                        await asyncio.sleep(PAUSE_S)
                    else:
                        noted.took(since, BATCH)
        except LOST as error:
            noted.refuse(type(error).__name__)
            await asyncio.sleep(PAUSE_S)


async def append_mail(writer: int, addresses: dict[str, str], noted: Noted, levels: Sequence[int] = PI_LEVELS) -> None:
    """Append to the writer's own user's inbox, for ever, in order."""
    numbers, generation, since = itertools.count(1), 0, 0.0
    pending: list[int] = []
    known = noted.listed.setdefault(writer, {})
    while True:
        try:
            async with call_of(pi_pb2_grpc.PiStub, addresses["pi"], "Exchange") as call:
                epoch = (await ask(call, pi_pb2.PiRequest(request=1))).epoch
                generation += 1
                for request in itertools.count(2):
                    if not pending:
                        pending, since = [LANE << 54 | writer << 40 | n for n in itertools.islice(numbers, BATCH)], time.monotonic()
                    level = levels[request % len(levels)]
                    items = b"".join(APPEND.pack(identity, writer) for identity in pending)
                    operations = encode([Appends(Writer(writer, generation, epoch), items)])
                    asked = pi_pb2.PiRequest(request=request, operations=operations, level=level)  # type: ignore[arg-type]
                    reply = await ask(call, asked)
                    if reply.code or min(reply.results, default=0) < 0:
                        noted.refuse(f"pi {reply.code or min(reply.results)}")
                        break
                    known.update(itertools.zip_longest(pending, reply.results, fillvalue=ANY))
                    noted.appended += len(pending)
                    noted.took(since, len(pending))
                    pending = []
        except LOST as error:
            noted.refuse(type(error).__name__)
        await asyncio.sleep(PAUSE_S)


async def missing_mail(address: str, wanted: dict[int, tuple[int, int]]) -> list[str]:
    """What is wrong with the mail of a Xiu."""
    found: dict[int, tuple[int, int]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        async for part in stub.Scan(xiu_pb2.ScanRequest(local=True)):
            for index, record in enumerate(split(part.batch, part.count)):
                writer, number, rest = decode_record(record).body.split(b" ", 2)
                if rest != b"x" * BODY_BYTES:
                    return [f"sequence {part.sequence + index} is not as it was written"]
                found[msg_id(0, record[6], part.sequence + index)] = int(writer), int(number)
    wrong = [f"mail {identity:x} of writer {what[0]}" for identity, what in wanted.items() if found.get(identity) != what]
    return wrong + ([] if len(set(found.values())) == len(found) else ["a mail is stored twice"])


async def missing_entries(address: str, wanted: dict[int, dict[int, int]]) -> list[str]:
    """What is wrong with the inboxes of a Pi."""
    wrong = list[str]()
    async with call_of(pi_pb2_grpc.PiStub, address, "Exchange") as call:
        numbers = itertools.count(1)
        for uin, known in wanted.items():
            opened = pi_pb2.PiRequest(request=next(numbers), operations=encode([OpenSessions(USER_DEVICE.pack(uin, 0))]))
            session = (await ask(call, opened)).results[0]
            found, start, last = dict[int, int](), 0, 1
            while start < last:
                read = pi_pb2.PiRead(uin=uin, lane=LANE, session=session, start=start, num=PAGE)
                (page,) = (await ask(call, pi_pb2.PiRequest(request=next(numbers), reads=[read]))).reads
                if page.code or (not page.seqs and page.last > start):
                    return [*wrong, f"inbox {uin} cannot be read behind {start}: {page.code}"]
                found.update(zip(page.msg_ids, page.seqs, strict=True))
                start, last = (page.seqs[-1] if page.seqs else page.last), page.last
            lost = [each for each, seq in known.items() if found.get(each, -1) != seq and (seq != ANY or each not in found)]
            wrong += [f"entry {identity:x} of inbox {uin}" for identity in lost]
    return wrong
