"""Pauses of mail for users who move to a new partition at a doubling's cut, as a proxy sees them. Pure.

    a parent refuses, because it was split ──▶ its child confirms the first mail that it is sent

Source: docs/doubling.md.
"""

from __future__ import annotations

from proxy.mail_events import Store


class Pauses:
    """Pauses of the last doubling of Xiu, and of Pi."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        """Role → longest pause of a partition, seconds."""
        self._partitions: dict[str, int] = {}
        """Role → number of partitions before the doubling whose pauses these are."""
        self._since: dict[Store, float] = {}
        """Child that has confirmed nothing yet → time when its parent refused."""

    def begun(self, role: str, partitions: int) -> None:
        """Note that a role with this number of partitions is being doubled."""
        if self._partitions.get(role) != partitions:
            self._partitions[role] = partitions
            self.longest.pop(role, None)
            self.taken_back(role)

    def refused(self, child: Store, partitions: int, now: float) -> None:
        """Note that a child's parent, one of `partitions` partitions, was split."""
        self.begun(child.role, partitions)
        self._since.setdefault(child, now)

    def confirmed(self, store: Store, now: float) -> None:
        """Note that a partition has stored, or appended, its mail."""
        since = self._since.pop(store, None)
        if since is not None:
            self.longest[store.role] = max(now - since, self.longest.get(store.role, 0.0))

    def taken_back(self, role: str) -> None:
        """The doubling was aborted: stop timing children that have confirmed nothing yet."""
        self._since = {store: since for store, since in self._since.items() if store.role != role}
