"""Steps of the wall clock that every use of it has to stand: a wrong time zone, a day and more, an empty battery."""

from __future__ import annotations

from typing import Final

HOUR_MS: Final = 3_600_000
NOW_MS: Final = 1_751_958_000_000
IN_2018_MS: Final = 1_530_000_000_000
STEPS_MS: Final = (8 * HOUR_MS, -8 * HOUR_MS, 30 * HOUR_MS, -30 * HOUR_MS, IN_2018_MS - NOW_MS)
