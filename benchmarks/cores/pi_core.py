"""Measure the appends that a Pi replica applies to LMDB per CPU second: `python -m benchmarks.cores.pi_core`.

Estimate, written before the first run, for batches of 100 appends to inboxes that repeat: a key, a value and a CRC for the entry
and for its index 1.4 µs, the look-up of the head and the bookkeeping 0.6 µs, two puts in sorted order 0.8 µs, the inbox's
head once a transaction 0.1 µs: 2.9 µs, so 340 000 a CPU second. To 100 000 inboxes at random every append writes its head
and half of its look-ups miss the processor's caches: 200 000.

First run (2 shared, loaded cores, python 3.11): 230 000 and 86 000. Keys were sorted before they were put, which cost more
(1.9 µs an append) than it saved (0.2 µs). Without that, in transactions of 50 000 changes: 265 000 to 420 000 by the machine's
load, and 110 000 to 100 000 new inboxes, where every second append makes one (its head, its hour). Acknowledgements 130 000, one
each of as many users.

In chunks (decision 283), estimate: 0.5 µs to apply, and at ten mails a user and transaction a fifth of two values, 0.5 µs; at one
mail what two values cost, since the chunk's is ten times as long. Measured, with a value an entry and an index before: 9.2 µs a
mail (10.7) at one a user and transaction, 1.8 (4.8) at ten, 0.9 (3.1) at a hundred; acknowledgements, which look at the oldest
entry, take a tenth more. What `run` prints has fewer transactions than before, as fewer changes come together: a process writes
each second.

A leader, without a log and a store: it checks its callers' requests in place and joins the bytes. Estimate: two numbers
unpacked and compared in C, 0.1 µs an append, and 10 µs a request, so 5 million appends a CPU second at batches of 100. First
run: 4,100,000 at batches of 1000, 2,000,000 at 100, 330,000 at 10, 37,000 one by one: a request costs 27 µs.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from pathlib import Path

from cluster.core.contract import END_OF_TURN
from cluster.replication.core.events import Accepted
from cluster.replication.model import Entry
from cluster.store.events import Committed, LeaderChanged, Propose
from pi import events as ev
from pi.core import Core
from pi.inboxes.reading import Read
from pi.state import State
from pi.store.store import StateStore
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    ENTRY_KIND,
    USER_DEVICE,
    Acknowledges,
    Appends,
    Limits,
    OpenSessions,
    Writer,
    encode,
)
from pixiu.wire.levels import Level

APPENDS = 200_000
BATCH = 100
TRANSACTION_CHANGES = 50_000
"""Changes in a transaction, as in the role's shell."""
AT_US = 1_750_000_000_000_000
TRANSACTION_MAILS = 10_000
TRANSACTIONS = 64
ROUND_US = 600_000_000
"""Interval between two transactions of `written`, by the log's time."""


class Replica:
    """A state over LMDB, fed with entries."""

    def __init__(self, folder: Path) -> None:
        self.store = StateStore(folder, 4 << 30)
        self.state = State(self.store)
        self.counter = 0

    def apply(self, payload: bytes) -> None:
        """Apply one committed entry; write a transaction when there are enough changes."""
        self.counter += 1
        self.state.apply([Entry(1, self.counter, ENTRY_KIND, AT_US, payload)])
        if self.state.unwritten >= TRANSACTION_CHANGES:
            self.flush()

    def flush(self) -> None:
        """Write one transaction."""
        self.store.write(self.state.freeze())
        self.store.renew()
        self.state.table.thawed()


def appends(count: int, uins: int, batch: int) -> list[bytes]:
    """Return payloads of entries, in batches, to inboxes at random."""
    chance = random.Random(1)
    writer = Writer(1, 1, 1)
    messages = [APPEND.pack(1 << 48 | 1 << 54 | (number + 1), chance.randrange(1, uins + 1)) for number in range(count)]
    return [encode([Appends(writer, b"".join(messages[at : at + batch]))]) for at in range(0, count, batch)]


def measure(replica: Replica, payloads: list[bytes]) -> float:
    """Return the CPU seconds to apply them, transactions included."""
    began = time.process_time()
    for payload in payloads:
        replica.apply(payload)
    replica.flush()
    return time.process_time() - began


def run(uins: int, batch: int) -> str:
    """Measure one row."""
    count = APPENDS if batch > 1 else APPENDS // 4
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica(Path(folder))
        appended = measure(replica, appends(count, uins, batch))
        sessions = b"".join(USER_DEVICE.pack(uin, 0) for uin in range(1, uins + 1))
        replica.apply(encode([OpenSessions(sessions)]))
        ends = [(uin, replica.state.inboxes.head(uin, 1).last) for uin in range(1, uins + 1)]
        acks = [ACKNOWLEDGE.pack(uin, 0, 1, 1, last // 2, 0) for uin, last in ends]
        acked = measure(replica, [encode([Acknowledges(b"".join(acks[at : at + batch]))]) for at in range(0, len(acks), batch)])
        began = time.process_time()
        found = sum(len(replica.state.read(uin, 0, 1, 1, 0, 100).entries) for uin in range(1, min(uins, 5000) + 1))
        reading = time.process_time() - began
        used = replica.store.bytes_used
        replica.store.close()
    return (
        f"{uins:>8,} inboxes, batches of {batch:>4}: {count / appended:>9,.0f} appends, {len(acks) / acked:>9,.0f} "
        f"acknowledgements, {found / reading:>9,.0f} entries read a CPU second; {used / count:.0f} bytes an entry"
    )


def written(a_user: int) -> str:
    """Measure one row: a number of mails a user in each transaction, entries of 1,000; the time of each part."""
    chance, writer = random.Random(1), Writer(1, 1, 1)
    users = list(range(1, TRANSACTION_MAILS // a_user + 1)) * a_user
    applying = encoding = writing = 0.0
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        replica = Replica(Path(folder))
        began_bytes = bytes_written()
        for turn in range(TRANSACTIONS):
            chance.shuffle(users)
            items = [APPEND.pack(1 << 48 | 1 << 54 | (number + place), uin) for place, uin in enumerate(users, 1)]
            number += len(items)
            payloads = [encode([Appends(writer, b"".join(items[at : at + 1000]))]) for at in range(0, len(items), 1000)]
            began = time.process_time()
            for payload in payloads:
                replica.counter += 1
                replica.state.apply([Entry(1, replica.counter, ENTRY_KIND, AT_US + turn * ROUND_US, payload)])
            applied = time.process_time()
            changes = replica.state.freeze()
            frozen = time.process_time()
            replica.store.write(changes)
            replica.store.renew()
            replica.state.table.thawed()
            ended = time.process_time()
            applying, encoding, writing = applying + applied - began, encoding + frozen - applied, writing + ended - frozen
        put, used = bytes_written() - began_bytes, replica.store.bytes_used
        replica.store.close()
    parts = [spent * 1e6 / number for spent in (applying, encoding, writing)]
    return (
        f"{a_user:>3} mails a user and transaction, µs a mail: {parts[0]:.2f} applied, {parts[1]:.2f} encoded, {parts[2]:.2f} "
        f"in LMDB, {sum(parts):.2f} in all; {used / number:.0f} bytes a mail on the disk, {put / number:.0f} given to it"
    )


def bytes_written() -> int:
    """Return the bytes that this process has passed to the system since its start."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


class NoInboxes:
    """Inboxes that nobody reads."""

    def stored(self, msg_id: int, uin: int) -> int:
        """See `pi.core.Inboxes`; appends do not read."""
        raise NotImplementedError

    def may_grow(self) -> bool:
        """See `pi.core.Inboxes`."""
        return True

    def may_read(self) -> bool:
        """See `pi.core.Inboxes`."""
        return True

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False, notes: bool = False,
    ) -> Read:  # fmt: skip
        """See `pi.core.Inboxes`; appends do not read."""
        raise NotImplementedError


def lead(batch: int, requests: int) -> str:
    """Measure one row: the time of a leader's core, `requests` in a turn; the results are made beforehand."""
    core = Core(partition=0, inboxes=NoInboxes(), limits=Limits(), clock_interval_s=1e9)
    core.step(ev.LayoutChanged(1, 1, {}), 0.0)
    core.step(LeaderChanged(1), 0.0)
    count = APPENDS if batch > 1 else APPENDS // 4
    payloads, results = appends(count, 1000, batch), [[1] * batch] * requests
    began = time.process_time()
    for counter, at in enumerate(range(0, len(payloads), requests), 1):
        for number, payload in enumerate(payloads[at : at + requests]):
            core.step(ev.Requested(1, number, payload, Level.REPLICATED, ()), 0.0)
        entry = core.step(END_OF_TURN, 0.0)[-1]  # the first time after the leader's limits
        assert isinstance(entry, Propose)
        core.step(Accepted(entry.token, 1, counter, counter), 0.0)
        core.step(Committed(counter, [results], 2), 0.0)
    spent = time.process_time() - began
    assert not core.under_way
    return f"a leader, batches of {batch:>4}, {requests:>2} requests a turn: {count / spent:>10,.0f} appends answered a CPU second"


def main() -> None:
    """Print the table."""
    gc.freeze()  # as a process does: visits of every imported module would fall into any case being measured
    for batch, requests in ((1000, 1), (100, 10), (10, 10), (1, 10)):
        print(lead(batch, requests))
    for a_user in (1, 10, 100):
        print(written(a_user))
    for uins, batch in ((1000, 100), (100_000, 100), (1000, 1000), (1000, 10), (1000, 1)):
        print(run(uins, batch))


if __name__ == "__main__":
    main()
