"""Soft state as a map of last-writer-wins registers: members of groups. Pure.

    (group, member, gateway instance) -> the GatewayMsgID that wrote it, live (login) or a tombstone (logout), and a value

Routers and brokers keep rooms (RoomID) and their users (UIN), without values; groups of shared subscriptions have one. Relays keep
`cluster.membership.map.devices`: users and their devices; the value holds a device's connect time.

A message applies if its GatewayMsgID is higher *for that key*, so loss, duplication and reordering cannot corrupt the map, and
merging snapshots and live messages gives the same result in every order. Three indexes keep the important paths short:

    group -> instance -> {member: GatewayMsgID}     for snapshots
    group -> (instance, …)                          for brokers, read for every record
    instance -> bucket -> {group, …}                for a purge of one gateway and a listing of one bucket

The first two are in shards by group, so that no dict is large (`cluster.membership.map.shards`).

Source: PiXiu §5.1.1, §5.2 step 12; docs/memberships.md. Departs from the seed, which compares per gateway, because that drops a
reordered login of another room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cluster.membership.map.digest import BUCKETS, Digest, DigestKey, DigestRule, bucket_of
from cluster.membership.map.shards import SHARDS, Register, Shard, shard_of
from cluster.membership.map.updates import ENTRY, ENTRY_BYTES, VALUE, Chunk, Listing, Update, logins
from pixiu.errors import MalformedData
from pixiu.ids import GATEWAY_COUNTER_BITS, GATEWAY_GENERATION_BITS, KEPT_INSTANCE, MAX_ID, gateway_generation, gateway_msg_id

TOMBSTONE_S: Final = 600.0
"""Time for which a logout is remembered, seconds: a login that was overtaken by its logout must not revive the entry."""
MAX_ENTRIES: Final = 4_000_000
"""Live entries of one map. Policy: a login with a new key is refused and counted."""
RESERVE: Final = 16
"""Divisor of the share reserved for entries that others hold already: replicas that heal, restart or merge. See
`LwwMap.without_space`."""
MAX_TOMBSTONES: Final = 1_000_000
"""Tombstones of one map. Policy: the oldest one in the shard that gets another one is forgotten early, and counted."""
SNAPSHOT_CHUNK_BYTES: Final = 4096
"""Largest total size of a snapshot chunk's entries and tombstones: merging one takes about a millisecond."""
CHUNK_ENTRIES: Final = SNAPSHOT_CHUNK_BYTES // ENTRY_BYTES
PURGE_SLICE: Final = 128
"""Entries dropped by one call of `purge_some`, about 10 µs each."""
DIGEST_SLICE: Final = 1000
"""Entries taken by one call of `build_digest`, about 3 µs each."""
LOOKS: Final = 32
"""Number of groups whose inspection costs as much as dropping one entry."""
NOBODY: Final[dict[int, dict[int, int]]] = {}
"""The members of an empty group."""
INSTANCE_SHIFT: Final = GATEWAY_GENERATION_BITS + GATEWAY_COUNTER_BITS

assert CHUNK_ENTRIES > 0


class Key(NamedTuple):
    """The key of one register."""

    group: int
    member: int
    instance: int


class Applied(NamedTuple):
    """Changes made by a batch."""

    changes: list[Update]
    """Updates that applied, in order."""
    groups: list[int]
    """Groups whose list of gateway instances changed, without repeats."""


class Purged(NamedTuple):
    """Registers removed by a purge."""

    keys: list[Key]
    """Keys of removed registers, live ones and tombstones."""
    groups: list[int]
    """Groups whose list of gateway instances changed, without repeats."""


class Dropped(NamedTuple):
    """A step of a purge."""

    key: Key | None
    """Key of the removed register."""
    group: int | None = None
    """Group whose list of gateway instances changed."""


@dataclass(slots=True)
class StoreCounters:
    """Outcomes of messages since the start."""

    applied: int = 0
    stale: int = 0
    """Messages not above the GatewayMsgID known for the key (repeated or overtaken), or below the instance's floor."""
    refused: int = 0
    """Logins with a new key at the limit of entries."""
    malformed: int = 0
    """Messages with IDs out of range."""
    tombstones_expired: int = 0
    tombstones_forgotten: int = 0
    """Tombstones dropped early at the limit of tombstones."""
    purged: int = 0
    healed: int = 0
    """Changes from listings, which replace lost messages."""


class LwwMap:
    """Members of groups, by gateway.

    `now` is monotonic seconds and must not go back.

    Args:
        max_entries: limit of live entries; see `MAX_ENTRIES` for the policy.
        max_tombstones: limit of tombstones; see `MAX_TOMBSTONES`.
        tombstone_s: time for which a logout is remembered, seconds.

    Source: docs/memberships.md.
    """

    __slots__ = (
        "_buried",
        "_burying",
        "_floors",
        "_groups_of",
        "_highest",
        "_live",
        "_max_entries",
        "_max_tombstones",
        "_purges",
        "_shards",
        "_tombstone_s",
        "_valued",
        "counters",
        "digest",
    )

    def __init__(
        self, *, max_entries: int = MAX_ENTRIES, max_tombstones: int = MAX_TOMBSTONES, tombstone_s: float = TOMBSTONE_S
    ) -> None:
        self._max_entries = max_entries
        self._max_tombstones = max_tombstones
        self._tombstone_s = tombstone_s
        self._shards = [Shard() for _ in range(SHARDS)]
        self._groups_of: dict[int, dict[int, set[int]]] = {}
        self._buried = 0
        """Number of tombstones."""
        self._burying: dict[int, Shard] = {}
        """Shards that may have tombstones, by number: inspecting every shard would cost more than a change of the map."""
        self._floors: dict[int, int] = {}
        self._valued = False
        """True if an entry ever had a value."""
        self._highest: dict[int, int] = {}
        """Instance → the highest GatewayMsgID of its logins since it has had entries."""
        self._purges: deque[Iterator[Dropped]] = deque()
        """Purges under way; only the first one proceeds."""
        self._live = 0
        self.digest = Digest()
        self.counters = StoreCounters()

    def __len__(self) -> int:
        """Number of live entries."""
        return self._live

    @property
    def groups(self) -> int:
        """Number of groups with members."""
        return sum(len(shard.groups) for shard in self._shards)

    def is_nearly_full(self, more: int = 1) -> bool:
        """True if this many new logins of gateways might exceed the capacity."""
        return self._live + more > self._max_entries - self._max_entries // RESERVE

    @property
    def tombstones(self) -> int:
        """Number of remembered logouts."""
        return self._buried

    def gateways(self, group: int) -> tuple[int, ...]:
        """Gateway instances with members in a group, ascending; kept ready, so that a call costs one look-up."""
        return self._shards[shard_of(group)].gateways.get(group, ())

    def members(self, group: int) -> int:
        """Number of members of a group; a user on two gateways counts twice."""
        return sum(map(len, self._of(group).values()))

    def live_keys(self, group: int) -> list[Key]:
        """The keys of a group's live entries."""
        found: list[Key] = []
        for instance, members in self._of(group).items():
            floor = self._rising(instance)
            found += [Key(group, member, instance) for member, id_ in members.items() if id_ >= floor]
        return found

    def instances(self) -> list[int]:
        """Gateway instances with live entries, ascending."""
        return sorted(self._groups_of)

    def has_instance(self, instance: int) -> bool:
        """True if an instance has live entries."""
        return instance in self._groups_of

    def groups_of(self, instance: int) -> list[int]:
        """Groups with live entries of an instance."""
        return [group for groups in self._groups_of.get(instance, {}).values() for group in groups]

    def generation(self, instance: int) -> int:
        """The highest generation among an instance's logins since it has had entries; 0 without entries."""
        return gateway_generation(self._highest.get(instance, 0))

    def set_digest_keys(self, keys: Sequence[DigestKey]) -> None:
        """Digest by these keys, see `Digest.set_keys`; `build_digest` makes the new ones."""
        self.digest.set_keys(keys)

    def build_digest(self, limit: int = DIGEST_SLICE) -> bool:
        """Continue building digests by new keys. Returns True if all are complete."""
        self.digest.build(self._groups_in, self._entries, limit)
        return not self.digest.building

    def _groups_in(self, shard: int) -> Iterable[int]:
        return self._shards[shard].groups

    def _entries(self, group: int) -> Iterator[tuple[int, int, int]]:
        for instance, members in self._of(group).items():
            for member, id_ in members.items():
                yield member, instance, id_

    def members_by_instance(self) -> dict[int, int]:
        """Gateway instance → number of its live entries, ascending."""
        return {instance: self.digest.first.count(instance) for instance in self.instances()}

    def floor(self, instance: int) -> int:
        """The GatewayMsgID below which nothing of an instance applies; 0 if there is no floor."""
        return self._floors.get(instance, 0)

    def get(self, group: int, member: int, instance: int) -> tuple[int, bool] | None:
        """(GatewayMsgID, live) of one register, or None."""
        found = self._of(group).get(instance, {}).get(member)
        if found is not None:
            return found, True
        tombstone = self._shards[shard_of(group)].tombstones.get(Key(group, member, instance))
        return (tombstone[0], False) if tombstone is not None else None

    def hides(self, change: Update) -> bool:
        """True if the instance's floor or a newer message for the same key prevents this message from taking effect. A logout may
        already have taken effect through a listing as of a later GatewayMsgID."""
        instance = change.id >> INSTANCE_SHIFT
        found = self.get(change.group, change.member, instance)
        newer = found is not None and found[0] > change.id
        return newer or change.id < self.floor(instance) if change.login else newer and found is not None and found[1]

    def value(self, group: int, member: int, instance: int) -> int:
        """Value of a live entry; 0 if it has none or does not exist."""
        return self._shards[shard_of(group)].values.get(Key(group, member, instance), 0)

    @property
    def valued(self) -> bool:
        """True if an entry ever had a value."""
        return self._valued

    @property
    def plain(self) -> bool:
        """True if no entry ever had a value, and no room is marked: brokers need to know no more than instances."""
        return not self._valued and KEPT_INSTANCE not in self._groups_of

    def values_of(self, group: int) -> list[tuple[Key, int]]:
        """The live entries of a group that have values. Costs what all groups of a shard have."""
        values = self._shards[shard_of(group)].values
        return [(Key(*key), value) for key, value in values.items() if key[0] == group]

    def without_space(self, batch: Iterable[Update]) -> list[Update]:
        """Logins of a batch that would be new keys beyond the share of gateways, which is all entries but a sixteenth: a replica
        that heals must always be able to become equal to a fuller one. The caller refuses these logins and does not pass them
        on."""
        found: list[Update] = []
        free = self._max_entries - self._max_entries // RESERVE - self._live
        new: set[tuple[int, int, int]] = set()
        for change in batch:
            instance = change.id >> INSTANCE_SHIFT
            key = (change.group, change.member, instance)
            if change.login and key not in new and change.member not in self._of(change.group).get(instance, ()):
                if len(new) < free:
                    new.add(key)
                else:
                    found.append(change)
        return found

    def apply(self, batch: Iterable[Update], now: float) -> Applied:
        """Apply logins and logouts. Stale, invalid and refused ones are counted and left out of the result.

        Source: PiXiu §5.2 step 12, §5.3 step 13; docs/memberships.md.
        """
        counters = self.counters
        changes: list[Update] = []
        groups: dict[int, None] = {}
        for change in batch:
            id_, group, member, login, _, value, _, _ = change
            if not (0 < id_ <= MAX_ID and 0 <= group <= MAX_ID and 0 <= member <= MAX_ID):
                counters.malformed += 1
                continue
            instance = id_ >> INSTANCE_SHIFT
            shard = self._shards[shard_of(group)]
            members = shard.groups.get(group, NOBODY).get(instance)
            live = members.get(member) if members is not None else None
            known = live if live is not None else self._tombstone_id(group, member, instance)
            if id_ <= known or id_ < self._floors.get(instance, 0):
                counters.stale += 1
                continue
            if login:
                if live is None and self._live >= self._max_entries:
                    counters.refused += 1
                    continue
                if self._add(group, member, instance, id_, live is None):
                    groups[group] = None
                if value:
                    self._valued = True
                    shard.values[Key(group, member, instance)] = value
                elif shard.values:
                    shard.values.pop(Key(group, member, instance), None)
            else:
                if live is not None and self._remove(group, member, instance):
                    groups[group] = None
                self._bury(Key(group, member, instance), id_, now)
            changes.append(change)
        counters.applied += len(changes)
        return Applied(changes, list(groups))

    def merge(self, chunk: Chunk, now: float) -> Applied:
        """Apply a part of a snapshot. Its tombstones start their full time again. Raises `MalformedData` if a size is wrong;
        nothing is applied then."""
        if len(chunk.entries) % ENTRY_BYTES or len(chunk.tombstones) % ENTRY_BYTES:
            raise MalformedData(f"a snapshot chunk's parts are multiples of {ENTRY_BYTES} bytes; take the snapshot again")
        live = self.apply(logins(chunk.entries, chunk.values), now)
        dead = self.apply([Update(id_, group, member, False) for group, member, id_ in ENTRY.iter_unpack(chunk.tombstones)], now)
        return Applied(live.changes + dead.changes, list(dict.fromkeys(live.groups + dead.groups)))

    def apply_listing(self, listing: Listing, now: float, *, own_word: bool) -> Applied:
        """Become equal to a listing. Its entries apply as usual. Entries that it lacks and that are not newer than its `as_of` are
        removed, by a logout with that GatewayMsgID, which can be passed on like any other.

        `own_word`: the listing is the gateway's own; a listed entry that is hidden by a tombstone not newer than `as_of` then
        becomes live again. In a router's listing, that may be an old login that the router should not have.

        `as_of` refers to the gateway's own state, so nothing that the gateway reported later is touched. Raises `MalformedData` if
        the size of the entries is wrong; nothing is applied then. Source: docs/memberships.md.
        """
        if len(listing.entries) % ENTRY_BYTES:
            raise MalformedData(f"a listing's entries are a multiple of {ENTRY_BYTES} bytes")
        changes = logins(listing.entries, listing.values)
        listed: set[tuple[int, int]] = set()
        for id_, group, member, *_ in changes:
            listed.add((group, member))
            key = Key(group, member, id_ >> INSTANCE_SHIFT)
            if own_word and id_ <= self._tombstone_id(*key) <= listing.as_of and key.instance == listing.instance:
                del self._shards[shard_of(group)].tombstones[key]
                self._buried -= 1
        if listing.as_of:
            for group, member, id_ in self.bucket_entries(listing.rule, listing.instance, listing.bucket, listing.first):
                if listing.end is not None and (group, member) >= listing.end:
                    break
                if id_ <= listing.as_of and (group, member) not in listed:
                    changes.append(Update(listing.as_of, group, member, False))
        applied = self.apply(changes, now)
        self.counters.healed += len(applied.changes)
        return applied

    def bucket_entries(
        self, rule: DigestRule, instance: int, bucket: int, first: tuple[int, int] = (0, 0)
    ) -> Iterator[tuple[int, int, int]]:
        """(group, member, GatewayMsgID) of a bucket's live entries from `first` on, ascending.

        The set of groups is noted at the first one; a group's members are read when it is reached. So the map may change meanwhile:
        a caller that lists it `as of` a GatewayMsgID must note that ID before.
        """
        want, floor = rule.partition % rule.partitions, self._rising(instance)
        groups = self._groups_of.get(instance, {}).get(bucket, ())
        for group in sorted(group for group in groups if group >= first[0] and group % rule.partitions == want):
            for member, id_ in sorted(self._of(group).get(instance, {}).items()):
                if (group, member) >= first and id_ >= floor:
                    yield group, member, id_

    def absent(self, as_of: int, groups: Iterable[int], now: float) -> Applied:
        """Log out members that are not newer than a GatewayMsgID as of which their gateway had no members of these groups.

        Source: docs/memberships.md, "Negative feedback".
        """
        instance = as_of >> INSTANCE_SHIFT
        gone = [
            Update(as_of, group, member, False)
            for group in groups
            for member, id_ in self._of(group).get(instance, {}).items()
            if id_ <= as_of
        ]
        return self.apply(gone, now)

    def snapshot(self, partition: int = 0, partitions: int = 1, chunk_entries: int = CHUNK_ENTRIES) -> Iterator[Chunk]:
        """Everything that a partition serves, in chunks of at most `chunk_entries` entries.

        The map is read while chunks are made, one bucket of an instance at a time, so that a large map never stops the event loop
        for long. The snapshot need not contain later changes if the receiver is also sent every change after this call: merging is
        last-writer-wins.
        """
        return self._chunks(DigestRule(partition % partitions, partitions), chunk_entries)

    def _chunks(self, rule: DigestRule, limit: int) -> Iterator[Chunk]:
        pack = ENTRY.pack
        entries: list[bytes] = []
        values: list[bytes] = []
        for group, instance in self._walk(rule):
            floor = self._rising(instance)
            found = [(member, id_) for member, id_ in self._of(group).get(instance, {}).items() if id_ >= floor]
            entries.extend([pack(group, member, id_) for member, id_ in found])
            if self._valued:
                values.extend([VALUE.pack(self.value(group, member, instance)) for member, _ in found])
            if len(values) < len(entries) and values:
                # The first value appeared while the snapshot was being made.
                values[:0] = [VALUE.pack(0)] * (len(entries) - len(values))
            # The group's entries were copied, so its members may change between two chunks.
            at = 0
            while len(entries) - at >= limit:
                yield Chunk(b"".join(entries[at : at + limit]), b"", b"".join(values[at : at + limit]))
                at += limit
            del entries[:at], values[:at]
        dead: list[bytes] = []
        for shard in self._shards:
            for key in list(shard.tombstones):
                found_dead = shard.tombstones.get(key)
                group, member, _ = key
                if found_dead is None or group % rule.partitions != rule.partition:
                    continue
                if len(entries) + len(dead) == limit:
                    yield Chunk(b"".join(entries), b"".join(dead), b"".join(values))
                    entries, dead, values = [], [], []
                dead.append(pack(group, member, found_dead[0]))
        yield Chunk(b"".join(entries), b"".join(dead), b"".join(values))

    def _walk(self, rule: DigestRule) -> Iterator[tuple[int, int]]:
        """(group, instance) of everything that a partition serves; pairs that exist from beginning to end are all included."""
        for instance in self.instances():
            for bucket in range(BUCKETS):
                for group in list(self._groups_of.get(instance, {}).get(bucket, ())):
                    if group % rule.partitions == rule.partition:
                        yield group, instance

    def expire(self, now: float, limit: int = 10_000) -> list[Key]:
        """Forget expired tombstones, at most `limit` in one call; returns their keys."""
        gone: list[Key] = []
        for number, shard in list(self._burying.items()):
            before = len(gone)
            for key, (_, until) in shard.tombstones.items():
                if until > now or len(gone) >= limit:
                    break
                gone.append(Key(*key))
            for over in gone[before:]:
                del shard.tombstones[over]
            if not shard.tombstones:
                del self._burying[number]
        self._buried -= len(gone)
        self.counters.tombstones_expired += len(gone)
        return gone

    def purge_partition(self, partition: int, partitions: int) -> None:
        """Start to drop every live entry whose group the partition does not serve (after a doubling); `purge_some` continues.
        Tombstones stay until they expire.

        Source: PiXiu §2.3 step 9, §5.2 step 11, §5.3 step 11.
        """
        self._purges.append(self._moved(DigestRule(partition % partitions, partitions)))

    @property
    def purging(self) -> bool:
        """True if a purge is under way."""
        return bool(self._purges)

    def purge_some(self, limit: int = PURGE_SLICE) -> Purged:
        """Continue the purges under way: drop at most `limit` entries. Source: docs/memberships.md."""
        keys: list[Key] = []
        groups: list[int] = []
        steps = 0
        while self._purges and steps < limit:
            step = next(self._purges[0], None)
            if step is None:
                self._purges.popleft()
                continue
            steps += 1
            if step.key is not None:
                keys.append(step.key)
            if step.group is not None:
                groups.append(step.group)
        self.counters.purged += len(keys)
        return Purged(keys, groups)

    def sweep(self, partition: int, partitions: int, keep: set[Key]) -> Purged:
        """Drop the live entries of a partition's groups that are not in `keep`: their logouts were missed.

        For a process that was out of contact for so long that the tombstones of logouts may have expired.
        """
        keys: list[Key] = []
        groups: list[int] = []
        for group in [group for shard in self._shards for group in shard.groups if group % partitions == partition % partitions]:
            before = self.gateways(group)
            for key in self.live_keys(group):
                if key not in keep:
                    self._remove(*key)
                    keys.append(key)
            if self.gateways(group) != before:
                groups.append(group)
        self.counters.purged += len(keys)
        return Purged(keys, groups)

    def raise_floor(self, instance: int, generation: int) -> None:
        """Raise the floor of an instance that a gateway of this generation holds: lower generations' entries are never taken again,
        and are dropped.

        The floor only rises. Entries below it are left out of snapshots and listings at once, and `purge_some` drops them. Walks
        the instance's groups, not the whole map. Tombstones below the floor stay until they expire; the floor refuses what they
        guarded against. Source: docs/memberships.md.
        """
        floor = gateway_msg_id(instance, generation, 0)
        if floor > self._floors.get(instance, 0):
            self._floors[instance] = floor
            if instance in self._groups_of:
                self._purges.append(self._below(instance, floor))

    def _rising(self, instance: int) -> int:
        """The floor of an instance while entries may be below it."""
        return self._floors.get(instance, 0) if self._purges else 0

    def _moved(self, rule: DigestRule) -> Iterator[Dropped]:
        """Drop entries that the partition does not serve."""
        looks = 0
        for group, instance in self._walk(DigestRule(0, 1)):
            if group % rule.partitions != rule.partition:
                yield from self._leave(group, instance, MAX_ID + 1)
                continue
            looks += 1
            if looks % LOOKS == 0:
                yield Dropped(None)

    def _below(self, instance: int, floor: int) -> Iterator[Dropped]:
        """Drop entries below the floor of an instance."""
        looks = 0
        for bucket in range(BUCKETS):
            for group in list(self._groups_of.get(instance, {}).get(bucket, ())):
                yield from self._leave(group, instance, floor)
                looks += 1
                if looks % LOOKS == 0:
                    yield Dropped(None)

    def _leave(self, group: int, instance: int, floor: int) -> Iterator[Dropped]:
        """Drop the members of a group on an instance that are below a floor, one at a time: they may change in between."""
        for member in list(self._of(group).get(instance, ())):
            id_ = self._of(group).get(instance, {}).get(member)
            if id_ is not None and id_ < floor:
                gone = self._remove(group, member, instance)
                yield Dropped(Key(group, member, instance), group if gone else None)

    def _of(self, group: int) -> dict[int, dict[int, int]]:
        """Instance → the members of a group there; must not be changed."""
        return self._shards[shard_of(group)].groups.get(group, NOBODY)

    def _tombstone_id(self, group: int, member: int, instance: int) -> int:
        found = self._shards[shard_of(group)].tombstones.get(Key(group, member, instance))
        return found[0] if found is not None else 0

    def _bury(self, key: Key, id_: int, now: float) -> None:
        number = shard_of(key.group)
        shard = self._burying[number] = self._shards[number]
        tombstones = shard.tombstones
        if tombstones.pop(key, None) is not None:
            self._buried -= 1
        if self._buried >= self._max_tombstones:
            self._forget_oldest(tombstones)
        tombstones[key] = (id_, now + self._tombstone_s)
        self._buried += 1

    def _forget_oldest(self, tombstones: dict[Register, tuple[int, float]]) -> None:
        """Forget the oldest tombstone of a shard that has any; all shards have had about equally many."""
        if not tombstones:
            tombstones = min(
                (shard.tombstones for shard in self._burying.values() if shard.tombstones),
                key=lambda each: next(iter(each.values()))[1],
            )
        del tombstones[next(iter(tombstones))]
        self._buried -= 1
        self.counters.tombstones_forgotten += 1

    def _add(self, group: int, member: int, instance: int, id_: int, new: bool) -> bool:
        """Add an entry. Returns True if the group's list of instances changed."""
        shard = self._shards[shard_of(group)]
        by_instance = shard.groups.setdefault(group, {})
        members = by_instance.get(instance)
        if members is not None:
            if not new:
                self.digest.remove(group, member, instance, members[member])
            members[member] = id_
        else:
            by_instance[instance] = {member: id_}
            self._groups_of.setdefault(instance, {}).setdefault(bucket_of(group), set()).add(group)
            shard.gateways[group] = tuple(sorted(by_instance))
        if id_ > self._highest.get(instance, 0):
            self._highest[instance] = id_
        self.digest.add(group, member, instance, id_)
        if new:
            self._live += 1
            if shard.tombstones and shard.tombstones.pop(Key(group, member, instance), None) is not None:
                self._buried -= 1
        return members is None

    def _remove(self, group: int, member: int, instance: int) -> bool:
        """Remove an entry. Returns True if the group's list of instances changed."""
        shard = self._shards[shard_of(group)]
        members = shard.groups[group][instance]
        if len(members) == 1:
            self._drop(group, instance)
            return True
        self.digest.remove(group, member, instance, members.pop(member))
        if shard.values:
            shard.values.pop(Key(group, member, instance), None)
        self._live -= 1
        return False

    def _drop(self, group: int, instance: int) -> list[Key]:
        """Remove all members of a group on one instance."""
        shard = self._shards[shard_of(group)]
        by_instance = shard.groups[group]
        members = by_instance.pop(instance)
        self._live -= len(members)
        for member, id_ in members.items():
            self.digest.remove(group, member, instance, id_)
            if shard.values:
                shard.values.pop(Key(group, member, instance), None)
        if by_instance:
            shard.gateways[group] = tuple(sorted(by_instance))
        else:
            del shard.groups[group]
            del shard.gateways[group]
        buckets, bucket = self._groups_of[instance], bucket_of(group)
        buckets[bucket].discard(group)
        if not buckets[bucket]:
            del buckets[bucket]
            if not buckets:
                del self._groups_of[instance], self._highest[instance]
        return [Key(group, member, instance) for member in members]
