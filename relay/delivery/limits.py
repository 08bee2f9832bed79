"""How much delivery does at once, and how long it waits.

Source: docs/delivery.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pixiu.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and times of one relay's deliveries."""

    opening: int = 128
    """Sessions that are opened at a time, up to their first entries. Policy: the others wait in order of their logins."""
    fetching: int = 256
    """Open sessions that read Pi and Xiu at a time. Policy: the others wait in their order."""
    fetch_entries: int = 64
    """Messages of one fetch, all lanes together."""
    max_sessions: int = 1_000_000
    """Devices that are served. Policy: a further login is refused and counted; its heartbeats try again."""
    max_remembered: int = 100_000
    """Devices that are gone and of which it is still known what was sent. Policy: the oldest is forgotten: what it gets
    again is not marked."""
    max_leaving: int = 10_000
    """Devices that logged out last, and whose last acknowledgements still count. Policy: the oldest is forgotten, and gets again
    what they were of."""
    record_bytes: int = 1024
    """A notify's record up to this size is sent on as it is."""
    call_timeout_s: float = 3.0
    """How long Pi and Xiu have for an answer."""
    slot_timeout_s: float = 30.0
    """How long a session waits for its turn before it pauses and asks again."""
    pause_s: float = 0.2
    """Before what failed is tried again; doubles up to `max_pause_s`, with jitter."""
    max_pause_s: float = 5.0
    resend_s: float = 10.0
    """After so long without an acknowledgement what is unacknowledged is redelivered; doubles up to `max_resend_s`."""
    max_resend_s: float = 60.0
    hold_s: float = 30.0
    """A gateway whose stream broke gets nothing for so long, or until the stream is there again."""
    poll_s: float = 60.0
    """Pi is asked so long after the last read, in case that a notify was lost."""
    seen_s: float = 12 * 3600.0
    """A device that acknowledged nothing for so long is told of to Pi all the same, by its cursor: else one that is connected and
    gets no mail would no longer count after a month."""
    reread_s: float = 0.5
    """Pi is asked once more so long after a notify without a number: its entry may have been on its way to the inbox."""
    settle_s: float = 3.0
    """A session that was taken over reads Pi once more so long after its login: by then all see the same owners."""
    acknowledge_wait_s: float = 0.02
    """Acknowledgements wait so long to leave together."""
    acknowledge_batch: int = 1000
    """Cursors in one call."""
    acknowledge_calls: int = 8
    """Calls with cursors that are under way. Policy: further cursors wait; a cursor that waits is replaced by a newer one."""
    fenced_pause_s: float = 5.0
    """A session that was fenced is not opened again before: two relays that both take themselves for the owner do not
    chase each other faster than that."""

    def validate(self) -> None:
        """Raises `ConfigurationError` that names the key."""
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise ConfigurationError(f"{limit.name} = {getattr(self, limit.name)}: must be above 0")
