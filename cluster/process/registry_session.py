"""Sessions with the registry: their logins, and their end when the event loop hangs.

Source: docs/registry.md.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
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


class SharedSession:
    """A session of one role, or of those of a process that have the same registry and time-outs, because each session costs three
    threads. It is opened with the first of them and ends with the last. Its threads log in the context in which it was made.

    Args:
        roles: the roles that log in by it.
        options: of one of them.
        tls: certificates for a ZooKeeper with TLS.
    """

    def __init__(self, roles: Sequence[str], cluster: ClusterOptions, options: RoleOptions, tls: Tls | None) -> None:
        self.address = parse_address(options.registry)
        self._timeout_s = options.session_timeout_ms / 1000
        self._new = partial(
            ZooKeeper, self.address, session_timeout_s=self._timeout_s, login=cluster.login(*roles), roles=roles, tls=tls
        )
        self.zookeeper = self._new(
            connect_timeout_s=options.connect_timeout_s,
            further_roots=(cluster.router_root,) if cluster.router_root else (),
        )
        self._log, self._context = log.get_logger(), contextvars.copy_context()
        self._opening: asyncio.Task[None] | None = None
        self._follows: asyncio.Task[None] | None = None
        self._users: list[Callable[[], None]] = []

    async def open(self, logged_in: Callable[[], None]) -> None:
        """Connect, for one more role. Raises as `ZooKeeper.connect`.

        logged_in: called when there were new credentials in the file.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self.zookeeper.connect(), context=self._context)
        await asyncio.shield(self._opening)
        if self._follows is None:
            self._follows = asyncio.get_running_loop().create_task(self._follow_login(), context=self._context)
        self._users.append(logged_in)

    async def close(self, logged_in: Callable[[], None]) -> None:
        """Leave it, as one of its roles; the last one ends it."""
        self._users.remove(logged_in)
        if not self._users:
            assert self._follows is not None
            self._follows.cancel()
            await asyncio.gather(self._follows, return_exceptions=True)
            await self.zookeeper.close()

    async def _follow_login(self) -> None:
        """Log in with new credentials when they are in the file; if it is unusable, the former ones stay in use."""
        while True:
            await asyncio.sleep(LOGIN_S)
            try:
                if await self.zookeeper.log_in_again():
                    for logged_in in self._users:
                        logged_in()
            except (ConfigurationError, RemoteError) as error:
                if log.once_per(60, log.LOGIN):
                    self._log.error(log.LOGIN, error=str(error))

    def end(self) -> None:
        """End the session by taking it over, and with it every place in the registry that hangs on it; not in the event loop's
        thread."""
        session = self.zookeeper.session
        if session is None or not session[0]:
            return
        try:
            asyncio.run(self._end(session))
        except Exception as error:  # the watchdog must survive; without a ZooKeeper the session ends by itself
            self._log.error(log.STALL_NOT_ENDED, error=str(error) or repr(error))

    async def _end(self, session: tuple[int, bytes]) -> None:
        """End a session by taking it over. Raises RegistryUnavailable."""
        zookeeper = self._new(connect_timeout_s=self._timeout_s, session=session)
        await zookeeper.connect()
        await zookeeper.close()


class RegistrySession:
    """The use that one role makes of a session."""

    def __init__(self, role: str, registry: str, shared: SharedSession, audit: Audit) -> None:
        self._role, self._name, self._shared, self._audit = role, registry, shared, audit
        self._log = log.get_logger()
        self.address, self.zookeeper = shared.address, shared.zookeeper

    @property
    def login(self) -> str:
        """The login that the role uses; empty: none."""
        return self._role if self.zookeeper.logged_in_as else ""

    async def connect(self) -> None:
        """Connect; reports a wait that takes long."""
        loop = asyncio.get_running_loop()
        waits = loop.call_later(QUIET_S, lambda: self._log.info(log.WAITING, part="registry", registry=self._name))
        try:
            await self._shared.open(self._logged_in)
        finally:
            waits.cancel()
        if self.login and await self.zookeeper.access(self.address.root) is None:
            self._log.warning(
                log.LISTENER_OPEN_TO_ALL, listener=f"the registry at {self.address}: `pixiu registry secure` guards it"
            )

    async def close(self) -> None:
        """Leave the session."""
        await self._shared.close(self._logged_in)

    def _logged_in(self) -> None:
        self._log.info(log.LOGIN)
        self._audit.write("registry_login")

    def end_soon(self) -> None:
        """End the session in a thread, because the loop's own session must not be waited for. Every role that shares it gets
        another one."""
        threading.Thread(target=self._shared.end, name="end-session", daemon=True).start()
