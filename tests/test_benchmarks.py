"""`python -m benchmarks` runs what can be run by itself."""

from __future__ import annotations

from benchmarks.__main__ import benchmarks


def test_programs_are_run_and_parts_of_them_are_not() -> None:
    names = set(benchmarks())
    assert {"cores.pi_core", "clusters.topics", "attacks.hostile"} <= names
    assert not {"clusters.bridging", "clusters.power", "clusters.topic_worker", "clusters.growth"} & names
