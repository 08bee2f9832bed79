"""Log lines of a process: structlog, JSON for programs or one readable line for people, on standard error.

Event names are constants. Every line has the role, partition and replica. Values are cut and control characters escaped, so that
nothing from the network can forge or break a line. Nothing is logged per message.

Several roles may run in one process. A role's identity is a context variable, which its tasks, callbacks and timers inherit. A
logger also remembers the identity in whose context it was made, so that its lines name the right role from any thread, and from a
call that another role makes.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger

STARTING: Final = "starting"
WAITING: Final = "waiting"
REGISTERED: Final = "registered"
RUNNING: Final = "running"
DRAIN_ASKED: Final = "drain_asked"
DRAINING: Final = "draining"
STOPPED: Final = "stopped"
START_FAILED: Final = "start_failed"
CRASHED: Final = "crashed"
VIEW_FAILED: Final = "view_failed"
LAYOUT_REFUSED: Final = "layout_refused"
DRAIN_FAILED: Final = "drain_failed"
STOP_FAILED: Final = "stop_failed"
STOPPED_AT_ONCE: Final = "stopped_at_once"
PEER_STATE: Final = "peer_state"
HANDLER_FAILED: Final = "handler_failed"
METRICS_FAILED: Final = "metrics_failed"
HEALTH_FAILED: Final = "health_failed"
LOOP_STALLED: Final = "loop_stalled"
STALL_NOT_ENDED: Final = "stall_session_not_ended"
LOOP_BACK: Final = "loop_back"
FILE_OPEN_TO_ALL: Final = "file_open_to_all"
LISTENER_OPEN_TO_ALL: Final = "listener_open_to_all"
SETTING_DOUBTFUL: Final = "setting_doubtful"
KEYS: Final = "keys"
LOGIN: Final = "registry_login"
AUDIT: Final = "audit"
LOOP_ERROR: Final = "loop_error"
SETTINGS_TAKEN: Final = "settings_taken"
SETTINGS_REFUSED: Final = "settings_refused"
LIBRARY: Final = "library"
"""A line of a library that we use, with its `logger` and `text`."""
UNREADABLE: Final = "call_unreadable"
"""A caller sent something unreadable, or left too soon; logged once in `UNREADABLE_S` for each kind."""
UNREADABLE_S: Final = 60.0
CALLERS_FAULTS: Final = {
    ("grpc.", "UnicodeDecodeError"): "metadata that is not UTF-8",
    ("grpc.", "DecodeError"): "a message that is not of its method's type",
    ("grpc.", "ExecuteBatchError"): "left before its call's failure was reported to it",
    ("aiohttp.", "HttpProcessingError"): "a request that is not HTTP",
    ("aiohttp.", "ConnectionResetError"): "left before it was answered",
    ("aiohttp.", "UnicodeEncodeError"): "a header that is not text, which aiohttp would have sent back",
}
"""(Logger, exception) → the caller's fault."""

MAX_VALUE: Final = 2048
"""Maximum characters of one value."""
MAX_TRACEBACK: Final = 16_384
"""Maximum characters of a traceback; its end is kept."""
MAX_KEYS: Final = 1024
"""Maximum keys that `OncePer` remembers; the one allowed longest ago is forgotten first."""

_BOUND: Final = "_identity"
"""Key under which a logger holds the identity in whose context it was made."""


class Identity:
    """The identity of a role that runs in this process, in all of its lines: role, partition, replica.

    log_level: the least important lines of this role that are logged.
    """

    def __init__(self, log_level: str = "debug", **values: Any) -> None:
        self.values = values
        self.level = level_of(log_level)
        _identities.add(self)

    def bind(self, **values: Any) -> None:
        """Set values in every further line."""
        self.values.update(values)

    def set_level(self, log_level: str) -> None:
        """Change the log level of this role. Loggers that were bound with values before keep theirs."""
        self.level = level_of(log_level)
        _let_through(min(each.level for each in _identities))


_identities: weakref.WeakSet[Identity] = weakref.WeakSet()
_current: ContextVar[Identity | None] = ContextVar("pixiu_identity", default=None)


def act_as(identity: Identity) -> None:
    """Write every further line of this context, and of those that inherit it, under this identity."""
    _current.set(identity)


def current_identity() -> Identity | None:
    """Return the identity of this context."""
    return _current.get()


def escape(text: str, *, keep_newlines: bool = False) -> str:
    """Return the text with control characters and other unprintable ones as \\u escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or (keep_newlines and char == "\n") else f"\\u{ord(char):04x}" for char in text)


class OncePer:
    """Allows a warning once per interval and key. Remembers at most 1 024 keys."""

    def __init__(self) -> None:
        self._last: OrderedDict[Hashable, float] = OrderedDict()

    def allow(self, seconds: float, key: Hashable, now: float) -> bool:
        """Return True if this key was last allowed at least `seconds` ago. `now`: monotonic seconds."""
        last = self._last.get(key)
        if last is not None and now - last < seconds:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > MAX_KEYS:
            self._last.popitem(last=False)
        return True


_once = OncePer()


def once_per(seconds: float, key: Hashable) -> bool:
    """Return True at most once per `seconds` and key of this context's role."""
    return _once.allow(seconds, (_current.get(), key), time.monotonic())


def configure(log_format: str, log_level: str, stream: TextIO | None = None) -> None:
    """Set up the logs of this process: structlog, and the standard library's loggers through it.

    log_format: console or json. log_level: debug, info, warning or error. stream: standard error by default.
    """
    output = stream if stream is not None else sys.stderr
    structlog.configure(
        processors=[
            _find_identity,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _add_identity,
            _escape_values,
            _render_json if log_format == "json" else _render_console,
        ],
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=False,
    )
    logging.getLogger().handlers[:] = [_LibraryHandler()]
    _let_through(level_of(log_level))


def level_of(log_level: str) -> int:
    """Return the number of a log level, as in `logging`."""
    return logging.getLevelNamesMapping()[log_level.upper()]


def _let_through(level: int) -> None:
    """Log no line below this level, of whichever role."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    # Libraries log every step of a reconnection at INFO; we log the result.
    logging.getLogger().setLevel(max(level, logging.WARNING) if level > logging.DEBUG else logging.INFO)


def get_logger() -> FilteringBoundLogger:
    """Return a logger of this context's role. Call `configure` first."""
    identity = _current.get()
    bound = {_BOUND: identity} if identity is not None else {}
    return cast(FilteringBoundLogger, structlog.get_logger(**bound))


class _LibraryHandler(logging.Handler):
    """Passes the lines of the standard library's loggers to structlog.

    Cancelled tasks are left out: gRPC reports every call that is still open when the process has stopped as one.

    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            text = str(record.msg)
        if (fault := _callers_fault(record)) is not None:
            # A caller may cause it as often as it likes, and its words may be a token.
            if once_per(UNREADABLE_S, (UNREADABLE, fault)):
                get_logger().warning(UNREADABLE, logger=record.name, text=fault)
            return
        method = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        values: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        getattr(get_logger(), method)(LIBRARY, logger=record.name, text=text, **values)


def _callers_fault(record: logging.LogRecord) -> str | None:
    """Return the caller's fault behind a line that a server's library logs with a traceback and the caller's words; None for all
    others."""
    if not record.exc_info or record.exc_info[0] is None:
        return None
    names = {kind.__name__ for kind in record.exc_info[0].__mro__}
    return next((text for (logger, kind), text in CALLERS_FAULTS.items() if record.name.startswith(logger) and kind in names), None)


def _find_identity(_logger: Any, method: str, event: EventDict) -> EventDict:
    """Leave out a line that is below its role's level."""
    identity = event.get(_BOUND) or _current.get()
    if identity is not None:
        event[_BOUND] = identity
        if level_of(method) < identity.level:
            raise structlog.DropEvent
    return event


def _add_identity(_logger: Any, _method: str, event: EventDict) -> EventDict:
    identity = event.pop(_BOUND, None)
    if identity is not None:
        for key, value in identity.values.items():
            event.setdefault(key, value)
    return event


def _escape_values(_logger: Any, _method: str, event: EventDict) -> EventDict:
    clean: MutableMapping[str, Any] = {}
    for key, value in event.items():
        if key == "exception":
            clean[key] = escape(str(value)[-MAX_TRACEBACK:], keep_newlines=True)
        elif value is None or isinstance(value, (bool, int, float)):
            clean[escape(key)] = value
        else:
            text = value if isinstance(value, str) else _plain(value)
            clean[escape(key)] = escape(text[:MAX_VALUE] + ("…" if len(text) > MAX_VALUE else ""))
    return clean


def _plain(value: Any) -> str:
    """Return a structured value as one text; of bytes only the length is shown, because they may be somebody's message."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain_inner)
    except (TypeError, ValueError):
        return str(value)


def _plain_inner(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _render_json(_logger: Any, _method: str, event: EventDict) -> str:
    head = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return json.dumps({**head, **event}, ensure_ascii=False)


def _render_console(_logger: Any, _method: str, event: EventDict) -> str:
    timestamp, level, name = event.pop("timestamp", ""), event.pop("level", ""), event.pop("event", "")
    exception = event.pop("exception", None)
    values = " ".join(f"{key}={_quote(value)}" for key, value in event.items())
    line = f"{timestamp} {level:<7} {name:<16} {values}".rstrip()
    return line if exception is None else f"{line}\n{exception}"


def _quote(value: Any) -> str:
    if isinstance(value, str) and (not value or any(char in ' "=' for char in value)):
        return '"' + value.replace('"', "'") + '"'
    return str(value)
