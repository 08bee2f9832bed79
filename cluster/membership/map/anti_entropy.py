"""Keeps two maps of memberships equal although messages are lost: the puller asks, the source answers. Pure.

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

Source and puller are gateway and router, router and peer, router and broker. A gateway lists its members as of the last
GatewayMsgID that it made. A router that was equal to a gateway as of some GatewayMsgID may list as of that: an entry that it lacks
and that is not newer was missing on the gateway too. Without such a GatewayMsgID a router's listing only adds, so that only a live
gateway's own reports, direct or forwarded, remove its entries.

Nothing here is sent again: the next heartbeat starts over.

Source: docs/memberships.md, "Anti-entropy".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.membership.map.digest import BUCKET, BUCKETS, DigestRule, Sum, Sums
from cluster.membership.map.lww_map import INSTANCE_SHIFT, Applied, LwwMap, Purged
from cluster.membership.map.updates import ENTRY, VALUE, Listing
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import INSTANCES, MAX_ID, EndpointID, gateway_generation
from pixiu.placement.partition import is_partition_count

PAGE_ENTRIES: Final = 30
"""Entries of a page, each 24 bytes and a value of 8, so that it fits one datagram."""
PROVEN_PAGE_ENTRIES: Final = 18
"""The same with a login ticket of 20 bytes for each."""
PAGES_AN_ANSWER: Final = 64
"""Pages that answer one request. Policy: the last one reports that there is more, and the puller asks for the rest."""
ROOT: Final = struct.Struct("<HQI")
ROOTS_A_MESSAGE: Final = 64
MAX_ASKED: Final = 32
"""Instances whose buckets are requested, or returned, at one time. Policy: the others follow at the next heartbeat."""
MAX_DOUBTS: Final = 100_000
"""Pairs of source and instance that differed at the last heartbeat. Policy: all are forgotten, and doubted anew."""
FRESH_HEARTBEATS: Final = 5
"""Number of heartbeats after which an earlier difference no longer counts as seen."""


def rule_of(partition: int, partitions: int) -> DigestRule | None:
    """A rule from the network; None if it is invalid."""
    return DigestRule(partition % partitions, partitions) if is_partition_count(partitions) else None


def is_anti_entropy(control: control_pb2.Control) -> bool:
    """True if a control message is one of those exchanged by source and puller."""
    return control.WhichOneof("body") in _ANTI_ENTROPY


_ANTI_ENTROPY: Final = frozenset({"digest_request", "instance_roots", "bucket_digests", "listing_request", "listing_page"})


def encode_absence(as_of: int, rooms: list[int]) -> bytes:
    """Encode a `Control`: as of this GatewayMsgID, the gateway that made it had no members of these rooms."""
    return control_pb2.Control(absence=control_pb2.Absence(as_of=as_of, rooms=rooms)).SerializeToString()


class Verified:
    """The highest GatewayMsgID at which a router was equal to a gateway, by instance and bucket."""

    def __init__(self) -> None:
        self._whole: dict[int, int] = {}
        self._buckets: dict[int, dict[int, int]] = {}

    def whole(self, instance: int, as_of: int) -> None:
        """Note that all buckets were equal."""
        self._whole[instance] = max(as_of, self._whole.get(instance, 0))
        above = {bucket: at for bucket, at in self._buckets.pop(instance, {}).items() if at > as_of}
        if above:
            self._buckets[instance] = above

    def bucket(self, instance: int, bucket: int, as_of: int) -> None:
        """Note that one bucket was equal."""
        if as_of > self.as_of(instance, bucket):
            self._buckets.setdefault(instance, {})[bucket] = as_of

    def as_of(self, instance: int, bucket: int) -> int:
        """The highest verified GatewayMsgID; 0 if there is none."""
        return max(self._whole.get(instance, 0), self._buckets.get(instance, {}).get(bucket, 0))

    def clear(self) -> None:
        """Forget everything, because the rule of the kept rooms has changed."""
        self._whole.clear()
        self._buckets.clear()


class Source:
    """Answers requests about a map.

    Args:
        membership: the map.
        as_of: (instance, bucket) → the GatewayMsgID as of which the map is complete, 0 if unknown.
        ticket_of: user → the login ticket to list with the user's entries; None: there are none.
    """

    def __init__(
        self, membership: LwwMap, as_of: Callable[[int, int], int], ticket_of: Callable[[int], bytes] | None = None
    ) -> None:
        self._membership = membership
        self._as_of = as_of
        self.ticket_of = ticket_of
        self._page_entries = PAGE_ENTRIES if ticket_of is None else PROVEN_PAGE_ENTRIES
        self.pages_sent = 0

    def digest(self, rule: DigestRule, as_of: int = 0, key: int = 0) -> control_pb2.Digest | None:
        """Digest for the answer to a heartbeat; None if there are no sums by this key."""
        sums = self._membership.digest.of(key)
        if sums is None:
            return None
        total = sums.total(rule)
        return control_pb2.Digest(
            partition=rule.partition, partitions=rule.partitions, root=total.xor, count=total.entries, as_of=as_of, key=key
        )

    def answer(self, control: control_pb2.Control) -> list[bytes]:
        """Messages that answer a request; none if it is not a request or is invalid."""
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
    def _roots(sums: Sums, rule: DigestRule) -> list[bytes]:
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

    def _buckets(self, sums: Sums, rule: DigestRule, instance: int) -> bytes:
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

    def _bucket_pages(self, rule: DigestRule, instance: int, asked: control_pb2.BucketFrom, limit: int) -> list[bytes]:
        """Pages of a bucket; at least one, so that an empty bucket is reported too."""
        number, first = asked.bucket, (asked.room, asked.uin)
        as_of = self._as_of(instance, number)
        pages: list[bytes] = []
        entries: list[bytes] = []
        values: list[int] = []
        tickets: list[bytes] = []

        def close(end: tuple[int, int] | None, more: bool) -> None:
            nonlocal first, entries, values, tickets
            page = control_pb2.ListingPage(
                partition=rule.partition, partitions=rule.partitions, instance=instance, bucket=number, as_of=as_of,
                first_room=first[0], first_uin=first[1], last=end is None, more=more, entries=b"".join(entries),
                values=b"".join(map(VALUE.pack, values)) if any(values) else b"", tickets=b"".join(tickets),
            )  # fmt: skip
            if end is not None:
                page.end_room, page.end_uin = first = end
            pages.append(control_pb2.Control(listing_page=page).SerializeToString())
            entries, values, tickets = [], [], []

        for room, uin, id_ in self._membership.bucket_entries(rule, instance, number, first):
            if len(entries) == self._page_entries:
                more = len(pages) + 1 == limit
                close((room, uin), more)
                if more:
                    return pages
            entries.append(ENTRY.pack(room, uin, id_))
            values.append(self._membership.value(room, uin, instance))
            if self.ticket_of is not None:
                tickets.append(self.ticket_of(room))
        close(None, False)
        return pages


@dataclass(slots=True)
class PullerCounters:
    """Differences that a puller found and repaired since the start."""

    digests_equal: int = 0
    digests_differing: int = 0
    buckets_repaired: int = 0
    pages_applied: int = 0
    healing_malformed: int = 0
    digests_of_other_keys: int = 0
    """Digests that could not be compared, because there are no sums by their key; briefly, when keys change."""


@dataclass(slots=True)
class _Doubt:
    """Buckets of an instance that differed from a source's at the last heartbeat."""

    mask: int
    at: float
    asked: int = 0
    """Buckets whose listing was requested."""


@dataclass(slots=True)
class PullOutcome:
    """Result of a message from a source."""

    messages: list[bytes] = field(default_factory=list)
    """Messages to send to the source."""
    applied: Applied = field(default_factory=lambda: Applied([], []))
    purged: Purged = field(default_factory=lambda: Purged([], []))


class Puller:
    """Compares a map with those of sources, requests what differs, and takes it over.

    Args:
        membership: the map.
        heartbeat_s: seconds between heartbeats.
    """

    def __init__(self, membership: LwwMap, heartbeat_s: float) -> None:
        self._membership = membership
        self._heartbeat_s = heartbeat_s
        self._doubts: dict[tuple[EndpointID, int], _Doubt] = {}
        self._asked: dict[EndpointID, int] = {}
        """Source → the last instance whose buckets were requested."""
        self._equal_at: dict[EndpointID, float] = {}
        """Router → time at which its total was equal; older doubts are void."""
        self.rule: DigestRule | None = None
        """All rooms that the map is for. `verified` records equality only if it covers all of them; None: nothing is recorded."""
        self.verified = Verified()
        self.counters = PullerCounters()

    def take(self, source: EndpointID, control: control_pb2.Control, now: float, *, own_word: bool = False) -> PullOutcome:
        """Handle a source's answer; other messages have no effect. `own_word`: the source is the gateway itself."""
        if control.HasField("instance_roots"):
            return PullOutcome(self._on_roots(source, control.instance_roots))
        if control.HasField("bucket_digests"):
            return self._on_buckets(source, control.bucket_digests, now)
        if control.HasField("listing_page"):
            return self._on_page(control.listing_page, now, own_word)
        return PullOutcome()

    def on_digest(self, source: EndpointID, digest: control_pb2.Digest, now: float) -> list[bytes]:
        """Handle a source's answer to a heartbeat. Returns the requests to send to it."""
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
        # Differences from the previous heartbeat are requested at once: that needs fewer messages, each of which may be lost.
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
        """Instances that recently differed from a source's."""
        oldest = max(now - FRESH_HEARTBEATS * self._heartbeat_s, self._equal_at.get(source, -1e9))
        return {key[1]: doubt for key, doubt in self._doubts.items() if key[0] == source and doubt.at > oldest and doubt.mask}

    def forget(self, source: EndpointID) -> None:
        """Forget a source that is gone."""
        self._asked.pop(source, None)
        self._equal_at.pop(source, None)
        for key in [key for key in self._doubts if key[0] == source]:
            del self._doubts[key]

    def _on_roots(self, source: EndpointID, roots: control_pb2.InstanceRoots) -> list[bytes]:
        """Handle the roots of a router's instances. Returns the requests to send to it."""
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
        # Instances after those requested last time come first, so that all get their turn.
        after = self._asked.get(source, -1)
        asked = sorted(differing, key=lambda instance: (instance <= after, instance))[:MAX_ASKED]
        self._asked[source] = asked[-1]
        return [_request(rule, asked, roots.key)]

    def _on_buckets(self, source: EndpointID, found: control_pb2.BucketDigests, now: float) -> PullOutcome:
        """Handle the buckets of an instance: request those that also differed at the last heartbeat."""
        rule = rule_of(found.partition, found.partitions)
        if rule is None or len(found.buckets) != BUCKETS * BUCKET.size or found.instance >= INSTANCES or found.as_of > MAX_ID:
            self.counters.healing_malformed += 1
            return PullOutcome()
        outcome = PullOutcome()
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
                # Equality with a router that was equal to the gateway is as good: both lack the same entries.
                self.verified.bucket(found.instance, number, found.as_of)
        key = (source, found.instance)
        before = self._doubts.get(key)
        if before is not None and now - before.at < self._heartbeat_s / 2:
            # A repeated datagram, not a new heartbeat.
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

    def _on_page(self, page: control_pb2.ListingPage, now: float, own_word: bool) -> PullOutcome:
        """Apply a page of a listing, and request the next one if the answer ended there."""
        rule = rule_of(page.partition, page.partitions)
        whole = page.as_of == 0 or page.as_of >> INSTANCE_SHIFT == page.instance
        if rule is None or not whole or page.bucket >= BUCKETS or page.instance >= INSTANCES or page.as_of > MAX_ID:
            self.counters.healing_malformed += 1
            return PullOutcome()
        end = None if page.last else (page.end_room, page.end_uin)
        first = (page.first_room, page.first_uin)
        try:
            listing = Listing(rule, page.instance, page.bucket, page.as_of, first, end, page.entries, page.values)
            outcome = PullOutcome(applied=self._membership.apply_listing(listing, now, own_word=own_word))
        except MalformedData:
            self.counters.healing_malformed += 1
            return PullOutcome()
        self.counters.pages_applied += 1
        if page.more and end is not None:
            outcome.messages = [_listing_request(rule, page.instance, [(page.bucket, end)])]
        return outcome


def _numbers(mask: int) -> list[int]:
    return [number for number in range(BUCKETS) if mask >> number & 1]


def _request(rule: DigestRule, instances: list[int], key: int) -> bytes:
    message = control_pb2.DigestRequest(partition=rule.partition, partitions=rule.partitions, instances=instances, key=key)
    return control_pb2.Control(digest_request=message).SerializeToString()


def _listing_request(rule: DigestRule, instance: int, buckets: list[tuple[int, tuple[int, int]]]) -> bytes:
    message = control_pb2.ListingRequest(partition=rule.partition, partitions=rule.partitions, instance=instance)
    for number, (room, uin) in buckets:
        message.buckets.add(bucket=number, room=room, uin=uin)
    return control_pb2.Control(listing_request=message).SerializeToString()
