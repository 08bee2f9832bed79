"""The differences between senders of rooms and of mail. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pixiu.client.options import ClientOptions
from pixiu.errors import Draining, StaleWriter, Unavailable
from pixiu.wire.inbox_operations import next_generation


class Writer:
    """Number and generation of a writer: each of its streams has a higher generation than those before.

    Args:
        held: returns the current worker number.
        clock_s: Unix seconds.
    """

    def __init__(self, held: Callable[[], int], clock_s: Callable[[], float]) -> None:
        self._held, self._clock_s = held, clock_s
        self._stale = 0
        self.worker = -1
        self.generation = 0

    def changed(self) -> bool:
        """True if another number is held than when the last stream began."""
        return self._held() != self.worker

    def begin(self) -> None:
        """Begin a stream. After others were stale, leap over whoever uses the number with a higher generation."""
        self.worker = self._held()
        self.generation = next_generation(self.generation, self._clock_s(), (1 << min(self._stale, 20)) - 1)

    def ended(self, code: str) -> None:
        """Note the code with which a stream ended; empty: it was answered."""
        self._stale = self._stale + 1 if code == StaleWriter.code else 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of one sender."""

    options: ClientOptions
    noun: str
    timeout_s: float
    """Time for which a message may be unresolved."""
    stall_s: float
    """Time after which a silent proxy that owes an answer is left for another one."""
    max_backoff_s: float
    advice: str
    """Consequence of sending a message again whose outcome is unknown."""
    again: str
    """Code of an outcome that resolves nothing: the message is sent again, through another stream."""
    unsent: str = ""
    """Code with which a proxy that alone had a message reports that it reached nobody."""
    writer: Writer | None = None
    """All messages go through one stream of this writer, in order; None: a stream to each proxy, and only each key in order."""


SEND_AGAIN = "sending it again may deliver it twice"


def room_policy(options: ClientOptions) -> Policy:
    """Rules of messages to rooms, topics and users; a silent proxy is left early enough for one more attempt."""
    timeout_s, longest_s = options.publish_timeout_s, options.max_backoff_s
    return Policy(options, "message", timeout_s, timeout_s / 2, longest_s, SEND_AGAIN, Draining.code, Unavailable.code)
