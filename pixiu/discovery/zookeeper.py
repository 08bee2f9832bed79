"""ZooKeeper for asyncio: the only module that imports kazoo.

kazoo runs the session in threads of its own. This facade starts operations without waiting for them and passes their results,
watches and session changes to the event loop, so that nothing here ever blocks it.

If the registry is guarded (`pixiu.discovery.access`), each new node gets its access list.

While there is no connection every operation is refused at once: kazoo would queue it, and perform it long after its caller has
given up.

Source: docs/registry.md; notes on reliability, hole 14 (the back-off that lost sessions).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, cast

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Watch as WatchReply
from kazoo.protocol.serialization import int_struct, write_string
from kazoo.protocol.states import EVENT_TYPE_MAP, KazooState, KeeperState
from kazoo.security import ACL, Id

from pixiu.discovery import login as logins
from pixiu.discovery import paths
from pixiu.discovery.access import Access
from pixiu.discovery.login import CREDENTIALS_FILE, Login
from pixiu.discovery.target import RegistryAddress
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, RegistryDenied, RegistryUnavailable, RemoteError

MAX_DATA_BYTES: Final = 65_536
"""Limit of a node's data, read or written, bytes; ZooKeeper itself would take 1 MiB."""
MAX_IN_FLIGHT: Final = 256
"""Limit of operations under way; more wait for their turn."""
MAX_TRANSACTION: Final = 64
RECONNECT_MAX_DELAY_S: Final = 0.5
"""Longest back-off between attempts to connect, seconds: far below every session timeout, so that it never costs a session."""
CONNECT_SHARE: Final = 1 / 3
"""Share of the session timeout that an attempt to connect may take."""
REFUSED_TIMES: Final = 5
REFUSED_FOR: Final = 2.0
"""After `REFUSED_TIMES` connections that servers took and then ended, and this multiple of the session timeout, the registry is
considered to have gone back: what this client has seen of it is forgotten."""
TLS_NAME: Final = "zookeeper.pixiu"
"""Host name in ZooKeeper's certificate, whatever its address is, as for processes (`pixiu.rpc.tls`)."""
PERMISSIONS: Final = {"r": 1, "w": 2, "c": 4, "d": 8, "a": 16}
"""ZooKeeper's permission bits."""
CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for ZooKeeper to end the session in close(), seconds; after that the session ends by its timeout."""

_log = logging.getLogger("pixiu.zookeeper")
_kazoo_log = logging.getLogger("pixiu.zookeeper.kazoo")
# kazoo warns at every attempt to connect, twice a second in an outage; session listeners report it once.
_kazoo_log.setLevel(logging.ERROR)


class RegistryConflict(RemoteError):
    """The registry differs from what an operation needs: read it again and decide again."""


class NoNode(RegistryConflict):
    """The node, or the parent of a node to create, does not exist."""


class NodeExists(RegistryConflict):
    """The node to create exists."""


class VersionConflict(RegistryConflict):
    """Somebody else changed the node since it was read."""


class NotEmpty(RegistryConflict):
    """The node to delete has children."""


class SessionState(Enum):
    """State of the session with ZooKeeper."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """No connection; the session, its nodes and its watches may still live."""
    LOST = "lost"
    """The session is over; a new one is being set up. ZooKeeper may have removed its nodes long before."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A change of the session."""

    state: SessionState
    session_id: int
    """0 when the session is lost."""
    new_session: bool
    """True if CONNECTED with another session than before (or with the first one)."""


class WatchKind(Enum):
    """Kind of change that a watch reports."""

    CREATED = "CREATED"
    DELETED = "DELETED"
    CHANGED = "CHANGED"
    CHILD = "CHILD"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A watch fired; it will not fire again until it is set again."""

    kind: WatchKind
    path: str


Watch = Callable[[WatchEvent], None]
"""Called in the event loop. Setting an equal one twice on a path sets it once."""
SessionListener = Callable[[SessionEvent], None]


@dataclass(frozen=True, slots=True)
class Stat:
    """ZooKeeper's metadata of a node."""

    version: int
    created_zxid: int
    modified_zxid: int
    """The transaction that changed the data last."""
    children_zxid: int
    """The transaction that last changed the list of children, not their data."""
    ephemeral_owner: int
    """The session that owns an ephemeral node; 0 for a persistent one."""
    children: int
    created_ms: int
    """Creation by the wall clock of ZooKeeper's leader, Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class Create:
    """Operation of a transaction: create a node. Its result is the path."""

    path: str
    data: bytes = b""
    ephemeral: bool = False
    sequence: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Operation of a transaction: replace the data of a node that has this version (-1: any)."""

    path: str
    data: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class Delete:
    """Operation of a transaction: delete a node that has this version (-1: any)."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class Check:
    """Operation of a transaction: continue only if a node has this version."""

    path: str
    version: int


Operation = Create | Set | Delete | Check


@dataclass(frozen=True)
class _LoopWatch:
    """A watch as kazoo keeps it: equal for equal callbacks, so that a watch set repeatedly is kept once."""

    loop: asyncio.AbstractEventLoop
    callback: Watch

    def __call__(self, event: Any) -> None:
        # NONE events report a change of the session, which session listeners handle.
        if event.type in WatchKind.__members__:
            _to_loop(self.loop, self.callback, WatchEvent(WatchKind(str(event.type)), str(event.path)))


@dataclass(frozen=True)
class _AddWatch:
    """A request that kazoo lacks: watch everything at and below a path, persistently, until the connection ends."""

    path: str
    type = 106
    """Its number in ZooKeeper's protocol, since 3.6."""

    def serialize(self) -> bytes:
        """Encode the request: the path, and the mode `PERSISTENT_RECURSIVE`."""
        return bytes(write_string(self.path)) + bytes(int_struct.pack(1))

    @staticmethod
    def deserialize(_data: bytes, _offset: int) -> bool:
        """Return True: the answer has no content."""
        return True


def _listen_below(connection: ConnectionHandler, heard: Callable[[WatchEvent], None]) -> None:
    """Make kazoo's connection report every watch that fires, including those that kazoo has not set."""
    read = connection._read_watch_event

    def both(buffer: bytes, offset: int) -> None:
        fired, _ = WatchReply.deserialize(buffer, offset)
        kind = EVENT_TYPE_MAP.get(fired.type)
        if kind in WatchKind.__members__:
            heard(WatchEvent(WatchKind(kind), str(fired.path)))
        read(buffer, offset)

    connection._read_watch_event = both


def _to_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    # The loop may be closed while kazoo's threads still run.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a time limit for every attempt to connect.

    A ZooKeeper that is just starting can accept a connection and never answer on it (measured: once in some ten restarts under
    load). kazoo waits the whole session timeout for that answer, and loses the session.
    """

    def __init__(
        self,
        patience_s: float,
        tls: Callable[[], ssl.SSLContext] | None,
        failed: Callable[[Exception], None],
        reached: Callable[[], None],
    ) -> None:
        super().__init__()
        self._reached = reached
        self._patience_s = patience_s
        self._tls, self._failed = tls, failed
        self._unanswered: Any = None
        """The newest connection, until the server's first answer can be read."""

    def create_connection(self, *arguments: Any, **options: Any) -> Any:
        """Connect, within the time limit."""
        options["timeout"] = min(options.get("timeout") or self._patience_s, self._patience_s)
        made = super().create_connection(*arguments, **options)
        if self._tls is not None:
            made.settimeout(options["timeout"])
            try:
                made = self._tls().wrap_socket(made, server_hostname=TLS_NAME)
            except (OSError, ConfigurationError) as error:  # ssl.SSLError is an OSError
                made.close()
                self._failed(error)
                raise OSError(f"no TLS with ZooKeeper: {error}") from error  # kazoo tries the next server
        self._unanswered = made
        self._reached()
        return self._unanswered

    def select(self, readable: Any, writable: Any, broken: Any, timeout: float | None = None) -> Any:
        """Wait for sockets; for the first answer on a connection only within the time limit."""
        if self._unanswered is None or list(readable) != [self._unanswered]:
            return super().select(readable, writable, broken, timeout)
        found = super().select(readable, writable, broken, self._patience_s if timeout is None else min(timeout, self._patience_s))
        if found[0]:
            self._unanswered = None
        return found


class ZooKeeper:
    """A session with ZooKeeper for one event loop.

    Args:
        address: ZooKeeper's address, with the root below which nodes get access lists; or `host:port[,host:port]`.
        session_timeout_s: time for which ZooKeeper keeps the session of a silent process, seconds; the server may bound it.
        connect_timeout_s: time limit of `connect`, seconds. Once connected, it reconnects for ever.
        operation_timeout_s: time limit of one operation, seconds.
        session: (id, password) of a session to take over, as `session` returns it.
        login: the login to use; None: this process's own (`pixiu.discovery.login`).
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
        further_roots: Sequence[str] = (),
    ) -> None:
        if isinstance(address, str):
            address = RegistryAddress(address)
        self._address, self._hosts = address, address.hosts
        self._roots = (address.root, *further_roots)
        self._login = login
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
        self._session_id = 0
        self._session_seen = False
        """True if there was ever a session."""
        self._refused, self._away_since = 0, 0.0
        """Number of connections that servers took since the session was lost, and the time of the loss, monotonic seconds."""
        self._listeners: list[SessionListener] = []
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._asked = 0
        """Number of operations that kazoo has not answered."""
        self._quiet, self._may_ask, self._one_login = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._quiet.set()
        self._may_ask.set()
        self._below: dict[str, list[Watch]] = {}
        self._closed = False

    @property
    def hosts(self) -> str:
        """The servers, as given."""
        return self._hosts

    @property
    def connected(self) -> bool:
        """True if operations are possible now."""
        return self._connected

    @property
    def login(self) -> Login | None:
        """The file of credentials in use; None: none."""
        return self._login or logins.own(self._hosts)

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
        self._listeners.append(listener)

    def remove_listener(self, listener: SessionListener) -> None:
        """Stop calling a listener."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

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
                f"no ZooKeeper answered at {self._hosts} within {self._connect_timeout_s:g} s; "
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
        threading.Thread(target=_stop_client, args=(client, partial(_to_loop, loop, done.set)), daemon=True).start()
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
        return bytes(data), _stat(stat)

    async def set(self, path: str, data: bytes, version: int = -1) -> Stat:
        """Replace a node's data if it has this version (-1: any). Raises `NoNode`, `VersionConflict`, `RegistryUnavailable`
        (it may have happened or not)."""
        _bounded(path, data)
        return _stat(await self._run(path, lambda client: client.set_async(path, data, version)))

    async def create(
        self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequence: bool = False, make_parents: bool = False
    ) -> str:
        """Create a node; returns its path, with the sequence. Raises `NodeExists`, `NoNode` (no parent), `RegistryUnavailable` (it
        may have happened or not)."""
        _bounded(path, data)
        acl = await self._acl(path)

        async def make() -> Any:
            return await self._run(
                path, lambda client: client.create_async(path, data, acl=acl, ephemeral=ephemeral, sequence=sequence)
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
        wanted = _acl(access, below)
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
        client, now = self._client, set(_auth(found))
        client.auth_data.clear()
        client.auth_data.update(now)  # sent by the next connection
        try:
            for scheme, said in sorted(now - set(_auth(former))):
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
                await self._ask("/", partial(_add_auth, scheme, said))
            except TimeoutError:
                text = f"ZooKeeper at {self._hosts} did not answer earlier requests within {self._operation_timeout_s:g} s"
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
        return None if stat is None else _stat(stat)

    async def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Read the names of a node's children, sorted. The watch fires when one is added or removed. Raises `NoNode` (and sets no
        watch)."""
        names = await self._run(path, lambda client: client.get_children_async(path, watch=self._watch(watch)))
        return sorted(names)

    async def listing(self, path: str) -> tuple[list[str], Stat]:
        """Read the names of a node's children, sorted, and its Stat. Raises `NoNode`, `RegistryUnavailable`."""
        names, stat = await self._run(path, lambda client: client.get_children_async(path, include_data=True))
        return sorted(names), _stat(stat)

    async def watch_below(self, path: str, watch: Watch) -> None:
        """Report every creation, change or deletion at or below a path to `watch` until the connection ends; then it must be set
        again. The path need not exist.

        Raises `RegistryUnavailable`, `RegistryConflict` from a ZooKeeper older than 3.6.
        """
        watches = self._below.setdefault(path, [])
        if watch not in watches:
            watches.append(watch)

        def start(client: Any) -> Any:
            done = client.handler.async_result()
            client._call(_AddWatch(path), done)
            return done

        await self._run(path, start)

    def stop_watching_below(self, watch: Watch) -> None:
        """Stop reporting to `watch`; the server's watches end with the connection."""
        for watches in self._below.values():
            if watch in watches:
                watches.remove(watch)

    async def transaction(self, operations: Sequence[Operation]) -> list[object]:
        """Do all operations or none. Returns a list with the path of each `Create` and something else for the others.

        Raises the error of the operation that failed, or `RegistryUnavailable` (all of it happened, or nothing).
        """
        if not 0 < len(operations) <= MAX_TRANSACTION:
            raise InvalidArgument(f"a transaction has 1 to {MAX_TRANSACTION} operations, not {len(operations)}")

        acls = [await self._acl(one.path) if isinstance(one, Create) else None for one in operations]

        def start(client: Any) -> Any:
            request = client.transaction()
            for operation, acl in zip(operations, acls, strict=True):
                match operation:
                    case Create():
                        _bounded(operation.path, operation.data)
                        request.create(operation.path, operation.data, acl, operation.ephemeral, operation.sequence)
                    case Set():
                        _bounded(operation.path, operation.data)
                        request.set_data(operation.path, operation.data, operation.version)
                    case Delete():
                        request.delete(operation.path, operation.version)
                    case Check():
                        request.check(operation.path, operation.version)
            return request.commit_async()

        results = list(await self._run(operations[0].path, start))
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, KazooException) and not isinstance(result, RolledBackError | RuntimeInconsistency):
                raise self._translate(result, operation.path)
        if any(isinstance(result, KazooException) for result in results):
            raise RegistryConflict(f"a transaction on {operations[0].path} was rolled back; read and try again")
        return results

    def _open(self) -> None:
        """Start kazoo. Its threads do the rest."""
        assert self._loop is not None
        client = KazooClient(
            hosts=self._hosts,
            handler=_Handler(
                self._session_timeout_s * CONNECT_SHARE,
                self._tls_context if self._address.tls else None,
                self._no_tls,
                partial(_to_loop, self._loop, self._on_reached),
            ),
            auth_data=_auth(self._passwords),
            timeout=self._session_timeout_s,
            client_id=self._take_over,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_jitter": 0.4, "max_delay": RECONNECT_MAX_DELAY_S},
            logger=_kazoo_log,
        )
        self._take_over = None
        self._client = client
        _listen_below(client._connection, partial(_to_loop, self._loop, self._heard_below))
        client.add_listener(partial(self._on_kazoo_state, self._loop, client))
        client.start_async()

    def _read_login(self) -> dict[str, tuple[str, ...]]:
        return self.login.read() if self.login is not None else {}

    def _check_tls(self) -> None:
        if self._address.tls:
            self._tls_context()

    def _tls_context(self) -> ssl.SSLContext:
        """Make the TLS context for each connection, so that changed files are used; in kazoo's thread."""
        from pixiu.rpc.tls import TLS_DIR, own  # gRPC, which most readers of the registry load anyway

        tls = own()
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
                return _acl(found, path[len(root) :]) if found is not None else None
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
            for watch in list(self._below.get(path, ())):
                watch(event)
            path = path.rpartition("/")[0]

    def _on_kazoo_state(self, loop: asyncio.AbstractEventLoop, client: Any, state: str) -> None:
        """Pass on a state of kazoo; in its thread, where the session's ID certainly belongs to this state."""
        identity = client.client_id if state == KazooState.CONNECTED else None
        _to_loop(loop, self._on_state, client, state, identity[0] if identity else 0)

    def _on_state(self, client: Any, state: str, session_id: int) -> None:
        if self._closed or client is not self._client:
            return
        if state == KazooState.CONNECTED or self._connected:
            assert self._loop is not None
            self._refused, self._away_since = 0, self._loop.time()
        if state == KazooState.CONNECTED:
            event = SessionEvent(SessionState.CONNECTED, session_id, session_id != self._session_id)
            self._session_id = session_id
            self._session_seen = self._connected = True
            self._first.set()
        elif state == KazooState.SUSPENDED:
            event = SessionEvent(SessionState.SUSPENDED, self._session_id, False)
            self._connected = False
        else:
            event = SessionEvent(SessionState.LOST, 0, False)
            self._session_id = 0
            self._connected = False
            assert self._loop is not None
            self._loop.call_later(RECONNECT_MAX_DELAY_S, self._revive, client)
        for listener in list(self._listeners):
            listener(event)

    def _on_reached(self) -> None:
        """Count a connection that a server took without restoring the session. A server restored from a backup, with data older
        than this client has seen, ends each attempt silently; so does one without a quorum, for which forgetting does no harm."""
        if self._closed or self._connected or self._loop is None or self._client is None or not self._session_seen:
            return
        self._refused += 1
        away_s = self._loop.time() - self._away_since
        if self._refused >= REFUSED_TIMES and away_s >= REFUSED_FOR * self._session_timeout_s:
            if self._client.last_zxid:
                _log.warning(
                    "registry_went_back servers=%s zxid=%x: they accept connections and close them; if ZooKeeper was restored "
                    "from an "
                    "older backup, see docs/operations.md",
                    self._hosts, self._client.last_zxid,
                )  # fmt: skip
            self._client.last_zxid = 0

    def _revive(self, client: Any) -> None:
        """Start kazoo again if its thread has ended: it ends for good on an answer that it does not understand, and a process must
        not lose its registry by that."""
        if self._closed or self._connected or client is not self._client or self._loop is None:
            return
        if str(client.client_state) == KeeperState.CLOSED:
            threading.Thread(target=_stop_client, args=(client, lambda: None), daemon=True).start()
            self._open()
        self._loop.call_later(RECONNECT_MAX_DELAY_S, self._revive, self._client)

    def _watch(self, callback: Watch | None) -> _LoopWatch | None:
        assert self._loop is not None
        return None if callback is None else _LoopWatch(self._loop, callback)

    async def _run(self, path: str, start: Callable[[Any], Any]) -> Any:
        """Start an operation in kazoo and wait for its result without blocking the loop. Waits for a login that is under way."""
        async with self._in_flight:
            while not self._may_ask.is_set():
                await self._may_ask.wait()
            return await self._ask(path, start)

    async def _ask(self, path: str, start: Callable[[Any], Any]) -> Any:
        if self._closed or not self._connected or self._loop is None:
            raise RegistryUnavailable(f"{path}: there is no connection to ZooKeeper at {self._hosts} now; try again later")
        future: asyncio.Future[Any] = self._loop.create_future()
        try:
            operation = start(self._client)
            self._asked += 1
            self._quiet.clear()
            operation.rawlink(partial(_settle, self._loop, partial(self._answered, future)))
            async with asyncio.timeout(self._operation_timeout_s):
                return await future
        except TimeoutError:
            raise RegistryUnavailable(
                f"{path}: ZooKeeper at {self._hosts} did not answer within {self._operation_timeout_s:g} s; "
                "whether the operation happened is unknown"
            ) from None
        except KazooException as error:
            raise self._translate(error, path) from error

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

    def _translate(self, error: KazooException, path: str) -> RemoteError:
        match error:
            case NoNodeError():
                return NoNode(f"{path} does not exist in ZooKeeper")
            case NodeExistsError():
                return NodeExists(f"{path} already exists in ZooKeeper")
            case BadVersionError():
                return VersionConflict(f"{path} was changed by another process; read it again")
            case NotEmptyError():
                return NotEmpty(f"{path} has children")
            case NoAuthError():
                who = ", ".join(self._passwords) or "nobody"
                return RegistryDenied(f"{path}: ZooKeeper at {self._hosts} does not let {who} do this (docs/security.md)")
            case ConnectionLoss() | SessionExpiredError() | SessionMovedError() | OperationTimeoutError():
                return RegistryUnavailable(
                    f"{path}: the connection to ZooKeeper at {self._hosts} broke ({type(error).__name__}); "
                    "whether the operation happened is unknown"
                )
            case _:
                return RegistryConflict(f"{path}: ZooKeeper refused the operation: {type(error).__name__} {error}")


def _settle(loop: asyncio.AbstractEventLoop, answered: Callable[[BaseException | None, Any], None], result: Any) -> None:
    """Hand a result to the loop; in kazoo's thread."""
    _to_loop(loop, answered, result.exception, result.value)


def _auth(passwords: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Logins that kazoo sends at the start of each connection."""
    return [("digest", f"{who}:{password}") for who, found in passwords.items() for password in found]


def _add_auth(scheme: str, said: str, client: Any) -> Any:
    return client.add_auth_async(scheme, said)


def _acl(access: Access, below: str) -> list[Any]:
    return [ACL(sum(PERMISSIONS[one] for one in what), Id("digest", digest)) for digest, what in access.acl_of(below)]


def _stop_client(client: Any, done: Callable[[], None]) -> None:
    """End kazoo's session and threads; in a thread of its own."""
    try:
        client.stop()
        client.close()
    except Exception as error:  # kazoo raises plain exceptions here when its thread hangs
        _log.debug("the ZooKeeper session was not closed in order: %s", error)
    finally:
        done()


def _stat(stat: Any) -> Stat:
    return Stat(
        version=int(stat.version),
        created_zxid=int(stat.czxid),
        modified_zxid=int(stat.mzxid),
        children_zxid=int(stat.pzxid),
        ephemeral_owner=int(stat.ephemeralOwner),
        children=int(stat.numChildren),
        created_ms=int(stat.ctime),
    )


def _bounded(path: str, data: bytes) -> None:
    if len(data) > MAX_DATA_BYTES:
        raise InvalidArgument(f"{path}: {len(data)} bytes of data; at most {MAX_DATA_BYTES} are written to the registry")
