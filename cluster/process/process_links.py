"""The links of a process to others: the keys of their datagrams, and what the view says of their senders.

Source: docs/links.md, docs/security.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from cluster.core import log
from cluster.links.endpoint import Endpoint
from cluster.links.local import LocalSwitch
from cluster.links.options import LinkOptions
from cluster.listeners.handler import Handler
from cluster.listeners.link_table import may_say
from cluster.process.views import Views
from cluster.rpc.framed import Framed
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from cluster.trust.key_ring import KeyRing
from pixiu.errors import ConfigurationError
from pixiu.ids import EndpointID, hex_id

KEYS_S: Final = 1.0
"""Interval of checking the keys of datagrams."""


class ProcessLinks:
    """The links of one process, and the handler of what arrives on them.

    Args:
        note: called after every handled batch of records, see `Handler`.
    """

    def __init__(
        self,
        role: str,
        cluster: ClusterOptions,
        views: Views,
        audit: Audit,
        note: Callable[[bytes, int, int, int, float], None],
    ) -> None:
        self._role, self._cluster, self._views, self._audit = role, cluster, views, audit
        self._discovery = views.discovery
        self._log = log.get_logger()
        self.handler = Handler(note, self._refuses)
        self.handler.on_dead, self.handler.on_alive = self._discovery.mark_dead, self._discovery.mark_alive
        self.endpoint: Endpoint | None = None
        self.ring: KeyRing | None = None
        self.counts = {"links_strangers_total": 0, "links_role_refused_total": 0}

    def new_endpoint(self, id_: EndpointID, options: LinkOptions, framed: Framed, switch: LocalSwitch | None = None) -> Endpoint:
        """Make the endpoint; it is not bound yet. `switch`: of the roles of this process."""
        return Endpoint(
            id_,
            options,
            self.handler,
            layout_version=self._layout_version,
            on_warning=self._link_warning,
            udp_address_of=self._udp_address_of,
            knows=self._knows,
            ring=self.ring,
            role=self._role,
            framed=framed,
            switch=switch,
        )

    def _layout_version(self) -> int:
        return self._discovery.view.layout.version

    def _link_warning(self, event: str, **fields: Any) -> None:
        if log.once_per(60, (event, fields.get("peer"))):
            self._log.warning(event, **fields)

    def _udp_address_of(self, endpoint: EndpointID) -> tuple[str, int] | None:
        node = self._discovery.view.by_endpoint(endpoint)
        return node.udp_address if node is not None else None

    async def follow_keys(self, endpoint: Endpoint) -> None:
        """Take new keys when they are in the folder; if it is unreadable, the former ones stay in use."""
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                found = await asyncio.to_thread(self._cluster.key_ring)
            except ConfigurationError as error:
                if log.once_per(60, log.KEYS):
                    self._log.error(log.KEYS, error=str(error))
                continue
            if found is not None and self.ring is not None and not found.same_as(self.ring):
                self.ring = found
                endpoint.set_ring(found)
                self._log.info(log.KEYS, ring=found.name())
                self._audit.write("keys", ring=found.name())

    def _role_of(self, endpoint: EndpointID) -> str:
        """Return the role of a process, from its link or from the view; empty for a stranger."""
        role = self.endpoint.role_of(endpoint) if self.endpoint is not None else ""
        if role:
            return role
        node = self._discovery.view.by_endpoint(endpoint)
        return node.role if node is not None else ""

    def _knows(self, endpoint: EndpointID) -> bool:
        """Return True if a sender belongs to the cluster. A stranger may have just arrived: the registry is read again soon."""
        if self._cluster.guests or self._role_of(endpoint):
            return True
        self.counts["links_strangers_total"] += 1
        self._views.look_again()
        return False

    def _refuses(self, endpoint: EndpointID, what: str) -> bool:
        role = self._role_of(endpoint)
        if may_say(what, role, self._role) or (not role and self._cluster.guests):
            if self.endpoint is not None and self.endpoint.role_inside(endpoint):
                self.handler.allowed.add((endpoint, what))  # it never changes, so that once is enough
            return False
        self.counts["links_role_refused_total"] += 1
        self._audit.write_limited("link_refused", f"{what} {role}", what=what, sender=role, endpoint=hex_id(endpoint))
        return True

    def name_of(self, endpoint: EndpointID) -> str:
        """Return a name of a process for people."""
        node = self._discovery.view.by_endpoint(endpoint)
        return f"{node.role}:{node.address}" if node is not None else f"unknown:{hex_id(endpoint)}"
