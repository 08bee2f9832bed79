"""ZooKeeper for asyncio: the only module that imports kazoo.

kazoo runs the session in threads of its own. This facade starts operations without waiting for them and takes their
results, watches and session changes back to the event loop, so that nothing here ever blocks it.

While there is no connection every operation is refused at once: kazoo would queue it, and carry it out at a moment
when its caller has long given up.

Source: docs/registry.md; notes on reliability, hole 14 (the back-off that lost sessions).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from kazoo.protocol.states import KazooState, KeeperState

from pixiu.errors import InvalidArgument, MalformedData, RegistryUnavailable, RemoteError

MAX_DATA_BYTES: Final = 65_536
"""A node's data, read or written; ZooKeeper itself would take 1 MiB."""
MAX_IN_FLIGHT: Final = 256
"""Operations under way at once; more wait for their turn."""
MAX_TRANSACTION: Final = 64
RECONNECT_MAX_DELAY_S: Final = 0.5
"""Longest back-off between attempts to connect: short against every session timeout, so that none is lost by it."""
CONNECT_SHARE: Final = 1 / 3
"""What part of the session timeout an attempt to connect may take."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long close() waits for ZooKeeper to end the session; after that the session ends by its timeout."""

_log = logging.getLogger("pixiu.zookeeper")
_kazoo_log = logging.getLogger("pixiu.zookeeper.kazoo")
# kazoo warns at every attempt to connect, twice a second in an outage; session listeners say the same once.
_kazoo_log.setLevel(logging.ERROR)


class RegistryConflict(RemoteError):
    """The registry is not as an operation needs it: read it again and decide anew."""


class NoNode(RegistryConflict):
    """The node, or the parent of a node to create, does not exist."""


class NodeExists(RegistryConflict):
    """The node to create exists."""


class VersionConflict(RegistryConflict):
    """Somebody else changed the node since it was read."""


class NotEmpty(RegistryConflict):
    """The node to delete has children."""


class SessionState(Enum):
    """How the session with ZooKeeper stands."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """No connection; the session, its nodes and its watches may still live."""
    LOST = "lost"
    """The session is over; the next one is being sought. ZooKeeper may have removed its nodes long before."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A change of the session."""

    state: SessionState
    session_id: int
    """0 when the session is lost."""
    new_session: bool
    """CONNECTED, and not with the session that was there before (or the first one)."""


class WatchKind(Enum):
    """What a watch saw."""

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
    """What ZooKeeper knows of a node beside its data."""

    version: int
    created_zxid: int
    ephemeral_owner: int
    """The session that an ephemeral node lives with; 0 for a persistent one."""
    children: int
    created_ms: int
    """By the wall clock of ZooKeeper's leader, Unix milliseconds."""


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
    """A watch as kazoo keeps it: equal for equal callbacks, so that a watch set again and again is kept once."""

    loop: asyncio.AbstractEventLoop
    callback: Watch

    def __call__(self, event: Any) -> None:
        # NONE events say that the session changed; session listeners hear of that.
        if event.type in WatchKind.__members__:
            _to_loop(self.loop, self.callback, WatchEvent(WatchKind(str(event.type)), str(event.path)))


def _to_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    # The loop may be closed while kazoo's threads still run.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a bound on every attempt to connect.

    A ZooKeeper that is just starting can accept a connection and never answer on it (measured: in some ten restarts under
    load, once). kazoo waits the whole session timeout for that answer, and the session is lost by it.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._patience_s = patience_s
        self._unanswered: Any = None
        """The newest connection, until the server's first answer can be read."""

    def create_connection(self, *arguments: Any, **options: Any) -> Any:
        """Connect, within the bound."""
        options["timeout"] = min(options.get("timeout") or self._patience_s, self._patience_s)
        self._unanswered = super().create_connection(*arguments, **options)
        return self._unanswered

    def select(self, readable: Any, writable: Any, broken: Any, timeout: float | None = None) -> Any:
        """Wait for sockets; for the first answer on a connection only within the bound."""
        if self._unanswered is None or list(readable) != [self._unanswered]:
            return super().select(readable, writable, broken, timeout)
        found = super().select(readable, writable, broken, self._patience_s if timeout is None else min(timeout, self._patience_s))
        if found[0]:
            self._unanswered = None
        return found


class ZooKeeper:
    """A session with ZooKeeper for one event loop.

    Args:
        hosts: `host:port[,host:port]`, as in `RegistryAddress.hosts`.
        session_timeout_s: how long ZooKeeper keeps the session of a silent process, seconds; the server may bound it.
        connect_timeout_s: how long `connect` tries, seconds. Once connected, it reconnects for ever.
        operation_timeout_s: how long one operation may take, seconds.
        session: (id, password) of a session to take over, as `session` gives it.

    Source: docs/registry.md.
    """

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_s: float = 10.0,
        connect_timeout_s: float = 10.0,
        operation_timeout_s: float = 10.0,
        session: tuple[int, bytes] | None = None,
    ) -> None:
        self._hosts = hosts
        self._session_timeout_s = session_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._operation_timeout_s = operation_timeout_s
        self._take_over = session
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected = False
        self._first = asyncio.Event()
        self._session_id = 0
        self._listeners: list[SessionListener] = []
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._closed = False

    @property
    def hosts(self) -> str:
        """The servers, as given."""
        return self._hosts

    @property
    def connected(self) -> bool:
        """Whether operations are possible now."""
        return self._connected

    @property
    def session_id(self) -> int:
        """The session's ID; 0 when there is none."""
        return self._session_id

    @property
    def session(self) -> tuple[int, bytes] | None:
        """(id, password) of the session while connected: whoever has it can take the session over, or end it."""
        return cast("tuple[int, bytes] | None", self._client.client_id) if self._client is not None else None

    def add_listener(self, listener: SessionListener) -> None:
        """Call this in the event loop at every change of the session from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: SessionListener) -> None:
        """Call it no more."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    async def connect(self) -> None:
        """Open the session. Raises `RegistryUnavailable` when no server answers within `connect_timeout_s`."""
        if self._client is not None:
            raise InvalidArgument("this ZooKeeper session was already opened; make a new one")
        self._loop = asyncio.get_running_loop()
        self._open()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._first.wait()
        except TimeoutError:
            await self.close()
            raise RegistryUnavailable(
                f"no ZooKeeper answered at {self._hosts} within {self._connect_timeout_s:g} s; check that it runs there and that "
                "the address is right (`pixiu up` and `pixiu zookeeper` start one for one machine)"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the session, and with it its ephemeral nodes; waits at most 5 s for the server to confirm it."""
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await done.wait()

    async def get(self, path: str, watch: Watch | None = None) -> tuple[bytes, Stat]:
        """A node's data. The watch fires when it changes or goes. Raises `NoNode` (and sets no watch), `MalformedData` when
        it is larger than `MAX_DATA_BYTES`, `RegistryUnavailable`."""
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
        """Create a node; its path, with the sequence. Raises `NodeExists`, `NoNode` (no parent), `RegistryUnavailable` (it may
        have happened or not)."""
        _bounded(path, data)
        made = await self._run(
            path,
            lambda client: client.create_async(path, data, ephemeral=ephemeral, sequence=sequence, makepath=make_parents),
        )
        return str(made)

    async def sync(self, path: str) -> None:
        """Let the server that this session speaks to catch up: reads that begin after it are not older than this call."""
        await self._run(path, lambda client: client.sync_async(path))

    async def ensure_path(self, path: str) -> None:
        """Create a persistent node and its parents where they are missing. Raises `RegistryUnavailable`."""
        await self._run(path, lambda client: client.ensure_path_async(path))

    async def delete(self, path: str, version: int = -1) -> None:
        """Delete a node if it has this version (-1: any). Raises `NoNode`, `VersionConflict`, `NotEmpty`,
        `RegistryUnavailable` (it may have happened or not)."""
        await self._run(path, lambda client: client.delete_async(path, version))

    async def exists(self, path: str, watch: Watch | None = None) -> Stat | None:
        """What is known of a node, None where there is none. The watch fires when it comes, changes or goes."""
        stat = await self._run(path, lambda client: client.exists_async(path, watch=self._watch(watch)))
        return None if stat is None else _stat(stat)

    async def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """The names of a node's children, sorted. The watch fires when one comes or goes. Raises `NoNode` (and sets no watch)."""
        names = await self._run(path, lambda client: client.get_children_async(path, watch=self._watch(watch)))
        return sorted(names)

    async def transaction(self, operations: Sequence[Operation]) -> list[object]:
        """Do all or nothing. A list with the path of each `Create` and something else for the others.

        Raises the error of the operation that could not be done, or `RegistryUnavailable` (all of it happened, or nothing).
        """
        if not 0 < len(operations) <= MAX_TRANSACTION:
            raise InvalidArgument(f"a transaction has 1 to {MAX_TRANSACTION} operations, not {len(operations)}")

        def start(client: Any) -> Any:
            request = client.transaction()
            for operation in operations:
                match operation:
                    case Create():
                        _bounded(operation.path, operation.data)
                        request.create(operation.path, operation.data, None, operation.ephemeral, operation.sequence)
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
            raise RegistryConflict(f"a transaction on {operations[0].path} was rolled back; read again and try anew")
        return results

    def _open(self) -> None:
        """Start kazoo. Its threads do the rest."""
        client = KazooClient(
            hosts=self._hosts,
            handler=_Handler(self._session_timeout_s * CONNECT_SHARE),
            timeout=self._session_timeout_s,
            client_id=self._take_over,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_jitter": 0.4, "max_delay": RECONNECT_MAX_DELAY_S},
            logger=_kazoo_log,
        )
        self._take_over = None
        self._client = client
        assert self._loop is not None
        client.add_listener(partial(self._on_kazoo_state, self._loop, client))
        client.start_async()

    def _on_kazoo_state(self, loop: asyncio.AbstractEventLoop, client: Any, state: str) -> None:
        """In kazoo's thread: the session's ID is read here, while it is certain to belong to this state."""
        identity = client.client_id if state == KazooState.CONNECTED else None
        _to_loop(loop, self._on_state, client, state, identity[0] if identity else 0)

    def _on_state(self, client: Any, state: str, session_id: int) -> None:
        if self._closed or client is not self._client:
            return
        if state == KazooState.CONNECTED:
            event = SessionEvent(SessionState.CONNECTED, session_id, session_id != self._session_id)
            self._session_id = session_id
            self._connected = True
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

    def _revive(self, client: Any) -> None:
        """kazoo's thread ends for good on an answer that it does not understand; a process must not lose its registry by that."""
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
        """Start an operation in kazoo and wait for its result without blocking the loop."""
        async with self._in_flight:
            if self._closed or not self._connected or self._loop is None:
                raise RegistryUnavailable(f"{path}: there is no connection to ZooKeeper at {self._hosts} now; try again later")
            future: asyncio.Future[Any] = self._loop.create_future()
            try:
                start(self._client).rawlink(partial(_settle, self._loop, future))
                async with asyncio.timeout(self._operation_timeout_s):
                    return await future
            except TimeoutError:
                raise RegistryUnavailable(
                    f"{path}: ZooKeeper at {self._hosts} did not answer within {self._operation_timeout_s:g} s; "
                    "whether the operation happened is unknown"
                ) from None
            except KazooException as error:
                raise self._translate(error, path) from error

    def _translate(self, error: KazooException, path: str) -> RemoteError:
        match error:
            case NoNodeError():
                return NoNode(f"{path} does not exist in ZooKeeper")
            case NodeExistsError():
                return NodeExists(f"{path} exists in ZooKeeper")
            case BadVersionError():
                return VersionConflict(f"{path} was changed by another process; read it again")
            case NotEmptyError():
                return NotEmpty(f"{path} has children")
            case ConnectionLoss() | SessionExpiredError() | SessionMovedError() | OperationTimeoutError():
                return RegistryUnavailable(
                    f"{path}: the connection to ZooKeeper at {self._hosts} broke ({type(error).__name__}); "
                    "whether the operation happened is unknown"
                )
            case _:
                return RegistryConflict(f"{path}: ZooKeeper refused the operation: {type(error).__name__} {error}")


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any) -> None:
    """In kazoo's thread: hand a result to the loop."""
    _to_loop(loop, _finish, future, result.exception, result.value)


def _finish(future: asyncio.Future[Any], exception: BaseException | None, value: Any) -> None:
    if future.done():
        return
    if exception is None:
        future.set_result(value)
    else:
        future.set_exception(exception)


def _stop_client(client: Any, done: Callable[[], None]) -> None:
    """In a thread of its own: end kazoo's session and threads."""
    try:
        client.stop()
        client.close()
    except Exception as error:  # kazoo raises plain exceptions here when its thread hangs
        _log.debug("the ZooKeeper session was not closed in order: %s", error)
    finally:
        done()


def _stat(stat: Any) -> Stat:
    return Stat(int(stat.version), int(stat.czxid), int(stat.ephemeralOwner), int(stat.numChildren), int(stat.ctime))


def _bounded(path: str, data: bytes) -> None:
    if len(data) > MAX_DATA_BYTES:
        raise InvalidArgument(f"{path}: {len(data)} bytes of data; at most {MAX_DATA_BYTES} are written to the registry")
