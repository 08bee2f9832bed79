"""So many at a time, in order."""

from __future__ import annotations

from relay.delivery.slots import Slots


def test_places_go_in_order_and_come_back() -> None:
    pacer: Slots[str] = Slots(2)
    for who in "abcd":
        pacer.ask(who)
    assert (pacer.grant(), pacer.grant(), pacer.held, pacer.waiting) == (["a", "b"], [], 2, 2)
    pacer.leave("a")
    pacer.leave("d")  # it waits no longer
    assert (pacer.grant(), pacer.held, pacer.waiting) == (["c"], 2, 0)


def test_who_asks_again_goes_to_the_end() -> None:
    pacer: Slots[str] = Slots(1)
    pacer.ask("a")
    pacer.ask("b")
    assert pacer.grant() == ["a"]
    pacer.ask("a")
    assert (pacer.grant(), pacer.waiting) == (["b"], 1)
