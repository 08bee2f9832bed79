"""kazoo's client for an event loop: its threads, its protocol and its errors. The only module that imports kazoo.

Source: docs/registry.md; notes on reliability, hole 14 (the back-off that lost sessions).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

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

from pixiu.discovery import operations
from pixiu.discovery.access import Access
from pixiu.errors import ConfigurationError, RegistryDenied, RegistryUnavailable, RemoteError

RECONNECT_MAX_DELAY_S: Final = 0.5
"""Longest back-off between attempts to connect, seconds: far below every session timeout, so that it never costs a session."""
CONNECT_SHARE: Final = 1 / 3
"""Share of the session timeout that an attempt to connect may take."""
TLS_NAME: Final = "zookeeper.pixiu"
"""Host name in ZooKeeper's certificate, whatever its address is, as for processes (`pixiu.rpc.tls`)."""
PERMISSIONS: Final = {"r": 1, "w": 2, "c": 4, "d": 8, "a": 16}
"""ZooKeeper's permission bits."""
KazooError: Final[type[Exception]] = KazooException
"""Base of the errors that operations raise and `translate` takes."""
_STATES: Final = {getattr(KazooState, state.name): state for state in operations.SessionState}

_log = logging.getLogger("pixiu.zookeeper")
_kazoo_log = logging.getLogger("pixiu.zookeeper.kazoo")
# kazoo warns at every attempt to connect, twice a second in an outage; session listeners report it once.
_kazoo_log.setLevel(logging.ERROR)


@dataclass(frozen=True)
class LoopWatch:
    """A watch as kazoo keeps it: equal for equal callbacks, so that a watch set repeatedly is kept once. It is called in the
    context in which it was set."""

    loop: asyncio.AbstractEventLoop
    callback: operations.Watch
    context: contextvars.Context = field(default_factory=contextvars.copy_context, compare=False)

    def __call__(self, event: Any) -> None:
        # NONE events report a change of the session, which session listeners handle.
        if event.type in operations.WatchKind.__members__:
            said = operations.WatchEvent(operations.WatchKind(str(event.type)), str(event.path))
            to_loop(self.loop, self.context.copy().run, self.callback, said)


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


def _listen_below(connection: ConnectionHandler, heard: Callable[[operations.WatchEvent], None]) -> None:
    """Make kazoo's connection report every watch that fires, including those that kazoo has not set."""
    read = connection._read_watch_event

    def both(buffer: bytes, offset: int) -> None:
        fired, _ = WatchReply.deserialize(buffer, offset)
        kind = EVENT_TYPE_MAP.get(fired.type)
        if kind in operations.WatchKind.__members__:
            heard(operations.WatchEvent(operations.WatchKind(kind), str(fired.path)))
        read(buffer, offset)

    connection._read_watch_event = both


def to_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call something in the event loop, from any thread."""
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

    def spawn(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Start a thread in the context of its starter: its lines, and what it hands to the loop, belong to the same role."""
        return super().spawn(contextvars.copy_context().run, function, *arguments, **options)

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


def new_client(
    hosts: str,
    session_timeout_s: float,
    *,
    tls: Callable[[], ssl.SSLContext] | None,
    tls_failed: Callable[[Exception], None],
    passwords: Mapping[str, Sequence[str]],
    session: tuple[int, bytes] | None,
    loop: asyncio.AbstractEventLoop,
    reached: Callable[[], None],
    heard_below: Callable[[operations.WatchEvent], None],
    changed: Callable[[Any, operations.SessionState, int], None],
) -> Any:
    """Make a client. `reached`, `heard_below` and `changed` (with the client, a state and the session's ID) are called in the loop;
    `tls` and `tls_failed` in kazoo's thread."""
    client = KazooClient(
        hosts=hosts,
        handler=_Handler(session_timeout_s * CONNECT_SHARE, tls, tls_failed, partial(to_loop, loop, reached)),
        auth_data=auth(passwords),
        timeout=session_timeout_s,
        client_id=session,
        connection_retry={"max_tries": -1, "delay": 0.1, "max_jitter": 0.4, "max_delay": RECONNECT_MAX_DELAY_S},
        logger=_kazoo_log,
    )

    def on_state(state: str) -> None:  # in kazoo's thread, where the session's ID certainly belongs to this state
        identity = client.client_id if state == KazooState.CONNECTED else None
        to_loop(loop, changed, client, _STATES[state], identity[0] if identity else 0)

    _listen_below(client._connection, partial(to_loop, loop, heard_below))
    client.add_listener(on_state)
    return client


def has_ended(client: Any) -> bool:
    """Return True if kazoo's thread has ended for good."""
    return bool(str(client.client_state) == KeeperState.CLOSED)


def stop_client(client: Any, done: Callable[[], None]) -> None:
    """End kazoo's session and threads; in a thread of its own."""
    try:
        client.stop()
        client.close()
    except Exception as error:  # kazoo raises plain exceptions here when its thread hangs
        _log.debug("the ZooKeeper session was not closed in order: %s", error)
    finally:
        done()


def settle(loop: asyncio.AbstractEventLoop, answered: Callable[[BaseException | None, Any], None], result: Any) -> None:
    """Hand a result to the loop; in kazoo's thread."""
    to_loop(loop, answered, result.exception, result.value)


def start_watch_below(path: str, client: Any) -> Any:
    """Start to watch everything at and below a path."""
    done = client.handler.async_result()
    client._call(_AddWatch(path), done)
    return done


def start_transaction(steps: Sequence[operations.Operation], acls: Sequence[list[Any] | None], client: Any) -> Any:
    """Start a transaction; `acls`: the access list for each step, as `acl` returns it."""
    request = client.transaction()
    for step, access in zip(steps, acls, strict=True):
        match step:
            case operations.Create():
                operations.check_size(step.path, step.data)
                request.create(step.path, step.data, access, step.ephemeral, step.sequence)
            case operations.Set():
                operations.check_size(step.path, step.data)
                request.set_data(step.path, step.data, step.version)
            case operations.Delete():
                request.delete(step.path, step.version)
            case operations.Check():
                request.check(step.path, step.version)
    return request.commit_async()


def failed(results: Sequence[object]) -> int | None:
    """Return the index of the operation for which a transaction failed; -1 if it is unknown, None if it did not fail."""
    errors = [at for at, result in enumerate(results) if isinstance(result, KazooException)]
    own = (at for at in errors if not isinstance(results[at], RolledBackError | RuntimeInconsistency))
    return next(own, -1) if errors else None


def auth(passwords: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Logins that kazoo sends at the start of each connection."""
    return [("digest", f"{who}:{password}") for who, found in passwords.items() for password in found]


def acl(access: Access, below: str) -> list[Any]:
    """Return the access list of a path below a cluster's root."""
    return [ACL(sum(PERMISSIONS[one] for one in what), Id("digest", digest)) for digest, what in access.acl_of(below)]


def stat_of(stat: Any) -> operations.Stat:
    """Return a node's metadata."""
    return operations.Stat(
        version=int(stat.version),
        created_zxid=int(stat.czxid),
        modified_zxid=int(stat.mzxid),
        children_zxid=int(stat.pzxid),
        ephemeral_owner=int(stat.ephemeralOwner),
        children=int(stat.numChildren),
        created_ms=int(stat.ctime),
    )


def translate(error: Exception, path: str, hosts: str, who: Iterable[str]) -> RemoteError:
    """Return the error of an operation that kazoo refused; `who`: the logins in use."""
    match error:
        case NoNodeError():
            return operations.NoNode(f"{path} does not exist in ZooKeeper")
        case NodeExistsError():
            return operations.NodeExists(f"{path} already exists in ZooKeeper")
        case BadVersionError():
            return operations.VersionConflict(f"{path} was changed by another process; read it again")
        case NotEmptyError():
            return operations.NotEmpty(f"{path} has children")
        case NoAuthError():
            name = ", ".join(who) or "nobody"
            return RegistryDenied(f"{path}: ZooKeeper at {hosts} does not let {name} do this (docs/security.md)")
        case ConnectionLoss() | SessionExpiredError() | SessionMovedError() | OperationTimeoutError():
            return RegistryUnavailable(
                f"{path}: the connection to ZooKeeper at {hosts} broke ({type(error).__name__}); "
                "whether the operation happened is unknown"
            )
        case _:
            return operations.RegistryConflict(f"{path}: ZooKeeper refused the operation: {type(error).__name__} {error}")
