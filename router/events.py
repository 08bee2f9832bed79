"""Events of a router's core, and the effects that it requests: those of all members of the shared map."""

from __future__ import annotations

from cluster.membership.events import Effect, Event

__all__ = ["Effect", "Event"]
