"""A router's or relay's part in anti-entropy: puller towards gateways and peers, source towards peers and brokers. Pure.

Source: docs/memberships.md.
"""

from __future__ import annotations

from cluster.membership.anti_entropy import Outcome, Puller, Source, rule_of
from cluster.membership.digest import Rule, common_rule
from cluster.membership.events import AbsenceReceived
from cluster.membership.lww_map import LwwMap
from cluster.membership.member_state import ClusterView
from pixiu.ids import MAX_ID, EndpointID, gateway_generation, gateway_instance
from pixiu.wire.v1 import control_pb2

MAX_ABSENT_ROOMS = 1024
"""Rooms in one message of negative feedback. Policy: a longer one is malformed."""


class ReplicaAntiEntropy:
    """Pulls from gateways and peers, and answers peers and brokers.

    Args:
        membership: its map.
        puller: of the same map.
    """

    def __init__(self, membership: LwwMap, puller: Puller) -> None:
        self._membership = membership
        self.puller = puller
        self.source = Source(membership, puller.verified.as_of)
        self.fenced = 0
        """Times a gateway was told that its generation is over."""

    def set_rule(self, partition: int, partitions: int) -> None:
        """The rooms, or users, that this replica keeps."""
        rule = Rule(partition % partitions, partitions)
        if rule != self.puller.rule:
            self.puller.rule = rule
            self.puller.verified.clear()

    def digest(self, partition: int, partitions: int, key: int) -> control_pb2.Digest | None:
        """The digest for the answer to a subscriber's heartbeat, by the key that it names; None where they share no room."""
        asked = rule_of(partition, partitions)
        own = self.puller.rule
        common = common_rule(asked, own) if asked is not None and own is not None else None
        return self.source.digest(common, key=key) if common is not None else None

    def on_digest(self, peer: EndpointID, digest: control_pb2.Digest, view: ClusterView, now: float) -> Outcome:
        """A peer's answer, or a gateway's, which speaks for its own instance only."""
        if peer in view.replicas:
            return Outcome() if digest.as_of else Outcome(self.puller.on_digest(peer, digest, now))
        instance = view.instance_of(peer)
        if instance is None or not 0 < digest.as_of <= MAX_ID or gateway_instance(digest.as_of) != instance:
            return Outcome()
        floor = self._membership.floor(instance)
        if digest.as_of < floor:
            self.fenced += 1
            return Outcome([control_pb2.Control(fenced=control_pb2.Fenced(floor=floor)).SerializeToString()])
        self._membership.raise_floor(instance, gateway_generation(digest.as_of))
        purged = self._membership.purge_some()
        return Outcome(self.puller.on_digest(peer, digest, now), purged=purged)

    def take(self, peer: EndpointID, control: control_pb2.Control, view: ClusterView, now: float) -> Outcome:
        """A request, or an answer to one. A gateway speaks for its own instance only."""
        instance = view.instance_of(peer)
        if instance is not None:
            if control.HasField("bucket_digests") and control.bucket_digests.instance != instance:
                return Outcome()
            if control.HasField("listing_page") and control.listing_page.instance != instance:
                return Outcome()
        outcome = self.puller.take(peer, control, now, own_word=instance is not None)
        outcome.messages += self.source.answer(control)
        return outcome

    def valid_absence(self, event: AbsenceReceived) -> bool:
        """Whether a message of negative feedback makes sense."""
        rooms = event.rooms
        return 0 < event.as_of <= MAX_ID and len(rooms) <= MAX_ABSENT_ROOMS and all(room <= MAX_ID for room in rooms)
