"""What happens to a router's core, and what it asks its shell to do: as every soft role, `cluster.membership.replica_events`."""

from __future__ import annotations

from cluster.membership.replica_events import Effect, Event

__all__ = ["Effect", "Event"]
