"""Times and sizes as people write them. Pure."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from pixiu.errors import InvalidArgument

TIMES: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
SIZES: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
UNITS: Final = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))
"""Milliseconds of the units in which times are said."""
_VALUE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)


def milliseconds_of(text: str) -> int:
    """A time such as `90`, `500ms` or `12h`, in milliseconds. Raises `InvalidArgument`."""
    return round(_value(text, TIMES, "a time such as 90, 500ms, 12h or 7d") * 1000)


def seconds_of(text: str) -> int:
    """A time, in whole seconds. Raises `InvalidArgument`."""
    return milliseconds_of(text) // 1000


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
    return int(_value(text, SIZES, "a size such as 100MB or 50GiB"))


def moment_of(text: str, now_s: float) -> int:
    """A moment, Unix µs: a time ago such as `10m`, or a date such as 2026-11-30T12:00. Raises `InvalidArgument`."""
    if _VALUE.fullmatch(text):
        return int((now_s - milliseconds_of(text) / 1000) * 1_000_000)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1_000_000)
    except ValueError:
        raise InvalidArgument(f"{text!r} must be a time ago such as 10m, or a date such as 2026-11-30T12:00") from None


def _value(text: str, units: dict[str, float] | dict[str, int], wanted: str) -> float:
    found = _VALUE.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise InvalidArgument(f"{text!r} must be {wanted}")
    return float(found[1]) * units[found[2].lower()]
