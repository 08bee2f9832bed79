"""The login of one MQTT client: whether its CONNECT is accepted, and its will.

Source: docs/security.md, "Logging in"; docs/mqtt.md.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, Protocol

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.tenants.use import TenantUse
from cluster.listeners.clients import host_of
from cluster.mqtt.packets import Connect
from cluster.mqtt.reason_codes import ReasonCode
from cluster.trust.identity import Credentials, Identity
from gateway.clients.access import check_will, code_of, credentials_of, foresee_will, open_user
from gateway.clients.clients import Clients, Pending
from gateway.mqtt.keeping import asked_expiry_s
from gateway.sessions.service import Sessions
from gateway.sessions.session import Session
from gateway.tenants.packets import connect_outward
from pixiu.errors import PixiuError
from pixiu.ids import uin_of_name

REFUSAL_DELAY_S: Final = 1.0
"""A client that is refused because too many connect gets the refusal after half of this to all of it, seconds, at random: MQTT
cannot give it a retry-after, and many try at once."""


class Connecting(Pending, Protocol):
    """A connection that may not be identified yet."""

    access: LoginSession | None

    @property
    def assigned_id(self) -> str:
        """Client ID if it sends none."""

    def admitted(self, code: ReasonCode, session: Session | None = None) -> None:
        """Answer a CONNECT about which the decision took time. session: the client's, if that outlives the connection."""

    def refuse_later(self, code: ReasonCode) -> None:
        """Refuse a client that came while too many did, after a while."""

    def login_over(self, text: str) -> None:
        """End the connection: its login is over."""

    def enter(self, tenant: TenantUse) -> None:
        """Use a tenant's names from now on."""


class Login:
    """Decides about the CONNECT of one client, at once or later."""

    __slots__ = ("_client", "_clients", "_task", "sessions", "transport")

    def __init__(self, client: Connecting, clients: Clients, sessions: Sessions | None = None) -> None:
        self._client, self._clients, self.sessions = client, clients, sessions
        self.transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def admit(self, connect: Connect) -> ReasonCode | None:
        """Decide about a CONNECT. Returns None if the answer comes later."""
        try:
            self._clients.admit(self._client)
        except PixiuError as error:
            self._client.refuse_later(code_of(error))
            return None
        if self._clients.guard is not None:
            return self._log_in(self._clients.guard, connect)
        try:
            self._check_will(connect)
        except PixiuError as error:
            return code_of(error)
        uin = uin_of_name(connect.user_name or connect.client_id or self._client.assigned_id)
        if self._concerns_sessions(connect):
            self._task = asyncio.get_running_loop().create_task(self._begin_session(uin, connect))
            return None
        return ReasonCode.SUCCESS

    async def _begin_session(self, uin: int, connect: Connect, tenant: TenantUse | None = None) -> None:
        """Resume, begin or discard the client's session, then answer."""
        client_id, expiry_s, session = connect.client_id or self._client.assigned_id, asked_expiry_s(connect), None
        assert self.sessions is not None
        try:
            if expiry_s:
                session = await self.sessions.begin(uin, client_id, expiry_s, clean=connect.clean_session, tenant=tenant)
            elif not connect.clean_session:
                session = await self.sessions.resume(uin, client_id, tenant)
            else:
                await self.sessions.discard(uin, client_id)
        except PixiuError as error:
            self._refuse(code_of(error))
        else:
            self._client.admitted(ReasonCode.SUCCESS, session)

    def _refuse(self, code: ReasonCode) -> None:
        if code is ReasonCode.QUOTA_EXCEEDED:
            self._client.refuse_later(code)  # many clients of one tenant may come at once, and again
        else:
            self._client.admitted(code)

    def cancel(self) -> None:
        """Decide nothing more: the connection has ended."""
        if self._task is not None:
            self._task.cancel()

    def _check_will(self, connect: Connect) -> None:
        if connect.will is not None:
            check_will(self._client.access, connect.will, self._clients.topics, self._clients.vrooms)

    async def _ask_about_will(self, access: LoginSession, connect: Connect) -> None:
        if connect.will is not None and foresee_will(access, connect.will, self._clients.topics, self._clients.vrooms):
            await access.ask()
        self._check_will(connect)

    def _log_in(self, guard: LoginGuard, connect: Connect) -> ReasonCode | None:
        """Ask the guard. Returns None if it answers later."""
        assert self.transport is not None
        address = host_of(self.transport)
        encrypted: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        shown = encrypted.getpeercert(binary_form=True) if encrypted is not None else None
        credentials = credentials_of(connect, address, shown or b"")
        try:
            identity = guard.check_now(credentials)
            # With a tenant, what comes after the CONNECT has to wait for its names.
            waits = self._clients.tickets is not None or connect.will is not None or self._concerns_sessions(connect)
            if identity is None or identity.tenant or waits:
                work = self._log_in_later(guard, credentials, identity, connect)
                self._task = asyncio.get_running_loop().create_task(work)
                return None
            self._client.access = open_user(guard, identity, address, connect.client_id, self._client.login_over)
        except PixiuError as error:
            return code_of(error)
        return ReasonCode.SUCCESS

    def _keeps(self, connect: Connect) -> bool:
        """True if the client asks for a session that outlives its connection, or to resume one until this connection ends."""
        resumes = bool(connect.client_id) and not connect.clean_session
        return self._concerns_sessions(connect) and (resumes or asked_expiry_s(connect) > 0)

    def _concerns_sessions(self, connect: Connect) -> bool:
        """True if the client keeps a session, or may have an earlier one."""
        sessions = self.sessions
        return sessions is not None and sessions.serves and bool(connect.client_id or asked_expiry_s(connect))

    async def _log_in_later(self, guard: LoginGuard, credentials: Credentials, identity: Identity | None, connect: Connect) -> None:
        try:
            if identity is None:
                identity = await guard.check(credentials)
            if self._clients.tickets is not None:
                session_client = (connect.client_id or self._client.assigned_id) if self._keeps(connect) else ""
                identity = await self._clients.tickets.admit(credentials, identity, session_client)
            access = open_user(guard, identity, credentials.address, credentials.client_id, self._client.login_over)
            self._client.access = access
            if access.tenant is not None:
                self._client.enter(access.tenant)
                connect = connect_outward(access.tenant.names, connect)
            await self._ask_about_will(access, connect)
        except PixiuError as error:
            self._refuse(code_of(error))
            return
        if self._concerns_sessions(connect):
            await self._begin_session(identity.uin, connect, access.tenant)
        else:
            self._client.admitted(ReasonCode.SUCCESS)
