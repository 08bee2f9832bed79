"""The events and effects of every core with a replicated log, besides `Accepted` and `Persisted` of
`cluster.replication.core.events`. Pure.

    core ── Propose ──▶ log ──▶ Accepted or Refused ──▶ Persisted ──▶ Committed
                          └──▶ LeaderChanged: what was not answered has an unknown outcome

Source: docs/replication.md, "Use by a role".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pixiu.errors import Refusal

# --- events


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """The leader has changed. `epoch`: in which this replica leads; 0: it does not. `address`: of another leader, if known."""

    epoch: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The entries of a proposal are not in the log, and will not be."""

    token: int
    refusal: Refusal


@dataclass(slots=True)
class Committed:
    """Entries are committed, on leaders and followers."""

    first: int
    """Counter of the first one; the others follow it."""
    values: Sequence[Any]
    """One for each: the entry, if the core applies it and reports by `Settle` whether it did; else the state machine's answer."""
    copies: int
    """Number of disks with them; 0: fewer than `min_in_sync`, so they are not reported as replicated."""


# --- effects


@dataclass(slots=True)
class Propose:
    """Append entries to the log, as leader; at least one, each (kind, payload)."""

    token: int
    payloads: Sequence[tuple[int, bytes]]
    replicated: bool = True
    """A sender waits for level replicated: refused if too few replicas are in sync."""
    grows: bool = False
    """They need space, and the store has none: to be refused, here or by the next leader."""
