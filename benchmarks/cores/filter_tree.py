"""How long does it take to find the filters that match a topic, among 100,000 with wildcards?

Estimate: a topic of four levels visits at most 2 + 4 + 8 nodes, in practice about six, at 0.3 µs each: 2 µs, whatever the number of
filters. A matcher that looks at all of them takes 0.1 s.

Source: docs/subscriptions.md, "Wildcards".
"""

from __future__ import annotations

import random
import statistics
import time

from pixiu.placement.filter_tree import FilterTree

FILTERS = 100_000
TOPICS = 20_000


def main() -> None:
    """Print the time of a match, and of putting a filter in."""
    chance = random.Random(1)
    tree: FilterTree[int] = FilterTree()
    kinds = ("devices/{}/+", "devices/+/s{}", "sites/{}/#", "sites/+/floor/{}", "sites/{}/floor/+/room", "jobs/{}/+/done")
    names = [kinds[number % len(kinds)].format(number // len(kinds)).encode() for number in range(FILTERS)]
    began = time.process_time()
    for number, name in enumerate(names):
        tree.put(name, number)
    put_us = (time.process_time() - began) / FILTERS * 1e6
    each = FILTERS // len(kinds)
    topics = [
        chance.choice(
            (
                f"devices/{chance.randrange(each)}/s{chance.randrange(each)}",
                f"sites/{chance.randrange(each)}/floor/{chance.randrange(each)}/room",
                f"jobs/{chance.randrange(each)}/{chance.randrange(9)}/done",
                f"other/{chance.randrange(each)}",
            )
        ).encode()
        for _ in range(TOPICS)
    ]
    took: list[float] = []
    found = 0
    for topic in topics:
        before = time.perf_counter()
        found += len(tree.match(topic))
        took.append(time.perf_counter() - before)
    took.sort()
    median_us, slow_us = statistics.median(took) * 1e6, took[TOPICS * 99 // 100] * 1e6
    print(f"{FILTERS} filters: {median_us:.1f} µs a match at the median, {slow_us:.1f} at 99 per cent, {found / TOPICS:.1f} found")
    print(f"{put_us:.1f} µs to put one in")


if __name__ == "__main__":
    main()
