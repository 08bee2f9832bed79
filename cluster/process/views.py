"""The views of a process: given to its service, audited, renewed early when something hints at a change.

Source: docs/registry.md.
"""

from __future__ import annotations

import random
import time
from typing import Final

from cluster.core import log
from cluster.core.layout_notices import LayoutRefresh
from cluster.process.context import Service
from cluster.process.interests import SEES
from cluster.trust.audit import Audit
from pixiu.discovery.paths import ROLES
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper

STRANGER_S: Final = 1.0
"""Interval between two readings of the registry because of unknown senders."""
STRANGER_POLL_S: Final = 0.05


class Views:
    """The views of one process. Its service gets them from `give_to` to `stop`."""

    def __init__(self, role: str, zookeeper: ZooKeeper, root: str, poll_interval_s: float, audit: Audit) -> None:
        self.discovery = Discovery(zookeeper, root, self._new, poll_interval_s, roles=SEES.get(role, ROLES))
        self._audit = audit
        self._log, self._once = log.get_logger(), log.OncePer()
        self._service: Service | None = None
        self._layout_audited = -1
        self._refresh = LayoutRefresh()
        self._counts = {"view_failures_total": 0, "layout_refreshes_total": 0}

    def give_to(self, service: Service) -> None:
        """Give the service the view, and each later one."""
        self._service = service
        self._give(service, self.discovery.view)

    def stop(self) -> None:
        """Give the service no more views."""
        self._service = None

    def _new(self, view: View) -> None:
        if self._service is not None:
            self._give(self._service, view)

    def _give(self, service: Service, view: View) -> None:
        if view.layout.version != self._layout_audited:
            self._layout_audited = view.layout.version
            roles = {role: [found.n, found.next, found.replicas] for role, found in sorted(view.layout.roles.items())}
            self._audit.write("layout", version=view.layout.version, roles=roles)
        for text in self.discovery.refused.values():
            if log.once_per(3600, (log.LAYOUT_REFUSED, text)):
                self._log.error(log.LAYOUT_REFUSED, text=text)
                self._audit.write("layout_refused", text=text)
        try:
            service.on_view(view)
        except Exception as error:  # the next view is another chance; the last good one stays
            self._counts["view_failures_total"] += 1
            if log.once_per(60, log.VIEW_FAILED):
                self._log.error(log.VIEW_FAILED, error=repr(error), exc_info=True)

    def layout_noticed(self, version: int) -> None:
        """Read the registry soon if a notice names a newer layout."""
        delay = self._refresh.noticed(version, self.discovery.view.layout.version, random.random(), time.monotonic())
        if delay is not None:
            self._counts["layout_refreshes_total"] += 1
            self.discovery.poll_within(delay)

    def look_again(self) -> None:
        """Read the registry soon, because there may be a process that is not in the view."""
        if self._service is not None and self._once.allow(STRANGER_S, "stranger", time.monotonic()):
            self.discovery.poll_within(STRANGER_POLL_S)

    def samples(self) -> dict[str, object]:
        """Return the metrics."""
        view = self.discovery.view
        return {
            **self._counts,
            "view_nodes": len(view.nodes),
            "view_held_nodes": self.discovery.held,
            "view_malformed_total": self.discovery.malformed,
            "layout_version": view.layout.version,
            "layout_refused": len(self.discovery.refused),
            "layout_doubling{of}": {role: int(found.next > found.n) for role, found in view.layout.roles.items()},
            "layout_notices_heard_total": self._refresh.notices,
        }
