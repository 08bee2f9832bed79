"""Which keys are hot: counted in windows, bounded, and the hot ones are among those that stay."""

from __future__ import annotations

import random

from cluster.metrics.hot_keys import MAX_KEYS, SHOWN, WINDOW_S, HotKeys


def test_the_last_whole_window_is_shown_with_rates() -> None:
    keys = HotKeys()
    for second in range(10):
        keys.add(7, 5, 100.0 + second)
        keys.add(8, 1, 100.0 + second)
    assert keys.top(109.0) == [], "the first window is not over"
    assert keys.per_s(110.0) == 6.0
    assert keys.top(110.0) == [(7, 5.0), (8, 1.0)]
    keys.add(9, 3, 111.0)
    assert keys.top(112.0) == [(7, 5.0), (8, 1.0)]
    assert keys.top(120.0) == [(9, 0.3)]
    assert keys.top(130.0 + WINDOW_S) == [], "what is older is no more"


def test_what_nobody_asked_for_and_nobody_sent_to_is_not_shown_as_if_it_were_now() -> None:
    keys = HotKeys()
    keys.add(7, 5, 100.0)
    assert keys.top(500.0) == []


def test_with_more_keys_than_are_counted_the_hot_ones_stay() -> None:
    rng = random.Random(5)
    keys = HotKeys()
    hot = {number: 200 + number for number in range(SHOWN)}
    events = [key for key, count in hot.items() for _ in range(count)] + list(range(1000, 1000 + 8 * MAX_KEYS))
    rng.shuffle(events)
    for key in events:
        keys.add(key, 1, 100.0)
        assert len(keys._counts) <= MAX_KEYS
    assert {key for key, _ in keys.top(100.0 + WINDOW_S)} == set(hot)
