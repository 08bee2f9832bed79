"""A process's session with the registry: its login, and its end when the event loop hangs.

Source: docs/registry.md.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Final

from cluster.core import log
from cluster.settings.options import ClusterOptions, RoleOptions
from cluster.trust.audit import Audit
from pixiu.discovery.target import parse_address
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, RemoteError
from pixiu.rpc.tls import Tls

QUIET_S: Final = 3.0
"""Time after which a start that waits for the registry, or for members of the cluster, logs it; for members repeatedly."""
LOGIN_S: Final = 1.0
"""Interval of checking the file of credentials."""


class RegistrySession:
    """The session of one process, and the address of its registry."""

    def __init__(self, role: str, cluster: ClusterOptions, options: RoleOptions, tls: Tls | None, audit: Audit) -> None:
        self._name, self._audit = options.registry, audit
        self._timeout_s = options.session_timeout_ms / 1000
        self._log = log.get_logger()
        self.address = parse_address(options.registry)
        self._new_session = partial(
            ZooKeeper, self.address, session_timeout_s=self._timeout_s, login=cluster.login(role), role=role, tls=tls
        )
        self.zookeeper = self._new_session(
            connect_timeout_s=options.connect_timeout_s,
            further_roots=(cluster.router_root,) if cluster.router_root else (),
        )

    async def connect(self) -> None:
        """Connect; reports a wait that takes long."""
        loop = asyncio.get_running_loop()
        waits = loop.call_later(QUIET_S, lambda: self._log.info(log.WAITING, part="registry", registry=self._name))
        try:
            await self.zookeeper.connect()
        finally:
            waits.cancel()
        if self.zookeeper.logged_in_as and await self.zookeeper.access(self.address.root) is None:
            self._log.warning(
                log.LISTENER_OPEN_TO_ALL, listener=f"the registry at {self.address}: `pixiu registry secure` guards it"
            )

    async def follow_login(self) -> None:
        """Log in with new credentials when they are in the file; if it is unusable, the former ones stay in use."""
        while True:
            await asyncio.sleep(LOGIN_S)
            try:
                if await self.zookeeper.log_in_again():
                    self._log.info(log.LOGIN)
                    self._audit.write("registry_login")
            except (ConfigurationError, RemoteError) as error:
                if log.once_per(60, log.LOGIN):
                    self._log.error(log.LOGIN, error=str(error))

    def end(self) -> None:
        """End the session by taking it over, and with it the place in the registry; not in the event loop's thread."""
        session = self.zookeeper.session
        if session is None or not session[0]:
            return
        try:
            asyncio.run(self._end(session))
        except Exception as error:  # the watchdog must survive; without a ZooKeeper the session ends by itself
            self._log.error(log.STALL_NOT_ENDED, error=str(error) or repr(error))

    def end_soon(self) -> None:
        """End the session in a thread, because the loop's own session must not be waited for."""
        threading.Thread(target=self.end, name="end-session", daemon=True).start()

    async def _end(self, session: tuple[int, bytes]) -> None:
        """End a session by taking it over. Raises RegistryUnavailable."""
        zookeeper = self._new_session(connect_timeout_s=self._timeout_s, session=session)
        await zookeeper.connect()
        await zookeeper.close()
