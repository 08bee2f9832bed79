"""Revocations: which requests are valid, which subscriptions they cover, and what they end."""

from __future__ import annotations

import pytest

from cluster.access.revocations import MAX_FILTER, MAX_REASON, Revocation, revocation_of
from cluster.trust.identity import Identity


@pytest.mark.parametrize(
    ("filter_", "covered", "others"),
    [
        ("room/7", ["room/7", "$share/g/room/7"], ["room/70", "room", "#", "+/7"]),
        (
            "clubs/7/#",
            ["clubs/7", "clubs/7/a/b", "clubs/7/+", "clubs/7/#", "$share/g/clubs/7/a"],
            ["clubs/8", "clubs/+", "clubs/#"],
        ),
        ("clubs/+/chat", ["clubs/7/chat", "clubs/+/chat"], ["clubs/7/chat/a", "clubs/7", "clubs/#", "clubs/7/+"]),
        ("#", ["a", "a/b", "#", "+/a"], ["$SYS/a", "$SYS/#"]),
        ("+", ["a", "+"], ["a/b", "#", "$SYS"]),
        ("clubs/#", ["clubs/#", "clubs"], ["#", "+"]),
    ],
)
def test_a_filter_covers_what_it_matches_and_nothing_wider(filter_: str, covered: list[str], others: list[str]) -> None:
    revocation = Revocation("bob", filter_)
    assert [topic for topic in (*covered, *others) if revocation.covers(topic)] == covered


@pytest.mark.parametrize(
    ("filter_", "concerned", "others"),
    [
        ("clubs/7", ["clubs/7", "clubs/+", "#", "$share/g/+/7", "clubs/7/#"], ["clubs/8", "clubs", "clubs/7/+", "$SYS/#"]),
        ("clubs/7/#", ["clubs/7/a", "clubs/+/b", "clubs/#", "$share/g/#"], ["clubs/8/#", "clubs/8"]),
    ],
)
def test_a_filter_concerns_what_gets_something_of_it(filter_: str, concerned: list[str], others: list[str]) -> None:
    revocation = Revocation("bob", filter_)
    assert [topic for topic in (*concerned, *others) if revocation.concerns(topic)] == concerned


def test_a_user_is_named_by_name_or_uin() -> None:
    users = [Identity("bob", 7), Identity("7", 8), Identity("bob", 0), Identity("ann", 9)]
    assert [Revocation("bob", "a").fits(identity) for identity in users] == [True, False, True, False]
    assert [Revocation("7", "a").fits(identity) for identity in users] == [True, True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 100_000, '{"user": "bob"}', '{"filter": "a"}', '{"user": "", "filter": "a"}',
        '{"user": 7, "filter": "a"}',
        '{"user": "bob", "filter": "a/#/b"}', '{"user": "bob", "filter": "a", "everybody": true}',
        '{"user": "bob", "filter": "a", "reason": "\\n"}', '{"user": "bob", "filter": "a", "reason": ["x"]}',
        Revocation("bob", "a" * (MAX_FILTER + 1)).text(), Revocation("bob", "a", "r" * (MAX_REASON + 1)).text(),
    ],
)  # fmt: skip
def test_anything_else_is_no_request(text: str) -> None:
    assert revocation_of(text) is None


def test_a_request_survives_the_registry() -> None:
    for revocation in (Revocation("bob", "clubs/7/#", "left"), Revocation("7", "a")):
        assert revocation_of(revocation.text()) == revocation
