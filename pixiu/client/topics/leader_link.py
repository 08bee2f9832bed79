"""The way to the leader of a group: which address is next, and when. Pure.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pixiu.rpc.backoff import Backoff

MAX_FOLLOWED: Final = 3
"""Times in a row that a named leader is followed at once. Policy: then the back-off counts, too."""


class LeaderLink:
    """Addresses of one group's replicas. The leader that a refusal names is next, at once; else, after a back-off, the one that
    failed least, since proxies name processes that were killed for a while, and each of them in another order.

    Args:
        backoff: of the waits.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._addresses: tuple[str, ...] = ()
        self._leader = ""
        self._failures: dict[str, int] = {}
        """Address → times that it failed since one answered."""
        self._followed = 0
        self.rest_until = 0.0
        """Time before which nothing is tried, monotonic seconds."""

    @classmethod
    def new(cls, first_s: float, max_s: float, uniform: Callable[[], float]) -> LeaderLink:
        """A link with a back-off of its own."""
        return cls(Backoff(first_s, max_s, uniform))

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Set the group's addresses, the leader first if it is known. An empty list changes nothing."""
        if addresses:
            self._addresses = tuple(addresses)
            self._failures = {each: self._failures[each] for each in addresses if each in self._failures}

    def address(self) -> str:
        """The address to try; empty: none is known."""
        if self._leader:
            return self._leader
        return min(self._addresses, key=lambda each: self._failures.get(each, 0), default="")

    def answered(self) -> None:
        """The address leads."""
        self._backoff.reset()
        self._failures.clear()
        self._followed = 0

    def failed(self, now: float, leader: str = "", retry_after_s: float = 0.0) -> None:
        """The address does not lead, or did not answer. `leader`: the address that it named."""
        if leader and leader != self.address() and self._followed < MAX_FOLLOWED:
            self._followed += 1
            self._leader, self.rest_until = leader, now + retry_after_s
            return
        if not self._leader and (address := self.address()):
            self._failures[address] = self._failures.get(address, 0) + 1
        self._leader, self._followed = "", 0
        self.rest_until = now + max(self._backoff.next_s(), retry_after_s)
