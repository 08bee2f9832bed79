"""Events and effects of messages for kept sessions: between a proxy's core, its writer of them, and their shell.

core ──▶ AskKept ──▶ routers ──▶ KeptMatched ──▶ core ──▶ StoreKept ──▶ writer ──▶ mail core ──▶ writer ──▶ KeptStored ──▶ core
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.contract import Tick
from pixiu.errors import Refusal
from proxy import mail_events as mail_ev


class Question(NamedTuple):
    """A message whose sessions are asked for."""

    number: int
    """Of the message."""
    room: int
    topic: bytes
    session: int
    """Of the client that published it; 0: none."""


@dataclass(frozen=True, slots=True)
class AskKept:
    """Ask the routers."""

    questions: Sequence[Question]


@dataclass(frozen=True, slots=True)
class KeptMatched:
    """The routers answered, for each message: its number and its sessions."""

    answers: Sequence[tuple[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class KeptRefused:
    """The routers did not answer for these messages."""

    numbers: Sequence[int]
    why: Refusal


class KeptMail(NamedTuple):
    """A message for at most as many sessions as one mail has receivers."""

    number: int
    """Of the message; a message to more sessions has several mails."""
    mail: mail_ev.RoomMail
    until: float
    """Time after which nobody waits for it, monotonic seconds."""


@dataclass(frozen=True, slots=True)
class StoreKept:
    """Store messages, those of each room in this order."""

    mails: Sequence[KeptMail]


@dataclass(frozen=True, slots=True)
class KeptStored:
    """Outcome of mails, by the number of the message; None: every session's inbox has it."""

    outcomes: Sequence[tuple[int, Refusal | None]]


@dataclass(frozen=True, slots=True)
class KeptAvailable:
    """The cluster can keep messages, or not: it has routers and both stores."""

    available: bool


@dataclass(frozen=True, slots=True)
class WriterLent:
    """The writer has a worker number. `generation` is above those of all that had it before."""

    worker: int
    generation: int


WriterEvent = StoreKept | WriterLent | mail_ev.Answer | mail_ev.EndWriter | Tick
WriterEffect = KeptStored | mail_ev.WriterOpened | mail_ev.RoomMailReceived
