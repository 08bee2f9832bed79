"""What happens to a router's core, and what it asks its shell to do: as for every soft role, with `Change` as message.

Source: DESIGN section 10.
"""

from __future__ import annotations

from pixiu.replicas.events import Effect, Event, MessagesReceived, Replica
from pixiu.softstore import Change

RouterMessages = MessagesReceived[Change]
"""Gateway messages, from a gateway or from another router."""

__all__ = ["Effect", "Event", "Replica", "RouterMessages"]
