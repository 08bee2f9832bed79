"""Measure the records that a Xiu stores per CPU second: `python -m benchmarks.cores.xiu_core`.

The core with RocksDB, the table and the log on real files: check, append, decide, table, commit, write; no network, no sync
(`benchmarks.cores.replication` has those). RocksDB's own threads are counted.

Estimate, written before the first run, for records of 100 bytes in batches of 100: the check with its CRC 0.6 µs, the walk for
the decision 0.4 µs, a look-up and a write of the dedupe entry 1.0 µs, everything that is there once for a batch (entry, block,
LMDB transaction, write batch) 60 µs, 0.6 µs a record. 2.6 µs in all: 380 000 a CPU second. The aim is 300 000.

First run (2 shared, loaded cores, python 3.11): 369 000 at batches of 100, 445 000 at 1000, 148 000 at 10, 20 000 one by one (an
LMDB transaction and a write batch of RocksDB each); with 1 KB 199 000 at batches of 100.

With runs of SnowflakeIDs (decision 284), before and after on a busier machine: 233 000 and 443 000 at batches of 100, 290 000 and
650 000 at 1000, 94 000 and 106 000 at 10, 14 400 and 13 700 one by one; with 1 KB 144 000 and 226 000 at batches of 100.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from cluster.core.contract import Settle
from cluster.replication.core.events import Accepted
from cluster.replication.model import Entry, EntryKind
from cluster.replication.storage.log import SegmentedLog
from cluster.store.events import Committed, LeaderChanged, Propose
from pixiu.ids import snowflake
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, encode
from xiu.core import Core, CoreSettings
from xiu.events import Answer, LayoutChanged, StoreReceived
from xiu.records.table import Table
from xiu.store.store import Store

RECORDS = 200_000
START_MS = 1_750_000_000_000


def make_batches(batch: int, records: int, size: int) -> list[bytes]:
    """Make batches of mail, with consecutive SnowflakeIDs."""
    body = b"x" * size
    made = [encode(Kind.MAIL, i % 10_000, body, snowflake(START_MS + i // 1000, 1, i % 1000)) for i in range(records)]
    return [b"".join(made[i : i + batch]) for i in range(0, records, batch)]


def measure(batch: int, size: int, shared: Path | None) -> tuple[float, float]:
    """Return (records a CPU second, records a second by the clock)."""
    records = min(RECORDS, 4000 * batch)
    batches = make_batches(batch, records, size)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=shared) as memory:
        log, store = SegmentedLog(Path(folder) / "log"), Store(Path(folder) / "store")
        table = Table(Path(memory), 128 << 20, log.member)
        core = Core(CoreSettings(partition=0, max_record_bytes=1 << 20), log, store, table)
        noop = Entry(1, 1, int(EntryKind.NOOP), 0, b"")
        log.append([noop])
        core.step(LayoutChanged(1, 1), 0.0)
        core.step(LeaderChanged(1), 0.0)
        core.step(Committed(1, [noop], 1), 0.0)
        began, clock, stored = time.process_time(), time.perf_counter(), 0
        for number, data in enumerate(batches):
            event = StoreReceived(1, 1 + number * batch, Level.REPLICATED, 0, data, batch)
            (proposal,) = core.step(event, 0.0)
            assert isinstance(proposal, Propose)
            first = log.last.counter + 1
            entries = [
                Entry(1, first + i, kind, START_MS * 1000 + number, body) for i, (kind, body) in enumerate(proposal.payloads)
            ]
            log.append(entries)
            core.step(Accepted(proposal.token, 1, first, log.last.counter), 0.0)
            answer, settled = core.step(Committed(first, entries, 1), 0.0)
            assert isinstance(answer, Answer)
            assert isinstance(settled, Settle)
            stored += sum(result.count for result in answer.results if not result.code)
        spent, took = time.process_time() - began, time.perf_counter() - clock
        assert stored == records
        table.close(remove=True)
        Path(memory).mkdir(exist_ok=True)
        store.close()
        log.close()
    return records / spent, records / took


def main() -> None:
    """Print a table."""
    shared = Path("/dev/shm")
    print(f"{'body':>6} {'batch':>6} {'records/CPU s':>14} {'records/s':>12}")
    for size in (100, 1000):
        for batch in (1, 10, 100, 1000):
            cpu, clock = measure(batch, size, shared if shared.is_dir() else None)
            print(f"{size:>6} {batch:>6} {cpu:>14,.0f} {clock:>12,.0f}")


if __name__ == "__main__":
    main()
