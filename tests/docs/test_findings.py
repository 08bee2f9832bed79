"""The table of findings in docs/security.md: none is without a test, and each test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNT = 13


def test_every_finding_has_tests_and_each_of_them_is_there() -> None:
    section = (ROOT / "docs/security.md").read_text().partition("\n## Findings and their tests\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| S")]
    assert {row[0] for row in rows} == {f"S{number}" for number in range(1, COUNT + 1)}
    missing = []
    for finding, _, tests, before in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
        assert named, finding
        assert before, finding
        missing += [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []
