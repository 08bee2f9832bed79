"""The schedule made of a log: who is a member when."""

from __future__ import annotations

from pixiu.ids import uin_of_name
from tools.replay.log import LogEvent, room_of_name
from tools.replay.plan import Action, Plan, make_plan

MINUTE = 60_000


def event(ts_ms: int, kind: str, user: str, room: str = "r", to: str = "") -> LogEvent:
    return LogEvent(ts_ms, room, kind, user, f"{user} at {ts_ms}" if kind in ("msg", "action") else "", to, ts_ms)


def steps(plan: Plan, room: str = "r") -> list[tuple[int, str, str]]:
    names = plan.names.user_names
    return [(step.at_ms, step.action.value, names[step.uin]) for step in plan.rooms[room_of_name(room)]]


def test_without_joins_everybody_who_speaks_is_a_member_from_the_start() -> None:
    plan = make_plan([event(1000, "msg", "a"), event(5000, "msg", "b"), event(90 * MINUTE, "msg", "a")])
    assert steps(plan) == [
        (0, "join", "a"),
        (0, "join", "b"),
        (0, "send", "a"),
        (4000, "send", "b"),
        (90 * MINUTE - 1000, "send", "a"),
    ]
    assert (plan.messages, plan.joins, plan.leaves, plan.expected, plan.users) == (3, 2, 0, 6, 2)


def test_with_joins_a_user_comes_by_join_or_first_message_and_goes_by_part() -> None:
    plan = make_plan(
        [
            event(0, "join", "a"),
            event(1, "msg", "b"),
            event(2, "join", "a"),
            event(3, "part", "a"),
            event(4, "part", "a"),
            event(5, "msg", "b"),
        ]
    )
    assert steps(plan) == [(0, "join", "a"), (1, "join", "b"), (1, "send", "b"), (3, "leave", "a"), (5, "send", "b")]
    assert plan.expected == 3


def test_a_nick_logs_the_new_name_in_and_the_old_one_out() -> None:
    plan = make_plan(
        [event(0, "join", "a"), event(1, "nick", "a", to="a_"), event(2, "msg", "a_"), event(3, "nick", "a_", to="a_")]
    )
    assert steps(plan) == [(0, "join", "a"), (1, "join", "a_"), (1, "leave", "a"), (2, "send", "a_")]


def test_an_idle_user_is_logged_out_at_the_end_of_its_idle_time_and_comes_back() -> None:
    plan = make_plan(
        [event(0, "join", "a"), event(5 * MINUTE, "msg", "b"), event(31 * MINUTE, "msg", "b"), event(32 * MINUTE, "msg", "a")],
        idle_ms=30 * MINUTE,
    )
    assert steps(plan) == [
        (0, "join", "a"),
        (5 * MINUTE, "join", "b"),
        (5 * MINUTE, "send", "b"),
        (30 * MINUTE, "leave", "a"),
        (31 * MINUTE, "send", "b"),
        (32 * MINUTE, "join", "a"),
        (32 * MINUTE, "send", "a"),
    ]


def test_rooms_with_and_without_joins_live_in_one_log() -> None:
    plan = make_plan([event(0, "join", "a", "x"), event(1, "msg", "b", "y"), event(2, "msg", "c", "y"), event(3, "msg", "b", "x")])
    assert steps(plan, "x") == [(0, "join", "a"), (3, "join", "b"), (3, "send", "b")]
    assert steps(plan, "y") == [(0, "join", "b"), (0, "join", "c"), (1, "send", "b"), (2, "send", "c")]


def test_messages_are_numbered_in_the_order_of_the_log_and_steps_never_go_back() -> None:
    plan = make_plan([event(ts, "msg", "ab"[ts % 2], "xy"[ts % 3 // 2]) for ts in range(50)])
    numbers = sorted(step.number for room in plan.rooms.values() for step in room if step.action is Action.SEND)
    assert numbers == list(range(50))
    for room in plan.rooms.values():
        assert [step.at_ms for step in room] == sorted(step.at_ms for step in room)
        sends = [step.number for step in room if step.action is Action.SEND]
        assert sends == sorted(sends)


def test_users_have_the_uins_of_their_names() -> None:
    plan = make_plan([event(0, "msg", "somebody")])
    assert plan.rooms[room_of_name("r")][0].uin == uin_of_name("somebody")


def test_an_empty_log_is_an_empty_plan() -> None:
    plan = make_plan([])
    assert (plan.rooms, plan.messages, plan.span_ms) == ({}, 0, 0)
