"""The page /tenants of a gateway: what each tenant uses here, and what was refused to it.

Source: docs/tenants.md, "Seeing it".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.access.tenants.book import TenantBook
from cluster.access.tenants.use import TenantUse
from gateway.tenants.watch import TenantWatch


def tenants(book: TenantBook, watch: TenantWatch) -> dict[str, object]:
    """The JSON of /tenants. Counts are since the start of the gateway."""
    return {"pressure": round(watch.pressure, 3), "tenants": [_shown(used) for used in book]}


async def counted(book: TenantBook, watch: TenantWatch, _query: Mapping[str, str]) -> dict[str, object]:
    """The same, after a look at the routers."""
    await watch.count_kept()
    return tenants(book, watch)


def system_topics(book: TenantBook) -> dict[str, object]:
    """Topic below `$SYS/` → value, of what tenants may know about themselves."""
    found: dict[str, object] = {}
    for used in book:
        counts = used.counters
        said = {"clients/connected": used.sessions, "messages/sent": counts.messages_out, "messages/received": counts.messages_in}
        said["subscriptions/count"] = used.subscriptions
        found |= {f"tenant/{used.name}/broker/{name}": value for name, value in said.items()}
    return found


def _shown(used: TenantUse) -> dict[str, Any]:
    counts, settings = used.counters, used.settings
    return {
        "tenant": used.name, "weight": settings.weight, "stage": used.stage.name.lower(), "sessions": used.sessions,
        "max_sessions": settings.connections, "subscriptions": used.subscriptions, "max_subscriptions": settings.subscriptions,
        "retained": used.retained.messages, "max_retained": settings.retained_messages,
        "kept": used.kept, "max_kept": settings.kept_sessions,
        **{name: getattr(counts, name) for name in counts.__slots__},
    }  # fmt: skip
