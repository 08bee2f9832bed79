"""Sorts the records of a batch into parcels: one for each destination and lane. Pure.

A fan-out walks a batch in place, cuts each record out once and appends it to the list of every destination that gets it:

    (target.normal if type_ >= FIRST_LANE_BELOW else target.first).append(record)

The loop is the caller's, because each caller decides something else in it; the rest is here.

Source: docs/architecture.md, "The contract".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.core.contract import SendRecords
from pixiu.ids import EndpointID
from pixiu.wire.trace import Tracer


@dataclass(slots=True, eq=False)
class Target:
    """A destination, with the parcels that are being collected for it."""

    endpoint: EndpointID
    normal: list[bytes] = field(default_factory=list)
    first: list[bytes] = field(default_factory=list)
    """Records of lane 0."""


def take_parcels(touched: Iterable[Target], tracer: Tracer, traced_us: int) -> tuple[list[SendRecords], int]:
    """Return the parcels of these targets, lane 0 first, and the number of records in them. Empties the targets.

    A target may be named twice. `traced_us`: arrival time of the batch if traced records are to be stamped here; else 0.
    """
    parcels: list[SendRecords] = []
    copies = 0
    for target in touched:
        if traced_us:
            tracer.stamp_all(target.first, traced_us)
            tracer.stamp_all(target.normal, traced_us)
        if target.first:
            parcels.append(SendRecords(target.endpoint, target.first, 0))
            copies += len(target.first)
            target.first = []
        if target.normal:
            parcels.append(SendRecords(target.endpoint, target.normal, 1))
            copies += len(target.normal)
            target.normal = []
    return parcels, copies


def discard(touched: Iterable[Target]) -> None:
    """Empty these targets: the batch is malformed."""
    for target in touched:
        target.normal, target.first = [], []
