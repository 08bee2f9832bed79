"""Events and effects of messages that routes store in durable topics: between a proxy's core and its shell.

core ──▶ StoreRouted ──▶ the SDK's writer of the durable topic ──▶ RoutedStored ──▶ core
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.routes.routes import Routes
from pixiu.errors import Refusal


class Storing(NamedTuple):
    """A message that a route stores in a durable topic."""

    number: int
    """Of the message."""
    route: str
    topic: str
    """The durable one."""
    body: bytes
    key: bytes | None
    headers: Mapping[str, bytes]
    tag: str
    event_time_us: int | None
    expires_in_s: int | None
    load_test: bool


@dataclass(frozen=True, slots=True)
class StoreRouted:
    """Store messages at level `replicated`, those of each key in this order."""

    messages: Sequence[Storing]


@dataclass(frozen=True, slots=True)
class RoutedStored:
    """Outcome of messages, by their numbers; None: every replica in sync has it."""

    outcomes: Sequence[tuple[int, Refusal | None]]


@dataclass(frozen=True, slots=True)
class RoutesChanged:
    """There are other routes."""

    routes: Routes
