"""Shared subscriptions on one gateway: the members of a group, and what they have not acknowledged. Pure.

A broker gives a message of the group's filter to one gateway with members, the gateway to one member: the rendezvous choice by the
message's SnowflakeID among members with credit. A member that goes gives back what it has not acknowledged.

Source: MQTT 5.0 section 4.8.2; docs/subscriptions.md, "Shared subscriptions".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from gateway.events import Wanted
from pixiu.ids import MAX_ID
from pixiu.placement.partition import rendezvous

MEMBERS_OF_QOS_0: Final = 1
"""Value of a group at the routers: what its members get is over when it is written, ..."""
MEMBERS_ACKNOWLEDGE: Final = 2
"""... or when they have acknowledged it."""


def share_number(group: str, name: str) -> int:
    """Number of a group with its filter, in place of a user: 63 bits that nobody can aim at a user's UIN."""
    return int.from_bytes(blake2b(f"{group}\0{name}".encode(), digest_size=8).digest(), "big") & MAX_ID


@dataclass(slots=True)
class Member:
    """A connection in a group."""

    wanted: Wanted
    credit: int
    """Messages that it may have unacknowledged."""


@dataclass(slots=True)
class SharedGroup:
    """The members of a group on this gateway."""

    number: int
    name: bytes
    """The filter."""
    rooms: tuple[int, ...]
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def value(self) -> int:
        """Value of the group at routers and brokers."""
        return MEMBERS_ACKNOWLEDGE if any(member.wanted.qos for member in self.members.values()) else MEMBERS_OF_QOS_0

    def put(self, connection: int, wanted: Wanted, credit: int) -> None:
        """Add a member, or change its options."""
        self.members[connection] = Member(wanted, credit)

    def remove(self, connection: int) -> None:
        """Remove a member."""
        self.members.pop(connection, None)

    def choose(self, snowflake: int, able: Sequence[int], unacknowledged: Mapping[int, Sized]) -> int | None:
        """The member for a message, of those that are able; None: there is none. Those without credit are chosen if all are."""
        having = [
            connection for connection in able if len(unacknowledged.get(connection, ())) < self.members[connection].credit
        ]  # fmt: skip
        return rendezvous(snowflake, having or able) if able else None
