"""Measure the entries that a leader and its follower replicate per CPU second: `python -m benchmarks.cores.replication`.

Both cores and both logs on real files, without a network between them: append, sync, acknowledge, commit.

Estimate, written before the first run, for entries of 100 bytes in batches of 100: an Entry (0.3 µs), its encoding with
the CRC (0.8 µs) and the note in the index (0.3 µs) on each side, 3 µs in all; two syncs a batch and side and the steps of the
cores 100 µs a batch, 1 µs an entry. So 250 000 entries a CPU second for the pair, 400 000 at batches of 1000, 8 000 one by one.
A store that puts a batch of 100 records into one entry pays a hundredth of that for each.

First run (2 shared, loaded cores, python 3.11, files on the machine's disk), the pair: 185 000 at batches of 100, 412 000 at 1000,
3 800 one by one (four `fdatasync`s cost 200 µs of system time); with 1 KB 131 000 and 247 000. By the clock, one batch
after the other without group commit: 29 000 at batches of 100.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.model import EntryKind, MemberID, PartitionState, Presence, Versioned
from cluster.replication.options import ReplicationOptions
from cluster.replication.storage.log import SegmentedLog

ENTRIES = 60_000
LEADER, FOLLOWER = MemberID(1), MemberID(2)
OPTIONS = ReplicationOptions()


class Pair:
    """Two replicas in sync."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.committed = 0
        self.logs = {member: SegmentedLog(directory / str(member)) for member in (LEADER, FOLLOWER)}
        self.cores = {
            member: Core(member=member, incarnation=1, log=log, options=OPTIONS, applied=0, now=0.0)
            for member, log in self.logs.items()
        }
        state = PartitionState(1, MemberID(9), 1, frozenset(self.cores))
        live = tuple(Presence(int(member), member, 1) for member in self.cores)
        for member in self.cores:
            self.step(member, ev.SessionStarted(int(member), 1))
            self.step(member, ev.PresenceChanged(live))
        self.step(LEADER, ev.StateRead(Versioned(0, state)))
        while not self.committed:
            self.now += 0.25
            self.step(LEADER, ev.Tick())

    def step(self, member: MemberID, event: ev.Event) -> None:
        """Process one event, and everything that follows from it."""
        for effect in self.cores[member].step(event, self.now):
            if isinstance(effect, ev.Sync):
                self.logs[member].sync()
                self.step(member, ev.Synced(effect.ticket))
            elif isinstance(effect, ev.Send):
                self.step(effect.to, ev.Received(effect.message))
            elif isinstance(effect, ev.CompareAndSet):
                self.step(member, ev.Swapped(effect.token, ev.CompareAndSetOutcome.OK))
            elif isinstance(effect, ev.Committed) and effect.copies == len(self.cores):
                self.committed = effect.counter


def measure(batch: int, payload: bytes) -> tuple[float, float]:
    """Return (entries a CPU second, entries a second by the clock) of the pair."""
    entries = min(ENTRIES, 1000 * batch)
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory))
        payloads = [(int(EntryKind.DATA), payload)] * batch
        start = pair.committed
        began, clock = time.process_time(), time.perf_counter()
        for _ in range(entries // batch):
            pair.step(LEADER, ev.Propose(0, payloads, 0))
        spent, took = time.process_time() - began, time.perf_counter() - clock
        assert pair.committed - start == entries // batch * batch
    return entries / spent, entries / took


def main() -> None:
    """Print a table."""
    print(f"{'payload':>8} {'batch':>6} {'entries/CPU s':>14} {'entries/s':>12}")
    for size in (100, 1000):
        for batch in (1, 10, 100, 1000):
            cpu, clock = measure(batch, b"x" * size)
            print(f"{size:>8} {batch:>6} {cpu:>14,.0f} {clock:>12,.0f}")


if __name__ == "__main__":
    main()
