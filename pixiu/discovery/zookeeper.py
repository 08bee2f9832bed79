"""ZooKeeper for asyncio.

kazoo runs the session in threads of its own. This facade starts operations without waiting for them and passes their results,
watches and session changes to the event loop, so that nothing here ever blocks it.

If the registry is guarded (`pixiu.discovery.access`), each new node gets its access list.

While there is no connection every operation is refused at once: kazoo would queue it, and perform it long after its caller has
given up.

Source: docs/registry.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from pixiu.discovery import kazoo_client, paths
from pixiu.discovery import login as logins
from pixiu.discovery.access import Access
from pixiu.discovery.login import CREDENTIALS_FILE, Login
from pixiu.discovery.operations import (
    MAX_DATA_BYTES,
    MAX_TRANSACTION,
    Create,
    NodeExists,
    NoNode,
    Operation,
    RegistryConflict,
    SessionEvent,
    SessionListener,
    SessionState,
    Stat,
    Watch,
    WatchEvent,
    check_size,
)
from pixiu.discovery.target import RegistryAddress
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, RegistryDenied, RegistryUnavailable

if TYPE_CHECKING:  # it loads gRPC
    from pixiu.rpc.tls import Tls

MAX_IN_FLIGHT: Final = 256
"""Limit of operations under way; more wait for their turn."""
REFUSED_TIMES: Final = 5
REFUSED_FOR: Final = 2.0
"""After `REFUSED_TIMES` connections that servers took and then ended, and this multiple of the session timeout, the registry is
considered to have gone back: what this client has seen of it is forgotten."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for ZooKeeper to end the session in close(), seconds; after that the session ends by its timeout."""

_log = logging.getLogger("pixiu.zookeeper")


class ZooKeeper:
    """A session with ZooKeeper for one event loop.

    Args:
        address: ZooKeeper's address, with the root below which nodes get access lists; or `host:port[,host:port]`.
        session_timeout_s: time for which ZooKeeper keeps the session of a silent process, seconds; the server may bound it.
        connect_timeout_s: time limit of `connect`, seconds. Once connected, it reconnects for ever.
        operation_timeout_s: time limit of one operation, seconds.
        session: (id, password) of a session to take over, as `session` returns it.
        login: the login to use; None: the one that this program finds by itself (`pixiu.discovery.login`).
        roles: of the process, to take only their lines of the login that is found; none: all lines.
        tls: certificates for a ZooKeeper with TLS; None: this program's own (`pixiu.rpc.tls`).
        further_roots: roots of other clusters in which this session writes.

    Source: docs/registry.md.
    """

    def __init__(
        self,
        address: RegistryAddress | str,
        *,
        session_timeout_s: float = 10.0,
        connect_timeout_s: float = 10.0,
        operation_timeout_s: float = 10.0,
        session: tuple[int, bytes] | None = None,
        login: Login | None = None,
        roles: Sequence[str] = (),
        tls: Tls | None = None,
        further_roots: Sequence[str] = (),
    ) -> None:
        if isinstance(address, str):
            address = RegistryAddress(address)
        self._address = address
        self._roots = (address.root, *further_roots)
        self._login = (lambda: login) if login is not None else partial(logins.own, address.hosts, *roles)
        self._tls = tls
        self._passwords: dict[str, tuple[str, ...]] = {}
        self._tls_problem = ""
        self._session_timeout_s = session_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._operation_timeout_s = operation_timeout_s
        self._take_over = session
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected = False
        self._first = asyncio.Event()
        """Set once there was a session."""
        self._session_id = 0
        self._refused, self._away_since = 0, 0.0
        """Number of connections that servers took since the session was lost, and the time of the loss, monotonic seconds."""
        self._listeners: dict[SessionListener, contextvars.Context] = {}
        """Each is called in the context in which it was added: several roles of a process may share a session."""
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._asked = 0
        """Number of operations that kazoo has not answered."""
        self._quiet, self._may_ask, self._one_login = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._quiet.set()
        self._may_ask.set()
        self._below: dict[str, dict[Watch, contextvars.Context]] = {}
        self._closed = False

    @property
    def hosts(self) -> str:
        """The servers, as given."""
        return self._address.hosts

    @property
    def connected(self) -> bool:
        """True if operations are possible now."""
        return self._connected

    @property
    def login(self) -> Login | None:
        """The file of credentials in use; None: none."""
        return self._login()

    @property
    def logged_in_as(self) -> tuple[str, ...]:
        """The logins in use."""
        return tuple(self._passwords)

    def says_of_login(self) -> str:
        """Describe the logins in use and their numbers of passwords, for people."""
        said = [f"{who} with {len(found)} password{'s' if len(found) > 1 else ''}" for who, found in self._passwords.items()]
        return ", ".join(said) or "nobody"

    @property
    def session_id(self) -> int:
        """The session's ID; 0 when there is none."""
        return self._session_id

    @property
    def session(self) -> tuple[int, bytes] | None:
        """(id, password) of the session while connected: anyone who has it can take the session over, or end it."""
        return cast("tuple[int, bytes] | None", self._client.client_id) if self._client is not None else None

    def add_listener(self, listener: SessionListener) -> None:
        """Call `listener` in the event loop at every change of the session from now on."""
        self._listeners[listener] = contextvars.copy_context()

    def remove_listener(self, listener: SessionListener) -> None:
        """Stop calling a listener."""
        self._listeners.pop(listener, None)

    async def connect(self) -> None:
        """Open the session.

        Raises `RegistryUnavailable` when no server answers within `connect_timeout_s`, `RegistryDenied` when the login is refused,
        and `ConfigurationError` when the file of credentials or the certificates cannot be used.
        """
        if self._client is not None:
            raise InvalidArgument("this ZooKeeper session was already opened; make a new one")
        self._loop = asyncio.get_running_loop()
        self._passwords = self._read_login()
        self._check_tls()
        self._open()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._first.wait()
        except TimeoutError:
            await self.close()
            raise RegistryUnavailable(
                f"no ZooKeeper answered at {self.hosts} within {self._connect_timeout_s:g} s; "
                + (
                    self._tls_problem
                    or "check that it runs there and that the address is right (`pixiu up` and `pixiu zookeeper` start one for one "
                    "machine)"
                )
            ) from None
        except BaseException:
            await self.close()
            raise
        try:
            await self._access(self._address.root)
        except RegistryDenied:
            await self.close()
            raise RegistryDenied(self._not_taken()) from None
        except (RegistryUnavailable, MalformedData):
            pass  # the next operation reports it

    async def close(self) -> None:
        """End the session, and with it its ephemeral nodes; waits at most 5 s for the server to confirm it, and not for one that
        never opened the session."""
        if self._closed:
            return
        self._closed = True
        self._connected = False
        self._listeners.clear()
        client = self._client
        if client is None:
            return
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        # stop() joins threads. A daemon thread, because a hung server must not keep the process from ending either.
        threading.Thread(
            target=kazoo_client.stop_client, args=(client, partial(kazoo_client.to_loop, loop, done.set)), daemon=True
        ).start()
        if not self._first.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await done.wait()

    async def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, Stat]:
        """Read a node's data. The watch fires when the node changes or is deleted. Raises `NoNode` (and sets no watch),
        `MalformedData` when it is larger than `MAX_DATA_BYTES`, `RegistryUnavailable`."""
        data, stat = await self._run(path, lambda client: client.get_async(path, watch=self._watch(watch)))
        if len(data) > MAX_DATA_BYTES:
            raise MalformedData(f"{path} has {len(data)} bytes of data; at most {MAX_DATA_BYTES} are read")
        return bytes(data), kazoo_client.stat_of(stat)

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        """Replace a node's data if it has this version (-1: any). Raises `NoNode`, `VersionConflict`, `RegistryUnavailable`
        (it may have happened or not)."""
        check_size(path, data)
        return kazoo_client.stat_of(await self._run(path, lambda client: client.set_async(path, data, version)))

    async def create(
        self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequence: bool = False, make_parents: bool = False
    ) -> str:
        """Create a node; returns its path, with the sequence. Raises `NodeExists`, `NoNode` (no parent), `RegistryUnavailable` (it
        may have happened or not)."""
        check_size(path, data)
        access = await self._acl(path)

        async def make() -> Any:
            return await self._run(
                path, lambda client: client.create_async(path, data, acl=access, ephemeral=ephemeral, sequence=sequence)
            )

        try:
            return str(await make())
        except NoNode:
            if not make_parents:
                raise
        await self.ensure_path(path.rpartition("/")[0])
        return str(await make())

    async def sync(self, path: str) -> None:
        """Let the session's server catch up: reads that begin afterwards are not older than this call."""
        await self._run(path, lambda client: client.sync_async(path))

    async def ensure_path(self, path: str) -> None:
        """Create a persistent node and any missing parents. Raises `RegistryUnavailable`."""
        missing = []
        while path and await self.exists(path) is None:
            missing.append(path)
            path = path.rpartition("/")[0]
        for each in reversed(missing):
            with contextlib.suppress(NodeExists):
                await self.create(each)

    async def set_acl(self, path: str, access: Access, below: str) -> bool:
        """Set a node's access list to that of the path `below` its root. True if it was different. Raises `NoNode`,
        `RegistryDenied`, `RegistryUnavailable`."""
        wanted = kazoo_client.acl(access, below)
        found, _ = await self._run(path, lambda client: client.get_acls_async(path))
        if set(found) == set(wanted):
            return False
        await self._run(path, lambda client: client.set_acls_async(path, wanted))
        return True

    async def access(self, root: str) -> Access | None:
        """Read the logins of a cluster's registry; None: it is open to everybody. Raises `RegistryDenied`, `MalformedData`,
        `RegistryUnavailable`."""
        return await self._access(root)

    async def log_in_again(self) -> bool:
        """Read the file of credentials again, and log in with new ones; the session stays. True if there were any.

        Raises `ConfigurationError`, `RegistryUnavailable`.
        """
        found = await asyncio.to_thread(self._read_login)
        if found == self._passwords or self._client is None:
            return False
        former, self._passwords = self._passwords, found
        client, now = self._client, set(kazoo_client.auth(found))
        client.auth_data.clear()
        client.auth_data.update(now)  # sent by the next connection
        try:
            for scheme, said in sorted(now - set(kazoo_client.auth(former))):
                await self._say(scheme, said)
        except BaseException:
            self._passwords = former  # the next call sends it
            raise
        return True

    async def _say(self, scheme: str, said: str) -> None:
        """Log in while nothing else is under way: ZooKeeper answers a login before earlier requests, and kazoo matches answers by
        order, so another request would get the login's answer. Raises `RegistryUnavailable`."""
        async with self._one_login:
            self._may_ask.clear()
            try:
                async with asyncio.timeout(self._operation_timeout_s):
                    await self._quiet.wait()
                await self._ask("/", lambda client: client.add_auth_async(scheme, said))
            except TimeoutError:
                text = f"ZooKeeper at {self.hosts} did not answer earlier requests within {self._operation_timeout_s:g} s"
                raise RegistryUnavailable(f"no login: {text}") from None
            finally:
                self._may_ask.set()

    async def delete(self, path: str, version: int = -1) -> None:
        """Delete a node if it has this version (-1: any). Raises `NoNode`, `VersionConflict`, `NotEmpty`,
        `RegistryUnavailable` (it may have happened or not)."""
        await self._run(path, lambda client: client.delete_async(path, version))

    async def exists(self, path: str, watch: Watch | None = None) -> Stat | None:
        """Read a node's Stat; None if it does not exist. The watch fires when it is created, changes or is deleted."""
        stat = await self._run(path, lambda client: client.exists_async(path, watch=self._watch(watch)))
        return None if stat is None else kazoo_client.stat_of(stat)

    async def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Read the names of a node's children, sorted. The watch fires when one is added or removed. Raises `NoNode` (and sets no
        watch)."""
        names = await self._run(path, lambda client: client.get_children_async(path, watch=self._watch(watch)))
        return sorted(names)

    async def listing(self, path: str) -> tuple[list[str], Stat]:
        """Read the names of a node's children, sorted, and its Stat. Raises `NoNode`, `RegistryUnavailable`."""
        names, stat = await self._run(path, lambda client: client.get_children_async(path, include_data=True))
        return sorted(names), kazoo_client.stat_of(stat)

    async def watch_below(self, path: str, watch: Watch) -> None:
        """Report every creation, change or deletion at or below a path to `watch` until the connection ends; then it must be set
        again. The path need not exist.

        Raises `RegistryUnavailable`, `RegistryConflict` from a ZooKeeper older than 3.6.
        """
        self._below.setdefault(path, {}).setdefault(watch, contextvars.copy_context())
        await self._run(path, partial(kazoo_client.start_watch_below, path))

    def stop_watching_below(self, watch: Watch) -> None:
        """Stop reporting to `watch`; the server's watches end with the connection."""
        for watches in self._below.values():
            watches.pop(watch, None)

    async def transaction(self, operations: Sequence[Operation]) -> list[object]:
        """Do all operations or none. Returns a list with the path of each `Create` and something else for the others.

        Raises the error of the operation that failed, or `RegistryUnavailable` (all of it happened, or nothing).
        """
        if not 0 < len(operations) <= MAX_TRANSACTION:
            raise InvalidArgument(f"a transaction has 1 to {MAX_TRANSACTION} operations, not {len(operations)}")

        acls = [await self._acl(one.path) if isinstance(one, Create) else None for one in operations]
        results = list(await self._run(operations[0].path, partial(kazoo_client.start_transaction, operations, acls)))
        at = kazoo_client.failed(results)
        if at == -1:
            raise RegistryConflict(f"a transaction on {operations[0].path} was rolled back; read and try again")
        if at is not None:
            raise kazoo_client.translate(results[at], operations[at].path, self.hosts, self._passwords)
        return results

    def _open(self) -> None:
        """Start kazoo. Its threads do the rest."""
        assert self._loop is not None
        self._client = kazoo_client.new_client(
            self.hosts,
            self._session_timeout_s,
            tls=self._tls_context if self._address.tls else None,
            tls_failed=self._no_tls,
            passwords=self._passwords,
            session=self._take_over,
            loop=self._loop,
            reached=self._on_reached,
            heard_below=self._heard_below,
            changed=self._on_state,
        )
        self._take_over = None
        self._client.start_async()

    def _read_login(self) -> dict[str, tuple[str, ...]]:
        return self.login.read() if self.login is not None else {}

    def _check_tls(self) -> None:
        if self._address.tls:
            self._tls_context()

    def _tls_context(self) -> ssl.SSLContext:
        """Make the TLS context for each connection, so that changed files are used; in kazoo's thread."""
        from pixiu.rpc.tls import TLS_DIR, own  # gRPC, which most readers of the registry load anyway

        tls = self._tls or own()
        if tls is None:
            raise ConfigurationError(f"{self._address}: TLS needs certificates: set [cluster] tls_dir, or for commands {TLS_DIR}")
        return tls.client_context()

    def _no_tls(self, error: Exception) -> None:
        """Note the failure of TLS; in kazoo's thread."""
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
        self._tls_problem = (
            f"TLS fails ({reason}): ZooKeeper needs a certificate of `pixiu pki issue zookeeper`, and this process one of the "
            "same authority"
        )

    async def _access(self, root: str) -> Access | None:
        try:
            data, _ = await self.get(paths.access(root))
        except NoNode:
            return None
        return Access.from_json(data)

    async def _acl(self, path: str) -> list[Any] | None:
        """The access list of a new node; None: everybody may do everything."""
        for root in self._roots:
            if path == root or path.startswith(f"{root}/"):
                found = await self._access(root)
                return kazoo_client.acl(found, path[len(root) :]) if found is not None else None
        return None

    def _not_taken(self) -> str:
        if not self._passwords:
            return (
                f"the registry at {self._address} requires a login: name its file in [cluster] registry_credentials_file, or for "
                f"commands in {CREDENTIALS_FILE} (`pixiu up` keeps it as zookeeper/credentials in its data folder); "
                "with a proxy's HOST:PORT as the target none is needed"
            )
        return (
            f"the registry at {self._address} refuses the login of {', '.join(self._passwords)} in "
            f"{self.login.path if self.login is not None else 'its file'}: copy the file of the cluster, or have an operator run "
            "`pixiu registry secure`"
        )

    def _heard_below(self, event: WatchEvent) -> None:
        path = event.path
        while path:
            for watch, context in list(self._below.get(path, {}).items()):
                context.copy().run(watch, event)
            path = path.rpartition("/")[0]

    def _on_state(self, client: Any, state: SessionState, session_id: int) -> None:
        if self._closed or client is not self._client:
            return
        if state is SessionState.CONNECTED or self._connected:
            assert self._loop is not None
            self._refused, self._away_since = 0, self._loop.time()
        if state is SessionState.CONNECTED:
            event = SessionEvent(state, session_id, session_id != self._session_id)
            self._session_id = session_id
            self._connected = True
            self._first.set()
        elif state is SessionState.SUSPENDED:
            event = SessionEvent(state, self._session_id, False)
            self._connected = False
        else:
            event = SessionEvent(state, 0, False)
            self._session_id = 0
            self._connected = False
            assert self._loop is not None
            self._loop.call_later(kazoo_client.RECONNECT_MAX_DELAY_S, self._revive, client)
        for listener, context in list(self._listeners.items()):
            context.copy().run(listener, event)

    def _on_reached(self) -> None:
        """Count a connection that a server took without restoring the session. A server restored from a backup, with data older
        than this client has seen, ends each attempt silently; so does one without a quorum, for which forgetting does no harm."""
        if self._closed or self._connected or self._loop is None or self._client is None or not self._first.is_set():
            return
        self._refused += 1
        away_s = self._loop.time() - self._away_since
        if self._refused >= REFUSED_TIMES and away_s >= REFUSED_FOR * self._session_timeout_s:
            if self._client.last_zxid:
                _log.warning(
                    "registry_went_back servers=%s zxid=%x: they accept connections and close them; if ZooKeeper was restored "
                    "from an "
                    "older backup, see docs/operations.md",
                    self.hosts, self._client.last_zxid,
                )  # fmt: skip
            self._client.last_zxid = 0

    def _revive(self, client: Any) -> None:
        """Start kazoo again if its thread has ended: it ends for good on an answer that it does not understand, and a process must
        not lose its registry by that."""
        if self._closed or self._connected or client is not self._client or self._loop is None:
            return
        if kazoo_client.has_ended(client):
            threading.Thread(target=kazoo_client.stop_client, args=(client, lambda: None), daemon=True).start()
            self._open()
        self._loop.call_later(kazoo_client.RECONNECT_MAX_DELAY_S, self._revive, self._client)

    def _watch(self, callback: Watch | None) -> kazoo_client.LoopWatch | None:
        assert self._loop is not None
        return None if callback is None else kazoo_client.LoopWatch(self._loop, callback)

    async def _run(self, path: str, start: Callable[[Any], Any]) -> Any:
        """Start an operation in kazoo and wait for its result without blocking the loop. Waits for a login that is under way."""
        async with self._in_flight:
            while not self._may_ask.is_set():
                await self._may_ask.wait()
            return await self._ask(path, start)

    async def _ask(self, path: str, start: Callable[[Any], Any]) -> Any:
        if self._closed or not self._connected or self._loop is None:
            raise RegistryUnavailable(f"{path}: there is no connection to ZooKeeper at {self.hosts} now; try again later")
        future: asyncio.Future[Any] = self._loop.create_future()
        try:
            operation = start(self._client)
            self._asked += 1
            self._quiet.clear()
            operation.rawlink(partial(kazoo_client.settle, self._loop, partial(self._answered, future)))
            async with asyncio.timeout(self._operation_timeout_s):
                return await future
        except TimeoutError:
            raise RegistryUnavailable(
                f"{path}: ZooKeeper at {self.hosts} did not answer within {self._operation_timeout_s:g} s; "
                "whether the operation happened is unknown"
            ) from None
        except kazoo_client.KazooError as error:
            raise kazoo_client.translate(error, path, self.hosts, self._passwords) from error

    def _answered(self, future: asyncio.Future[Any], exception: BaseException | None, value: Any) -> None:
        self._asked -= 1
        if not self._asked:
            self._quiet.set()
        if future.done():
            return
        if exception is None:
            future.set_result(value)
        else:
            future.set_exception(exception)
