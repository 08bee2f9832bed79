"""Times, sizes and offsets as people write them. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Final

from pixiu.discovery.topics import MAX_TIMEOUT_MS, MIN_TIMEOUT_MS
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID

MAX_SECONDS: Final = MAX_ID // 1_000_000
"""Limit of times, so that they are also numbers of microseconds."""
MAX_DIGITS: Final = 40
"""Limit of a number's length, characters."""
TIMES: Final = {"": 1_000, "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
SIZES: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
UNITS: Final = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))
"""Milliseconds of the units in which times are said."""
_VALUE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_TIME: Final = "a time such as 90, 500ms, 12h or 7d"


def seconds_of(text: str) -> int:
    """A time such as `90` or `12h`, in whole seconds. Raises `InvalidArgument`."""
    milliseconds = _value(text, TIMES, _TIME)
    if 0 < milliseconds < 1_000:
        raise InvalidArgument(f"{text!r} must be 0, or at least 1 second")
    if milliseconds > MAX_SECONDS * 1_000:
        raise InvalidArgument(f"{text!r} must be at most {MAX_SECONDS // 86_400}d")
    return int(milliseconds) // 1_000


def timeout_ms_of(text: str) -> int:
    """The time for which a member of a channel may keep a message, in milliseconds; 0: as it is. Raises `InvalidArgument`."""
    milliseconds = _value(text, TIMES, _TIME)
    if milliseconds and not MIN_TIMEOUT_MS <= milliseconds <= MAX_TIMEOUT_MS:
        raise InvalidArgument(f"{text!r} must be from {MIN_TIMEOUT_MS}ms to {MAX_TIMEOUT_MS // 3_600_000}h, or 0")
    return int(milliseconds)


def duration_text(milliseconds: int, most: int = 4) -> str:
    """A time in words, such as `7 days` or `1 minute 30 seconds`: its `most` greatest units, rounded down."""
    said: list[str] = []
    left = milliseconds
    for name, size in UNITS:
        count, left = divmod(left, size)
        said += [f"{count:,} {name}{'s' if count != 1 else ''}"] if count else []
    said += [f"{left} ms"] if left and (most >= len(UNITS) or not said) else []
    return " ".join(said[:most]) or "0 seconds"


def bytes_of(text: str) -> int:
    """A size such as `100MB` or `50GiB`. Raises `InvalidArgument`."""
    size = _value(text, SIZES, "a size such as 100MB or 50GiB")
    if 0 < size < 1:
        raise InvalidArgument(f"{text!r} must be 0, or at least 1 byte")
    if size > MAX_ID:
        raise InvalidArgument(f"{text!r} must be at most {MAX_ID // SIZES['tib']}TiB")
    return int(size)


def moment_of(text: str, now_s: float) -> int:
    """A moment, Unix µs: a time ago such as `10m`, or a date such as 2026-11-30T12:00. Raises `InvalidArgument`."""
    if _VALUE.fullmatch(text):
        ago = _value(text, TIMES, _TIME)
        if ago > now_s * 1_000:
            raise InvalidArgument(f"{text!r} must be at most {int(now_s) // 86_400}d: times begin with 1970")
        return int((now_s - float(ago) / 1_000) * 1_000_000)
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} must be a time ago such as 10m, or a date such as 2026-11-30T12:00") from None
    try:
        moment = int(date.timestamp() * 1_000_000)
    except (ValueError, OverflowError):  # the first and the last day that a date may have, in some time zones
        moment = -1
    if moment < 0:
        raise InvalidArgument(f"{text!r} must be from 1970-01-01 to 9999-12-30")
    return moment


def offset_of(text: str, parts: list[int] | None) -> int:
    """The offset of `@OFFSET`, which is one of the one part that is named. Raises `InvalidArgument`."""
    number = text[1:]
    if not number.isdecimal() or not parts or len(parts) != 1:
        raise InvalidArgument("an offset is @NUMBER, and of one part: give --part PART")
    if len(number) > MAX_DIGITS or int(number) > MAX_ID:
        raise InvalidArgument(f"an offset is at most {MAX_ID}")
    return int(number)


def _value(text: str, units: dict[str, int], wanted: str) -> Decimal:
    found = _VALUE.fullmatch(text.strip())
    if found is None or found[2].lower() not in units or len(found[1]) > MAX_DIGITS:
        raise InvalidArgument(f"{text[:MAX_DIGITS]!r} must be {wanted}")
    return Decimal(found[1]) * units[found[2].lower()]
