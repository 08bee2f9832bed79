"""The replicas that a leader requires: the maximal in-sync set, and the compare-and-sets that change it. Pure.

    ZooKeeper's set      {A, B}            a candidate may come from it now
    proposed             {A, B, C}         a compare-and-set that may land at any time while the version is v
    joining              D                 must reach a noted end; proposed when it has
    ─────────────────────────────────
    maximal              {A, B, C, D}      an entry is committed when all of these have synced it

A proposal at version v is dead once a higher version was seen, whoever made it; that is why a member leaves only by a
compare-and-set that succeeded, even one that changes nothing but the version.

Source: docs/replication.md; Kafka's KIP-966 for the name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from cluster.replication.model import MemberID, PartitionState


class InSync:
    """The in-sync sets of one leader in one epoch.

    Args:
        member: the leader.
        version: version of the state that promoted it.
        state: that state.
    """

    def __init__(self, member: MemberID, version: int, state: PartitionState) -> None:
        self.member = member
        self.version = version
        self.state = state
        self.joining: dict[MemberID, int] = {}
        """Member → the counter that it must reach before it is proposed."""
        self._proposed: frozenset[MemberID] = frozenset()
        self._asked: PartitionState | None = None
        self._leaving: frozenset[MemberID] = frozenset()

    @property
    def maximal(self) -> frozenset[MemberID]:
        """Every member that a commit requires, including the leader."""
        if not self._proposed and not self.joining:
            return self.state.in_sync
        return self.state.in_sync | self._proposed | frozenset(self.joining)  # uniting with the keys view directly would give a set

    @property
    def asking(self) -> bool:
        """True while a compare-and-set is pending."""
        return self._asked is not None

    def join(self, member: MemberID, end: int) -> None:
        """Require this follower from now on; it is proposed when it has acknowledged `end`."""
        self.joining[member] = end

    def give_up(self, member: MemberID) -> bool:
        """Stop requiring a joining member. Returns False if ZooKeeper was already asked to add it."""
        if member in self._proposed:
            return False
        return self.joining.pop(member, None) is not None

    def next_proposal(self, silent: Collection[MemberID], matched: Mapping[MemberID, int]) -> PartitionState | None:
        """The state to ask ZooKeeper for, if any: first without silent members, then with those that have caught up."""
        if self.asking:
            return None
        target = self.state.in_sync
        self._leaving = frozenset(silent)
        if silent:
            target -= self._leaving
        else:
            target |= {member for member, end in self.joining.items() if matched.get(member, 0) >= end}
            if target == self.state.in_sync:
                return None
        return self.propose(target)

    def propose(self, target: frozenset[MemberID]) -> PartitionState:
        """Request a set: until the version changes it counts as if ZooKeeper held it."""
        self._proposed |= target
        self._asked = replace(self.state, in_sync=target)
        return self._asked

    def succeeded(self) -> None:
        """Take the requested state over: the compare-and-set was applied."""
        assert self._asked is not None
        for member in self._leaving:
            self.joining.pop(member, None)
        self._move_to(self.version + 1, self._asked)

    def failed(self) -> None:
        """Continue to require all members: the compare-and-set was refused, or its outcome is unknown. The caller reads the
        state."""
        self._asked = None

    def adopt(self, version: int, state: PartitionState) -> None:
        """Take over ZooKeeper's state, which still names this leader and epoch."""
        if version > self.version:
            self.joining.clear()
            self._move_to(version, state)

    def _move_to(self, version: int, state: PartitionState) -> None:
        self.version, self.state = version, state
        self._proposed, self._asked = frozenset(), None
        for member in state.in_sync:
            self.joining.pop(member, None)
