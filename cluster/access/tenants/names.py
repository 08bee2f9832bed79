"""A tenant's own names for topics, rooms and users, and the cluster's names for the same. Pure.

    the tenant says          the cluster says, for uins 1000001-2000000, rooms 5001-6000
    a/b, #, $share/g/a/+     acme/a/b, acme/#, $share/g/acme/a/+
    room/7                   room/5007
    user/7                   user/1000007
    $SYS/#                   $SYS/tenant/acme/#
    orders (durable)         acme.orders

*Outward* is from the tenant's names to the cluster's. What has no name there becomes one that is refused everywhere, never
somebody else's.

Source: docs/tenants.md, "Names".
"""

from __future__ import annotations

from typing import Final

from cluster.access.rules import ALL, IMPERSONATE, OF_TOPICS, REVOKE, Target
from cluster.access.tenants.settings import TenantSettings, range_of
from pixiu.placement.topics import ROOM_PREFIX, SHARE_PREFIX, SYSTEM_PREFIX, USER_PREFIX, resolve, user_of_topic

_NOT_FREE: Final = (ROOM_PREFIX, USER_PREFIX, "$")
_USER: Final = USER_PREFIX.encode()
_ROOM: Final = ROOM_PREFIX.encode()


class TenantNames:
    """The names of one tenant."""

    def __init__(self, name: str, settings: TenantSettings) -> None:
        self.name = name
        self.prefix = f"{settings.prefix or name}/"
        self.uins, self.rooms = range_of(settings.uins), range_of(settings.rooms)
        self._system = f"{SYSTEM_PREFIX}tenant/{name}/"
        self._durable = f"{name}."
        self._prefix_bytes, self._system_bytes = self.prefix.encode(), self._system.encode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TenantNames) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.name, self.prefix, self.uins, self.rooms

    # --- outward

    def outward(self, name: str) -> str:
        """The cluster's name of a topic or filter. What is malformed stays as it is, and is refused as everybody's."""
        if name.startswith(SHARE_PREFIX):
            group, slash, rest = name[len(SHARE_PREFIX) :].partition("/")
            return f"{SHARE_PREFIX}{group}/{self.outward(rest)}" if slash and rest else name
        if name.startswith(ROOM_PREFIX):
            room = resolve(name)
            return f"{ROOM_PREFIX}{self.room_outward(room)}" if isinstance(room, int) else name
        if name.startswith(USER_PREFIX):
            uin = user_of_topic(name)
            return f"{USER_PREFIX}{self.uin_outward(uin)}" if uin is not None else name
        if name.startswith(SYSTEM_PREFIX):
            return self._system + name[len(SYSTEM_PREFIX) :]
        return name if not name or name[0] == "$" else self.prefix + name

    def uin_outward(self, uin: int) -> int:
        """The cluster's UIN of a user; 0: the tenant has no such user."""
        return _outward(uin, self.uins)

    def room_outward(self, room: int) -> int:
        """The cluster's number of a room; 0: the tenant has no such room."""
        return _outward(room, self.rooms)

    def durable_outward(self, name: str) -> str:
        """The cluster's name of a durable topic."""
        return self._durable + name

    # --- inward

    def inward(self, name: bytes) -> bytes:
        """The tenant's name of a topic, UTF-8; empty: it is not the tenant's."""
        if name.startswith(self._prefix_bytes):
            rest = name[len(self._prefix_bytes) :]
            # Whoever publishes by the cluster's names must not make names that mean something else here.
            return b"" if rest[:1] == b"$" or rest.startswith((_ROOM, _USER)) else rest
        for prefix, owned in ((_USER, self.uins), (_ROOM, self.rooms)):
            if name.startswith(prefix):
                number = _inward(int(name[len(prefix) :]), owned)
                return b"%s%d" % (prefix, number) if number else b""
        return SYSTEM_PREFIX.encode() + name[len(self._system_bytes) :] if name.startswith(self._system_bytes) else b""

    def text_inward(self, name: str) -> str:
        """The tenant's name of a topic; empty: it is not the tenant's."""
        return self.inward(name.encode()).decode()

    def uin_inward(self, uin: int) -> int:
        """The tenant's UIN of a user; 0: the user is not the tenant's."""
        return _inward(uin, self.uins)

    def target_inward(self, action: str, target: Target) -> Target | None:
        """The tenant's name of an action's target; None: the action reaches beyond the tenant."""
        if action == IMPERSONATE:
            return None
        if not isinstance(target, str):
            number = _inward(target, self.rooms) if target > 0 else -_inward(-target, self.uins)
            return number or None
        if action in OF_TOPICS:
            return target.removeprefix(self._durable) or None if target.startswith(self._durable) else None
        if action == REVOKE and target == ALL:
            return target  # who revokes names the tenant's users and filters
        if target.startswith(self._system):
            return SYSTEM_PREFIX + target[len(self._system) :]
        rest = target.removeprefix(self.prefix)
        return None if rest == target or not rest or rest.startswith(_NOT_FREE) else rest


def _outward(number: int, owned: tuple[int, int]) -> int:
    outside = owned[0] + number - 1
    return outside if number > 0 and outside <= owned[1] else 0


def _inward(number: int, owned: tuple[int, int]) -> int:
    return number - owned[0] + 1 if owned[0] <= number <= owned[1] else 0
