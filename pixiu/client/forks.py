"""Clients that are open when the process forks: the child has neither their threads nor their connections, and is told so."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

BEFORE_FORK: Final = "the client was opened before a fork: its connections belong to the parent process. Fork first, then connect"


class Forked(Protocol):
    """What is told in the child."""

    def forked(self) -> None:
        """This process is a child that was made while the client was open."""


_open: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def watch(client: Forked) -> None:
    """Tell a client, from now on, in each child."""
    _open.add(client)


def forget(client: Forked) -> None:
    """Tell a client no more: it was closed."""
    _open.discard(client)


def _tell() -> None:
    for client in list(_open):
        client.forked()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
