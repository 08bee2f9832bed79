"""The way to a leader, of which proxies have different views."""

from __future__ import annotations

from itertools import cycle

from pixiu.client.topics.leader_link import LeaderLink


def link() -> LeaderLink:
    return LeaderLink.new(0.1, 1.0, lambda: 0.5)


def test_every_address_is_tried_although_each_proxy_names_them_in_another_order() -> None:
    found, tried = link(), list[str]()
    orders = cycle([("dead", "killed", "leads"), ("killed", "dead", "leads")])
    for _ in range(3):
        found.set_addresses(next(orders))
        tried.append(found.address())
        found.failed(0.0)
    assert sorted(tried) == ["dead", "killed", "leads"]


def test_a_leader_that_is_new_comes_first_and_one_that_failed_is_tried_again() -> None:
    found = link()
    found.set_addresses(["a", "b"])
    found.failed(0.0)
    found.set_addresses(["c", "a", "b"])
    assert found.address() == "c"
    found.failed(0.0)
    assert found.address() == "b"
    found.failed(0.0)
    assert found.address() == "c"
    found.answered()
    found.failed(0.0, leader="b")
    assert found.address() == "b"
    found.failed(0.0)
    assert found.address() == "c"
