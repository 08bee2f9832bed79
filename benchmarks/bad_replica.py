"""What does one bad follower of three cost replicated writes: a full disk, a disk of 2 s a sync, a clock ten years ahead?

Real processes of one partition, writers in closed loops at level replicated. A rate is taken, then the follower becomes bad while
the writers go on, then the rate is taken again from ten seconds later on, and the longest that any write took since the fault.
At the end all replicas but the bad one must have everything that was acknowledged; in the run with the clock the others are ended
in good order until the bad one leads, and then it must have everything too. Beside it three replicas without a fault are written to
at the same time: what their rate does is the machine's noise, and a rate is judged by theirs.

The full disk is a tmpfs that is filled. The other two are a library for LD_PRELOAD, which is built when this runs: `fdatasync`,
`fsync` and `msync` sleep first; CLOCK_REALTIME is ahead for calls out of the interpreter only (what the product reads; threads of
RocksDB and gRPC wait by the wall clock of the kernel, which is not ahead, and would wait for ten years). Needs Linux, root and cc.

Estimate: the full follower leaves at once; the slow one after 5 s, in which each write takes 2 to 4 s; the clock costs nothing.
Afterwards writes wait for one disk less: no slower than before. A Xiu trims every second here, so ten years would delete all.

First run (two shared, loaded cores), rate after by rate before, over that of the replicas without a fault: Xiu 95 % full, 109 %
slow, 100 % clock; Pi 105, 112 and 94 %; longest wait 1.0, 4.1, 0.3 s; nothing missing. It showed that a disk that hangs for more
than half of the session timeout was never late for long, as each hang made a new incarnation: no writes for 12 s, then for 8, and
for 4 to 5 since a member is no less late after a mismatch either, and late from when things left on.

    python -m benchmarks.bad_replica [--roles xiu pi] [--faults full slow clock] [--seconds 15]   # exit code 1: did not hold
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import working
from benchmarks.noting_writers import Noted, append_mail, missing_entries, missing_mail, run, write_mail
from benchmarks.stores import Stores, replication, stores
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from tests.support.disks import fill
from tests.support.interposed import EVERY, Interposed

GOOD: Final = ("good-0", "good-1")
BAD: Final = "bad"
WRITERS: Final = 2
FAULTS: Final = ("full", "slow", "clock")
SLOW_US: Final = 2_000_000
AHEAD_S: Final = 10 * 365 * 86_400
SETTLE_S: Final = 10.0
WAIT_AT_MOST_S: Final = 6.25
"""Six, and a tick."""
RATE_AT_LEAST: Final = 0.9
DISK_MIB: Final = 256
LOOK_S: Final = 0.25
LEAD_S: Final = 180.0
WRITE = {"xiu": write_mail, "pi": append_mail}
LEVEL: dict[str, int] = {"xiu": xiu_pb2.StoreLevel.REPLICATED, "pi": pi_pb2.PiLevel.PI_LEVEL_REPLICATED}
SETTINGS = {
    "xiu": ("reserve_mb=1", "trim_interval_s=1", "table_mb=16", "memtable_mb=4", "flush_interval_s=1"),
    "pi": ("inbox_cap=10000000", "store_mb=512", "clock_interval_s=1"),
}


class Fault:
    """What is wrong with the bad replica, from when it is told on."""

    def __init__(self, folder: Path) -> None:
        self._interposed = Interposed(folder)
        self.disk = folder / "small"
        self.disk.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Of the bad replica."""
        return self._interposed.environment

    def begin(self, name: str) -> None:
        """From now on."""
        if name == "full":
            fill(self.disk / "ballast")
        else:
            self._interposed.begin(EVERY, sync_us=SLOW_US if name == "slow" else 0, ahead_s=AHEAD_S if name == "clock" else 0)


@contextlib.contextmanager
def fault_in(folder: Path) -> Iterator[Fault]:
    """With the small disk, which is gone afterwards."""
    fault = Fault(folder)
    run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(fault.disk))
    try:
        yield fault
    finally:
        run("umount", "-l", str(fault.disk))


async def leads(running: Stores, at: dict[str, str]) -> str:
    """The name of who leads, whose address is put into `at`; empty for nobody."""
    for name, process in running.processes.items():
        if process.poll() is None:
            with contextlib.suppress(RuntimeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    node = await running.running(name)
                    if (await asyncio.to_thread(replication, node)).get("state") == "Leading":
                        at[running.role] = node.address
                        return name
    return ""


async def follow(running: Stores, at: dict[str, str]) -> None:
    """Keep the address, for ever."""
    while True:
        await leads(running, at)
        await asyncio.sleep(LOOK_S)


def writers(running: Stores, at: dict[str, str], noted: Noted) -> list[asyncio.Task[None]]:
    """That write, and what follows the leader for them."""
    role = running.role
    tasks = [asyncio.create_task(WRITE[role](n + 1, at, noted, [LEVEL[role]])) for n in range(WRITERS)]
    return [*tasks, asyncio.create_task(follow(running, at))]


async def in_sync(running: Stores) -> int:
    """How many the leader requires."""
    status = await asyncio.to_thread(replication, await running.running(await leads(running, {}) or GOOD[0]))
    return len(status.get("in_sync", ()))


async def rates(seconds: float, *noted: Noted) -> list[float]:
    """Records acknowledged a second from now on, of each."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    now = time.monotonic()
    return [sum(count for at, _, count in each.times if began < at <= now) / (now - began) for each in noted]


async def missing(role: str, address: str, noted: Noted) -> list[str]:
    """What a replica does not have of what was acknowledged."""
    if role == "xiu":
        return await missing_mail(address, dict(noted.stored))
    return await missing_entries(address, {uin: dict(known) for uin, known in noted.listed.items()})


async def bad_one_leads(running: Stores, at: dict[str, str]) -> bool:
    """End who leads, in good order, until the bad one does. Whether it came to that."""
    end = time.monotonic() + LEAD_S
    while time.monotonic() < end:
        name = await leads(running, at)
        if name == BAD:
            return True
        if name:
            await asyncio.to_thread(running.end, name, signal.SIGTERM)
            while not await leads(running, at) and time.monotonic() < end:
                await asyncio.sleep(LOOK_S)
            running.start(name)
            await asyncio.sleep(SETTLE_S)
    return False


async def one(role: str, fault: str, seconds: float) -> bool:
    """One run. Whether it held."""
    folder = Path(tempfile.mkdtemp(prefix="pixiu-bench-"))
    noted, others, at, theirs = Noted(), Noted(), dict[str, str](), dict[str, str]()
    try:
        with fault_in(folder) as bad:
            async with stores(role, 0, SETTINGS[role]) as running, stores(role, 0, SETTINGS[role]) as control:
                running.data[BAD], running.environments[BAD] = bad.disk / BAD, bad.environment
                for name in (GOOD[0], BAD, GOOD[1]):
                    running.start(name)
                    control.start(name)
                    at[role], theirs[role] = (await running.leader()).address, (await control.leader()).address
                async with working([*writers(running, at, noted), *writers(control, theirs, others)]):
                    await asyncio.sleep(3.0)
                    before, control_before = await rates(seconds, noted, others)
                    bad.begin(fault)
                    began = time.monotonic()
                    await asyncio.sleep(SETTLE_S)
                    after, control_after = await rates(seconds, noted, others)
                    members = await in_sync(running)
                waits, control_waits = (
                    [(at_ - began, took) for at_, took, _ in each.times if at_ > began] for each in (noted, others)
                )
                await asyncio.sleep(1.0)
                told, wrong = await at_the_end(running, at, fault, noted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept, noise = after / before, control_after / control_before
    longest_at, longest = max(waits, key=lambda each: each[1], default=(0.0, float("inf")))
    late = sum(took > 1.0 for at_, took in waits if at_ > SETTLE_S)
    print(
        f"{role}, {fault}: {before:,.0f}/s before, {after:,.0f}/s after ({kept:.0%}; without a fault {noise:.0%}, so "
        f"{kept / noise:.0%}); longest wait {longest:.2f} s, acknowledged {longest_at:.1f} s after the fault (without "
        f"{max(took for _, took in control_waits):.2f} s); {late} waits above 1 s after {SETTLE_S:.0f} s; "
        f"{members} in sync; {told}",
        flush=True,
    )
    for each in wrong:
        print(f"    {each}")
    if noted.refused:
        print(f"    refused: {noted.refused}")
    return not wrong and longest <= WAIT_AT_MOST_S and kept >= RATE_AT_LEAST * noise


async def at_the_end(running: Stores, at: dict[str, str], fault: str, noted: Noted) -> tuple[str, list[str]]:
    """What is there: in words, and what is wrong. Of Pi the one that leads is asked: others do not serve reads."""
    acknowledged, wrong = len(noted.stored) or noted.appended, list[str]()
    leader = await leads(running, at)
    for name in GOOD:
        if name == leader or running.role == "xiu":
            lost = await missing(running.role, (await running.running(name)).address, noted)
            wrong += [f"{name}: {len(lost)} wrong, such as {lost[0]}"] if lost else []
    said = ""
    if fault == "clock":
        if await bad_one_leads(running, at):
            await asyncio.sleep(SETTLE_S)
            lost = await missing(running.role, at[running.role], noted)
            wrong += [f"the bad one, which leads: {len(lost)} wrong, such as {lost[0]}"] if lost else []
            said = ", also when the bad one leads"
        else:
            said = "; the bad one never led"
    return f"{acknowledged:,} acknowledged, {'not all' if wrong else 'all'} there{said}", wrong


async def all_of(roles: Sequence[str], faults: Sequence[str], seconds: float) -> bool:
    """Every run. Whether all held."""
    held = [await one(role, fault, seconds) for role in roles for fault in faults]
    return all(held)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roles", nargs="+", choices=tuple(WRITE), default=tuple(WRITE))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seconds", type=float, default=15.0, help="for which a rate is taken")
    args = parser.parse_args()
    if shutil.which("cc") is None or subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() != "0":
        print("left out: needs root and cc")
        return 0
    held = asyncio.run(all_of(args.roles, args.faults, args.seconds))
    print("all held" if held else "not all held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
