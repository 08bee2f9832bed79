"""Picking effects out of what a core asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def of(kind: type[T], effects: Iterable[object]) -> list[T]:
    """Those of a kind, in order."""
    return [effect for effect in effects if isinstance(effect, kind)]


def only(kind: type[T], effects: Iterable[object]) -> T:
    """The one of a kind; there must be one."""
    found = of(kind, effects)
    assert len(found) == 1, found
    return found[0]
