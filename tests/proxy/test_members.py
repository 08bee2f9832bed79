"""Clients whose proxy died ask another one where the cluster's processes are, all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from proxy.service import Service
from tests.support.zookeeper import make_node


class Asked(Service):
    """Counts how often it makes the answer."""

    def __init__(self, view: View) -> None:
        self._context = cast(Any, SimpleNamespace(view=view))
        self._members = None
        self.made = 0

    def _members_of(self, view: View) -> Any:
        self.made += 1
        return super()._members_of(view)


def test_the_answer_is_made_once_for_each_view_whoever_asks() -> None:
    nodes = tuple(make_node("gateway", port=7000 + 10 * number, state=NodeState.RUNNING) for number in range(100))
    service = Asked(View(nodes=nodes[:99]))
    assert {len(service.members().members) for _ in range(1000)} == {99}
    assert service.made == 1
    service._context = cast(Any, SimpleNamespace(view=View(nodes=nodes)))
    assert len(service.members().members) == 100
    assert service.made == 2
