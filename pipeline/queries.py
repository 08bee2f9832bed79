"""Streaming queries that end by themselves, begun again where Spark gave up for want of CPU.

Spark gives a new Python process ten seconds to connect, which cannot be set; on a machine that is busy enough it ends the query. A
query goes on at its checkpoint, so that nothing is lost or comes twice.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

TRIES: Final = 10
"""Policy: Spark is given a minute and a half of a machine that has no CPU for it."""
BUSY: Final = "Python worker failed to connect back"


def run_to_end(start: Callable[[], Any]) -> list[Any]:
    """Start a query, and wait until it has ended; again, `TRIES - 1` times at the most, when no Python process connected in time.

    Returns the queries, the last of which did all that was left. Raises what the last one raised.
    """
    queries: list[Any] = []
    while True:
        query = start()
        queries.append(query)
        try:
            query.awaitTermination()
        except Exception as error:
            if BUSY not in str(error) or len(queries) == TRIES:
                raise
            continue
        return queries
