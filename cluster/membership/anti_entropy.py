"""Keeping two maps of memberships equal although messages are lost: the source answers, the puller asks. Pure.

    puller                                              source
      │ heartbeat: the rule of my rooms ─────────────────▶│
      │◀──────────────── its answer: Digest (one root) ───┤   every heartbeat; nothing follows while the roots are equal
      │ DigestRequest, without instances ────────────────▶│   (a source that is a gateway has one instance: left out)
      │◀─────────────────────────────── InstanceRoots ────┤
      │ DigestRequest, the instances that differ ────────▶│
      │◀─────────────────────────────── BucketDigests ────┤
      │ ListingRequest, buckets that differed last time   │
      │ as well ─────────────────────────────────────────▶│
      │◀──────────────────────────────── ListingPage … ───┤   applied page by page

Source and puller are gateway and router, router and peer, router and broker. A gateway lists what is on it as of the last
GatewayMsgID that it made. A router that found itself equal to a gateway as of some GatewayMsgID may list as of that: what
it lacks and is not newer, the gateway had not either. Without it a router's listing only adds, so that for a live gateway
only its own word removes anything, directly or handed on.

Nothing here is sent again: the next heartbeat begins anew.

Source: docs/memberships.md, "Anti-entropy".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.membership.digest import BUCKET, BUCKETS, Rule, Sum, Sums
from cluster.membership.lww_map import ENTRY, INSTANCE_SHIFT, VALUE, Applied, Listing, LwwMap, Purged
from pixiu.errors import MalformedData
from pixiu.ids import INSTANCES, MAX_ID, EndpointID, gateway_generation
from pixiu.placement.partition import is_partition_count
from pixiu.wire.v1 import control_pb2

PAGE_ENTRIES: Final = 30
"""Entries in a page, of 24 bytes and a value of 8, so that it fits one datagram."""
PAGES_AN_ANSWER: Final = 64
"""Pages that answer one request. Policy: the last one says that there is more, and the puller asks on from there."""
ROOT: Final = struct.Struct("<HQI")
ROOTS_A_MESSAGE: Final = 64
MAX_ASKED: Final = 32
"""Instances whose buckets are asked for, or answered, at one time. Policy: the others have their turn at the next heartbeat."""
MAX_DOUBTS: Final = 100_000
"""Pairs of source and instance that differed at the last heartbeat. Policy: all are forgotten, and doubted anew."""
FRESH_HEARTBEATS: Final = 5
"""A difference that was seen so many heartbeats ago does not count as seen at the one before."""


def rule_of(partition: int, partitions: int) -> Rule | None:
    """A rule from the network; None when it makes no sense."""
    return Rule(partition % partitions, partitions) if is_partition_count(partitions) else None


def is_anti_entropy(control: control_pb2.Control) -> bool:
    """Whether a control message is one of those that a source and a puller exchange."""
    return control.WhichOneof("body") in _ANTI_ENTROPY


_ANTI_ENTROPY: Final = frozenset({"digest_request", "instance_roots", "bucket_digests", "listing_request", "listing_page"})


def encode_absence(as_of: int, rooms: list[int]) -> bytes:
    """A serialized `Control`: as of this GatewayMsgID the gateway that made it had no members of these rooms."""
    return control_pb2.Control(absence=control_pb2.Absence(as_of=as_of, rooms=rooms)).SerializeToString()


class Verified:
    """The highest GatewayMsgID at which a router was equal to a gateway, by instance and bucket."""

    def __init__(self) -> None:
        self._whole: dict[int, int] = {}
        self._buckets: dict[int, dict[int, int]] = {}

    def whole(self, instance: int, as_of: int) -> None:
        """All buckets were equal."""
        self._whole[instance] = max(as_of, self._whole.get(instance, 0))
        above = {bucket: at for bucket, at in self._buckets.pop(instance, {}).items() if at > as_of}
        if above:
            self._buckets[instance] = above

    def bucket(self, instance: int, bucket: int, as_of: int) -> None:
        """One bucket was equal."""
        if as_of > self.as_of(instance, bucket):
            self._buckets.setdefault(instance, {})[bucket] = as_of

    def as_of(self, instance: int, bucket: int) -> int:
        """The highest GatewayMsgID; 0 where nothing was verified."""
        return max(self._whole.get(instance, 0), self._buckets.get(instance, {}).get(bucket, 0))

    def clear(self) -> None:
        """Nothing is verified any more: the rule of the rooms that are held is another one."""
        self._whole.clear()
        self._buckets.clear()


class Source:
    """Answers what is asked about a map.

    Args:
        membership: the map.
        as_of: (instance, bucket) → the GatewayMsgID as of which the map has all of it, 0 where that is not known.
    """

    def __init__(self, membership: LwwMap, as_of: Callable[[int, int], int]) -> None:
        self._membership = membership
        self._as_of = as_of
        self.pages_sent = 0

    def digest(self, rule: Rule, as_of: int = 0, key: int = 0) -> control_pb2.Digest | None:
        """What the answer to a heartbeat carries; None where there are no sums by this key."""
        sums = self._membership.digest.of(key)
        if sums is None:
            return None
        total = sums.total(rule)
        return control_pb2.Digest(
            partition=rule.partition, partitions=rule.partitions, root=total.xor, count=total.entries, as_of=as_of, key=key
        )

    def answer(self, control: control_pb2.Control) -> list[bytes]:
        """The messages that answer a request; none for what is none or makes no sense."""
        if control.HasField("digest_request"):
            asked = control.digest_request
            rule = rule_of(asked.partition, asked.partitions)
            sums = self._membership.digest.of(asked.key)
            if rule is None or sums is None:
                return []
            if asked.instances:
                return [self._buckets(sums, rule, instance) for instance in asked.instances[:MAX_ASKED] if instance < INSTANCES]
            return self._roots(sums, rule)
        if control.HasField("listing_request"):
            return self._list(control.listing_request)
        return []

    @staticmethod
    def _roots(sums: Sums, rule: Rule) -> list[bytes]:
        roots = list(sums.roots(rule).items())
        messages: list[bytes] = []
        first = 0
        for start in range(0, max(len(roots), 1), ROOTS_A_MESSAGE):
            part = roots[start : start + ROOTS_A_MESSAGE]
            last = part[-1][0] if start + ROOTS_A_MESSAGE < len(roots) else INSTANCES - 1
            packed = b"".join([ROOT.pack(instance, root.xor, root.entries) for instance, root in part])
            message = control_pb2.InstanceRoots(
                partition=rule.partition, partitions=rule.partitions, first=first, last=last, roots=packed, key=sums.key.number
            )
            messages.append(control_pb2.Control(instance_roots=message).SerializeToString())
            first = last + 1
        return messages

    def _buckets(self, sums: Sums, rule: Rule, instance: int) -> bytes:
        buckets = sums.buckets(instance, rule)
        message = control_pb2.BucketDigests(
            partition=rule.partition,
            partitions=rule.partitions,
            instance=instance,
            floor=gateway_generation(self._membership.floor(instance)),
            as_of=min((self._as_of(instance, bucket) for bucket in range(BUCKETS)), default=0),
            buckets=b"".join([BUCKET.pack(*found) for found in buckets]),
            key=sums.key.number,
        )
        return control_pb2.Control(bucket_digests=message).SerializeToString()

    def _list(self, asked: control_pb2.ListingRequest) -> list[bytes]:
        rule = rule_of(asked.partition, asked.partitions)
        if rule is None or asked.instance >= INSTANCES:
            return []
        pages: list[bytes] = []
        for bucket in asked.buckets[:BUCKETS]:
            room = PAGES_AN_ANSWER - len(pages)
            if room > 0 and bucket.bucket < BUCKETS:
                pages += self._bucket_pages(rule, asked.instance, bucket, room)
        self.pages_sent += len(pages)
        return pages

    def _bucket_pages(self, rule: Rule, instance: int, asked: control_pb2.BucketFrom, limit: int) -> list[bytes]:
        """At least one page, so that an empty bucket is told too."""
        number, first = asked.bucket, (asked.room, asked.uin)
        as_of = self._as_of(instance, number)
        pages: list[bytes] = []
        entries: list[bytes] = []
        values: list[int] = []

        def close(end: tuple[int, int] | None, more: bool) -> None:
            nonlocal first, entries, values
            page = control_pb2.ListingPage(
                partition=rule.partition, partitions=rule.partitions, instance=instance, bucket=number, as_of=as_of,
                first_room=first[0], first_uin=first[1], last=end is None, more=more, entries=b"".join(entries),
                values=b"".join(map(VALUE.pack, values)) if any(values) else b"",
            )  # fmt: skip
            if end is not None:
                page.end_room, page.end_uin = first = end
            pages.append(control_pb2.Control(listing_page=page).SerializeToString())
            entries, values = [], []

        for room, uin, id_ in self._membership.bucket_entries(rule, instance, number, first):
            if len(entries) == PAGE_ENTRIES:
                more = len(pages) + 1 == limit
                close((room, uin), more)
                if more:
                    return pages
            entries.append(ENTRY.pack(room, uin, id_))
            values.append(self._membership.value(room, uin, instance))
        close(None, False)
        return pages


@dataclass(slots=True)
class PullerCounters:
    """What a puller found and repaired, since the start."""

    digests_equal: int = 0
    digests_differing: int = 0
    buckets_repaired: int = 0
    pages_applied: int = 0
    healing_malformed: int = 0
    digests_of_other_keys: int = 0
    """That could not be compared, as there are no sums by the key; for a moment when keys change."""


@dataclass(slots=True)
class _Doubt:
    """The buckets of an instance that differed from a source's at the last heartbeat."""

    mask: int
    at: float
    asked: int = 0
    """Those of which a listing was asked for."""


@dataclass(slots=True)
class Outcome:
    """What a message from a source brought."""

    messages: list[bytes] = field(default_factory=list)
    """What to say to the source."""
    applied: Applied = field(default_factory=lambda: Applied([], []))
    purged: Purged = field(default_factory=lambda: Purged([], []))


class Puller:
    """Compares a map with those of sources, asks for what differs, and takes it over.

    Args:
        membership: the map.
        heartbeat_s: seconds between heartbeats.
    """

    def __init__(self, membership: LwwMap, heartbeat_s: float) -> None:
        self._membership = membership
        self._heartbeat_s = heartbeat_s
        self._doubts: dict[tuple[EndpointID, int], _Doubt] = {}
        self._asked: dict[EndpointID, int] = {}
        """Source → the last instance whose buckets were asked for."""
        self._equal_at: dict[EndpointID, float] = {}
        """Router → when its total was equal; older doubts are over."""
        self.rule: Rule | None = None
        """All rooms that the map is for. Only equality about all of them is remembered in `verified`; None: none is."""
        self.verified = Verified()
        self.counters = PullerCounters()

    def take(self, source: EndpointID, control: control_pb2.Control, now: float, *, own_word: bool = False) -> Outcome:
        """A source answered a request; what is no answer brings nothing. `own_word`: the source is the gateway itself."""
        if control.HasField("instance_roots"):
            return Outcome(self._on_roots(source, control.instance_roots))
        if control.HasField("bucket_digests"):
            return self._on_buckets(source, control.bucket_digests, now)
        if control.HasField("listing_page"):
            return self._on_page(control.listing_page, now, own_word)
        return Outcome()

    def on_digest(self, source: EndpointID, digest: control_pb2.Digest, now: float) -> list[bytes]:
        """A source answered a heartbeat. Returns what to ask it."""
        rule = rule_of(digest.partition, digest.partitions)
        if rule is None or digest.as_of > MAX_ID:
            self.counters.healing_malformed += 1
            return []
        instance = digest.as_of >> INSTANCE_SHIFT if digest.as_of else None
        sums = self._membership.digest.of(digest.key)
        if sums is None:
            self.counters.digests_of_other_keys += 1
            return []
        mine = sums.total(rule) if instance is None else sums.root(instance, rule)
        if mine == (digest.root, digest.count):
            self.counters.digests_equal += 1
            if instance is None:
                self._equal_at[source] = now
                return []
            self._doubts.pop((source, instance), None)
            if rule == self.rule:
                self.verified.whole(instance, digest.as_of)
            return []
        self.counters.digests_differing += 1
        # What differed at the heartbeat before is asked for at once: fewer messages, of which each may be lost.
        doubts = self._fresh(source, now)
        again = [
            _listing_request(rule, number, [(bucket, (0, 0)) for bucket in _numbers(doubt.asked)])
            for number, doubt in doubts.items()
            if doubt.asked and (instance is None or number == instance)
        ]
        if instance is not None:
            return [_request(rule, [instance], digest.key), *again]
        more = [_request(rule, list(doubts)[:MAX_ASKED], digest.key)] if doubts else []
        return [_request(rule, [], digest.key), *more, *again[:MAX_ASKED]]

    def _fresh(self, source: EndpointID, now: float) -> dict[int, _Doubt]:
        """The instances that differed from a source's lately."""
        oldest = max(now - FRESH_HEARTBEATS * self._heartbeat_s, self._equal_at.get(source, -1e9))
        return {key[1]: doubt for key, doubt in self._doubts.items() if key[0] == source and doubt.at > oldest and doubt.mask}

    def forget(self, source: EndpointID) -> None:
        """A source is gone."""
        self._asked.pop(source, None)
        self._equal_at.pop(source, None)
        for key in [key for key in self._doubts if key[0] == source]:
            del self._doubts[key]

    def _on_roots(self, source: EndpointID, roots: control_pb2.InstanceRoots) -> list[bytes]:
        """The roots of a router's instances. Returns what to ask it."""
        rule = rule_of(roots.partition, roots.partitions)
        if rule is None or len(roots.roots) % ROOT.size or not roots.first <= roots.last < INSTANCES:
            self.counters.healing_malformed += 1
            return []
        sums = self._membership.digest.of(roots.key)
        if sums is None:
            self.counters.digests_of_other_keys += 1
            return []
        theirs = {instance: Sum(xor, count) for instance, xor, count in ROOT.iter_unpack(roots.roots)}
        mine = {i: root for i, root in sums.roots(rule).items() if roots.first <= i <= roots.last}
        nothing = Sum(0, 0)
        differing: list[int] = []
        for instance in sorted(mine.keys() | theirs.keys()):
            if mine.get(instance, nothing) != theirs.get(instance, nothing):
                differing.append(instance)
            else:
                self._doubts.pop((source, instance), None)
        if not differing:
            return []
        # Those after the ones that were asked for last time come first, so that all have their turn.
        after = self._asked.get(source, -1)
        asked = sorted(differing, key=lambda instance: (instance <= after, instance))[:MAX_ASKED]
        self._asked[source] = asked[-1]
        return [_request(rule, asked, roots.key)]

    def _on_buckets(self, source: EndpointID, found: control_pb2.BucketDigests, now: float) -> Outcome:
        """The buckets of an instance: ask for those that differed at the last heartbeat as well."""
        rule = rule_of(found.partition, found.partitions)
        if rule is None or len(found.buckets) != BUCKETS * BUCKET.size or found.instance >= INSTANCES or found.as_of > MAX_ID:
            self.counters.healing_malformed += 1
            return Outcome()
        outcome = Outcome()
        if found.floor:
            self._membership.raise_floor(found.instance, found.floor)
            outcome.purged = self._membership.purge_some()
        sums = self._membership.digest.of(found.key)
        if sums is None:
            self.counters.digests_of_other_keys += 1
            return outcome
        mine = sums.buckets(found.instance, rule)
        mask = 0
        for number, theirs in enumerate(BUCKET.iter_unpack(found.buckets)):
            if mine[number] != theirs:
                mask |= 1 << number
            elif rule == self.rule and found.as_of >> INSTANCE_SHIFT == found.instance and found.as_of:
                # Equal to a router that was equal to the gateway is as good: both lack the same.
                self.verified.bucket(found.instance, number, found.as_of)
        key = (source, found.instance)
        before = self._doubts.get(key)
        if before is not None and now - before.at < self._heartbeat_s / 2:
            # A repeated datagram, not another heartbeat.
            return outcome
        if len(self._doubts) >= MAX_DOUBTS:
            self._doubts.clear()
        oldest = max(now - FRESH_HEARTBEATS * self._heartbeat_s, self._equal_at.get(source, -1e9))
        repair = mask & before.mask if before is not None and before.at > oldest else 0
        self._doubts[key] = _Doubt(mask, now, repair)
        numbers = _numbers(repair)
        self.counters.buckets_repaired += len(numbers)
        if numbers:
            outcome.messages = [_listing_request(rule, found.instance, [(number, (0, 0)) for number in numbers])]
        return outcome

    def _on_page(self, page: control_pb2.ListingPage, now: float, own_word: bool) -> Outcome:
        """A page of a listing: take it over, and ask for what follows it when the answer ended there."""
        rule = rule_of(page.partition, page.partitions)
        whole = page.as_of == 0 or page.as_of >> INSTANCE_SHIFT == page.instance
        if rule is None or not whole or page.bucket >= BUCKETS or page.instance >= INSTANCES or page.as_of > MAX_ID:
            self.counters.healing_malformed += 1
            return Outcome()
        end = None if page.last else (page.end_room, page.end_uin)
        first = (page.first_room, page.first_uin)
        try:
            listing = Listing(rule, page.instance, page.bucket, page.as_of, first, end, page.entries, page.values)
            outcome = Outcome(applied=self._membership.apply_listing(listing, now, own_word=own_word))
        except MalformedData:
            self.counters.healing_malformed += 1
            return Outcome()
        self.counters.pages_applied += 1
        if page.more and end is not None:
            outcome.messages = [_listing_request(rule, page.instance, [(page.bucket, end)])]
        return outcome


def _numbers(mask: int) -> list[int]:
    return [number for number in range(BUCKETS) if mask >> number & 1]


def _request(rule: Rule, instances: list[int], key: int) -> bytes:
    message = control_pb2.DigestRequest(partition=rule.partition, partitions=rule.partitions, instances=instances, key=key)
    return control_pb2.Control(digest_request=message).SerializeToString()


def _listing_request(rule: Rule, instance: int, buckets: list[tuple[int, tuple[int, int]]]) -> bytes:
    message = control_pb2.ListingRequest(partition=rule.partition, partitions=rule.partitions, instance=instance)
    for number, (room, uin) in buckets:
        message.buckets.add(bucket=number, room=room, uin=uin)
    return control_pb2.Control(listing_request=message).SerializeToString()
