"""Retries of Spark's work that Spark gave up for lack of CPU.

Spark gives a new Python process ten seconds to connect, which cannot be changed; on a very busy machine it ends the query. A
streaming query continues at its checkpoint, so that nothing is lost or repeated.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

TRIES: Final = 10
"""Policy: Spark gets a minute and a half of a machine without free CPU."""
BUSY: Final = "Python worker failed to connect back"
T = TypeVar("T")


def until_not_busy(work: Callable[[], T]) -> T:
    """Run the work and return its result; try `TRIES` times in all if no Python process connected in time. Raises the last
    error."""
    tries = 1
    while True:
        try:
            return work()
        except Exception as error:
            if BUSY not in str(error) or tries == TRIES:
                raise
        tries += 1


def run_to_end(start: Callable[[], Any]) -> list[Any]:
    """Start a query that ends by itself, and wait for its end; return all queries started, the last of which did the rest.

    Raises the last one's error.
    """
    queries: list[Any] = []

    def run() -> None:
        queries.append(start())
        queries[-1].awaitTermination()

    until_not_busy(run)
    return queries
