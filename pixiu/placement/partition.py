"""Placement of keys: the partition rule and the choice of a replica. Pure functions.

Source: PiXiu §2.2 step 8, §5.1, §5.3; docs/routing.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

import xxhash

MAX_PARTITIONS = 128


def is_partition_count(count: int) -> bool:
    """True if a number of partitions is allowed: a power of two up to 128."""
    return 0 < count <= MAX_PARTITIONS and count & (count - 1) == 0


def serves(partition: int, key: int, count: int) -> bool:
    """True if a partition serves a key, `key % n == p % n`.

    While a doubling is under way partition numbers reach beyond `count`, and the rule is true for the old and the new partition.
    Source: PiXiu §5.1.
    """
    return key % count == partition % count


def share_rooms(broker: int, brokers: int, router: int, routers: int) -> bool:
    """True if a broker partition and a router partition have rooms in common.

    Departs from PiXiu §5.3 step 6 because `% BrokerPartitionNum` finds no router for some brokers
    when there are more broker partitions than router partitions.
    """
    least = min(brokers, routers)
    return broker % least == router % least


def rendezvous(key: int, replicas: Iterable[int]) -> int:
    """Choose the replica (an endpoint ID) that serves a key: the highest xxh3(key, replica). Raises ValueError if there is none.

    Departs from PiXiu §2.2 step 8 (`RoomID % ReplicaNum`) because there one death moves most rooms.
    """
    best, chosen = -1, -1
    head = key.to_bytes(8, "little")
    for replica in replicas:
        score = xxhash.xxh3_64_intdigest(head + replica.to_bytes(8, "little"))
        if score > best or (score == best and replica > chosen):
            best, chosen = score, replica
    if chosen < 0:
        raise ValueError("no replica to choose from")
    return chosen


def weighted_rendezvous(key: int, replicas: Iterable[tuple[int, float]]) -> int:
    """Choose a replica from (replica, weight): replicas get shares of the keys in proportion to their weights, which are above 0.

    It has the lowest -ln(u) / weight, u being the hash as a number in (0, 1). When one weight changes, keys move only to that
    replica or away from it; with equal weights the choice is that of `rendezvous`. Raises ValueError if there is none.

    Source: PiXiu, to-do 2; docs/routing.md.
    """
    head = key.to_bytes(8, "little")
    chosen: tuple[float, int, int] | None = None
    for replica, weight in replicas:
        digest = xxhash.xxh3_64_intdigest(head + replica.to_bytes(8, "little"))
        found = -log((digest + 0.5) / (1 << 64)) / weight, -digest, -replica
        if chosen is None or found < chosen:
            chosen = found
    if chosen is None:
        raise ValueError("no replica to choose from")
    return -chosen[2]


def rendezvous_order(key: int, replicas: Sequence[int]) -> list[int]:
    """Sort all replicas by preference, the preferred one first."""
    head = key.to_bytes(8, "little")
    return sorted(replicas, key=lambda replica: (-xxhash.xxh3_64_intdigest(head + replica.to_bytes(8, "little")), -replica))
