"""The ticket of a mail, and the rules of sending it. Pure.

All mail of a client goes through one stream of a writer (`pixiu.client.send.sender`), whatever its receivers.

Source: docs/architecture.md, "A mail is sent"; Swift (the write protocol).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pixiu.client.options import ClientOptions
from pixiu.client.send.events import Outcome, Ticket
from pixiu.client.send.policy import Policy, Writer
from pixiu.errors import OutcomeUnknown
from pixiu.wire.levels import Level
from pixiu.wire.record import LANE_NORMAL

STALL_S: Final = 30.0
"""A proxy that owes an answer and is silent for this time is left for another one, seconds. Above `proxy.mail_timeout_s`."""
MAX_BACKOFF_S: Final = 1.0
RESEND: Final = "`resend` it, which uses the same ID, so that it is stored once"
MAX_OPEN_SHOWN: Final = 1000


class MailTicket(Ticket):
    """A mail from its offer until it is resolved."""

    __slots__ = ("copies", "level", "more", "msg_id", "open")
    level: Level

    def __init__(self, record: bytes, message_id: int, level: Level, more: tuple[int, ...] = ()) -> None:
        super().__init__(record, 0, LANE_NORMAL, message_id)  # one queue: a stream keeps the order of all lanes and receivers
        self.size += 8 * len(more)
        self.level = level
        self.more = more
        self.msg_id = self.copies = 0
        self.open: tuple[int, ...] = ()

    def learn(self, outcome: Outcome, index: int) -> None:
        """Note where the mail is stored, and how often."""
        if index < len(outcome.msg_ids):
            self.msg_id = outcome.msg_ids[index]
        self.copies = outcome.copies
        self.open = tuple(outcome.open[:MAX_OPEN_SHOWN]) if outcome.open else ()


def mail_policy(options: ClientOptions, worker: Callable[[], int], clock_s: Callable[[], float]) -> Policy:
    """Rules of mail. `worker` returns the current worker number, `clock_s` Unix seconds."""
    longest_s, writer = min(MAX_BACKOFF_S, options.max_backoff_s), Writer(worker, clock_s)
    return Policy(options, "mail", options.mail_timeout_s, STALL_S, longest_s, RESEND, OutcomeUnknown.code, writer=writer)
