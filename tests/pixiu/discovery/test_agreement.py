"""Who may join whom: protocol versions, and what must agree."""

from __future__ import annotations

from typing import Any

import pytest

from pixiu.discovery.agreement import MAX_PROTOCOL, MIN_PROTOCOL, disagreement, spoken
from pixiu.discovery.node import Node
from pixiu.errors import MalformedData
from tests.support.zookeeper import make_node


def new(**changes: object) -> Node:
    """A process of this tree."""
    said: dict[str, Any] = {"protocol_min": MIN_PROTOCOL, "protocol_max": MAX_PROTOCOL, "wire_hash": "wire", **changes}
    return make_node("router", 0, **said)


@pytest.mark.parametrize("own", [(1, 1), (1, 2), (2, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("other", [(1, 1), (1, 2), (2, 2), (2, 4), (3, 5)])
def test_ranges_of_protocol_versions_must_overlap(own: tuple[int, int], other: tuple[int, int]) -> None:
    one, two = (new(protocol_min=least, protocol_max=most) for least, most in (own, other))
    common = set(range(own[0], own[1] + 1)) & set(range(other[0], other[1] + 1))
    assert (disagreement(one, two) == "") is bool(common)
    if common:
        assert spoken((one, two)) == max(common)


def test_nobody_registered_speaks_what_this_tree_speaks() -> None:
    assert spoken(()) == MAX_PROTOCOL


def test_a_node_keeps_what_it_says_and_must_say_what_it_speaks() -> None:
    node = new(stream_port=7)
    assert Node.from_json(node.to_json(), replica=node.replica) == node
    spoken_here = b'"protocol_min":1,"protocol_max":%d,' % MAX_PROTOCOL
    for wrong in (
        b'"protocol_min":0,',
        b'"protocol_min":"1",',
        b'"protocol_max":1000001,',
        b'"protocol_min":2,"protocol_max":1,',
        b"",
    ):
        with pytest.raises(MalformedData, match="protocol_m"):
            Node.from_json(node.to_json().replace(spoken_here, wrong))
