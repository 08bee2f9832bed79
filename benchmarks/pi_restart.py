"""How soon a Pi replica with a million entries in 100 000 inboxes serves after its start: `python -m benchmarks.pi_restart`.

Estimate, written before the first run: nothing is loaded but the writers and the position; LMDB maps its file; so a flushed
state is open within 0.1 s, whatever it holds, and 60 MB. The log is verified behind the last transaction only. When the last
transaction was lost, 50 000 appends in 500 batches are applied anew in 0.3 s.

First run (2 shared, loaded cores): open 0.001 s, log 0.03 s, applied anew 0.76 s (each of those inboxes is looked up in the store);
586 MiB resident, of which the mapped file is 353 MiB.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.pi_core import AT_US, appends
from cluster.replication.log import SegmentedLog
from cluster.replication.model import Entry
from pi.machine import Machine
from pixiu.errors import PixiuError
from pixiu.wire.inbox_operations import ENTRY_KIND

ENTRIES = 1_000_000
INBOXES = 100_000
UNFLUSHED = 50_000
BATCH = 100


def fail(error: PixiuError) -> None:
    """Nothing may fail here."""
    raise error


def machine(folder: Path) -> Machine:
    """The state in a folder."""
    made = Machine(folder / "inboxes", 4 << 30, 200_000, 1.0, fail)
    made.open()
    return made


async def fill(folder: Path) -> None:
    """Log and state, the last batches in the log alone."""
    log, state = SegmentedLog(folder / "log"), machine(folder)
    flushed = (ENTRIES - UNFLUSHED) // BATCH
    for counter, payload in enumerate(appends(ENTRIES, INBOXES, BATCH), 1):
        entry = Entry(1, counter, ENTRY_KIND, AT_US, payload)
        log.append([entry])
        if counter <= flushed:
            state.apply([entry])
            if counter % 500 == 0 or counter == flushed:
                await state.flush()
    log.sync()
    log.close()
    state.store.close()


async def restart(folder: Path) -> None:
    """Open, verify, apply what is missing, read one inbox: prints seconds and MiB."""
    began = time.perf_counter()
    state = machine(folder)
    opened = time.perf_counter()
    log = SegmentedLog(folder / "log", verify_from=state.applied)
    verified = time.perf_counter()
    while state.applied < log.last.counter:
        state.apply(log.read(state.applied, 256, 1 << 20))
    applied = time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    size = sum(path.stat().st_size for path in (folder / "inboxes").iterdir()) >> 20
    print(
        f"{ENTRIES:,} entries in {INBOXES:,} inboxes: state open {opened - began:.3f} s, log verified {verified - opened:.3f} s, "
        f"{UNFLUSHED:,} appends applied anew {applied - verified:.3f} s; {memory} MiB, {size} MiB on the disk"
    )
    state.store.close()
    log.close()


def main() -> None:
    """Fill in this process, restart in another."""
    if len(sys.argv) > 1:
        asyncio.run(restart(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(fill(Path(folder)))
        subprocess.run([sys.executable, "-m", "benchmarks.pi_restart", folder], check=True)


if __name__ == "__main__":
    main()
