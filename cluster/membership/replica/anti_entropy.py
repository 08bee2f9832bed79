"""A router's or relay's part in anti-entropy: puller from gateways and peers, source for peers and brokers. Pure.

Source: docs/memberships.md.
"""

from __future__ import annotations

from cluster.membership.events import AbsenceReceived
from cluster.membership.map.anti_entropy import Puller, PullOutcome, Source, rule_of
from cluster.membership.map.digest import DigestRule, common_rule
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import ENTRY, ENTRY_BYTES
from cluster.membership.member.state import ClusterView
from cluster.wire.v1 import control_pb2
from pixiu.ids import MAX_ID, EndpointID, gateway_generation, gateway_instance, gateway_run

MAX_ABSENT_ROOMS = 1024
"""Rooms in one message of negative feedback. Policy: a longer one is malformed."""


class ReplicaAntiEntropy:
    """Pulls from gateways and peers, and answers peers and brokers.

    Args:
        membership: the map.
        puller: puller of the same map.
    """

    def __init__(self, membership: LwwMap, puller: Puller) -> None:
        self._membership = membership
        self.puller = puller
        self.source = Source(membership, puller.verified.as_of)
        self.fenced = 0
        """Number of times that a gateway was informed that its generation has ended."""

    def set_rule(self, partition: int, partitions: int) -> None:
        """Set the rooms, or users, that this replica keeps."""
        rule = DigestRule(partition % partitions, partitions)
        if rule != self.puller.rule:
            self.puller.rule = rule
            self.puller.verified.clear()

    def digest(self, partition: int, partitions: int, key: int) -> control_pb2.Digest | None:
        """The digest for the answer to a subscriber's heartbeat, by the key that it names; None if they share no room."""
        asked = rule_of(partition, partitions)
        own = self.puller.rule
        common = common_rule(asked, own) if asked is not None and own is not None else None
        return self.source.digest(common, key=key) if common is not None else None

    def on_digest(self, peer: EndpointID, digest: control_pb2.Digest, view: ClusterView, now: float) -> PullOutcome:
        """Handle the digest in an answer of a peer, or of a gateway, which reports for its own instance only."""
        if peer in view.replicas:
            return PullOutcome() if digest.as_of else PullOutcome(self.puller.on_digest(peer, digest, now))
        if not 0 < digest.as_of <= MAX_ID or view.runs.get(peer) != gateway_run(digest.as_of):
            return PullOutcome()
        floor = self._membership.floor(gateway_instance(digest.as_of))
        if digest.as_of < floor:
            self.fenced += 1
            return PullOutcome([control_pb2.Control(fenced=control_pb2.Fenced(floor=floor)).SerializeToString()])
        return PullOutcome(self.puller.on_digest(peer, digest, now))

    def take(self, peer: EndpointID, control: control_pb2.Control, view: ClusterView, now: float) -> PullOutcome:
        """Handle a request, or an answer of a peer or of a gateway that reports for itself (`speaks_for`). Strangers may only
        ask."""
        run = view.runs.get(peer)
        outcome = PullOutcome()
        if run is not None or peer in view.replicas:
            outcome = self.puller.take(peer, control, now, own_word=run is not None)
        outcome.messages += self.source.answer(control)
        return outcome

    def valid_absence(self, event: AbsenceReceived) -> bool:
        """True if a message of negative feedback is valid."""
        rooms = event.rooms
        return 0 < event.as_of <= MAX_ID and len(rooms) <= MAX_ABSENT_ROOMS and all(room <= MAX_ID for room in rooms)


def speaks_for(run: int, control: control_pb2.Control) -> bool:
    """True if a gateway's answer is about this run alone."""
    if control.HasField("bucket_digests"):
        found = control.bucket_digests
        own = gateway_run(found.as_of) == run and gateway_instance(found.as_of) == found.instance
        return own and found.floor <= gateway_generation(found.as_of)
    if control.HasField("listing_page"):
        page = control.listing_page
        ids = [id_ for _, _, id_ in ENTRY.iter_unpack(page.entries)] if len(page.entries) % ENTRY_BYTES == 0 else []
        return page.instance == gateway_instance(page.as_of) and all(gateway_run(id_) == run for id_ in (page.as_of, *ids))
    return True
