"""Filters of clients, in the form of the gateway's events: a number stands for a room."""

from __future__ import annotations

from gateway.events import Wanted


def names(*filters: int | str) -> list[str]:
    """Names of rooms, topics and filters."""
    return [f"room/{each}" if isinstance(each, int) else each for each in filters]


def wants(*filters: int | str) -> list[Wanted]:
    """Subscriptions to rooms, topics and filters, without what is retained there."""
    return [Wanted(name, retain_handling=2) for name in names(*filters)]
