"""Filters with wildcards in a tree by levels, and which of them match a topic. Pure.

    devices/+/heat     root ─ "devices" ─ + ─ "heat": here
    devices/#          root ─ "devices": below

A match walks the nodes that fit the topic's levels, one level after the other, at most two for each node of the level before: the
child of that name and the `+`. So it costs what fits, and not what is in the tree.

Source: MQTT 5.0 section 4.7; docs/subscriptions.md, "Wildcards".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

ANY_LEVEL = b"+"
ALL_BELOW = b"#"
SYSTEM = b"$"


class _Node(Generic[V]):
    __slots__ = ("below", "children", "here", "plus")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[V]] = {}
        self.plus: _Node[V] | None = None
        self.here: V | None = None
        """Value of the filter that ends here."""
        self.below: V | None = None
        """Value of the filter that ends here with `/#`."""

    def is_empty(self) -> bool:
        return not self.children and self.plus is None and self.here is None and self.below is None


class FilterTree(Generic[V]):
    """A value for each filter. Filters and topics are UTF-8."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()
        self._values: dict[bytes, V] = {}

    def __len__(self) -> int:
        """Number of filters."""
        return len(self._values)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._values)

    def get(self, name: bytes) -> V | None:
        """The value of a filter."""
        return self._values.get(name)

    def put(self, name: bytes, value: V) -> None:
        """Set the value of a filter."""
        self._values[name] = value
        node = self._root
        levels = name.split(b"/")
        for level in levels:
            if level == ALL_BELOW:
                node.below = value
                return
            if level == ANY_LEVEL:
                if node.plus is None:
                    node.plus = _Node()
                node = node.plus
            else:
                node = node.children.setdefault(level, _Node())
        node.here = value

    def remove(self, name: bytes) -> None:
        """Remove a filter, with the nodes that nothing needs any more. Raises KeyError if it is not there."""
        del self._values[name]
        path: list[tuple[_Node[V], bytes]] = []
        node = self._root
        for level in name.split(b"/"):
            if level == ALL_BELOW:
                node.below = None
                break
            path.append((node, level))
            found = node.plus if level == ANY_LEVEL else node.children[level]
            assert found is not None, "the filter is in the tree"
            node = found
        else:
            node.here = None
        while path and node.is_empty():
            node, level = path.pop()
            if level == ANY_LEVEL:
                node.plus = None
            else:
                del node.children[level]

    def match(self, topic: bytes) -> list[V]:
        """Values of all filters that match a topic. A wildcard in the first level matches no topic that begins with `$`."""
        found: list[V] = []
        nodes = [self._root]
        wild = topic[:1] != SYSTEM
        for level in topic.split(b"/"):
            following: list[_Node[V]] = []
            for node in nodes:
                if wild:
                    if node.below is not None:
                        found.append(node.below)
                    if node.plus is not None:
                        following.append(node.plus)
                child = node.children.get(level)
                if child is not None:
                    following.append(child)
            if not following:
                return found
            nodes, wild = following, True
        for node in nodes:
            if node.here is not None:
                found.append(node.here)
            if node.below is not None:  # `a/#` matches `a`, too
                found.append(node.below)
        return found


def filter_matches(name: bytes, topic: bytes) -> bool:
    """True if one filter matches a topic."""
    wanted, levels = name.split(b"/"), topic.split(b"/")
    if topic[:1] == SYSTEM and wanted[0] in (ANY_LEVEL, ALL_BELOW):
        return False
    for index, level in enumerate(wanted):
        if level == ALL_BELOW:
            return True
        if index >= len(levels) or level not in (ANY_LEVEL, levels[index]):
            return False
    return len(wanted) == len(levels)
