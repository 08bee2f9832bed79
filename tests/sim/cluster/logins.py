"""The login policy as users see it: who may stay together does, whoever came last is never the one that goes, and in the end
of those that contest a place one is there.

Which of two is newer is the order in which gateways took them, whatever their clocks say. Where the older one was not known to
the cluster when the newer one came, the two came at the same time, and either may go.

Source: docs/memberships.md, "Devices and logins".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from cluster.membership.map.devices import LoginPolicy

if TYPE_CHECKING:
    from tests.sim.cluster.clients import Connection, User


class Logins:
    """See the module.

    Args:
        policy: of the cluster.
    """

    def __init__(self, policy: LoginPolicy) -> None:
        self._policy = policy
        self._opened: list[Connection] = []
        self.checked: Counter[str] = Counter()

    def contest(self, one: User, other: User) -> bool:
        """Whether two devices may not be online together."""
        if one.uin != other.uin or not (one.login and other.login):
            return False
        same_class = self._policy is LoginPolicy.NEWEST_OF_CLASS and one.device_class == other.device_class
        return one.device == other.device or same_class or self._policy is LoginPolicy.NEWEST

    def opened(self, connection: Connection) -> None:
        """A gateway took a connection."""
        self._opened.append(connection)
        connection.opened = len(self._opened)

    def known(self, connection: Connection) -> None:
        """The cluster knows it."""
        connection.online_since = connection.online_since or len(self._opened)

    def ended(self, connection: Connection) -> None:
        """A gateway ended a connection for a newer login."""
        rivals = [c for c in self._opened if c is not connection and self.contest(c.user, connection.user)]
        assert rivals, "somebody was disconnected whom nobody contests"
        newer = [c for c in rivals if c.opened > connection.opened]
        together = [c for c in rivals if not c.online_since or c.online_since >= connection.opened]
        assert newer or together, "the newest login is the one that was ended"
        self.checked["ended"] += 1
        self.checked["ended as another device"] += any(c.user is not connection.user for c in newer)

    def differences(self, connected: list[Connection]) -> Iterator[str]:
        """Who is still there together at the end, or was ended although the newest."""
        for one, other in combinations(connected, 2):
            # Two connections of a device to one gateway are one entry of relay data.
            if self.contest(one.user, other.user) and not (one.user is other.user and one.gateway is other.gateway):
                names = [f"connection {c.number} of device {c.user.device} on {c.gateway.place.name}" for c in (one, other)]
                yield f"user {one.uin} has {' and '.join(names)}, which may not be together"
