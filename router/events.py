"""What happens to a router's core, and what it asks its shell to do: what every soft role has, `pixiu.replicas.events`."""

from __future__ import annotations

from pixiu.replicas.events import Effect, Event

__all__ = ["Effect", "Event"]
