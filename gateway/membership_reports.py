"""What a gateway reports to one role: to routers who is in which room, to relays which devices are here. Pure.

What it said is kept, so that whoever missed it can compare and ask; what it is sent for somebody who is not here it
answers with a word to that role.

Source: DESIGN sections 9 and 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.membership.anti_entropy import Source, rule_of
from cluster.membership.lww_map import MESSAGES_A_CONTROL, Update
from gateway.events import Effect, Replica, SendControl
from gateway.feedback import Feedback, absences
from gateway.membership_reporter import FEW_MEMBERS, MembershipReporter
from pixiu.ids import EndpointID
from pixiu.wire.v1 import control_pb2


class Reports:
    """See the module. `presence` sends what is new; its map `own` is what is here.

    Args:
        instance: this gateway's leased number.
        as_of: gives the last GatewayMsgID that the gateway made: `presence.own` is complete up to it.
        next_token: gives a token for a parcel.
        few_members: a change of a room with fewer local members is sent twice.
        parcel: most messages in a parcel.
    """

    def __init__(
        self,
        instance: int,
        as_of: Callable[[], int],
        next_token: Callable[[], int],
        *,
        few_members: int = FEW_MEMBERS,
        parcel: int = MESSAGES_A_CONTROL,
    ) -> None:
        self._as_of = as_of
        self.presence = MembershipReporter(next_token, few_members=few_members, parcel=parcel)
        self.feedback = Feedback()
        self.source = Source(self.presence.own, lambda asked, _: as_of() if asked == instance else 0)
        self._partitions = 0
        self._partition_of: dict[EndpointID, int] = {}

    def set_replicas(self, partitions: int, replicas: tuple[Replica, ...], now: float) -> None:
        """Report to these. `partitions` 0: the cluster has none; what is here is noted, and told when they come."""
        self._partitions = partitions
        self._partition_of = {replica.endpoint: replica.partition for replica in replicas}
        if partitions:
            self.presence.set_replicas(partitions, replicas, now)

    def announce(self, changes: Iterable[Update], now: float) -> None:
        """Say these."""
        if self._partitions:
            self.presence.announce(changes, now)
        else:
            # Replicas that come find by their first heartbeats what they lack.
            self.presence.remember(changes, now)

    def confirmed(self, peer: EndpointID, ids: list[int]) -> list[Effect]:
        """A replica confirmed messages. Returns the answers that this allows."""
        partition = self._partition_of.get(peer)
        return [] if partition is None else self.presence.confirmed(partition, ids)

    def reports_to(self, peer: EndpointID) -> bool:
        """Whether a process is one of those that are told."""
        return peer in self._partition_of

    def digest(self, partition: int, partitions: int) -> control_pb2.Digest | None:
        """For the answer to a heartbeat: what is here of what the replica keeps; None when its rule makes no sense."""
        rule = rule_of(partition, partitions)
        return self.source.digest(rule, self._as_of()) if rule is not None else None

    def answer(self, peer: EndpointID, control: control_pb2.Control) -> list[Effect]:
        """A replica asks what is here."""
        messages = self.source.answer(control)
        return [SendControl(peer, messages)] if messages else []

    def missing(self, key: int) -> None:
        """A record came for a room or user that nobody here is in, or is. Without an entry its sender is told."""
        if not self.presence.own.gateways(key):
            self.feedback.note(key)

    def flush(self, now: float) -> list[Effect]:
        """Send what is due."""
        effects = self.presence.flush(now)
        by_replica: dict[EndpointID, list[int]] = {}
        for key in self.feedback.due(now):
            # Who came since the record did has a GatewayMsgID that is higher than what would be said to be absent.
            for replica in () if self.presence.own.gateways(key) else self.presence.replicas(key):
                by_replica.setdefault(replica, []).append(key)
        effects += [SendControl(replica, messages) for replica, messages in absences(by_replica, self._as_of())]
        return effects
