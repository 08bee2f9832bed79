"""A change of routes waits for what is under way."""

from __future__ import annotations

import math

from pixiu.placement.ordered_routes import Routes

WAIT = "(waits)"


def test_a_key_moves_only_when_what_was_sent_before_is_settled() -> None:
    targets, before = {1: "a", 2: "c"}, {1: "a", 2: "c"}
    routes: Routes[str] = Routes(targets.get, WAIT)
    assert routes.target(1) == "a"
    routes.sent(10, "a")
    routes.sent(11, "c")
    targets[1] = "b"
    assert routes.target(1) == "a"
    routes.change(0.0, before.get)
    assert (routes.held, routes.target(1), routes.target(2)) == (True, WAIT, "c")
    routes.settled(10)
    routes.settled(11)
    assert not routes.held
    assert routes.target(1) == "b"


def test_what_cannot_lose_keys_is_not_waited_for() -> None:
    routes: Routes[str] = Routes(lambda key: "b", WAIT)
    routes.sent(10, "c")
    routes.change(0.0, lambda key: "a", among={"a"})
    assert not routes.held


def test_nobody_waits_for_what_went_to_a_dead_target() -> None:
    routes: Routes[str] = Routes(lambda key: "b", WAIT)
    routes.sent(10, "a")
    routes.change(0.0, lambda key: "a", gone=["a"])
    assert (routes.held, routes.target(1)) == (False, "b")


def test_the_wait_has_an_end_that_later_changes_do_not_move() -> None:
    routes: Routes[str] = Routes(lambda key: "b", WAIT, barrier_ms=200)
    routes.sent(10, "a")
    routes.change(1.0, lambda key: "a")
    routes.change(1.1, lambda key: "b")
    assert (routes.deadline, routes.target(1)) == (1.2, WAIT)
    routes.expire(1.19)
    assert routes.held
    routes.expire(1.2)
    assert (routes.held, routes.target(1)) == (False, "b")
    assert routes.deadline == math.inf


def test_a_key_that_waits_goes_on_waiting_when_a_further_change_takes_it_back() -> None:
    """Else what is new would leave before what waits."""
    at = ["a"]
    routes: Routes[str] = Routes(lambda key: at[0], WAIT)
    routes.sent(10, routes.target(1) or "")
    at[0] = "b"
    routes.change(0.0, lambda key: "a")
    assert routes.target(1) == WAIT
    at[0] = "a"
    routes.change(0.1, lambda key: "b")
    assert routes.target(1) == WAIT
    routes.cache.pop(1)
    assert routes.target(1) == WAIT
    assert routes.target(2) == "a", "it was not told to wait"
    routes.settled(10)
    assert (routes.held, routes.target(1)) == (False, "a")
