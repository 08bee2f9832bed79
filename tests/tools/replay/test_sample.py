"""The sample that ships has the skew of real chat."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tools.replay.log import load_log
from tools.replay.plan import make_plan

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "tools" / "replay" / "data" / "sample_chat.jsonl.gz"


def test_the_sample_has_the_skew_of_real_chat() -> None:
    events = load_log(SHIPPED)
    rooms = Counter(event.room for event in events)
    kinds = Counter(event.kind for event in events)
    sizes = sorted(len(event.text.encode()) for event in events if event.kind == "msg")
    assert len(events) == 3000
    assert len(rooms) == 40
    assert 120 <= len({event.user for event in events}) <= 180
    assert set(kinds) == {"msg", "action", "join", "part", "nick"}
    assert rooms.most_common(1)[0][1] > 5 * sorted(rooms.values())[len(rooms) // 2]
    assert 40 <= sizes[len(sizes) // 2] <= 55
    assert 450 <= sizes[int(len(sizes) * 0.99)] <= 800
    assert len({character for event in events for character in event.text}) > 100


def test_the_sample_plays_with_joins_and_leaves() -> None:
    plan = make_plan(load_log(SHIPPED))
    assert plan.messages > 2000
    assert plan.leaves > 50
    assert 20_000 < plan.expected < 100_000
