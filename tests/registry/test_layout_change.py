"""What an operator asks of the layout: how it is written, what may change, and what is said of the rest."""

from __future__ import annotations

import pytest

from pixiu.discovery.view import Layout, RoleLayout
from pixiu.errors import ConfigurationError, InvalidArgument
from registry.layout_change import changed_layout, changes, check_doubled, parse_wanted

THERE = Layout(7, {"broker": RoleLayout(2, 2, 3), "pi": RoleLayout(1, 2, 2), "proxy": RoleLayout(1, 1, 2)})


def test_roles_are_written_with_partitions_and_replicas_or_with_a_number_of_processes() -> None:
    assert parse_wanted(["broker=4x3", "proxy=2", "xiu=1x1"]) == {
        "broker": RoleLayout(4, 4, 3),
        "proxy": RoleLayout(1, 1, 2),
        "xiu": RoleLayout(1, 1, 1),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no role is given"),
        (["broker"], "ROLE=PARTITIONSxREPLICAS, such as broker=2x3"),
        (["broker=2x3x4"], "'broker=2x3x4' is not the layout of a role"),
        (["broker=-1x3"], "is not the layout of a role"),
        (["broker=9999999x1"], "is not the layout of a role"),
        (["broker=3"], "write broker=PARTITIONSx3"),
        (["proxy=2x3"], "write proxy=3"),
        (["king=1x1"], "role 'king' is unknown; one of proxy"),
        (["broker=3x1"], "broker cannot have 3 partitions; a power of two up to 128"),
        (["broker=256x1"], "cannot have 256 partitions"),
        (["topic=0x1"], "topic cannot have 0 groups; 1 to 128"),
        (["topic=129x1"], "topic cannot have 129 groups"),
        (["topic=3"], "write topic=GROUPSx3"),
        (["admin=1x2"], "write admin=2"),
        (["broker=2x0"], "at least one replica"),
        (["broker=2x70000"], "70000 replicas of broker"),
        (["broker=2x1", "broker=2x2"], "broker is given twice"),
    ],
)
def test_what_cannot_be_is_named_and_so_is_how_to_write_it(words: list[str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said.replace("(", r"\(")):
        parse_wanted(words)


def test_new_roles_are_added_wanted_replicas_change_and_the_rest_stays() -> None:
    after = changed_layout(THERE, parse_wanted(["broker=2x5", "relay=4x2"]))
    assert after.roles == {**THERE.roles, "broker": RoleLayout(2, 2, 5), "relay": RoleLayout(4, 4, 2)}
    assert [str(change) for change in changes(THERE, after)] == [
        "broker: 2 partitions × 3 replicas → 2 partitions × 5 replicas",
        "relay: 4 partitions × 2 replicas (new)",
    ]
    assert changes(THERE, changed_layout(THERE, parse_wanted(["broker=2x3", "proxy=2"]))) == []


def test_another_number_of_partitions_is_refused_with_the_command_that_changes_it() -> None:
    with pytest.raises(ConfigurationError, match=r"broker has 2 partition\(s\), not 4: `pixiu double broker`.*write broker=2x3"):
        changed_layout(THERE, parse_wanted(["relay=1x1", "broker=4x3"]))


def test_a_role_that_is_being_doubled_does_not_change() -> None:
    with pytest.raises(ConfigurationError, match="pi is being doubled from 1 to 2 partitions: wait"):
        changed_layout(THERE, parse_wanted(["pi=1x3"]))


def test_topic_gets_further_groups_and_none_is_taken_away() -> None:
    before = Layout(7, {"topic": RoleLayout(1, 1, 2)})
    after = changed_layout(before, parse_wanted(["topic=3x1", "admin=2"]))
    assert after.roles == {"topic": RoleLayout(3, 3, 1), "admin": RoleLayout(1, 1, 2)}
    assert str(changes(before, after)[1]) == "topic: 1 group × 2 replicas → 3 groups × 1 replica"
    with pytest.raises(ConfigurationError, match=r"a group is never taken away.*: write topic=3x2"):
        changed_layout(after, parse_wanted(["topic=2x2"]))


def test_topic_is_not_doubled() -> None:
    check_doubled("broker")
    with pytest.raises(InvalidArgument, match=r"topic is never doubled: .*`pixiu layout set topic=GROUPSxREPLICAS`"):
        check_doubled("topic")
    with pytest.raises(InvalidArgument, match="'admin' has no partitions"):
        check_doubled("admin")
