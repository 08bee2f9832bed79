"""How much of what can be repeated at will is played: little while one works, more in continuous integration, by turns in both."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
"""Set by services of continuous integration, and by `.ci/run`."""
PORTION = 3 if CI else 6
"""One case in so many is played."""


def _turn_of_now() -> int:
    """Locally the number of the day. In continuous integration one that is another's a run later, be that in 20 minutes, an hour, a
    day or a week."""
    minutes = int(time.time()) // 60
    days = minutes // 1440
    return minutes // 20 + minutes // 60 + days if CI else days


TURN = int(os.environ.setdefault("PIXIU_TURN", str(_turn_of_now())))
"""Which cases are played, and which simulations with many seeds; one for all workers of a run. Who repeats a run names it."""


def in_full(variable: str) -> bool:
    """Whether continuous integration plays many seeds this time of what the variable counts. It does in one turn of three."""
    return CI and (zlib.crc32(variable.encode()) - TURN) % PORTION == 0


def runs(variable: str, local: int, ci: int) -> int:
    """How many seeds to play: what the environment variable says; without it `ci` in a turn of its own, else `local`."""
    return int(os.environ.get(variable) or (ci if in_full(variable) else local))


def portion(cases: Iterable[Case]) -> list[Case]:
    """A third of the cases in continuous integration, a sixth locally, one at least; so many turns play all of them."""
    everything = list(cases)
    parts = min(PORTION, len(everything))
    return everything[TURN % parts :: parts]
