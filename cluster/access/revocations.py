"""A back end's request to end a user's subscriptions at all gateways, because a permission has ended. Pure.

    {"user": "alice", "filter": "rooms/7/#", "reason": "left the room"}

Every subscription to what is revoked, or to a part of it, ends. One to more than that ends if the rules, without remembered answers
of callbacks, do not allow it. The connection stays, with everything else. The rules decide whether the client may subscribe again.

Source: docs/security.md, "Revoking subscriptions".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cluster.access.rules import overlaps
from cluster.trust.identity import Identity
from pixiu.errors import InvalidArgument
from pixiu.placement.topics import is_filter

MAX_FILTER: Final = 1024
MAX_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class Revocation:
    """A request."""

    user: str
    """Name or UIN."""
    filter: str
    """Topic, or MQTT filter: every subscription that it covers ends, a subscription with the same filter included."""
    reason: str = ""

    def check(self) -> None:
        """Raise `InvalidArgument` if the request is invalid."""
        if not self.user or not self.filter or "\\0" in self.filter or not is_filter(self.filter):
            raise InvalidArgument("a revocation names a user, and a topic or an MQTT filter")
        if len(self.filter) > MAX_FILTER or len(self.reason) > MAX_REASON:
            raise InvalidArgument(f"a filter has at most {MAX_FILTER} characters, a reason {MAX_REASON}")
        if not self.reason.isprintable():
            raise InvalidArgument("a reason has no control characters")

    def fits(self, identity: Identity) -> bool:
        """True if it is about an identity."""
        return self.user in (identity.user, str(identity.uin or identity.user))

    def covers(self, topic: str) -> bool:
        """True if a subscription to this topic or filter ends."""
        if topic.startswith("$share/"):
            topic = topic.split("/", 2)[-1]
        return topic == self.filter or _covers(self.filter.split("/"), topic.split("/"))

    def concerns(self, topic: str) -> bool:
        """True if a subscription to this topic or filter gets something of what is revoked."""
        if topic.startswith("$share/"):
            topic = topic.split("/", 2)[-1]
        return overlaps(topic.split("/"), self.filter.split("/"), {})

    def text(self) -> str:
        """The request in the registry's form."""
        return json.dumps({name: value for name, value in asdict(self).items() if value})


def _covers(wide: list[str], narrow: list[str]) -> bool:
    """True if a filter, by levels, matches everything that another one does."""
    for at, level in enumerate(wide):
        if level == "#":
            return not (at == 0 and narrow[0].startswith("$"))
        if at >= len(narrow) or (level not in ("+", narrow[at])) or (level == "+" and narrow[at] == "#"):
            return False
        if at == 0 and level == "+" and narrow[0].startswith("$"):
            return False
    return len(wide) == len(narrow)


def revocation_of(text: str) -> Revocation | None:
    """Parse a request from the registry; None if it is invalid."""
    try:
        found = Revocation(**json.loads(text))
        if not all(isinstance(value, str) for value in (found.user, found.filter, found.reason)):
            return None
        found.check()
    except (ValueError, TypeError, RecursionError, InvalidArgument):
        return None
    return found
