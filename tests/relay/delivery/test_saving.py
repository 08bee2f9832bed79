"""Cursors leave together, until they are answered, the newest alone."""

from __future__ import annotations

import math

from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.saving import Saving

LIMITS = Limits(acknowledge_batch=3, acknowledge_calls=2, call_timeout_s=1.0, pause_s=0.1)


def cursor(up_to: int, device: int = 0, session: int = 1) -> ev.Acknowledgement:
    return ev.Acknowledgement(7, device, session, 1, up_to, 0)


def test_cursors_leave_together_and_the_newest_alone() -> None:
    saving = Saving(LIMITS)
    assert (saving.due(0.0), saving.next_deadline()) == ([], math.inf)
    for up_to in (1, 2, 3):
        saving.add(cursor(up_to), 0.0)
    saving.add(cursor(9, device=1), 0.01)
    assert saving.due(0.019) == []
    (call,) = saving.due(saving.next_deadline())
    assert call.items == [cursor(3), cursor(9, device=1)]
    assert saving.answered(call.number, [None, None], 0.03) == []
    assert (saving.unsaved, saving.next_deadline()) == (0, math.inf)


def test_a_call_that_is_not_answered_is_made_again() -> None:
    saving = Saving(LIMITS)
    saving.add(cursor(3), 0.0)
    (first,) = saving.due(0.02)
    assert saving.next_deadline() == 1.02
    assert saving.due(1.02) == []  # a pause comes first
    (second,) = saving.due(saving.next_deadline())
    assert (second.items, second.number != first.number) == ([cursor(3)], True)
    assert saving.answered(first.number, [None], 1.2) == []  # too late
    assert saving.unsaved == 1


def test_what_a_newer_call_has_is_not_sent_again() -> None:
    saving = Saving(LIMITS)
    saving.add(cursor(3), 0.0)
    (first,) = saving.due(0.02)
    saving.add(cursor(5), 0.1)
    (second,) = saving.due(saving.next_deadline())
    saving.answered(second.number, [None], 0.2)
    saving.answered(first.number, None, 0.2)
    assert saving.unsaved == 0


def test_a_cursor_that_is_refused_for_now_waits_and_one_that_is_fenced_is_told() -> None:
    saving = Saving(LIMITS)
    for device in range(3):
        saving.add(cursor(3, device), 0.0)
    (call,) = saving.due(0.02)
    assert saving.answered(call.number, [ev.Failure.LATER, ev.Failure.FENCED, None], 0.03) == [(cursor(3, 1), ev.Failure.FENCED)]
    (again,) = saving.due(0.03 + LIMITS.pause_s)
    assert again.items == [cursor(3, 0)]


def test_calls_are_bounded_in_size_and_number() -> None:
    saving = Saving(LIMITS)
    for device in range(10):
        saving.add(cursor(1, device), 0.0)
    calls = saving.due(0.02)
    assert [len(call.items) for call in calls] == [3, 3]
    assert saving.due(0.5) == []
    saving.answered(calls[0].number, [None] * 3, 0.5)
    assert [len(call.items) for call in saving.due(0.5)] == [3]
    assert saving.unsaved == 3 + 3 + 1


def test_cursors_of_a_session_that_ends_leave_at_once() -> None:
    saving = Saving(LIMITS)
    saving.add(cursor(1), 5.0)
    saving.hurry(5.0)
    assert len(saving.due(5.0)) == 1
