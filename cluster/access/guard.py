"""The guard of a process's client doors: asks the authenticators in turn, opens sessions, ends them when their time is over.

    credentials ─▶ certificate? ─▶ token? ─▶ password? ─▶ callback? ─▶ Identity ─▶ Session ─▶ Permissions
                     │               │          │            │            │           └ ends: expired, kicked, not allowed any more
                     └───────────────┴──────────┴────────────┴─ no ───────┴─▶ refused, counted, audited

The access file, and the files that it names, are read again when they change. What cannot be read then is said in the log, and what
was read before stays.

Source: docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from structlog.typing import FilteringBoundLogger

from cluster.access import certificates, passwords, tokens
from cluster.access.callback import Callback, Decider, Question
from cluster.access.decisions import Remembered
from cluster.access.identity import NEVER_S, Credentials, Identity, machine_of
from cluster.access.rules import Permissions, Target, name_of, topic_of
from cluster.access.settings import Quota, Settings, parse
from cluster.runtime.audit import Audit
from cluster.runtime.options import read_bounded
from cluster.runtime.token_bucket import Meter, Meters
from pixiu.errors import ConfigurationError, NotAllowed, NotAuthenticated, Overloaded, PixiuError

MAX_FILE_BYTES: Final = 64 << 20
LOOK_S: Final = 2.0
"""How often files are looked at."""
MAX_HASHING: Final = 4
"""Passwords that are hashed at one time, 16 MiB each."""
MAX_WAITING: Final = 64
"""That wait for it; more are refused."""
REMEMBER_S: Final = 300.0
MAX_REMEMBERED: Final = 100_000
MAX_TIMER_S: Final = 86_400.0
MAX_HOLD_S: Final = 10.0
"""A client that publishes too much is not read from for at most so long; then it is looked whether anything is owed still."""
MAX_ADDRESSES: Final = 100_000
RETRY_MS: Final = 1000
Stamp = tuple[int, int, int]
"""Of a file: another one when it was written."""
Made = TypeVar("Made")
ACCESS_FILE_READ: Final = "access_file_read"
ACCESS_FILE_WRONG: Final = "access_file_wrong"


class Session:
    """One client's time at a door.

    permissions: of now; another object after the rules have changed. end: ends the connection, with why in words.
    """

    def __init__(
        self, guard: Guard, identity: Identity, permissions: Permissions, address: str, end: Callable[[str], None]
    ) -> None:
        self.identity, self.permissions, self.address = identity, permissions, address
        self.end = end
        self.rules_changed: Callable[[], None] = lambda: None
        """Called after the rules have changed: what is held on must be allowed still."""
        self.client_id = ""
        self.entry: passwords.Entry | None = None
        """Of the password that opened it."""
        self._guard = guard
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def allows(self, action: str, target: Target) -> bool:
        """Whether the client may do something; a new no is counted and audited."""
        permissions = self.permissions
        new = not permissions.seen(action, target)
        allowed = permissions.allows(action, target)
        if not allowed:
            self._guard.denied(self, action, target, new)
        return allowed

    def require(self, action: str, target: Target) -> None:
        """Raises `NotAllowed`, unless the client may do it."""
        if not self.allows(action, target):
            self.permissions.require(action, target)

    @property
    def asks(self) -> bool:
        """Whether a callback may have to be asked what the client may do: a door says before what it will try (`foresee`)."""
        return self.permissions.asks

    def foresee(self, action: str, target: Target) -> None:
        """The client will try this."""
        self.permissions.foresee(action, target)

    @property
    def must_ask(self) -> bool:
        """Whether something foreseen has to be asked for."""
        return bool(self.permissions.foreseen)

    async def ask(self) -> None:
        """Have callbacks asked for all that was foreseen. What they do not answer in time is a no."""
        foreseen = list(self.permissions.foreseen)
        self.permissions.foreseen.clear()
        await asyncio.gather(*(self._guard.ask(self, *question) for question in foreseen))

    def not_lent(self, ids: int) -> None:
        """The client used so many message IDs that it may not; `ids` above 0."""
        self._guard.not_lent(self, ids)

    def spend(self, messages: int, size: int) -> float:
        """The client published. Returns the seconds for which it is not to be read from."""
        return self._guard.spend(self.identity, messages, size)

    def owed(self) -> float:
        """The seconds for which the client is not to be read from: its user has published too much, here or in other sessions."""
        return self._guard.spend(self.identity, 0, 0)

    async def hold(self) -> None:
        """Wait until nothing is owed any more; looks again every `MAX_HOLD_S`, as the quota may have changed."""
        while wait_s := self.owed():
            await asyncio.sleep(min(wait_s, MAX_HOLD_S))

    def close(self) -> None:
        """The client is gone."""
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


class Guard:
    """Knows who may come in at a process's client doors, and who is in.

    Args:
        path: of the access file. log, audit: of the process.

    Raises `ConfigurationError` when the file, or one that it names, does not do.
    """

    def __init__(self, path: str, log: FilteringBoundLogger, audit: Audit) -> None:
        self._path, self._log, self._audit = Path(path), log, audit
        self._stamps: dict[Path, Stamp] = {}
        """Of the last try to read them."""
        self._keys: tuple[tokens.Key, ...] = ()
        self._users: Mapping[str, passwords.Entry] = {}
        self._revoked: frozenset[int] = frozenset()
        self._callback: Callback | None = None
        self._deciders: dict[str, Decider] = {}
        """Callbacks that rules name."""
        self._closing: set[asyncio.Task[None]] = set()
        self._hashed: Remembered[Identity] = Remembered(secrets.token_bytes(32), MAX_REMEMBERED)
        self._hashing = asyncio.Semaphore(MAX_HASHING)
        self._waiting = 0
        self._sessions: set[Session] = set()
        self._of_user: Counter[str] = Counter()
        self._of_address: Counter[str] = Counter()
        self._failures: Meters[str] | None = None
        self._spent: dict[Quota, Meters[str]] = {}
        self._task: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        self.called: Callable[[str], None] = lambda _peer: None
        """Told of each gRPC call's peer, as gRPC names it."""
        self.settings = Settings()
        self._files = _Files(self._path, {})
        self._files.read()
        self._use(self._files)

    # --- logging in

    def check_now(self, credentials: Credentials) -> Identity | None:
        """Who it is, when that can be said without waiting; None: `check` can. Raises `NotAuthenticated` or `Overloaded`."""
        with self.refusing(credentials.address, credentials.client_id):
            credentials.check()
            self._check_failures(credentials.address)
            if credentials.certificate and self.settings.certificate is not None:
                shown = certificates.read(credentials.certificate, self._revoked, time.time())
                if not credentials.secret:
                    return self._accepted(certificates.identity_of(shown, self.settings.certificate), credentials)
            if not credentials.secret:
                raise NotAuthenticated("this door wants a token or a password: certificates are no logins here ([certificate])")
            if self._keys and tokens.looks_like_token(credentials.secret):
                return self._accepted(tokens.verify(credentials.secret, self._keys, self.settings.tokens, time.time()), credentials)
            known = self._hashed.get((credentials.user, credentials.secret), time.monotonic())
            if known is None and self._callback is not None and credentials.user not in self._users:
                known = self._callback.remembered_login(credentials)
            if known is not None:
                return self._accepted(known, credentials)
            if not (self._users or self.settings.users or self._callback):
                raise NotAuthenticated("this cluster takes tokens, and this is none")
            return None

    async def check(self, credentials: Credentials) -> Identity:
        """Who it is. Raises `NotAuthenticated` or `Overloaded`."""
        found = self.check_now(credentials)
        if found is not None:
            return found
        with self.refusing(credentials.address, credentials.client_id):
            if credentials.user in self._users or self._callback is None:
                return self._accepted(await self._check_password(credentials), credentials)
            return self._accepted(await self._callback.log_in(credentials), credentials)

    async def _check_password(self, credentials: Credentials) -> Identity:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many log in with passwords at once", RETRY_MS)
        self._waiting += 1
        try:
            await self._hashing.acquire()
        except BaseException:
            self._waiting -= 1
            raise
        entry = self._users.get(credentials.user)
        # A thread goes on when whoever waits for it has hung up: its place is free when it is done.
        hashing = asyncio.get_running_loop().run_in_executor(None, passwords.check, entry, credentials.secret)
        hashing.add_done_callback(self._hashed_one)
        await asyncio.wait((hashing,))
        if self._users.get(credentials.user) != entry:
            raise Overloaded("the user's password entry has changed meanwhile: try again", RETRY_MS)
        identity = hashing.result()
        self._hashed.put((credentials.user, credentials.secret), identity, time.monotonic() + REMEMBER_S)
        return identity

    def _hashed_one(self, hashing: asyncio.Future[Identity]) -> None:
        self._waiting -= 1
        self._hashing.release()
        if not hashing.cancelled():
            hashing.exception()  # somebody may have hung up, and nobody else ask for it

    @contextlib.contextmanager
    def refusing(self, address: str, client: str) -> Iterator[None]:
        """What is raised in here keeps a client out: it is counted and audited. Of who did not prove who he is, or hung up before
        the answer, the address pays."""
        try:
            yield
        except NotAuthenticated as error:
            self._failed(address, client, str(error))
            raise
        except PixiuError as error:
            # Who comes is not to blame, and all may be told the same: it has one line a second.
            self._refused(str(error), address, client, str(error))
            raise
        except asyncio.CancelledError:
            self._failed(address, client, "the client hung up before the answer")
            raise

    def _failed(self, address: str, client: str, why: str) -> None:
        now, machine = time.monotonic(), machine_of(address)
        if self._failures is not None:
            self._failures.of(machine, now).spend(1, 0, now)
        self._refused(machine, address, client, why)

    def _refused(self, about: str, address: str, client: str, why: str) -> None:
        self.counts["refused"] += 1
        self._audit.write_limited("login_refused", about, address=address, client=client[:128], why=why)

    def refused_certificate(self, address: str, why: str) -> None:
        """TLS has refused a client for its certificate, before it could say anything."""
        self._failed(address, "", why)

    def _check_failures(self, address: str) -> None:
        if self._failures is not None and self._failures.of(machine_of(address), time.monotonic()).wait_s(time.monotonic()):
            raise Overloaded("too many logins of this address have failed; wait a minute", 60_000)

    def _accepted(self, identity: Identity, credentials: Credentials) -> Identity:
        identity.check_name(credentials.user)
        return identity

    # --- sessions

    def open(self, identity: Identity, address: str, client_id: str, end: Callable[[str], None]) -> Session:
        """A session of somebody who has logged in; its owner closes it. Raises `NotAllowed` or `Overloaded`."""
        quota = self._quota(identity)
        try:
            if quota.sessions_per_user and self._of_user[identity.user] >= quota.sessions_per_user:
                raise Overloaded(f"this user has {quota.sessions_per_user} sessions here already", RETRY_MS)
            if quota.sessions_per_address and self._of_address[machine_of(address)] >= quota.sessions_per_address:
                raise Overloaded(f"this address has {quota.sessions_per_address} sessions here already", RETRY_MS)
            permissions = self._permissions(identity, client_id, address)
        except PixiuError as error:
            self.counts["refused"] += 1
            self._audit.write_limited("login_refused", identity.user, user=identity.user, address=address, why=str(error))
            raise
        session = Session(self, identity, permissions, address, end)
        session.client_id = client_id
        session.entry = self._users.get(identity.user) if identity.by == "password" else None
        self._sessions.add(session)
        self._of_user[identity.user] += 1
        self._of_address[machine_of(address)] += 1
        self.counts["logins"] += 1
        about = f"{identity.user} {address}"
        self._audit.write_limited(
            "login", about, user=identity.user, uin=identity.uin, by=identity.by, address=address, client=client_id[:128]
        )
        return session

    def _permissions(self, identity: Identity, client_id: str, address: str) -> Permissions:
        def answers(callback: str, action: str, target: Target) -> bool | None:
            found = self._deciders.get(callback)
            return None if found is None else found.known(Question(identity, client_id, address, action, topic_of(target)).key)

        return Permissions(identity, self.settings.rules, client_id, answers)

    async def ask(self, session: Session, callback: str, action: str, target: Target) -> None:
        """Have a callback asked whether a session may do something."""
        found = self._deciders.get(callback)
        if found is not None:
            await found.decide(Question(session.identity, session.client_id, session.address, action, topic_of(target)))

    def closed(self, session: Session) -> None:
        """A session is over."""
        if session in self._sessions:
            self._sessions.discard(session)
            for counter, key in ((self._of_user, session.identity.user), (self._of_address, machine_of(session.address))):
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]

    def expired(self, session: Session) -> None:
        """A session's time is over."""
        self.counts["expired"] += 1
        user, address = session.identity.user, session.address
        self._audit.write_limited("login_expired", f"{user} {address}", user=user, address=address)

    def denied(self, session: Session, action: str, target: Target, new: bool) -> None:
        """A session may not do what it tried."""
        self.counts["denied"] += 1
        if new:
            user = session.identity.user
            self._audit.write_limited(
                "denied", f"{user} {action}", user=user, address=session.address, action=action, target=name_of(target)
            )

    def not_lent(self, session: Session, ids: int) -> None:
        """A session used message IDs that it may not."""
        self.counts["ids_refused"] += ids
        user = session.identity.user
        self._audit.write_limited("ids_refused", f"{user} {session.address}", user=user, address=session.address, ids=ids)

    def kick(self, who: str) -> int:
        """End the sessions of a user, by name or UIN. Returns how many."""
        if not who:
            return 0
        # A service has no UIN, and is ended by its name.
        found = [item for item in self._sessions if who in (item.identity.user, str(item.identity.uin or item.identity.user))]
        for session in found:
            self.counts["kicked"] += 1
            self._audit.write("kicked", user=session.identity.user, address=session.address)
            session.end("an operator ended the session")
        return len(found)

    def spend(self, identity: Identity, messages: int, size: int) -> float:
        """Somebody published. Returns the seconds for which he is not to be read from."""
        quota = self._quota(identity)
        meters = self._spent.get(quota)
        if meters is None:
            meters = self._spent[quota] = Meters(quota.messages_per_s, quota.bytes_per_s, 1.0, MAX_ADDRESSES)
        now = time.monotonic()
        meter: Meter = meters.of(identity.user, now)
        return meter.spend(messages, size, now)

    def _quota(self, identity: Identity) -> Quota:
        """Of the first of the file's groups that somebody is in, or the one of all."""
        quotas = self.settings.group_quotas
        return next((quota for group, quota in quotas.items() if group in identity.groups), self.settings.quota)

    # --- files

    def start(self) -> None:
        """Look at the files from now on."""
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def close(self) -> None:
        """Look no more, and end the connections to the callback."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for asker in (self._callback, *self._deciders.values()):
            if asker is not None:
                await asker.close()

    async def read_again(self) -> None:
        """Read what has changed; sessions get the new rules. What does not do is said in the log, and changes nothing."""
        if all(_stamp(path) == stamp for path, stamp in self._stamps.items()):
            return
        files = _Files(self._path, self._files.parsed)
        try:
            await asyncio.to_thread(files.read)  # a large file of passwords takes seconds
        except Exception as error:
            self._stamps = files.stamps
            self._wrong(error)
            return
        self._use(files)
        self._log.info(ACCESS_FILE_READ, path=str(self._path), rules=len(self.settings.rules))
        self._audit.write("access_file_read", path=str(self._path))
        for session in list(self._sessions):
            self._recheck(session)

    def _wrong(self, error: Exception) -> None:
        self.counts["files_wrong"] += 1
        text = str(error) if isinstance(error, ConfigurationError) else f"{self._path}: {type(error).__name__}: {error}"
        self._log.error(ACCESS_FILE_WRONG, error=text)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        found: dict[str, object] = {"access_sessions": len(self._sessions)}
        for name in ("logins", "refused", "denied", "ids_refused", "expired", "kicked", "files_wrong"):
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
            except Exception as error:  # whatever it is: the next change must be seen
                self._wrong(error)

    def _use(self, files: _Files) -> None:
        settings = files.settings
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
            self._failures = Meters(per_min / 60, 0, 60.0, MAX_ADDRESSES) if per_min else None
        self._spent.clear()
        self._hashed.clear()
        self._files, self._stamps, self.settings = files, files.stamps, settings
        self._keys, self._users, self._revoked = files.keys, files.users, files.revoked

    def _close_soon(self, asker: Callback | Decider | None) -> None:
        if asker is not None:
            task = asyncio.get_running_loop().create_task(asker.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _recheck(self, session: Session) -> None:
        identity = session.identity
        if identity.by == "password" and (session.entry is None or self._users.get(identity.user) != session.entry):
            session.end("the user's password entry has changed; log in again")
            return
        if certificates.is_revoked(identity, self._revoked):
            session.end("the client's certificate has been revoked")
            return
        try:
            older, session.permissions = session.permissions, self._permissions(identity, session.client_id, session.address)
            session.permissions.keep(older)
        except NotAllowed as error:
            session.end(str(error))
            return
        session.rules_changed()


class _Files:
    """The access file and those that it names, as they are read once. Args: before: what was parsed the last time."""

    def __init__(self, path: Path, before: Mapping[tuple[str, Path], tuple[Stamp, Any]]) -> None:
        self._path, self._before = path, before
        self.parsed: dict[tuple[str, Path], tuple[Stamp, Any]] = {}
        self.stamps: dict[Path, Stamp] = {}
        """Of each file before it was read: what is written meanwhile is a change. Also of those that do not do."""
        self.settings = Settings()
        self.keys: tuple[tokens.Key, ...] = ()
        self.users: Mapping[str, passwords.Entry] = {}
        self.revoked: frozenset[int] = frozenset()

    def read(self) -> None:
        """Read them; what has not changed is not parsed again. Blocking. Raises `ConfigurationError`."""
        self.settings = self._parsed("access", self._path, lambda data, name: parse(data.decode(errors="replace"), name))
        folder = self._path.parent
        if self.settings.keys:
            self.keys = self._parsed("keys", folder / self.settings.keys, tokens.read_keys)
        if self.settings.users:
            path = folder / self.settings.users
            self.users = self._parsed("users", path, lambda data, name: passwords.read_users(data.decode(errors="replace"), name))
        if self.settings.certificate is not None and self.settings.certificate.revoked:
            self.revoked = self._parsed("revoked", folder / self.settings.certificate.revoked, certificates.read_revoked)

    def _parsed(self, kind: str, path: Path, parse_: Callable[[bytes, str], Made]) -> Made:
        self.stamps[path] = stamp = _stamp(path)
        found = self._before.get((kind, path))
        if found is None or found[0] != stamp:
            found = stamp, parse_(read_bounded(path, MAX_FILE_BYTES), str(path))
        self.parsed[kind, path] = found
        made: Made = found[1]
        return made


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino
