"""Rates at which topics may be read: a part gives its share of them, to members and readers together. Pure.

What a channel gives is charged when it is given, by the size that messages of the part have had lately; the difference follows when
they are cut from their blocks. So a member has at most a moment's worth of messages that wait for nothing but the rate.

Source: docs/topics.md, "Reading".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cluster.core.token_bucket import Meter
from cluster.topics.entries import topic_of
from pixiu.placement.slots import SLOTS
from topic.state.parts import Part
from topic.state.state import State

BURST_S: Final = 1.0
"""Burst of a topic's rates, seconds."""
STEP_S: Final = 0.1
"""Share of a second's worth that is given at once at most; a message, and to readers a block, always may be."""
FIRST_SIZE: Final = 1_024.0
"""Size that a message is taken to have before any was given, bytes."""
WEIGHT: Final = 0.25
"""Weight of the latest messages in the average size."""


@dataclass(slots=True)
class _Pace:
    """A part that has a rate."""

    rates: tuple[float, float]
    """Messages and bytes a second; 0: no limit."""
    meter: Meter
    size: float = FIRST_SIZE
    """Average size of its messages lately."""


class Paces:
    """The messages that the parts of a leader have given lately.

    Args:
        state: of the group.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._parts: dict[int, _Pace] = {}

    def clear(self) -> None:
        """The leader has changed."""
        self._parts.clear()

    def _of(self, part: Part, now: float) -> _Pace | None:
        """The pace of a part; None: its topic has no rate."""
        topic = self._state.topics.get(topic_of(part.part))
        if topic is None or not (topic.read_messages_per_s or topic.read_bytes_per_s):
            return None
        share = (part.high - part.low) / SLOTS
        rates = topic.read_messages_per_s * share, topic.read_bytes_per_s * share
        found = self._parts.get(part.part)
        if found is None or found.rates != rates:
            self._parts = {each: pace for each, pace in self._parts.items() if each in self._state.parts}
            size = found.size if found is not None else FIRST_SIZE
            found = self._parts[part.part] = _Pace(rates, Meter(*rates, BURST_S, now), size)
        return found

    def wait_s(self, part: Part, now: float) -> float:
        """Time until a part may give something; 0: now."""
        pace = self._of(part, now)
        return 0.0 if pace is None else pace.meter.wait_s(now)

    def limit(self, part: Part, messages: int, now: float) -> int:
        """Messages of so many that a part may give to a member at once."""
        pace = self._of(part, now)
        if pace is None:
            return messages
        per_s, bytes_per_s = pace.rates
        most = [messages, *([per_s * STEP_S] if per_s else []), *([bytes_per_s * STEP_S / pace.size] if bytes_per_s else [])]
        return max(1, math.floor(min(most)))

    def gave(self, part: Part, messages: int, now: float) -> None:
        """Charge messages that a member gets."""
        pace = self._of(part, now)
        if pace is not None:
            pace.meter.spend(messages, math.ceil(messages * pace.size), now)

    def cut(self, part: Part, messages: int, size: int, now: float) -> None:
        """Note the size of messages that were charged before."""
        pace = self._of(part, now)
        if pace is not None:
            pace.meter.spend(0, size - math.ceil(messages * pace.size), now)
            pace.size += (size / messages - pace.size) * WEIGHT

    def read(self, part: Part, messages: int, size: int, now: float) -> None:
        """Charge what a reader gets."""
        pace = self._of(part, now)
        if pace is not None:
            pace.meter.spend(messages, size, now)

    def read_limit(self, part: Part, size: int, now: float) -> int:
        """Bytes of so many that a reader may get at once."""
        pace = self._of(part, now)
        return size if pace is None or not pace.rates[1] else max(1, min(size, int(pace.rates[1] * STEP_S)))
