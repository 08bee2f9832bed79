"""Every histogram and every alert is in docs/operations.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.alerts import rules

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("proxy", "router", "broker", "relay", "gateway", "xiu", "pi", "cluster")


def test_histograms_and_alerts_are_documented_and_no_other_ones_are() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("## Watching a cluster") : text.index("## Probes")]
    sources = [path.read_text() for role in ROLES for path in (ROOT / role).rglob("*.py")]
    made = {name for source in sources for name in re.findall(r'histogram\("(pixiu_\w+)"', source)}
    assert len(made) > 10
    told = set(re.findall(r"`(pixiu_[a-z_]+_(?:seconds|records|entries))\b", section))
    assert made == told
    assert set(re.findall(r"`(Pixiu\w+)`", section)) == set(rules())
