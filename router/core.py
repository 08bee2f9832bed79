"""The router's core: room membership reported by gateways, kept equal with its peers, and sent to brokers.

Almost all of it is `cluster.membership.replica.core`, over `cluster.membership.map.lww_map.LwwMap`. A room with kept filters has a
*mark* there: one more member, of an instance that no gateway has. It goes the way of a gateway's report: to the peers and to all
brokers that serve the room, confirmed when they have it. No purge and no gateway's digest touches it.

Source: PiXiu §2.4, §5 and §5.2; docs/architecture.md, docs/memberships.md, docs/routing.md, "Partitions"; docs/subscriptions.md,
"Kept filters".
"""

from __future__ import annotations

from typing import ClassVar, Final

from cluster.membership.events import Effect, MarkRooms, MarksLost, RoomsMarked
from cluster.membership.map.lww_map import INSTANCE_SHIFT, Applied
from cluster.membership.map.updates import Update
from cluster.membership.member.state import Speaker
from cluster.membership.replica.core import ReplicaCore
from cluster.membership.replica.forwards import ForwardOutcome, Group
from pixiu.ids import KEPT_INSTANCE
from pixiu.placement.partition import serves

MARK: Final = 0
"""The member by which a room is marked."""
FIRST_MARK_ID: Final = KEPT_INSTANCE << INSTANCE_SHIFT
"""GatewayMsgIDs of marks are not below it; Unix milliseconds are added."""


class Core(ReplicaCore):
    """Decides; takes the arguments of `ReplicaCore`. `step` never raises on what comes from the network."""

    ROLE: ClassVar[str] = "router"
    SNAPSHOT_ROLES: ClassVar[tuple[str, ...]] = ("broker", "router")

    def register_own_events(self) -> None:
        """See `ReplicaCore`."""
        self.on(MarkRooms, self._on_mark)

    def is_marked(self, room: int) -> bool:
        """True if a room is marked here."""
        found = self.membership.get(room, MARK, KEPT_INSTANCE)
        return found is not None and found[1]

    def _on_mark(self, event: MarkRooms, now: float, out: list[Effect]) -> None:
        partitions = self._view.partitions if self._view is not None else 1
        # An ID above the one that is known takes effect, whatever the clock of the router that made that one.
        updates = [
            Update(max(FIRST_MARK_ID + event.now_ms, self._mark_id(room) + 1), room, MARK, event.marked)
            for room in event.rooms
            if serves(self.partition, room, partitions)
        ]
        if event.marked and self.membership.is_nearly_full(len(updates)) and self.membership.without_space(updates):
            out.append(RoomsMarked(event.request, refused=True))
            return
        group = Group(self.endpoint, [event.request], waiting=1)  # above 0 until every forward is made
        if updates:
            self._forward(self.endpoint, updates, Speaker.GATEWAY, group, out)
            self._persist(self.membership.apply(updates, now), out)
        group.waiting -= 1
        if not group.waiting:
            self._confirm(ForwardOutcome([group]), out)

    def _mark_id(self, room: int) -> int:
        found = self.membership.get(room, MARK, KEPT_INSTANCE)
        return found[0] if found is not None else 0

    def _apply(self, messages: list[Update], now: float, out: list[Effect]) -> Applied:
        applied = super()._apply(messages, now, out)
        lost = tuple(change.group for change in applied.changes if change.id >= FIRST_MARK_ID and not change.login)
        if lost:
            out.append(MarksLost(lost))
        return applied

    def _confirm(self, outcome: ForwardOutcome, out: list[Effect]) -> None:
        own = [group for group in outcome.confirmed if group.gateway == self.endpoint]
        out += [RoomsMarked(request) for group in own for request in group.ids]
        outcome.confirmed = [group for group in outcome.confirmed if group.gateway != self.endpoint]
        super()._confirm(outcome, out)
