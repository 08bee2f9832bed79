"""Measure how long a chunk of a snapshot stops the event loop while a map of millions is loaded: `python -m
benchmarks.cores.membership_map`.

Estimate, written before the first run: a chunk has 170 entries of 5 µs, 0.9 ms. With Python's own thresholds a full collection
comes whenever a quarter more containers are there, and looks at each in 0.1 µs or more: near four million members that is some
tenths of a second to a second. Set aside after each long one, no collection sees more than some ten thousand containers: 2 ms.
What stays is the growth of a dict, which is copied in one go when it is two thirds full: 60 ns an entry, a tenth of a second at
two million groups.

First run (2 shared cores, python 3.11): see benchmarks/README.md.

Times are CPU time of the thread, so that a busy machine changes little. `--entries N`, `--own`: with Python's own thresholds;
`--users`: a group for each member, as relays have them, instead of rooms of ten.
"""

from __future__ import annotations

import argparse
import gc
import time

from cluster.membership.map.digest import UNKEYED, digest_key
from cluster.membership.map.lww_map import CHUNK_ENTRIES, LwwMap
from cluster.membership.map.updates import ENTRY, Chunk
from cluster.process.collector import Collector
from pixiu.ids import gateway_msg_id

GATEWAYS = 4
MEMBERS = 10


def chunk(begin: int, count: int, members: int) -> Chunk:
    """Make a chunk of `count` entries from `begin` on, as in a snapshot."""
    entries = b"".join(
        ENTRY.pack(number // members, number, gateway_msg_id(number // members % GATEWAYS, 1, number + 1))
        for number in range(begin, begin + count)
    )
    return Chunk(entries, b"")


def digests(entries: int) -> None:
    """Measure the cost of a key: the same chunks merged without one and with one, in turn; and a key that is added to a full
    map."""
    key = digest_key(b"a secret of the cluster")
    for _ in range(3):
        said = []
        for keys in ((UNKEYED,), (key,)):
            store = LwwMap()
            store.set_digest_keys(keys)
            parts = [chunk(begin, min(CHUNK_ENTRIES, entries - begin), MEMBERS) for begin in range(0, entries, CHUNK_ENTRIES)]
            start = time.thread_time()
            for part in parts:
                store.merge(part, 0.0)
            said.append((time.thread_time() - start) / entries * 1e6)
        store = LwwMap()
        for part in parts:
            store.merge(part, 0.0)
        store.set_digest_keys((key,))
        slices = []
        while store.digest.building:
            start = time.thread_time()
            store.build_digest()
            slices.append(time.thread_time() - start)
        added = f"a key added in slices of at most {max(slices) * 1e3:.1f} ms, {sum(slices) / entries * 1e6:.2f} µs an entry"
        print(f"merged without a key {said[0]:.2f} µs an entry, with one {said[1]:.2f}; {added}")


def measure(entries: int, members: int) -> tuple[list[tuple[float, float, int]], float]:
    """Return (CPU seconds of a merge, of them in the collector, entries before it) for each chunk, and the total."""
    store, spent, began, took = LwwMap(), [], 0.0, 0.0

    def collected(phase: str, _info: object) -> None:
        nonlocal began, took
        if phase == "start":
            began = time.thread_time()
        else:
            took += time.thread_time() - began

    gc.callbacks.insert(0, collected)
    for begin in range(0, entries, CHUNK_ENTRIES):
        part = chunk(begin, min(CHUNK_ENTRIES, entries - begin), members)
        took = 0.0
        start = time.thread_time()
        store.merge(part, 0.0)
        spent.append((time.thread_time() - start, took, begin))
    gc.callbacks.remove(collected)
    return spent, sum(one[0] for one in spent)


def main() -> None:
    """Print the distribution of one run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=4_000_000)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--users", action="store_true")
    parser.add_argument("--digests", action="store_true")
    wanted = parser.parse_args()
    if wanted.digests:
        digests(wanted.entries)
        return
    collector = Collector()
    if not wanted.own:
        collector.start()
    spent, total = measure(wanted.entries, 1 if wanted.users else MEMBERS)
    ordered = sorted(one[0] for one in spent)
    print(
        f"{wanted.entries:,} entries, {'a group each' if wanted.users else f'groups of {MEMBERS}'}, "
        f"{'Python' if wanted.own else 'own'} thresholds: {total:.1f} s in {len(spent):,} chunks; a chunk p50 "
        f"{ordered[len(ordered) // 2] * 1e3:.2f} ms, p99 {ordered[len(ordered) * 99 // 100] * 1e3:.2f} ms"
    )
    for took, collecting, before in sorted(spent, reverse=True)[:5]:
        print(f"  {took * 1e3:8.1f} ms, of them {collecting * 1e3:8.1f} ms in the collector, at {before:,} entries")
    print(f"  set aside {collector.set_aside} times, the longest collection {collector.longest_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
