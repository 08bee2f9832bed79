"""Is anything that a Xiu or a Pi acknowledged missing after a power cut in mid-write?

A Xiu and a Pi, one replica each, keep their data on one ext4 that lies on a loop device over `benchmarks.power_disk`; ZooKeeper and
the writers lie elsewhere, as on other machines. Writers store mail and append to inboxes all the time, by turns at the levels
persisted and replicated (which is the same with one replica), and note what is acknowledged. In each round the power goes at a
write drawn by chance: the disk refuses everything from then on, the processes are killed, the file system is unmounted, and the
power comes back. Then it is mounted, which replays its journal, both replicas start on what is there, and everything that was ever
acknowledged is read: no mail missing, other than it was written, or stored twice; no entry of an inbox missing or under another
number. The next round goes on with the same disk.

What is modelled: the machine's memory is gone (page cache, table in shared memory), and so is what the disk had in its cache and
the kernel had not asked it to flush, a drawn part of its 4,096-byte sectors (none, half, nine tenths, all), in any order. So it
is harder than a copy of the image, which has all that the kernel wrote. What is not: sectors torn in themselves, a disk that lies
about flushing, a reboot (the kernel, and so its boot ID and monotonic clock, is the same), loss of ZooKeeper, several replicas that
lose power at once. Needs Linux, root, FUSE, loop devices and mkfs.ext4.

Estimate: nothing missing; some 1 to 20 sectors in the cache at a cut, as each sync flushes them; 8 s a round, most of it the
end of the old session and the wait of a replica that confirmed an epoch.

First run (two shared, loaded cores): 50 cuts, nothing missing of 520,000 mails and 620,000 entries; 1 to 1,216 sectors in the
cache, mostly under 5. It led again 3.1 to 9.8 s after. With `--lies 200` every cut lost hundreds of mails, and was found out.

    python -m benchmarks.power_cut [--rounds 50] [--seed 1] [--mib 1024]      # exit code 1: something was missing
    python -m benchmarks.power_cut --rounds 3 --lies 200     # a disk that loses what it said it flushed: something must be missing
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from benchmarks.stores import SHARED, Stores
from pixiu.discovery.paths import DEFAULT_ROOT
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import msg_id, snowflake
from pixiu.wire.inbox_operations import APPEND, USER_DEVICE, Appends, OpenSessions, Writer, encode
from pixiu.wire.record import Kind, split
from pixiu.wire.record import decode as decode_record
from pixiu.wire.record import encode as encode_record
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2, xiu_pb2_grpc
from registry.embedded import EmbeddedZooKeeper
from registry.layout import ensure_layout

WRITERS: Final = 3
"""Of each role."""
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
BEFORE_A_CUT: Final = 200
"""Acknowledgements of each role that a round waits for."""
WRITES: Final = 300
"""The power goes within so many writes of the disk."""


def run(*command: str) -> str:
    """A command of the system. Raises RuntimeError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Machine:
    """The disk, its loop device and the file system on it."""

    def __init__(self, folder: Path, mib: int, lies: int) -> None:
        self._served, self.mount = folder / "fuse", folder / "mount"
        self._served.mkdir()
        self.mount.mkdir()
        self._loop = ""
        self._disk = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.power_disk", str(self._served), str(mib), str(lies)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _heard(self) -> dict[str, int]:
        assert self._disk.stdout is not None
        line = self._disk.stdout.readline()
        if not line:
            raise RuntimeError("the disk's process ended")
        found: dict[str, int] = json.loads(line)
        return found

    def _ask(self, **command: int) -> dict[str, int]:
        assert self._disk.stdin is not None
        self._disk.stdin.write(json.dumps(command) + "\n")
        self._disk.stdin.flush()
        return self._heard()

    def make(self) -> None:
        """A new file system, not mounted."""
        self._heard()
        self._attach()
        run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", self._loop)

    def _attach(self) -> None:
        if not self._loop:
            self._loop = run("losetup", "--find", "--show", str(self._served / "disk"))

    def up(self) -> None:
        """Mount what is on the disk, as a machine does when it starts."""
        self._attach()
        run("mount", "-t", "ext4", self._loop, str(self.mount))

    def cut(self, seed: int, after: int) -> dict[str, int]:
        """The power goes after so many writes more."""
        return self._ask(cut=seed, after=after)

    def down(self) -> None:
        """Nothing is mounted any more, nothing of it cached, and the power is on."""
        run("umount", str(self.mount))
        run("losetup", "--detach", self._loop)
        self._loop = ""
        self._ask(on=1)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        subprocess.run(["umount", str(self.mount)], capture_output=True, check=False)
        if self._loop:
            subprocess.run(["losetup", "--detach", self._loop], capture_output=True, check=False)
        assert self._disk.stdin is not None
        self._disk.stdin.close()
        try:
            self._disk.wait(20)
        except subprocess.TimeoutExpired:
            self._disk.kill()
            self._disk.wait(20)
        subprocess.run(["umount", "-l", str(self._served)], capture_output=True, check=False)


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


@contextlib.contextmanager
def machine(folder: Path, mib: int, lies: int) -> Iterator[Machine]:
    """It leaves nothing behind."""
    made = Machine(folder, mib, lies)
    try:
        made.make()
        yield made
    finally:
        made.close()


class Rounds:
    """All of it."""

    def __init__(self, args: argparse.Namespace, folder: Path, disk: Machine, target: str, zookeeper: ZooKeeper) -> None:
        self._args, self._disk = args, disk
        self._chance = random.Random(args.seed)
        self._table = Path(tempfile.mkdtemp(prefix="pixiu-bench-", dir=SHARED if SHARED.is_dir() else folder))
        small = {"xiu": ["reserve_mb=0", "flush_interval_s=0.5", "memtable_mb=1", "table_mb=32"]}
        small["pi"] = ["inbox_cap=10000000", "store_mb=512"]
        self._stores = {}
        for role, settings in small.items():
            self._stores[role] = Stores(role, folder, self._table, target, zookeeper, settings, data={role: disk.mount / role})
        self._addresses: dict[str, str] = {}
        self._writers: list[asyncio.Task[None]] = []
        self.noted = Noted()

    async def _start(self) -> None:
        self._disk.up()
        for each in self._table.iterdir():
            shutil.rmtree(each)
        for role, store in self._stores.items():
            store.start(role)
        for role, store in self._stores.items():
            self._addresses[role] = (await store.leader()).address

    def kill(self) -> None:
        """Of the machine whose power went nothing runs."""
        for store in self._stores.values():
            for name, process in store.processes.items():
                if process.poll() is None:
                    store.end(name, signal.SIGKILL)
        self._addresses.clear()

    async def _enough(self) -> None:
        stored, appended, end = len(self.noted.stored), self.noted.appended, time.monotonic() + 120
        while len(self.noted.stored) < stored + BEFORE_A_CUT or self.noted.appended < appended + BEFORE_A_CUT:
            for task in self._writers:
                if task.done():
                    task.result()
            if time.monotonic() > end:
                raise RuntimeError(f"nothing is acknowledged any more: {self.noted.refused}")
            await asyncio.sleep(0.01)

    async def _check(self, stored: dict[int, tuple[int, int]], listed: dict[int, dict[int, int]]) -> list[str]:
        wrong = await missing_mail(self._addresses["xiu"], stored)
        return wrong + await missing_entries(self._addresses["pi"], listed)

    async def go(self) -> int:
        """How many rounds lost something."""
        bad = 0
        self._writers = [
            asyncio.create_task(what(number + 1, self._addresses, self.noted))
            for what in (write_mail, append_mail)
            for number in range(WRITERS)
        ]
        try:
            await self._start()
            for number in range(1, self._args.rounds + 1):
                await self._enough()
                seed, after = self._chance.getrandbits(32), self._chance.randint(1, WRITES)
                cut = await asyncio.to_thread(self._disk.cut, seed, after)
                self.kill()
                await asyncio.sleep(0.2)  # what the replicas had answered is read
                stored, listed = dict(self.noted.stored), {uin: dict(known) for uin, known in self.noted.listed.items()}
                self._disk.down()
                began = time.monotonic()
                await self._start()
                took = time.monotonic() - began
                wrong = await self._check(stored, listed)
                bad += bool(wrong)
                entries = sum(map(len, listed.values()))
                told = f"{cut['lost']} of {cut['cached']} sectors lost; {len(stored):,} mails and {entries:,} entries acknowledged"
                said = f"{len(wrong)} wrong, such as {wrong[0]}" if wrong else "all there"
                print(f"cut {number}: {told}, {said}; led again after {took:.1f} s", flush=True)
        finally:
            for task in self._writers:
                task.cancel()
            await asyncio.gather(*self._writers, return_exceptions=True)
            self.kill()
            shutil.rmtree(self._table, ignore_errors=True)
        return bad


async def power_cuts(args: argparse.Namespace) -> int:
    """The exit code."""
    folder = Path(tempfile.mkdtemp(prefix="pixiu-bench-"))
    server = EmbeddedZooKeeper(folder / "zookeeper")
    zookeeper: ZooKeeper | None = None
    try:
        await asyncio.to_thread(server.start)
        zookeeper = ZooKeeper(server.address, session_timeout_s=10.0)
        await zookeeper.connect()
        await ensure_layout(zookeeper, DEFAULT_ROOT, {role: RoleLayout(1, 1, 1) for role in ("xiu", "pi")})
        with machine(folder, args.mib, args.lies) as disk:
            rounds = Rounds(args, folder, disk, f"zk://{server.address}{DEFAULT_ROOT}", zookeeper)
            bad = await rounds.go()
    finally:
        if zookeeper is not None:
            await zookeeper.close()
        await asyncio.to_thread(server.stop)
        for log in folder.glob("*.log") if args.logs else ():
            shutil.copy(log, args.logs)
        shutil.rmtree(folder, ignore_errors=True)
    noted = rounds.noted
    print(f"{args.rounds} cuts, {bad} with something missing; {len(noted.stored):,} mails, {noted.appended:,} entries acknowledged")
    return 1 if bad else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the moments and of what the disk loses")
    parser.add_argument("--mib", type=int, default=1024, help="of the disk")
    parser.add_argument("--lies", type=int, default=0, help="the newest sectors that the disk says it flushed, and did not")
    parser.add_argument("--logs", type=Path, help="a folder to which the logs are copied at the end")
    args = parser.parse_args()
    if os.geteuid() or not Path("/dev/fuse").exists() or shutil.which("mkfs.ext4") is None:
        print("left out: needs root, /dev/fuse and mkfs.ext4")
        return 0
    return asyncio.run(power_cuts(args))


if __name__ == "__main__":
    sys.exit(main())
