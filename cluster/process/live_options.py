"""The options of a process while the registry's settings change them.

Source: docs/registry.md.
"""

from __future__ import annotations

from cluster.core import log
from cluster.settings.live_settings import Effective, Reconfigurable, Settings, changed, effective
from cluster.settings.options import ClusterOptions, RoleOptions
from cluster.trust.audit import Audit
from pixiu.errors import MalformedData


class LiveOptions:
    """The settings of the registry, and a process's options under them."""

    def __init__(self, role: str, cluster: ClusterOptions, options: RoleOptions, audit: Audit) -> None:
        self._role, self._cluster, self._options, self._audit = role, cluster, options, audit
        self._log, self._identity = log.get_logger(), log.current_identity()
        self.settings = Settings()
        self.effective = Effective(cluster, options, {}, {})

    def change(self, data: bytes, service: object) -> None:
        """Apply new settings from the registry, also to the service; empty: none. Unreadable ones change nothing."""
        try:
            settings = Settings.from_json(data) if data else Settings()
        except MalformedData as error:
            self._log.error(log.SETTINGS_REFUSED, error=str(error))
            return
        if settings.version != self.settings.version:
            what = changed(self.settings.values, settings.values)
            self._audit.write("settings", version=settings.version, operator=settings.operator, settings=what)
        before = self.effective
        self.settings = settings
        self.effective = now = effective(self._role, self._cluster, self._options, settings)
        if now.refused and now.refused != before.refused:
            self._log.error(log.SETTINGS_REFUSED, version=settings.version, settings=dict(now.refused))
        if now.options == before.options and now.cluster == before.cluster:
            return
        if self._identity is not None:
            self._identity.set_level(now.options.log_level)
        if isinstance(service, Reconfigurable):
            service.on_settings(now.cluster, now.options)
        self._log.info(log.SETTINGS_TAKEN, version=settings.version, settings=changed(before.taken, now.taken))
