"""The tables of findings, of docs/security.md and of the decision about the network: each finding has a test, which is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNT = 13
NETWORK = "docs/decisions/0266-faults-of-the-network-and-the-tests-that-hold-them.md"
NETWORK_FINDINGS = {f"R{number}" for number in range(1, 20)} | {f"C{number}" for number in (1, 2, 3, 4, 5, 7, 8)}


def rows_of(text: str, letters: str) -> list[list[str]]:
    """The cells of those rows of a table that begin with one of these letters and a number."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if re.fullmatch(rf"[{letters}]\d+", row[0])]


def named_in(cell: str) -> list[tuple[str, str]]:
    """The file and the name of each test that is named."""
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)


def missing(named: list[tuple[str, str]]) -> list[str]:
    """Those that are not there."""
    return [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]


def test_every_finding_has_tests_and_each_of_them_is_there() -> None:
    section = (ROOT / "docs/security.md").read_text().partition("\n## Findings and their tests\n")[2].partition("\n## ")[0]
    rows = rows_of(section, "S")
    assert {row[0] for row in rows} == {f"S{number}" for number in range(1, COUNT + 1)}
    for finding, _, tests, before in rows:
        assert named_in(tests), finding
        assert before, finding
    assert missing([named for row in rows for named in named_in(row[2])]) == []


def test_every_finding_about_the_network_has_tests_and_each_of_them_is_there() -> None:
    rows = rows_of((ROOT / NETWORK).read_text(), "RC")
    assert len(rows) == len(NETWORK_FINDINGS)
    assert {row[0] for row in rows} == NETWORK_FINDINGS
    for row in rows:
        assert named_in(row[2]), row[0]
    assert missing([named for row in rows for named in named_in(row[2])]) == []
