"""Bounds and times of deliveries.

Source: docs/delivery.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pixiu.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and times of one relay's deliveries."""

    opening: int = 128
    """Limit of sessions being opened, up to their first entries. Policy: the others wait in order of their logins."""
    fetching: int = 256
    """Limit of open sessions that read Pi and Xiu. Policy: the others wait in order."""
    fetch_entries: int = 64
    """Limit of messages of one fetch, all lanes together."""
    max_sessions: int = 1_000_000
    """Limit of served devices. Policy: a further login is refused and counted; its heartbeats try again."""
    max_remembered: int = 100_000
    """Limit of devices that are gone and whose sent positions are remembered. Policy: the oldest is forgotten: mail that it gets
    again is not marked."""
    max_leaving: int = 10_000
    """Limit of logged-out devices whose last acknowledgements still count. Policy: the oldest is forgotten, and gets the mail
    concerned again."""
    record_bytes: int = 1024
    """Size limit of a record that is sent straight from a notice."""
    call_timeout_s: float = 3.0
    """Time limit of an answer of Pi or Xiu."""
    slot_timeout_s: float = 30.0
    """Time limit of a session's wait for its turn; then it pauses and asks again."""
    pause_s: float = 0.2
    """Pause after a failure; doubles up to `max_pause_s`, with jitter."""
    max_pause_s: float = 5.0
    resend_s: float = 10.0
    """Time without an acknowledgement after which unacknowledged mail is redelivered; doubles up to `max_resend_s`."""
    max_resend_s: float = 60.0
    hold_s: float = 30.0
    """Time for which a gateway whose stream broke gets nothing, unless the stream is ready earlier."""
    poll_s: float = 60.0
    """Interval of reads of Pi, in case a notice was lost."""
    seen_s: float = 12 * 3600.0
    """Time without an acknowledgement after which a device's cursor is saved at Pi all the same: else a connected device without
    mail would no longer count after a month."""
    reread_s: float = 0.5
    """Delay of a further read after a notice without a number: its entry may have been on its way to the inbox."""
    settle_s: float = 3.0
    """Delay of a further read after the login of a session that was taken over: by then all relays see the same owners."""
    acknowledge_wait_s: float = 0.02
    """Time for which acknowledgements wait to leave together."""
    acknowledge_batch: int = 1000
    """Limit of cursors in one call."""
    acknowledge_calls: int = 8
    """Limit of calls with cursors in progress. Policy: further cursors wait; a waiting cursor is replaced by a newer one."""
    fenced_pause_s: float = 5.0
    """Pause before a fenced session is opened again: two relays that both consider themselves the owner fence each other no
    faster."""

    def validate(self) -> None:
        """Raise `ConfigurationError` that names the key."""
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise ConfigurationError(f"{limit.name} = {getattr(self, limit.name)}: must be above 0")
