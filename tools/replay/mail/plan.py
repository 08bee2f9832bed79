"""The schedule of a replay of mail: senders, receivers and times, and each receiver's presence. Pure.

    user   ──[here]────────────[here]───────────[here]──        a stay in each cycle, somewhere in it, by the seed
    mail   ─x──x─────x──────x───────────x─x──────x─────         in the log's time, faster
                                                    [until all is acknowledged]

Source: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.ids import UIN
from tools.replay.inbox import Mention
from tools.replay.log import Names
from tools.replay.plan import share_of

MAX_STAYS: Final = 1_000_000
"""Limit of the stays of all users together."""


class Letter(NamedTuple):
    """One mail to send."""

    at_s: float
    """Seconds since the replay's start."""
    sender: UIN
    to: UIN
    text: bytes


class Stay(NamedTuple):
    """A period in which a user is connected."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class MailSchedule:
    """Times of users' presence. `validate()` names the option at fault."""

    seconds: float = 60.0
    """Time in which the whole log is sent, seconds."""
    online: float = 0.1
    """Share of the time in which each user is connected."""
    cycle_s: float = 30.0
    """Interval in which each user connects once, seconds."""
    seed: int = 1
    """Seed of the times at which users connect."""

    def validate(self) -> None:
        """Check all options. Raises `ConfigurationError` that names the option at fault."""
        for name in ("seconds", "cycle_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigurationError(f"replay option {name} = {getattr(self, name)}: must be above 0 and below a million")
        if not 0 < self.online <= 1:
            raise ConfigurationError(f"replay option online = {self.online}: must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class MailPlan:
    """A schedule of mail."""

    letters: list[Letter]
    """Letters in the order of time; a letter's number is its place."""
    stays: dict[UIN, list[Stay]]
    """Stays of each receiver, in the order of time."""
    names: Names
    senders: int
    schedule: MailSchedule


def make_mail_plan(mentions: Iterable[Mention], schedule: MailSchedule) -> MailPlan:
    """Make the schedule of mentions that are in the order of time.

    Raises `InvalidArgument` when there are none, two names have one ID, or users would connect too often; `ConfigurationError`.
    """
    schedule.validate()
    listed = list(mentions)
    if not listed:
        raise InvalidArgument("there are no mentions to send")
    names = Names()
    first, span = listed[0].ts_ms, max(listed[-1].ts_ms - listed[0].ts_ms, 1)
    letters = [
        Letter((each.ts_ms - first) / span * schedule.seconds, names.user(each.user), names.user(each.to), each.text)
        for each in listed
    ]
    receivers = sorted({letter.to for letter in letters})
    cycles = max(round(schedule.seconds / schedule.cycle_s), 1)
    if cycles * len(receivers) > MAX_STAYS:
        raise InvalidArgument(
            f"{len(receivers)} users would come {cycles} times; a replay has at most {MAX_STAYS}: a longer --cycle"
        )
    stays = {uin: _stays(uin, cycles, schedule) for uin in receivers}
    return MailPlan(letters, stays, names, len({letter.sender for letter in letters}), schedule)


def _stays(uin: UIN, cycles: int, schedule: MailSchedule) -> list[Stay]:
    """Choose one stay in each cycle, at a random place; it is the same for the same user and seed, regardless of other users."""
    length = schedule.online * schedule.cycle_s
    found: list[Stay] = []
    for cycle in range(cycles):
        begin = cycle * schedule.cycle_s + share_of(uin, schedule.seed, cycle) * (schedule.cycle_s - length)
        if found and begin <= found[-1].end_s:
            found[-1] = Stay(found[-1].begin_s, begin + length)  # join two that touch
        else:
            found.append(Stay(begin, begin + length))
    return found
