"""Events and effects of a relay's core: as for all members of the shared map."""

from __future__ import annotations

from cluster.membership.events import Effect, Event

__all__ = ["Effect", "Event"]
