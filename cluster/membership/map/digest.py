"""Content of a map of memberships as a few numbers, updated with every change. Pure.

    entry    xxh3_64(group u64, member u64, GatewayMsgID u64), or 64 bits of keyed BLAKE2b where the cluster has keys
    bucket   XOR of the entries whose group falls into it, and their number             64 of an instance and partition
    root     XOR of the buckets, and the sum of their counts                          one of an instance and partition
    total    XOR of the roots of all instances, and the sum of their counts           one of a partition

Without a key, anybody who chooses the content of a map can make another map with equal sums, because XOR is linear. While keys
change, and while processes of a version without keys run, there are sums by two or three keys: a message names its key, and a
process without sums by that key compares nothing.

Only live entries count. Tombstones do not: every replica forgets them at another time, so equal maps would differ. A listing
conveys the same as a tombstone by not listing the key (see `LwwMap.apply_listing`).

Sums are kept by slot, the group's number modulo 128 (the largest number of partitions), so the digest of any partition under any
number of partitions is a sum of slots: nothing is computed anew when partitions double, or when broker and router have different
numbers of them. An instance has at most 8 192 cells of about 140 bytes each.

Source: docs/memberships.md, "Anti-entropy", "Keys of digests".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import xxhash

from cluster.membership.map.shards import SHARDS, shard_of
from pixiu.ids import KEPT_INSTANCE
from pixiu.placement.partition import MAX_PARTITIONS

BUCKETS: Final = 64
BUCKET_BITS: Final = 6
SLOTS: Final = MAX_PARTITIONS
ENTRY: Final = struct.Struct("<QQQ")
"""Group, member, GatewayMsgID: the hashed data, and one entry of a snapshot or a listing."""
BUCKET: Final = struct.Struct("<QI")
"""XOR and count: one bucket in a message."""
MASK: Final = (1 << 64) - 1
ONE: Final = 1 << 64
"""One entry in a sum. A sum is one number: the count above 64 bits of XOR."""
PERSON: Final = b"pixiu-digests"
GOLDEN: Final = 0x9E37_79B9_7F4A_7C15

assert 1 << BUCKET_BITS == BUCKETS
assert SLOTS & (SLOTS - 1) == 0


class DigestRule(NamedTuple):
    """Groups covered by a digest: group % partitions == partition % partitions."""

    partition: int
    partitions: int


ALL_GROUPS: Final = DigestRule(0, 1)


class DigestKey(NamedTuple):
    """Key for hashing entries. `number` identifies it in messages; 0: no key, xxh3."""

    number: int
    secret: bytes

    def __repr__(self) -> str:
        """Omit the secret."""
        return f"DigestKey({self.number:08x})"


UNKEYED: Final = DigestKey(0, b"")


def digest_key(secret: bytes) -> DigestKey:
    """Derive a key from one of the cluster's."""
    derived = hashlib.blake2b(b"entries", key=secret, digest_size=32, person=PERSON).digest()
    number = int.from_bytes(hashlib.blake2b(b"number", key=secret, digest_size=4, person=PERSON).digest(), "little")
    return DigestKey(number or 1, derived)


class Sum(NamedTuple):
    """XOR and count over some live entries."""

    xor: int
    entries: int

    def __str__(self) -> str:
        """Format for comparison by people."""
        return f"{self.xor:016x}/{self.entries}"


def bucket_of(group: int) -> int:
    """Bucket of a group: the top bits of a product, which depend on all bits of the group; partitions use the lowest bits."""
    return (group * GOLDEN & MASK) >> (64 - BUCKET_BITS)


def common_rule(one: DigestRule, other: DigestRule) -> DigestRule | None:
    """The groups of both rules; None if there are none. Source: docs/routing.md."""
    narrow, wide = (one, other) if one.partitions >= other.partitions else (other, one)
    if narrow.partition % wide.partitions != wide.partition % wide.partitions:
        return None
    return DigestRule(narrow.partition % narrow.partitions, narrow.partitions)


class Sums:
    """The sums of one map by one key."""

    __slots__ = ("_cells", "_keyed", "_roots", "_totals", "key")

    def __init__(self, key: DigestKey = UNKEYED) -> None:
        self.key = key
        self._keyed = hashlib.blake2b(key=key.secret, digest_size=8, person=PERSON) if key.secret else None
        self._totals: dict[int, int] = {}
        self._roots: dict[int, dict[int, int]] = {}
        self._cells: dict[int, dict[int, int]] = {}

    def _hash_of(self, entry: bytes) -> int:
        if self._keyed is None:
            return xxhash.xxh3_64_intdigest(entry)
        keyed = self._keyed.copy()
        keyed.update(entry)
        return int.from_bytes(keyed.digest(), "little")

    @property
    def used(self) -> bool:
        """True if there is any entry."""
        return bool(self._roots)

    def add(self, group: int, member: int, instance: int, id_: int) -> None:
        """Add an entry that became live."""
        roots = self._roots.get(instance)
        if roots is None:
            roots = self._roots[instance] = {}
            self._cells[instance] = {}
        hashed = self._hash_of(ENTRY.pack(group, member, id_))
        slot = group % SLOTS
        cell = slot << BUCKET_BITS | bucket_of(group)
        for sums, key in ((self._totals, slot), (roots, slot), (self._cells[instance], cell)):
            sums[key] = (sums.get(key, 0) ^ hashed) + ONE

    def remove(self, group: int, member: int, instance: int, id_: int) -> None:
        """Remove an entry that was added before."""
        roots, cells = self._roots[instance], self._cells[instance]
        hashed = self._hash_of(ENTRY.pack(group, member, id_))
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

    def total(self, rule: DigestRule) -> Sum:
        """The sum over all instances."""
        return _sum(self._totals, rule)

    def root(self, instance: int, rule: DigestRule) -> Sum:
        """The sum over one instance."""
        return _sum(self._roots.get(instance, {}), rule)

    def count(self, instance: int) -> int:
        """Number of an instance's live entries in all groups."""
        return sum(value >> 64 for value in self._roots.get(instance, {}).values())

    def roots(self, rule: DigestRule) -> dict[int, Sum]:
        """The sums of all instances with entries, ascending by instance."""
        found = {instance: self.root(instance, rule) for instance in sorted(self._roots)}
        return {instance: root for instance, root in found.items() if root.entries}

    def buckets(self, instance: int, rule: DigestRule) -> list[Sum]:
        """The 64 buckets of an instance."""
        xors, counts = [0] * BUCKETS, [0] * BUCKETS
        partition = rule.partition % rule.partitions
        for cell, value in self._cells.get(instance, {}).items():
            if (cell >> BUCKET_BITS) % rule.partitions == partition:
                bucket = cell & (BUCKETS - 1)
                xors[bucket] ^= value & MASK
                counts[bucket] += value >> 64
        return [Sum(xor, count) for xor, count in zip(xors, counts, strict=True)]

    def shown(self, rule: DigestRule) -> str:
        """The total of all gateways' entries, without routers' marks, for comparison by people. With a key it is not the XOR
        itself: whoever sees what their own entries add to that needs no key."""
        total, marks = self.total(rule), self.root(KEPT_INSTANCE, rule)
        total = Sum(total.xor ^ marks.xor, total.entries - marks.entries)
        if self._keyed is None:
            return str(total)
        keyed = self._keyed.copy()
        keyed.update(BUCKET.pack(*total))
        return f"{keyed.hexdigest()}/{total.entries}"


class _Building:
    """Sums by a key that was added while the map had entries."""

    __slots__ = ("left", "shard", "sums")

    def __init__(self, key: DigestKey, shard: int) -> None:
        self.sums = Sums(key)
        self.shard = shard
        """First shard of which nothing is in the sums yet."""
        self.left: dict[int, None] = {}
        """Groups of the previous shard that are not in the sums yet."""

    @property
    def done(self) -> bool:
        """True if the sums are complete."""
        return self.shard == SHARDS and not self.left

    def has(self, group: int) -> bool:
        """True if a group is in the sums."""
        return shard_of(group) < self.shard and group not in self.left


class Digest:
    """The sums of one map, by each key in use. `add` and `remove` are called for every live entry that appears or disappears."""

    __slots__ = ("_all", "_building", "_wanted")

    def __init__(self) -> None:
        self._wanted: tuple[DigestKey, ...] = (UNKEYED,)
        self._all: tuple[Sums, ...] = (Sums(),)
        """Complete sums; those for asking others come first."""
        self._building: tuple[_Building, ...] = ()

    @property
    def first(self) -> Sums:
        """The sums by the key for asking others."""
        return self._all[0]

    def of(self, number: int) -> Sums | None:
        """The sums by the key that a message names; None if there are none, or none yet."""
        return next((sums for sums in self._all if sums.key.number == number), None)

    @property
    def building(self) -> bool:
        """True if sums by some key are incomplete."""
        return bool(self._building)

    def set_keys(self, keys: Sequence[DigestKey]) -> None:
        """Keep sums by these keys; the first is for asking others.

        `build` makes the new ones; sums by a key that is removed are kept until others are complete."""
        if tuple(keys) == self._wanted or not keys:
            return
        self._wanted = tuple(keys)
        known = {sums.key for sums in self._all} | {each.sums.key for each in self._building}
        kept = tuple(each for each in self._building if each.sums.key in keys)
        begin = 0 if self.first.used else SHARDS
        self._building = kept + tuple(_Building(key, begin) for key in keys if key not in known)
        self._settle()

    def build(
        self, groups: Callable[[int], Iterable[int]], entries: Callable[[int], Iterable[tuple[int, int, int]]], limit: int
    ) -> None:
        """Continue with about `limit` entries. `groups`: shard → its groups; `entries`: group → (member, instance, GatewayMsgID) of
        each live entry."""
        for each in self._building:
            while limit > 0 and not each.done:
                if not each.left:
                    each.left = dict.fromkeys(groups(each.shard))
                    each.shard += 1
                    limit -= 1
                    continue
                group, _ = each.left.popitem()
                limit -= 1
                for member, instance, id_ in entries(group):
                    each.sums.add(group, member, instance, id_)
                    limit -= 1
        self._settle()

    def _settle(self) -> None:
        """Take over completed sums, and drop those that are no longer wanted."""
        ready = {sums.key: sums for sums in self._all} | {each.sums.key: each.sums for each in self._building if each.done}
        self._building = tuple(each for each in self._building if not each.done)
        wanted = [ready[key] for key in self._wanted if key in ready]
        if not self._building or not wanted:
            self._all = tuple(wanted) or self._all
        else:
            self._all = (*wanted, *(sums for sums in self._all if sums.key not in self._wanted))

    def add(self, group: int, member: int, instance: int, id_: int) -> None:
        """Add an entry that became live."""
        for sums in self._all:
            sums.add(group, member, instance, id_)
        for each in self._building:
            if each.has(group):
                each.sums.add(group, member, instance, id_)

    def remove(self, group: int, member: int, instance: int, id_: int) -> None:
        """Remove an entry that was added before."""
        for sums in self._all:
            sums.remove(group, member, instance, id_)
        for each in self._building:
            if each.has(group):
                each.sums.remove(group, member, instance, id_)


def _sum(sums: dict[int, int], rule: DigestRule) -> Sum:
    xor, count = 0, 0
    for slot in range(rule.partition % rule.partitions, SLOTS, rule.partitions):
        value = sums.get(slot, 0)
        xor ^= value & MASK
        count += value >> 64
    return Sum(xor, count)
