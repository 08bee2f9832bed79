"""How long does a new replica of a large Xiu take to join, and what do writes beside it wait?

One replica is filled with mail of 64 KiB that cannot be compressed. Then writers go on in closed loops, a second replica starts
with an empty folder, and the time is taken until it is in sync; at the end it alone must have every mail that was acknowledged
since, and every one of before, byte for byte.

Estimate: a snapshot is hard links, sent at the rate at which one core copies, sums and writes: 150 MB/s, so 140 s for 20 GB; the
log that came meanwhile is kept. Writes share two cores and a disk with it: half their rate, and none waits for a second.

First run, beside the whole suite: 307,680 mails of 21.6 GB, joined after 461 s (47 MB/s), writes at 70 % of their rate, longest
wait 1.6 s, nothing missing of these and of 1,137,840 written meanwhile. With 0.5 GB and less beside it 129 MB/s, 0.5 s.

    python -m benchmarks.big_join [--gigabytes 20]      # needs twice the space, and the log's 8 GB

The exit code is 1 when it did not join within its time, or something is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import grpc.aio

from benchmarks.harness import working
from benchmarks.noting_writers import Noted, call_of, write_mail
from benchmarks.stores import Stores, replication, stores
from pixiu.ids import msg_id, snowflake
from pixiu.wire.record import Kind, decode, split
from pixiu.wire.record import encode as encode_record
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc

BODY_BYTES: Final = 65_000
BATCH: Final = 16
UNDER_WAY: Final = 4
"""Batches that are sent and not answered."""
WRITERS: Final = 2
WORKER: Final = 9
"""The number in SnowflakeIDs of what fills the store; the writers have others."""
WITHIN_S: Final = 1800.0
LOOK_S: Final = 0.5
SETTINGS: Final = ("reserve_mb=64", "trim_interval_s=3600", "table_mb=64")


async def fill(address: str, gigabytes: float) -> int:
    """Store so much at level persisted. Returns how many mails that was."""
    rng = random.Random(1)
    wanted = int(gigabytes * 1e9) // BODY_BYTES // BATCH * BATCH
    answered, sent = 0, 0
    async with call_of(xiu_pb2_grpc.XiuStub, address, "Store") as call:
        while answered < wanted:
            while sent < wanted and sent - answered < BATCH * UNDER_WAY:
                now_ms = time.time_ns() // 1_000_000
                records = b"".join(
                    encode_record(Kind.MAIL, 4, rng.randbytes(BODY_BYTES), snowflake(now_ms, WORKER, (sent + each) % 1024))
                    for each in range(BATCH)
                )
                await call.write(
                    xiu_pb2.StoreRequest(batch=records, count=BATCH, position=sent + 1, level=xiu_pb2.StoreLevel.PERSISTED)
                )
                sent += BATCH
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise RuntimeError(f"the store ended the stream: {await call.code()}: {await call.details()}")
            for result in reply.results:
                if result.code:
                    raise RuntimeError(f"the store refused a mail: {result.code}")
                answered += result.count
    return answered


async def wrong_in(address: str, count: int, stored: set[int]) -> list[str]:
    """What is not there, or not as it was written, of what filled a store and of what was stored then."""
    rng, filled, found = random.Random(1), 0, set[int]()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        async for part in stub.Scan(xiu_pb2.ScanRequest(local=True)):
            for index, record in enumerate(split(part.batch, part.count)):
                found.add(msg_id(0, record[6], part.sequence + index))
                body = decode(record).body
                if len(body) == BODY_BYTES:
                    if body != rng.randbytes(BODY_BYTES):
                        return [f"mail {filled} is not as it was written"]
                    filled += 1
    missing = len(stored - found)
    return [f"{missing} of {len(stored)}, {count - filled} of {count} are missing"] if missing or filled != count else []


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def said_by(running: Stores, name: str) -> dict[str, Any]:
    """What a replica says of itself."""
    return await asyncio.to_thread(replication, await running.running(name))


async def run(gigabytes: float, disk: Path) -> bool:
    """Fill, join, check. Whether all was well."""
    noted = Noted()
    async with stores("xiu", 0, SETTINGS, disk) as running:
        running.start("old")
        address = (await running.leader()).address
        began = time.monotonic()
        count = await fill(address, gigabytes)
        filled_s = time.monotonic() - began
        size = size_of(running.folder / "old")
        print(f"{count:,} mails, {size / 1e9:.1f} GB on disk, filled at {count * BODY_BYTES / 1e6 / filled_s:.0f} MB/s", flush=True)
        level = [xiu_pb2.StoreLevel.REPLICATED]
        writers = [asyncio.create_task(write_mail(1 + each, {"xiu": address}, noted, level)) for each in range(WRITERS)]
        async with working(writers):
            await asyncio.sleep(10.0)
            before = len(noted.times) / 10.0
            began = time.monotonic()
            running.start("new")
            while len((await said_by(running, "old")).get("in_sync", ())) < 2:
                if time.monotonic() > began + WITHIN_S:
                    print("did not join in time")
                    return False
                await asyncio.sleep(LOOK_S)
            joined_s = time.monotonic() - began
            await asyncio.sleep(5.0)
        during = [took for at, took, _ in noted.times if began < at <= began + joined_s]
        print(
            f"joined after {joined_s:.0f} s ({size / 1e6 / joined_s:.0f} MB/s); requests of {WRITERS} writers meanwhile: "
            f"{len(during) / joined_s / before:.0%} of the rate before, longest wait {max(during, default=0.0):.2f} s; "
            f"refused: {noted.refused or 'nothing'}",
            flush=True,
        )
        await asyncio.to_thread(running.end, "old")
        del running.processes["old"]
        wrong = await wrong_in((await running.leader()).address, count, set(noted.stored))
        print(f"{len(noted.stored):,} mails acknowledged beside it, {count:,} of before: {'; '.join(wrong) or 'all there'}")
        return not wrong


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    args = parser.parse_args()
    disk = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))
    free = shutil.disk_usage(disk).free / 1e9
    if free < 2.5 * args.gigabytes + 8:
        print(f"left out: {disk} has {free:.0f} GB free, {2.5 * args.gigabytes + 8:.0f} are needed")
        return 0
    return 0 if asyncio.run(run(args.gigabytes, disk)) else 1


if __name__ == "__main__":
    sys.exit(main())
