"""The tables `[tenants]` and `[tenant.NAME]` of the access file. Pure.

    [tenants]
    claim = "tenant"

    [tenant.acme]
    uins = "1000001-2000000"     # the tenant's users 1 to 1,000,000
    prefix = "customers/acme"

Source: docs/tenants.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.ids import MAX_ID, MAX_ROOM
from pixiu.placement.topics import has_wildcard

MAX_TENANTS: Final = 1000
MAX_LABELS: Final = 64
"""Tenants with a label of their own in metrics; the others share `OTHERS`."""
OTHERS: Final = "others"
MAX_PREFIX: Final = 256
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", re.ASCII)
_RANGE: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,19})", re.ASCII)
_RESERVED: Final = ("room", "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllTenants:
    """The table [tenants]."""

    claim: str = "tenant"
    """Claim of a token, or of a callback's answer, that names the login's tenant."""
    required: bool = False
    """True: a login that belongs to no tenant is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One table [tenant.NAME]. Limits are of each process; 0: no limit."""

    uins: str
    """The cluster's UINs that are the tenant's, FIRST-LAST. The tenant calls them 1, 2, …"""
    prefix: str = ""
    """The cluster's topics below this one are the tenant's. Empty: the tenant's name."""
    rooms: str = ""
    """The cluster's rooms that are the tenant's, FIRST-LAST. The tenant calls them 1, 2, … Empty: it has no rooms by number."""
    rules: str = ""
    """File with the tenant's rules, in the tenant's own names. Empty: the rules of the access file."""
    weight: float = 1.0
    """Share of an overloaded gateway, beside the weights of the other tenants."""
    connections: int = 0
    """Sessions at one time; more are refused."""
    subscriptions: int = 0
    """Filters of all of its MQTT clients at one gateway; more are refused."""
    messages_in_per_s: float = 0.0
    """Messages that it publishes in a second."""
    bytes_in_per_s: float = 0.0
    """The same in bytes of payload."""
    messages_out_per_s: float = 0.0
    """Messages of topics and rooms that its MQTT clients at one gateway get in a second; more of QoS 0 is dropped."""
    bytes_out_per_s: float = 0.0
    """The same in bytes."""
    retained_messages: int = 0
    """Retained messages in the cluster, as far as a gateway knows it; more are refused."""
    retained_bytes: int = 0
    """The same in bytes."""
    kept_sessions: int = 0
    """MQTT sessions in the cluster that outlive their connections; more are refused."""


def range_of(text: str) -> tuple[int, int]:
    """First and last number of a range; (1, 0), of none, for an empty text. Raises `ValueError` for what is no range."""
    if not text:
        return 1, 0
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < low <= high:
        raise ValueError(text)
    return low, high


def problems(tenants: Mapping[str, TenantSettings]) -> Iterator[tuple[str, object, str]]:
    """(key, value, what it must be) of everything that is wrong."""
    uins: list[tuple[int, int, str]] = []
    rooms: list[tuple[int, int, str]] = []
    prefixes: dict[str, str] = {}
    for name, tenant in tenants.items():
        where = f"[tenant.{name}]"
        if not NAME.fullmatch(name):
            yield "tenant", name, "named by 1 to 32 letters, digits and the characters _ and -, with a letter or digit first"
        for key, text, highest, taken in (("uins", tenant.uins, MAX_ID, uins), ("rooms", tenant.rooms, MAX_ROOM, rooms)):
            try:
                low, high = range_of(text)
            except ValueError:
                low, high = 0, highest + 1
            if high > highest or (key == "uins" and not text):
                yield f"{where} {key}", text, f'a range such as "1000001-2000000", from 1 to {highest}'
                continue
            other = next((owner for first, last, owner in taken if first <= high and low <= last), None)
            if other is not None:
                yield f"{where} {key}", text, f"apart from those of the tenant {other}: a number belongs to one tenant"
            taken.append((low, high, name))
        prefix = tenant.prefix or name
        levels = prefix.split("/")
        if len(prefix) > MAX_PREFIX or not prefix.isprintable() or has_wildcard(prefix) or "$" in prefix[:1] or "" in levels:
            yield f"{where} prefix", prefix, f"a topic of at most {MAX_PREFIX} characters, without wildcards and empty levels"
        elif levels[0] in _RESERVED:
            yield f"{where} prefix", prefix, "a free topic: not below room or user"
        for other, owner in prefixes.items():
            if f"{other}/".startswith(f"{prefix}/") or f"{prefix}/".startswith(f"{other}/"):
                yield f"{where} prefix", prefix, f"apart from that of the tenant {owner}, {other}: neither may be below the other"
        prefixes[prefix] = name
        if not tenant.weight:
            yield f"{where} weight", tenant.weight, "above 0"
