"""Places of sessions that outlive their connections among those of their tenant, which routers keep like filters. Pure.

    gateway ── "$tenant/acme", its session, the tenant's limit ──▶ the router partition of that name ── as many there? refused

All gateways ask one replica, so the count is right however many sessions begin at a time. Like a filter, a place is on every
replica and in its database, is renewed with its session, and goes with it.

Source: docs/tenants.md, "Limits".
"""

from __future__ import annotations

from typing import Final

from pixiu.ids import RoomID, topic_room

PLACE_PREFIX: Final = "$tenant/"


def place_of(tenant: str) -> tuple[str, RoomID]:
    """The name of a tenant's places, and the room whose partition keeps them."""
    return PLACE_PREFIX + tenant, topic_room(tenant)


def is_place(name: str, room: int) -> bool:
    """True if a filter and its room are those of a place."""
    tenant = name.removeprefix(PLACE_PREFIX)
    return tenant not in (name, "") and "/" not in tenant and room == topic_room(tenant)
