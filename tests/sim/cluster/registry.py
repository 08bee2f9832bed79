"""A model of the registry: nodes that live as long as their sessions, leases of gateway instances, the layout.

Every process has a view of its own, which is the registry as it was some time ago; after each change each process is told
at its own time, now and then only by its next poll.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pixiu.discovery.view import RoleLayout
from pixiu.ids import EndpointID

VIEW_LAG_S = 0.3
POLL_S = 2.0
"""A view is never older than this."""
MISSED_WATCH = 0.08
"""Probability that a process hears of a change by its poll only."""


@dataclass(frozen=True)
class Node:
    """One process in the registry."""

    endpoint: EndpointID
    role: str
    partition: int
    address: tuple[str, int]
    state: str = "Init"
    instance: int = -1
    generation: int = 0

    @property
    def running(self) -> bool:
        """Whether it may get traffic."""
        return self.state == "Running"


@dataclass(frozen=True)
class View:
    """What a process knows."""

    version: int = 1
    partitions: tuple[tuple[str, int, int, tuple[str, ...]], ...] = ()
    """(role, partitions, and of the doubling that is under way, IDs of doublings)."""
    nodes: tuple[Node, ...] = ()

    def of_role(self, role: str) -> list[Node]:
        """In the order of their registration."""
        return [node for node in self.nodes if node.role == role]

    def running(self, role: str) -> list[Node]:
        """Those that may get traffic."""
        return [node for node in self.nodes if node.role == role and node.running]

    def count(self, role: str) -> int:
        """Partitions of a role."""
        return next((number for name, number, *_ in self.partitions if name == role), 1)

    def next(self, role: str) -> int:
        """Partitions of a role once its doubling is over."""
        return next((number for name, _, number, _ in self.partitions if name == role), 1)

    def laid_out(self, role: str) -> RoleLayout:
        """A role's layout."""
        found = next((found for found in self.partitions if found[0] == role), (role, 1, 1, ()))
        return RoleLayout(found[1], found[2], 2, found[3])


class Registry:
    """See the module.

    Args:
        rng: of the run.
        after: does something later.
        tell: gives a process its new view; called for each process at its own time.
        instances: gateway instances that can be leased.
    """

    def __init__(
        self,
        rng: random.Random,
        after: Callable[[float, Callable[[], None]], None],
        tell: Callable[[EndpointID, View], None],
        instances: int,
    ) -> None:
        self._rng, self._after, self._tell = rng, after, tell
        self.view = View()
        self.generations = dict.fromkeys(range(1, instances + 1), 0)

    def layout(self, role: str, count: int, following: int, doublings: tuple[str, ...] = ()) -> None:
        """Set a role's partitions."""
        rest = tuple(found for found in self.view.partitions if found[0] != role)
        self._change(replace(self.view, version=self.view.version + 1, partitions=(*rest, (role, count, following, doublings))))

    def lease(self) -> tuple[int, int] | None:
        """An instance that nobody holds, and its next generation; None while all are held."""
        held = {node.instance for node in self.view.nodes}
        free = [instance for instance in self.generations if instance not in held]
        if not free:
            return None
        instance = self._rng.choice(free)
        self.generations[instance] += 1
        return instance, self.generations[instance]

    def register(self, node: Node) -> None:
        """A node is there, or is another now."""
        nodes = self.view.nodes
        if any(other.endpoint == node.endpoint for other in nodes):
            nodes = tuple(node if other.endpoint == node.endpoint else other for other in nodes)
        else:
            nodes = (*nodes, node)
        self._change(replace(self.view, nodes=nodes))

    def set_state(self, endpoint: EndpointID, state: str) -> None:
        """A process says what it is."""
        found = next((node for node in self.view.nodes if node.endpoint == endpoint), None)
        if found is not None and found.state != state:
            self.register(replace(found, state=state))

    def remove(self, endpoint: EndpointID) -> None:
        """A session is over."""
        self._change(replace(self.view, nodes=tuple(node for node in self.view.nodes if node.endpoint != endpoint)))

    def _change(self, view: View) -> None:
        self.view = view
        for node in view.nodes:
            lag = self._rng.uniform(0.0, POLL_S if self._rng.random() < MISSED_WATCH else VIEW_LAG_S)
            self._after(lag, lambda endpoint=node.endpoint: self._tell(endpoint, self.view))  # type: ignore[misc]
