"""Judge what a bridge carried: nothing is missing, nothing is foreign, order by key, and once where that is promised. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHOWN = 5
"""Examples of a violation."""
Arrived = tuple[str, int]
"""Key and number of a message."""


@dataclass(frozen=True)
class Promise:
    """What a bridge promises beside at least once."""

    ordered: bool = True
    once: bool = False


@dataclass(frozen=True)
class Judgement:
    """What a history shows."""

    violations: Sequence[str]
    repeats: int = 0
    """Messages that came more than once, each time counted but the first."""


def judge(sent: Mapping[str, Sequence[int]], got: Sequence[Arrived], promise: Promise, lag: int) -> Judgement:
    """Compare what was sent, by key in order, with what arrived in its order; `lag`: what the bridge still has to carry."""
    wanted = {(key, number) for key, numbers in sent.items() for number in numbers}
    counts = Counter(got)
    violations = list(_shown("missing", wanted - counts.keys())) + list(_shown("never sent", counts.keys() - wanted))
    repeats = sum(count - 1 for count in counts.values())
    if promise.once:
        violations += _shown("came more than once", (each for each, count in counts.items() if count > 1))
    if promise.ordered:
        first: dict[str, list[int]] = {}
        for key, number in dict.fromkeys(got):
            first.setdefault(key, []).append(number)
        for key, numbers in first.items():
            places = {number: place for place, number in enumerate(sent.get(key, ()))}
            found = [places[number] for number in numbers if number in places]
            late = [numbers[at] for at in range(1, len(found)) if found[at] < found[at - 1]]
            violations += _shown(f"key {key}: out of order", late)
    if lag:
        violations.append(f"the lag is {lag}, not 0")
    return Judgement(violations, repeats)


def _shown(what: str, found: Iterable[object]) -> list[str]:
    some = sorted(found, key=str)
    return [f"{what}: {len(some)}, such as {some[:SHOWN]}"] if some else []
