"""A role whose watches on the registry are all lost: it sees a change only when it polls, and it does not hurry with that for a
sender that it does not know. `python deaf_role.py ROLE ARGUMENTS…`."""

from __future__ import annotations

import runpy
import sys

from cluster.process import views
from pixiu.discovery.operations import WatchEvent
from pixiu.discovery.watcher import Discovery


def _ignore(self: Discovery, event: WatchEvent) -> None:
    pass


if __name__ == "__main__":
    views.STRANGER_POLL_S = 0.5  # type: ignore[misc]
    Discovery._on_watch = _ignore  # type: ignore[method-assign]
    role = sys.argv.pop(1)
    sys.argv[0] = role
    runpy.run_module(role, run_name="__main__", alter_sys=True)
