"""How much of a history each rule looked at: one that looked at nothing has said nothing.

Source: docs/promises.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.history.checker import counts
from tests.history.record import APP, FAIL, UNTOLD, WIRE, Acknowledged, History, Listed, Login, Read
from tests.history.survey import NEVER, Message, Survey
from tests.history.violation import Limits, Rule


def applied(history: History) -> dict[Rule, int]:
    """By rule: the calls, copies or messages that could have broken it."""
    survey = Survey(history.events, Limits())
    found: dict[Rule, int] = dict.fromkeys(Rule, 0)
    found[Rule.HISTORY] = len(history.events)
    found[Rule.TOO_LITTLE] = len(counts(history))
    _of_copies(survey, found)
    _of_messages(survey, found)
    _of_lists(survey, found)
    return found


def _of_copies(survey: Survey, found: dict[Rule, int]) -> None:
    repeats: Counter[tuple[str, int]] = Counter()
    connections: set[str] = {each.process for each in survey.doings if isinstance(each.operation, Login)}
    for copy in survey.copies:
        found[Rule.ALIEN] += copy.id > 0
        found[Rule.CONTENT] += copy.mail is not None and copy.mail.crc != 0
        found[Rule.ENTRY] += copy.seq > 0
        found[Rule.ONE_TO_ONE] += copy.id > 0 and copy.msg_id > 0
        found[Rule.ONCE] += copy.kind == APP
        found[Rule.ORDER] += copy.kind in (APP, WIRE) and copy.seq > 0
        found[Rule.DUP] += copy.kind == WIRE
        if copy.kind == WIRE and copy.mail is not None and copy.mail.dup and copy.process in connections:
            repeats[copy.process, copy.place[2]] += 1
        if copy.kind in (APP, WIRE) and survey.done[copy.place].first(copy.seq) != NEVER:
            found[Rule.ACKNOWLEDGED_AGAIN] += 1
    found[Rule.WINDOW] = len(repeats)


def _of_messages(survey: Survey, found: dict[Rule, int]) -> None:
    failed = {id_ for id_, message in survey.messages.items() if message.possible == NEVER or message.possible > message.first}
    found[Rule.REFUSED] = len(failed)
    shown: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for copy in survey.copies:
        if copy.kind in (APP, WIRE):
            shown[copy.place].add(copy.id)
    gaps = {(gap.uin, gap.lane) for _, gap in survey.gaps} | _listed_gaps(survey)
    for message in survey.messages.values():
        if message.owed:
            _of_one(survey, message, shown, gaps, found)


def _listed_gaps(survey: Survey) -> set[tuple[int, int]]:
    """The inboxes with gaps that lists tell of."""
    reads = ((each.operation, each.result) for each in survey.ended_well(Read))
    return {(call.uin, call.lane) for call, said in reads if isinstance(call, Read) and isinstance(said, Listed) and said.gap}


def _of_one(
    survey: Survey,
    message: Message,
    shown: dict[tuple[int, int, int], set[int]],
    gaps: set[tuple[int, int]],
    found: dict[Rule, int],
) -> None:
    sent = message.sent
    for uin in sent.receivers:
        found[Rule.GAP] += (uin, sent.lane) in gaps
        for number in survey.devices[uin]:
            place = (uin, number, sent.lane)
            seq = survey.seqs[uin, sent.lane].get(sent.id, (0, 0))[0]
            found[Rule.LOST] += 1
            found[Rule.EXPIRED_SILENTLY] += sent.expires_us > 0
            found[Rule.KEPT] += sent.id in shown[place] and survey.begun[place].first(seq) == NEVER


def _of_lists(survey: Survey, found: dict[Rule, int]) -> None:
    for doing in survey.doings:
        call, said = doing.operation, doing.result
        if doing.how == FAIL or not isinstance(said, Listed | Acknowledged):
            continue
        found[Rule.CURSOR] += said.cursor != UNTOLD
        if isinstance(call, Read) and isinstance(said, Listed):
            found[Rule.STALE] += said.last != UNTOLD
            found[Rule.UNLISTED] += not call.final and bool(said.entries)
            found[Rule.DENSE] += call.final
