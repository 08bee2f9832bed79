"""The guard of a process's client ports: asks the authenticators in turn, opens sessions, ends expired ones.

    credentials ─▶ certificate? ─▶ token? ─▶ password? ─▶ callback? ─▶ Identity ─▶ Session ─▶ Permissions
                     │               │          │            │            │           └ ends: expired, kicked, no longer allowed
                     └───────────────┴──────────┴────────────┴─ no ───────┴─▶ refused, counted, audited

The access file, and the files that it names, are read again when they change. A file that cannot be read then is reported in the
log, and the previous content stays. A change concerns sessions whose proof is gone (a password's line, a key, a certificate), and
all sessions if the rules change. They are visited in slices; until then each is decided anew at its next message.

Source: docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from cluster.access import certificates, passwords, tokens
from cluster.access.callback import Callback, Decider, Question, Unanswered
from cluster.access.decisions import Remembered
from cluster.access.files import Files, Proof, Stamp, stamp_of
from cluster.access.kicks import kick_of
from cluster.access.rules import NOTHING, SUBSCRIBE, Permissions, RuleSet, Target, name_of, topic_of
from cluster.access.settings import AccessSettings, Quota
from cluster.access.tenants.book import TenantBook
from cluster.access.tenants.use import TenantUse
from cluster.access.visits import Visits
from cluster.core.token_bucket import Meter, Meters
from cluster.trust.audit import Audit
from cluster.trust.identity import NEVER_S, Credentials, Identity, machine_of
from pixiu.errors import ConfigurationError, NotAllowed, NotAuthenticated, Overloaded, PixiuError, Unavailable

LOOK_S: Final = 1.0
"""Interval at which files are checked, seconds. Changes that stayed the same between two checks are read."""
CALL_MESSAGES: Final = 20
"""Messages that a gRPC call costs its login: who opens one after the other is slowed down as who publishes too much."""
FAILED: Final = 4
"""Cost of a failed login for its address, in quarters of one; a login without an answer costs one quarter."""
MAX_HASHING: Final = 4
"""Passwords hashed at one time, 16 MiB each."""
MAX_WAITING: Final = 64
"""Passwords that wait to be hashed; more are refused."""
REMEMBER_S: Final = 300.0
MAX_REMEMBERED: Final = 100_000
MAX_TIMER_S: Final = 86_400.0
MAX_HOLD_S: Final = 10.0
"""Longest time for which a client that publishes too much is not read from, seconds; then its debt is checked again."""
MAX_ADDRESSES: Final = 100_000
RETRY_MS: Final = 1000
ACCESS_FILE_READ: Final = "access_file_read"
ACCESS_FILE_WRONG: Final = "access_file_wrong"


def _nothing(_filters: Sequence[str], _why: str) -> None:
    pass


class LoginSession:
    """Session of one client at a port.

    end: ends the connection, with a reason in words.
    """

    def __init__(
        self, guard: LoginGuard, identity: Identity, permissions: Permissions, address: str, end: Callable[[str], None]
    ) -> None:
        self.identity, self.address = identity, address
        self.end = end
        self.over = ""
        """Reason why the session is over; empty if it is not."""
        self._told = False
        self._permissions, self._as_of = permissions, guard.as_of
        self.rules_changed: Callable[[], None] = lambda: None
        """Called after the rules have changed: subscriptions and inboxes must still be allowed."""
        self.filters: Callable[[], Sequence[str]] = tuple
        """Returns the filters that the client is subscribed to."""
        self.revoked: Callable[[Sequence[str], str], None] = _nothing
        """Ends subscriptions, for a reason in words."""
        self.client_id = ""
        self.tenant: TenantUse | None = None
        self._guard = guard
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    @property
    def permissions(self) -> Permissions:
        """Present permissions of the client: another object after the rules have changed, none when the session is over."""
        if self._as_of != self._guard.as_of and not self.over and (why := self._guard.renew(self)):
            # In the middle of a client's message: its handling continues to its end, without any permissions.
            self.lose(why)
            asyncio.get_running_loop().call_soon(self._end)
        return self._permissions

    def renewed(self, permissions: Permissions) -> None:
        """Take over new permissions, and what callbacks have granted under the previous rules."""
        permissions.keep(self._permissions)
        self._permissions, self._as_of = permissions, self._guard.as_of

    def doubt(self) -> None:
        """Have the session decided anew before it is used again."""
        self._as_of = -1

    def lose(self, why: str) -> None:
        """End the session: nothing is allowed any more."""
        self.over = self.over or why
        self._permissions = NOTHING

    def visit(self) -> None:
        """Handle a change: end the session if it is over, otherwise have its owner check that everything held is still allowed."""
        if self not in self._guard.sessions:
            return
        self.permissions  # noqa: B018 (decided anew)
        if self.over:
            self._end()
        else:
            self.rules_changed()

    def _end(self) -> None:
        if self in self._guard.sessions and not self._told:
            self._told = True
            self.end(self.over)

    def allows(self, action: str, target: Target) -> bool:
        """True if the client may do something; a new no is counted and audited. False when the session is `over`."""
        permissions = self.permissions
        new = not permissions.seen(action, target)
        allowed = permissions.allows(action, target)
        if not allowed and not self.over:
            self._guard.denied(self, action, target, new)
        return allowed

    def require(self, action: str, target: Target) -> None:
        """Raise `NotAllowed` unless the client may do it; `Unavailable` if the session is over."""
        if not self.allows(action, target):
            self.require_session()
            self.permissions.require(action, target)

    def require_session(self) -> None:
        """Raise `Unavailable` if the session is over: the client may do in a new one what this one may not do any more."""
        if self.over:
            raise Unavailable(self.over)

    @property
    def asks(self) -> bool:
        """True if a callback may have to be asked about the client's actions: a port then announces what it will try
        (`foresee`)."""
        return self.permissions.asks

    def foresee(self, action: str, target: Target) -> None:
        """Announce an action that the client will try."""
        self.permissions.foresee(action, target)

    @property
    def must_ask(self) -> bool:
        """True if a callback must be asked about an announced action."""
        return bool(self.permissions.foreseen)

    async def ask(self) -> None:
        """Ask callbacks about all announced actions. Missing answers count as a no."""
        foreseen = list(self.permissions.foreseen)
        self.permissions.foreseen.clear()
        await asyncio.gather(*(self._guard.ask(self, *question) for question in foreseen))

    def not_lent(self, ids: int) -> None:
        """Note that the client used `ids` message IDs (above 0) that were not lent to it."""
        self._guard.not_lent(self, ids)

    def spend(self, messages: int, size: int) -> float:
        """Note a publish of the client. Returns the seconds for which it must not be read from."""
        return self._guard.spend(self.identity, messages, size)

    def owed(self) -> float:
        """Seconds for which the client must not be read from, because its user has published too much, here or in other
        sessions."""
        return self._guard.spend(self.identity, 0, 0)

    async def charge_call(self) -> None:
        """Charge a gRPC call; returns when it and what came before it are paid: calls go on one after the other, and not all in one
        turn. The session is closed if the caller is gone by then."""
        if wait_s := self.spend(CALL_MESSAGES, 0):
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self.close()
                raise

    async def hold(self) -> None:
        """Wait until nothing is owed any more; checks again every `MAX_HOLD_S`, because the quota may have changed."""
        while wait_s := self.owed():
            await asyncio.sleep(min(wait_s, MAX_HOLD_S))

    def close(self) -> None:
        """Note that the client is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._guard.closed(self)

    def _wait(self) -> None:
        left = self.identity.expires_at - time.time()
        if self.identity.expires_at != NEVER_S:
            self._timer = asyncio.get_running_loop().call_later(min(max(left, 0.0), MAX_TIMER_S), self._expire)

    def _expire(self) -> None:
        self._timer = None
        if time.time() < self.identity.expires_at:
            self._wait()
            return
        self._guard.expired(self)
        self.end("the login has expired; connect again with a new token")


class LoginGuard:
    """Admits clients at a process's client ports, and tracks their sessions.

    Args:
        path: path of the access file. log, audit: the process's.

    Raises `ConfigurationError` if the file, or one that it names, is invalid.
    """

    def __init__(self, path: str, log: FilteringBoundLogger, audit: Audit) -> None:
        self._path, self._log, self._audit = Path(path), log, audit
        self._stamps: dict[Path, Stamp] = {}
        """Versions at the last attempt to read the files."""
        self._seen: dict[Path, Stamp] = {}
        """Versions at the last check."""
        self._callback: Callback | None = None
        self._deciders: dict[str, Decider] = {}
        """Callbacks that rules name."""
        self._closing: set[asyncio.Task[None]] = set()
        self._hashed: Remembered[Identity] = Remembered(secrets.token_bytes(32), MAX_REMEMBERED)
        self._hashing = asyncio.Semaphore(MAX_HASHING)
        self._waiting = 0
        self.sessions: set[LoginSession] = set()
        self._by_proof: dict[Proof, set[LoginSession]] = {}
        self._of_user: Counter[str] = Counter()
        self._of_address: Counter[str] = Counter()
        self._failures: Meters[str] | None = None
        self._spent: dict[Quota, Meters[str]] = {}
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        self.called: Callable[[str], None] = lambda _peer: None
        """Called with each gRPC call's peer, as gRPC names it."""
        self.tenants = TenantBook(time.monotonic)
        self.as_of = 0
        """Version of the rules: a session whose permissions are of another version is decided anew."""
        self._ending: Visits[LoginSession] = Visits(LoginSession.visit, self._wrong)
        """Sessions whose proof is gone, or that an operator ends."""
        self._changed: Visits[LoginSession] = Visits(LoginSession.visit, self._wrong)
        """Sessions whose rules have changed."""
        self._files, files = Files(self._path), Files(self._path)
        files.read()
        self._use(files)

    @property
    def settings(self) -> AccessSettings:
        """Current settings of the files."""
        return self._files.settings

    # --- logging in

    def check_now(self, credentials: Credentials) -> Identity | None:
        """Identify a client if that is possible without waiting; None: use `check`. Raises `NotAuthenticated` or `Overloaded`."""
        with self.refusing(credentials.charged, credentials.client_id):
            credentials.check()
            self._check_failures(credentials.charged)
            if credentials.certificate and self.settings.certificate is not None:
                shown = certificates.read(credentials.certificate, self._files.revoked, time.time())
                if not credentials.secret:
                    return self._accepted(certificates.identity_of(shown, self.settings.certificate), credentials)
            if not credentials.secret:
                raise NotAuthenticated(
                    "this port requires a token or a password: certificates are not accepted as logins here ([certificate])"
                )
            if self._files.keys and tokens.looks_like_token(credentials.secret):
                return self._accepted(
                    tokens.verify(credentials.secret, self._files.keys, self.settings.tokens, time.time()), credentials
                )
            known = self._hashed.get((credentials.user, credentials.secret), time.monotonic())
            if known is None and self._callback is not None and credentials.user not in self._files.users:
                known = self._callback.remembered_login(credentials)
            if known is not None:
                return self._accepted(known, credentials)
            if not (self._files.users or self.settings.users or self._callback):
                raise NotAuthenticated("this cluster accepts tokens only, and this is not one")
            return None

    async def check(self, credentials: Credentials) -> Identity:
        """Identify a client. Raises `NotAuthenticated` or `Overloaded`."""
        found = self.check_now(credentials)
        if found is not None:
            return found
        with self.refusing(credentials.charged, credentials.client_id):
            if credentials.user in self._files.users or self._callback is None:
                return self._accepted(await self._check_password(credentials), credentials)
            return self._accepted(await self._callback.log_in(credentials), credentials)

    async def _check_password(self, credentials: Credentials) -> Identity:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many logins with passwords at once", RETRY_MS)
        self._waiting += 1
        try:
            await self._hashing.acquire()
        except BaseException:
            self._waiting -= 1
            raise
        entry = self._files.users.get(credentials.user)
        # A thread continues after its caller has hung up: its place is free when it is done.
        hashing = asyncio.get_running_loop().run_in_executor(None, passwords.check, entry, credentials.secret)
        hashing.add_done_callback(self._hashed_one)
        await asyncio.wait((hashing,))
        if self._files.users.get(credentials.user) != entry:
            raise Overloaded("the user's password entry has changed meanwhile: try again", RETRY_MS)
        identity = hashing.result()
        self._hashed.put((credentials.user, credentials.secret), identity, time.monotonic() + REMEMBER_S)
        return identity

    def _hashed_one(self, hashing: asyncio.Future[Identity]) -> None:
        self._waiting -= 1
        self._hashing.release()
        if not hashing.cancelled():
            hashing.exception()  # the caller may have hung up, and nobody else retrieve the exception

    @contextlib.contextmanager
    def refusing(self, address: str, client: str) -> Iterator[None]:
        """Count and audit exceptions in this block, which keep a client out. Clients that did not prove their identity, or hung up
        before the answer, are charged to their address."""
        try:
            yield
        except NotAuthenticated as error:
            self._failed(address, client, str(error))
            raise
        except PixiuError as error:
            # The client is not to blame, and all may get the same error: it is logged once a second.
            if isinstance(error, Unanswered):
                self._charge(address, 1)
            self._refused(str(error), address, client, str(error))
            raise
        except asyncio.CancelledError:
            self._failed(address, client, "the client hung up before the answer")
            raise

    def _failed(self, address: str, client: str, why: str) -> None:
        self._charge(address, FAILED)
        self._refused(machine_of(address), address, client, why)

    def _charge(self, address: str, quarters: int) -> None:
        if self._failures is not None:
            now = time.monotonic()
            self._failures.of(machine_of(address), now).spend(quarters, 0, now)

    def _refused(self, about: str, address: str, client: str, why: str) -> None:
        self.counts["refused"] += 1
        self._audit.write_limited("login_refused", about, address=address, client=client[:128], why=why)

    def refused_certificate(self, address: str, why: str) -> None:
        """Note that TLS has refused a client's certificate, before the client could send anything."""
        self._failed(address, "", why)

    def _check_failures(self, address: str) -> None:
        if self._failures is not None and self._failures.of(machine_of(address), time.monotonic()).wait_s(time.monotonic()):
            raise Overloaded("too many logins of this address have failed; wait a minute", 60_000)

    def _accepted(self, identity: Identity, credentials: Credentials) -> Identity:
        identity.check_name(credentials.user)
        return self.tenants.place(identity) if self.tenants else identity

    # --- sessions

    def open(self, identity: Identity, address: str, client_id: str, end: Callable[[str], None]) -> LoginSession:
        """Open a session for a login; its owner closes it. Raises `NotAllowed` or `Overloaded`."""
        quota = self._quota(identity)
        try:
            if quota.sessions_per_user and self._of_user[identity.user] >= quota.sessions_per_user:
                raise Overloaded(f"this user has {quota.sessions_per_user} sessions here already", RETRY_MS)
            if quota.sessions_per_address and self._of_address[machine_of(address)] >= quota.sessions_per_address:
                raise Overloaded(f"this address has {quota.sessions_per_address} sessions here already", RETRY_MS)
            if why := self._gone(identity):
                raise Overloaded(f"meanwhile {why}", RETRY_MS)
            tenant = self.tenants.of(identity)
            if tenant is not None:
                tenant.require_session()
            permissions = self._permissions(identity, client_id, address)
        except PixiuError as error:
            self.counts["refused"] += 1
            self._audit.write_limited("login_refused", identity.user, user=identity.user, address=address, why=str(error))
            raise
        session = LoginSession(self, identity, permissions, address, end)
        session.client_id = client_id
        if tenant is not None:
            session.tenant = tenant
            tenant.sessions += 1
        self.sessions.add(session)
        self._by_proof.setdefault((identity.by, identity.proof), set()).add(session)
        self._of_user[identity.user] += 1
        self._of_address[machine_of(address)] += 1
        self.counts["logins"] += 1
        about = f"{identity.user} {address}"
        self._audit.write_limited(
            "login", about, user=identity.user, uin=identity.uin, by=identity.by, signed_by=identity.signed_by, address=address,
            client=client_id[:128],
        )  # fmt: skip
        return session

    def _permissions(self, identity: Identity, client_id: str, address: str) -> Permissions:
        def answers(callback: str, action: str, target: Target) -> bool | None:
            found = self._deciders.get(callback)
            return None if found is None else found.known(Question(identity, client_id, address, action, topic_of(target)).key)

        return self.tenants.permissions(identity, client_id, answers)

    def _gone(self, identity: Identity) -> str:
        """Reason why a login is no longer valid; empty if it is."""
        if identity.by == "password":
            entry = self._files.users.get(identity.user)
            return "" if entry and entry.identity.proof == identity.proof else "the user's password entry has changed; log in again"
        if identity.by == "jwt" and all(key.fingerprint != identity.proof for key in self._files.keys):
            return "the key that signed the token was removed; connect again with a new token"
        if identity.by == "certificate" and (self.settings.certificate is None or int(identity.proof, 16) in self._files.revoked):
            return "the client's certificate has been revoked"
        if identity.by == "callback" and self._callback is None:
            return "the callback that let the client in was removed; log in again"
        return self.tenants.why_gone(identity) if self.tenants or identity.tenant else ""

    def renew(self, session: LoginSession) -> str:
        """Give a session the present permissions. Returns the reason if it no longer has any; otherwise empty."""
        why = self._gone(session.identity)
        if session.tenant is not self.tenants.of(session.identity):
            why = why or "the names of the login's tenant have changed; log in again"
        if not why:
            try:
                session.renewed(self._permissions(session.identity, session.client_id, session.address))
            except NotAllowed as error:
                why = str(error)
        return why

    async def ask(self, session: LoginSession, callback: str, action: str, target: Target) -> None:
        """Ask a callback about an action of a session."""
        found = self._deciders.get(callback)
        if found is not None:
            await found.decide(Question(session.identity, session.client_id, session.address, action, topic_of(target)))

    def closed(self, session: LoginSession) -> None:
        """Remove a session that is over."""
        if session in self.sessions:
            self.sessions.discard(session)
            if session.tenant is not None:
                session.tenant.sessions -= 1
            proof = session.identity.by, session.identity.proof
            self._by_proof[proof].discard(session)
            if not self._by_proof[proof]:
                del self._by_proof[proof]
            for counter, key in ((self._of_user, session.identity.user), (self._of_address, machine_of(session.address))):
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    def expired(self, session: LoginSession) -> None:
        """Note that a session's time is over."""
        self.counts["expired"] += 1
        user, address = session.identity.user, session.address
        self._audit.write_limited("login_expired", f"{user} {address}", user=user, address=address)

    def denied(self, session: LoginSession, action: str, target: Target, new: bool) -> None:
        """Note that a session tried something that it may not do."""
        self.counts["denied"] += 1
        if new:
            user = session.identity.user
            self._audit.write_limited(
                "denied", f"{user} {action}", user=user, address=session.address, action=action, target=name_of(target)
            )

    def not_lent(self, session: LoginSession, ids: int) -> None:
        """Note that a session used message IDs that were not lent to it."""
        self.counts["ids_refused"] += ids
        user = session.identity.user
        self._audit.write_limited("ids_refused", f"{user} {session.address}", user=user, address=session.address, ids=ids)

    def kick(self, request: str) -> int:
        """End the sessions that match an operator's request (`Kick`). Returns their number; an invalid request ends none.

        From now on they are allowed nothing; their owners are informed in slices.
        """
        kick = kick_of(request)
        found = [] if kick is None else [session for session in self.sessions if kick.fits(session.identity, session.client_id)]
        for session in found:
            session.lose("an operator ended the session")
        self.counts["kicked"] += len(found)
        if kick is not None and (kick.user or kick.client):
            for session in found:
                self._audit.write("kicked", user=session.identity.user, address=session.address, client=session.client_id)
        elif kick is not None:
            self._audit.write("kicked", by=kick.by, signed_by=kick.signed_by, sessions=len(found))
        self._ending.add(found)
        return len(found)

    def forget(self, session: LoginSession, target: Target) -> None:
        """Forget what callbacks have answered about a subscription."""
        session.permissions.forget(SUBSCRIBE, target)
        question = Question(session.identity, session.client_id, session.address, SUBSCRIBE, topic_of(target))
        for decider in self._deciders.values():
            decider.remembered.forget(question.key)

    def may(self, identity: Identity, client_id: str, address: str, action: str, target: Target) -> bool:
        """True if a login may do something, outside of a session; callbacks are not asked."""
        return self._permissions(identity, client_id, address).allows(action, target)

    def end_users(self, uins: Container[int], why: str) -> int:
        """End all sessions of these users, for a reason in words. Returns their number."""
        found = [session for session in self.sessions if session.identity.uin in uins]
        for session in found:
            session.lose(why)
        self._ending.add(found)
        return len(found)

    def spend(self, identity: Identity, messages: int, size: int) -> float:
        """Note a publish of a login. Returns the seconds for which its client must not be read from."""
        quota = self._quota(identity)
        meters = self._spent.get(quota)
        if meters is None:
            meters = self._spent[quota] = Meters(quota.messages_per_s, quota.bytes_per_s, 1.0, MAX_ADDRESSES)
        now = time.monotonic()
        meter: Meter = meters.of(identity.user, now)
        wait_s = meter.spend(messages, size, now)
        return max(wait_s, self.tenants.spend(identity, messages, size)) if identity.tenant else wait_s

    def _quota(self, identity: Identity) -> Quota:
        """Quota of the first of the file's groups that a login is in, or the general one."""
        quotas = self.settings.group_quotas
        return next((quota for group, quota in quotas.items() if group in identity.groups), self.settings.quota)

    # --- files

    def start(self) -> None:
        """Start checking the files."""
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def close(self) -> None:
        """Stop checking the files, and close the connections to callbacks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._ending.close()
        await self._changed.close()
        for asker in (self._callback, *self._deciders.values()):
            if asker is not None:
                await asker.close()

    async def read_again(self) -> None:
        """Read files that have changed and stayed the same since the last check; sessions get the new rules. Invalid files are
        reported in the log, and change nothing."""
        before, self._seen = self._seen, {path: stamp_of(path) for path in self._seen or self._stamps}
        if self._seen == self._stamps or self._seen != before:
            return
        files = Files(self._path, self._files)
        try:
            await asyncio.to_thread(files.read)  # a large file of passwords takes seconds
        except Exception as error:
            self._seen = self._stamps = self._seen | files.stamps
            self._wrong(error)
            return
        if not files.stamps.items() <= self._seen.items() or not files.stood_still():
            self._seen = self._seen | files.stamps  # it names another file, or is being written again: wait for one more check
            return
        changed = self._use(files)
        self._log.info(ACCESS_FILE_READ, path=str(self._path), rules=len(self.settings.rules))
        self._audit.write("access_file_read", path=str(self._path))
        self._ending.add(self._concerned(files.gone))
        self._changed.add(self.sessions if changed else ())

    def _concerned(self, gone: frozenset[Proof]) -> list[LoginSession]:
        everybody = {by for by, proof in gone if not proof}
        proofs = set(self._by_proof.keys() & gone)
        proofs.update(each for each in self._by_proof if each[0] in everybody) if everybody else None
        found = [session for proof in proofs for session in self._by_proof[proof]]
        for session in found:
            session.doubt()
        return found

    @property
    def _to_visit(self) -> int:
        return len(self._ending) + len(self._changed)

    def _wrong(self, error: Exception) -> None:
        self.counts["files_wrong"] += 1
        text = str(error) if isinstance(error, ConfigurationError) else f"{self._path}: {type(error).__name__}: {error}"
        self._log.error(ACCESS_FILE_WRONG, error=text)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        found: dict[str, object] = {"access_sessions": len(self.sessions), "access_sessions_to_visit": self._to_visit}
        found |= self.tenants.samples() if self.tenants else {}
        for name in ("logins", "refused", "denied", "ids_refused", "expired", "kicked", "revoked", "files_wrong"):
            found[f"access_{name}_total"] = self.counts[name]
        if self._callback is not None:
            found |= {"access_callback_asked_total": self._callback.asked, "access_callback_failed_total": self._callback.failed}
            found |= {
                "access_callback_cached_total": self._callback.cached,
                "access_callback_open": int(self._callback.breaker.is_open),
            }
        if self._deciders:
            deciders = self._deciders.values()
            found |= {
                "access_decider_asked_total": sum(each.asked for each in deciders),
                "access_decider_failed_total": sum(each.failed for each in deciders),
                "access_decider_cached_total": sum(each.cached for each in deciders),
                "access_decider_open": sum(each.breaker.is_open for each in deciders),
            }
        return found

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.read_again()
            except Exception as error:  # of any kind: the next change must be seen
                self._wrong(error)

    def _use(self, files: Files) -> bool:
        """Use the content of files. Returns True if the rules have changed."""
        settings = files.settings
        changed = settings.rules != self.settings.rules or files.tenant_rules != self._files.tenant_rules
        own = {tenant: RuleSet(rules) for tenant, rules in files.tenant_rules.items()}
        changed = self.tenants.use(settings.all_tenants, settings.tenants, own) or changed
        if changed:
            self.tenants.rules, self.as_of = RuleSet(settings.rules), self.as_of + 1
        if settings.callback != self.settings.callback:
            old, self._callback = self._callback, None
            if settings.callback is not None:
                self._callback = Callback(settings.callback, time.monotonic, time.time)
            self._close_soon(old)
        before, asked = self.settings.callbacks, settings.callbacks
        for name in [name for name in self._deciders if before.get(name) != asked.get(name)]:
            self._close_soon(self._deciders.pop(name))
        for name, of in asked.items():
            if name not in self._deciders:
                self._deciders[name] = Decider(of, time.monotonic)
        per_min = settings.quota.failed_logins_per_min
        if self._failures is None or settings.quota != self.settings.quota:
            self._failures = Meters(per_min * FAILED / 60, 0, 60.0, MAX_ADDRESSES) if per_min else None
        self._spent.clear()
        self._hashed.clear()
        self._files = files
        self._stamps = self._seen = files.stamps
        return changed

    def _close_soon(self, asker: Callback | Decider | None) -> None:
        if asker is not None:
            task = asyncio.get_running_loop().create_task(asker.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
