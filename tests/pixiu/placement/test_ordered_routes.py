"""A change of routes waits for what is under way."""

from __future__ import annotations

from pixiu.placement.ordered_routes import Routes


def test_a_key_moves_only_when_what_was_sent_before_is_settled() -> None:
    targets = {1: "a"}
    routes: Routes[str] = Routes(targets.get)
    assert routes.target(1) == "a"
    routes.sent(10, "a")
    targets[1] = "b"
    assert routes.target(1) == "a"
    routes.change(0.0)
    assert routes.held
    routes.settled(10)
    assert not routes.held
    assert routes.target(1) == "b"


def test_nobody_waits_for_what_went_to_a_dead_target() -> None:
    routes: Routes[str] = Routes(lambda key: "a")
    routes.sent(10, "a")
    routes.change(0.0, gone=["a"])
    assert not routes.held


def test_the_wait_has_an_end_that_later_changes_do_not_move() -> None:
    routes: Routes[str] = Routes(lambda key: "a", barrier_ms=200)
    routes.sent(10, "a")
    routes.change(1.0)
    routes.change(1.1)
    assert routes.deadline == 1.2
    routes.expire(1.19)
    assert routes.held
    routes.expire(1.2)
    assert not routes.held
    assert routes.deadline is None
