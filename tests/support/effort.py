"""How much of what can be repeated at will is played: little while one works, more in continuous integration."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
"""Set by services of continuous integration, and by `.ci/run`."""
A_DAY_S = 24 * 3600
PORTION = 6
"""One case in so many is played locally; which, changes every day."""


def runs(variable: str, local: int, ci: int) -> int:
    """How many seeds to play: what the environment variable says; without it `ci` in continuous integration, else `local`."""
    return int(os.environ.get(variable) or (ci if CI else local))


def portion(cases: Iterable[Case]) -> list[Case]:
    """All cases in continuous integration; locally a sixth, or one, by the day's number: in six days all are played."""
    everything = list(cases)
    parts = min(PORTION, len(everything))
    return everything if CI else everything[int(time.time() // A_DAY_S) % parts :: parts]
