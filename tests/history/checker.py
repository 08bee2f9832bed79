"""The checker of histories of mail.

    violations = check(history, Limits(sends=1000, faults=30))
    assert not violations, report(history, violations)

It knows what was recorded and nothing of the cluster. What may or may not have happened (unknown calls) it accepts either way; what
it cannot tell for want of numbers, as a copy by MQTT whose InboxSeq nobody said, it leaves out.

Source: docs/promises.md, docs/architecture.md, docs/stores.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.history.arrivals import check_arrivals
from tests.history.inboxes import check_inboxes
from tests.history.promises import Promises
from tests.history.record import APP, Acknowledge, History
from tests.history.survey import NEVER, Survey
from tests.history.violation import Limits, Rule, Violation

SHOWN = 10
"""Violations of each rule in a report."""


def check(history: History, limits: Limits) -> list[Violation]:
    """Everything that is wrong with a history, in its order."""
    survey = Survey(history.events, limits)
    check_arrivals(survey)
    check_inboxes(survey)
    Promises(survey).check()
    _check_amount(survey)
    return sorted(survey.violations, key=lambda violation: violation.lines)


def counts(history: History) -> dict[str, int]:
    """What happened, as far as limits ask for it."""
    return _counts(Survey(history.events, Limits()))


def report(history: History, violations: Sequence[Violation]) -> str:
    """For a person: how many of each rule, and the first of them with their events."""
    found = Counter(violation.rule for violation in violations)
    said: Counter[Rule] = Counter()
    lines = [f"{number} × {rule.name}" for rule, number in found.most_common()]
    for violation in violations:
        said[violation.rule] += 1
        if said[violation.rule] <= SHOWN:
            lines.append(violation.shown(history.events))
    return "\n".join(lines)


def _counts(survey: Survey) -> dict[str, int]:
    return {
        "sends": sum(message.ok != NEVER for message in survey.messages.values()),
        "deliveries": sum(copy.kind == APP for copy in survey.copies),
        "acknowledgements": sum(isinstance(doing.operation, Acknowledge) for doing in survey.doings),
        "faults": len(survey.faults),
    }


def _check_amount(survey: Survey) -> None:
    for name, number in _counts(survey).items():
        least = getattr(survey.limits, name)
        if number < least:
            survey.blame(Rule.TOO_LITTLE, f"{number} {name}, where {least} are asked for")
