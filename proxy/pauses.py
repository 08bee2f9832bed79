"""How long mail of users who move to a new partition pauses at a doubling's cut, as a proxy sees it. Pure.

    a parent refuses, as it was split ──▶ its child confirms the first that it is sent

Source: docs/doubling.md.
"""

from __future__ import annotations

from proxy.mail_events import Store


class Pauses:
    """The pauses of the last doubling of Xiu, and of Pi."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        """Role → seconds, of the partition that paused longest."""
        self._partitions: dict[str, int] = {}
        """Role → of how many partitions the doubling was whose pauses these are."""
        self._since: dict[Store, float] = {}
        """Child that has confirmed nothing yet → when its parent refused."""

    def begun(self, role: str, partitions: int) -> None:
        """A role of so many partitions is being doubled."""
        if self._partitions.get(role) != partitions:
            self._partitions[role] = partitions
            self.longest.pop(role, None)
            self.taken_back(role)

    def refused(self, child: Store, partitions: int, now: float) -> None:
        """The parent of a child was split, one of so many partitions."""
        self.begun(child.role, partitions)
        self._since.setdefault(child, now)

    def confirmed(self, store: Store, now: float) -> None:
        """A partition has stored, or appended, what it was sent."""
        since = self._since.pop(store, None)
        if since is not None:
            self.longest[store.role] = max(now - since, self.longest.get(store.role, 0.0))

    def taken_back(self, role: str) -> None:
        """Nothing of a role is being doubled: who has confirmed nothing yet is waited for no more."""
        self._since = {store: since for store, since in self._since.items() if store.role != role}
