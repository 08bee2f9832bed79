"""Work of Spark's begun again where Spark gave up for want of CPU.

Spark gives a new Python process ten seconds to connect, which cannot be set; on a machine that is busy enough it ends the query. A
streaming query goes on at its checkpoint, so that nothing is lost or comes twice.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

TRIES: Final = 10
"""Policy: Spark is given a minute and a half of a machine that has no CPU for it."""
BUSY: Final = "Python worker failed to connect back"
T = TypeVar("T")


def until_not_busy(work: Callable[[], T]) -> T:
    """What the work returns; it is done again, `TRIES - 1` times at the most, when no Python process connected in time. Raises what
    it raised last."""
    tries = 1
    while True:
        try:
            return work()
        except Exception as error:
            if BUSY not in str(error) or tries == TRIES:
                raise
        tries += 1


def run_to_end(start: Callable[[], Any]) -> list[Any]:
    """Start a query that ends by itself, and wait until it has; the queries that it took, the last of which did all that was left.

    Raises what the last one raised.
    """
    queries: list[Any] = []

    def run() -> None:
        queries.append(start())
        queries[-1].awaitTermination()

    until_not_busy(run)
    return queries
