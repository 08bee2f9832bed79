"""What a map of memberships holds, in a few numbers that are kept up to date with every change. Pure.

    entry    xxh3_64(group u64, member u64, GatewayMsgID u64)
    bucket   XOR of the entries whose group falls into it, and how many there are      64 of an instance and partition
    root     XOR of the buckets, and the sum of their counts                          one of an instance and partition
    total    XOR of the roots of all instances, and the sum of their counts           one of a partition

Only live entries count. Tombstones do not: every replica forgets them at another time, so that equal maps would differ;
what a tombstone says, a listing says by not listing the key (see `LwwMap.apply_listing`).

Sums are kept by slot, the group's number modulo 128 (the most partitions that there are), so that the digest of any
partition of any number of partitions is a sum of slots: nothing is computed anew when partitions double or when broker
and router have different numbers of them. At most 8 192 cells an instance, about 140 bytes each.

Source: docs/memberships.md, "Anti-entropy"; docs/decisions/0030-digests-in-answers-to-heartbeats.md.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from pixiu.placement.partition import MAX_PARTITIONS

BUCKETS: Final = 64
BUCKET_BITS: Final = 6
SLOTS: Final = MAX_PARTITIONS
ENTRY: Final = struct.Struct("<QQQ")
"""group, member, GatewayMsgID: what is hashed, and one entry of a snapshot or a listing."""
BUCKET: Final = struct.Struct("<QI")
"""XOR, count: one bucket in a message."""
MASK: Final = (1 << 64) - 1
ONE: Final = 1 << 64
"""A sum is one number: the count above 64 bits of XOR."""
GOLDEN: Final = 0x9E37_79B9_7F4A_7C15

assert 1 << BUCKET_BITS == BUCKETS
assert SLOTS & (SLOTS - 1) == 0


class Rule(NamedTuple):
    """Which groups a digest is about: group % partitions == partition % partitions."""

    partition: int
    partitions: int


ALL_GROUPS: Final = Rule(0, 1)


class Sum(NamedTuple):
    """Of some live entries."""

    xor: int
    entries: int

    def __str__(self) -> str:
        """As people compare it."""
        return f"{self.xor:016x}/{self.entries}"


def bucket_of(group: int) -> int:
    """A group's bucket: the top bits of a product, which depend on all bits, while partitions are the lowest."""
    return (group * GOLDEN & MASK) >> (64 - BUCKET_BITS)


def common_rule(one: Rule, other: Rule) -> Rule | None:
    """The groups of both rules; None when there are none. Source: docs/routing.md."""
    narrow, wide = (one, other) if one.partitions >= other.partitions else (other, one)
    if narrow.partition % wide.partitions != wide.partition % wide.partitions:
        return None
    return Rule(narrow.partition % narrow.partitions, narrow.partitions)


class Digest:
    """The sums of one map. `add` and `remove` are called for every live entry that comes or goes."""

    __slots__ = ("_cells", "_roots", "_totals")

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}
        self._roots: dict[int, dict[int, int]] = {}
        self._cells: dict[int, dict[int, int]] = {}

    def add(self, group: int, member: int, instance: int, id_: int) -> None:
        """An entry is live now."""
        roots = self._roots.get(instance)
        if roots is None:
            roots = self._roots[instance] = {}
            self._cells[instance] = {}
        hashed = xxhash.xxh3_64_intdigest(ENTRY.pack(group, member, id_))
        slot = group % SLOTS
        cell = slot << BUCKET_BITS | bucket_of(group)
        for sums, key in ((self._totals, slot), (roots, slot), (self._cells[instance], cell)):
            sums[key] = (sums.get(key, 0) ^ hashed) + ONE

    def remove(self, group: int, member: int, instance: int, id_: int) -> None:
        """An entry that was added is not live any more."""
        roots, cells = self._roots[instance], self._cells[instance]
        hashed = xxhash.xxh3_64_intdigest(ENTRY.pack(group, member, id_))
        slot = group % SLOTS
        cell = slot << BUCKET_BITS | bucket_of(group)
        for sums, key in ((self._totals, slot), (roots, slot), (cells, cell)):
            left = (sums[key] ^ hashed) - ONE
            if left:
                sums[key] = left
            else:
                del sums[key]
        if not roots:
            del self._roots[instance], self._cells[instance]

    def total(self, rule: Rule) -> Sum:
        """Of all instances."""
        return _sum(self._totals, rule)

    def root(self, instance: int, rule: Rule) -> Sum:
        """Of one instance."""
        return _sum(self._roots.get(instance, {}), rule)

    def count(self, instance: int) -> int:
        """Live entries of an instance in all groups."""
        return sum(value >> 64 for value in self._roots.get(instance, {}).values())

    def roots(self, rule: Rule) -> dict[int, Sum]:
        """Of every instance that has entries, ascending."""
        found = {instance: self.root(instance, rule) for instance in sorted(self._roots)}
        return {instance: root for instance, root in found.items() if root.entries}

    def buckets(self, instance: int, rule: Rule) -> list[Sum]:
        """The 64 buckets of an instance."""
        xors, counts = [0] * BUCKETS, [0] * BUCKETS
        partition = rule.partition % rule.partitions
        for cell, value in self._cells.get(instance, {}).items():
            if (cell >> BUCKET_BITS) % rule.partitions == partition:
                bucket = cell & (BUCKETS - 1)
                xors[bucket] ^= value & MASK
                counts[bucket] += value >> 64
        return [Sum(xor, count) for xor, count in zip(xors, counts, strict=True)]


def _sum(sums: dict[int, int], rule: Rule) -> Sum:
    xor, count = 0, 0
    for slot in range(rule.partition % rule.partitions, SLOTS, rule.partitions):
        value = sums.get(slot, 0)
        xor ^= value & MASK
        count += value >> 64
    return Sum(xor, count)
