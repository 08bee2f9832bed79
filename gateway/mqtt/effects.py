"""Kinds of effects of a connection's session, as the shell needs them.

Source: docs/mqtt.md.
"""

from __future__ import annotations

from typing import Final

from cluster.mqtt.events import Close, CloseReason, PublishMessages, SubscribeFilters, UnsubscribeFilters

IN_TURN: Final = (PublishMessages, SubscribeFilters, UnsubscribeFilters, Close)
"""Effects that must not overtake those waiting for a callback: a client that publishes and leaves has published."""
LOGOUT_REASONS: Final = {
    CloseReason.KEEP_ALIVE: 2,
    CloseReason.CONNECTION_LOST: 2,
    CloseReason.SLOW_CONSUMER: 3,
    CloseReason.DRAINING: 4,
    CloseReason.TAKEN_OVER: 5,
    CloseReason.REPLACED: 5,
}
"""Reason of a user's departure, as `Reason` of control.proto; 1 (left) otherwise."""
