"""Clients that are open when the process forks: the child has neither their threads nor their connections, and they are
notified."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

BEFORE_FORK: Final = "the client was opened before a fork: its connections belong to the parent process. Fork first, then connect"


class Forked(Protocol):
    """An object that is notified in the child."""

    def forked(self) -> None:
        """Handle the fork: this process is a child that was made while the client was open."""


_open: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def watch(client: Forked) -> None:
    """Notify a client in each child from now on."""
    _open.add(client)


def forget(client: Forked) -> None:
    """Stop notifying a client, because it was closed."""
    _open.discard(client)


def _tell() -> None:
    for client in list(_open):
        client.forked()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
