"""What a process knows of the others of its role when it hands over records late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.process.context import Context
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from tests.support.zookeeper import make_node


@pytest.mark.parametrize(
    ("late", "others", "overtaken"),
    [
        (True, [("broker", 0, NodeState.RUNNING)], True),
        (False, [("broker", 0, NodeState.RUNNING)], False),
        (True, [("broker", 1, NodeState.RUNNING), ("relay", 0, NodeState.RUNNING), ("broker", 0, NodeState.INIT)], False),
    ],
)
def test_late_records_are_overtaken_if_another_process_may_have_got_later_ones(
    late: bool, others: list[tuple[str, int, NodeState]], overtaken: bool
) -> None:
    own = make_node("broker", state=NodeState.RUNNING)
    nodes = [make_node(role, partition, port=7100 + at, state=state) for at, (role, partition, state) in enumerate(others)]
    this: Any = SimpleNamespace(
        links=SimpleNamespace(late=late), view=View(nodes=(own, *nodes)), endpoint_id=own.endpoint, role="broker"
    )
    assert Context.is_overtaken(this) is overtaken
