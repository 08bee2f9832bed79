"""Every histogram and every alert is in docs/operations.md, and every counter that a page names is in the code."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.alerts import rules

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("proxy", "router", "broker", "relay", "gateway", "xiu", "pi", "topic", "admin", "bridge", "cluster", "nsqdoor")
SOURCES = [path.read_text() for role in ROLES for path in (ROOT / role).rglob("*.py")]


def test_histograms_and_alerts_are_documented_and_no_other_ones_are() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("## Watching a cluster") : text.index("## Probes")]
    made = {name for source in SOURCES for name in re.findall(r'histogram\("(pixiu_\w+)"', source)}
    assert len(made) > 10
    told = set(re.findall(r"`(pixiu_[a-z_]+_(?:seconds|records|entries))\b", section))
    assert made == told
    assert set(re.findall(r"`(Pixiu\w+)`", section)) == set(rules())


def test_counters_that_pages_name_exist() -> None:
    """By the end of their names: role and part stand before the field of the counters, or the sample of the service."""
    made = {name for source in SOURCES for name in re.findall(r"^    (\w+): (?:int|float) = 0", source, re.MULTILINE)}
    made |= {name for source in SOURCES for name in re.findall(r'["}](\w+)_total', source)}
    named = {name for page in (ROOT / "docs").glob("*.md") for name in re.findall(r"`([a-z_]+)_total\b", page.read_text())}
    assert len(named) > 50
    assert {name for name in named if name not in made and not any(name.endswith(f"_{field}") for field in made)} == set()
