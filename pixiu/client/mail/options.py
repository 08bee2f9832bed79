"""Options of a mail: its level, lane, lifetime and further receivers, and checks of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final, Literal, TypedDict

from pixiu.errors import InvalidArgument, TooManyReceivers
from pixiu.ids import MAX_ID, is_within
from pixiu.wire.inbox_operations import MAX_RECEIVERS
from pixiu.wire.levels import Level

LevelName = Literal["replicated", "persisted", "accepted"]
LEVELS: Final = {"replicated": Level.REPLICATED, "persisted": Level.PERSISTED, "accepted": Level.ACCEPTED}
MAX_EXPIRE_MIN: Final = 65_535


class MailSendOptions(TypedDict, total=False):
    """Options of a mail beside its payload: `await user.mail(b"…", level="persisted")`."""

    level: LevelName
    """"replicated", the default: confirmed when it is on the disks of all replicas in sync; "persisted": on both leaders' disks;
    "accepted": in both leaders' logs. The latter two may be lost by a change of leader."""
    lane: int
    """0 is delivered before 1; 1 by default. Order holds within a lane."""
    expire: timedelta | None
    """Lifetime, in whole minutes; None, the default: as long as the cluster keeps mail."""
    to: Iterable[int]
    """Further receivers, at most 1 000 in all; the body is stored once."""
    type: int
    """A number for the application, 0 to 63; 0 by default."""
    extension: bytes
    """Bytes beside the payload, instead of headers: at most 65 535; none by default."""
    headers: Mapping[str, str] | None
    """Named texts, which receivers read as `mail.headers`: at most 64, of 65 535 bytes; None, the default: none."""
    load_test: bool
    """True: it belongs to a load test, and receivers do not get it unless they ask for such. Default: as the message that is being
    handled by a handler of `run`; else False."""
    derived_id: int | None
    """ID derived from the content's origin; None, the default: a new ID. For a day after the mail was stored, sending it again
    stores nothing; different content under the same ID fails with `IdReused`."""


def minutes_of(expire: timedelta | None) -> int:
    """Convert a lifetime to whole minutes, rounded up; 0 for none. Raises `InvalidArgument`."""
    if expire is None:
        return 0
    if not isinstance(expire, timedelta):
        raise InvalidArgument(f"expire is a timedelta, not {expire!r}; write expire=timedelta(minutes=5)")
    minutes = -int(-expire.total_seconds() // 60)
    if not 0 < minutes <= MAX_EXPIRE_MIN:
        raise InvalidArgument(f"expire is above 0 and at most {MAX_EXPIRE_MIN} minutes, not {expire}")
    return minutes


def receivers_of(uin: int, to: Iterable[int]) -> tuple[int, ...]:
    """Check the receivers and return those besides the first one. Raises `InvalidArgument` and `TooManyReceivers`."""
    if to == () and is_within(uin, 1, MAX_ID):
        return ()
    if isinstance(to, str | bytes) or not isinstance(to, Iterable):
        raise InvalidArgument(f"to is a list of UINs, not {to!r}; write to=[8, 9]")
    receivers = list(dict.fromkeys([uin, *to]))
    if len(receivers) > MAX_RECEIVERS:
        raise TooManyReceivers(f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several")
    for each in receivers:
        if not is_within(each, 1, MAX_ID):
            raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {each!r}")
    return tuple(receivers[1:])


def level_of(level: str) -> Level:
    """Look up a level by its name. Raises `InvalidArgument`."""
    found = LEVELS.get(level)
    if found is None:
        raise InvalidArgument(f"a level is one of {', '.join(LEVELS)}, not {level!r}")
    return found
