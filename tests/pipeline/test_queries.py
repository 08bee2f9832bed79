"""A query that Spark ended for want of CPU is begun again; what it ended for anything else is not."""

from __future__ import annotations

import pytest

from pipeline.queries import BUSY, TRIES, run_to_end


class Query:
    def __init__(self, problem: str) -> None:
        self._problem = problem

    def awaitTermination(self) -> None:
        if self._problem:
            raise RuntimeError(self._problem)


@pytest.mark.parametrize("busy", range(TRIES))
def test_a_query_whose_python_did_not_connect_is_begun_again(busy: int) -> None:
    queries = iter([Query(f"[STREAM_FAILED] {BUSY}.")] * busy + [Query("")])
    assert len(run_to_end(lambda: next(queries))) == busy + 1


@pytest.mark.parametrize(("problem", "tries"), [(BUSY, TRIES), ("the folder holds another schema", 1)])
def test_what_does_not_help_is_raised(problem: str, tries: int) -> None:
    begun: list[Query] = []

    def start() -> Query:
        begun.append(Query(problem))
        return begun[-1]

    with pytest.raises(RuntimeError, match=problem):
        run_to_end(start)
    assert len(begun) == tries
