"""What happens to a broker's core, and what it asks its shell to do: as with all members of the shared map."""

from __future__ import annotations

from cluster.membership.events import Effect, Event

__all__ = ["Effect", "Event"]
