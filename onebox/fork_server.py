"""A process that has imported every role and forks one on request. A start takes a tenth of the time of `python -m ROLE`, which
imports for a second. `pixiu up` and the tests start their processes with it.

    ForkServer ──{"module": "xiu", "arguments": […]} + the log──▶ python -m onebox.fork_server ──fork──▶ python -m xiu …
               ◀───{"start": 1, "pid": 4711}─────────────────────
               ◀───{"pid": 4711, "code": 0}──────────────────────

A server that is asked for one process alone does not fork: it becomes that process, and its memory is not needed twice.

Nothing but imports happens before a fork: no thread, no socket, no gRPC object. When the server or its client ends, its children
are killed.

Source: docs/operations.md, "One machine".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

from setproctitle import setproctitle

from onebox.children import DieWithParent

MAX_MESSAGE: Final = 256 << 10
ROLES: Final = ("proxy", "router", "broker", "relay", "xiu", "pi", "topic", "admin", "gateway")
"""Bridges are left out: most clusters have none, and they bring the SDK."""
PRELOADED: Final = ("cluster.process.host", "registry.membership", "node.options", *(f"{role}.service" for role in ROLES))
LOOK_S: Final = 1.0
"""Starts within this time use the same code: they belong to one cluster that starts."""
LOST: Final = -signal.SIGKILL
"""Exit code of processes whose server is gone: they were killed with it."""


class Forked:
    """One forked process, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while it runs. A signal's number is negative."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises `subprocess.TimeoutExpired`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call a function, in another thread, when the process ends; at once if it has ended."""
        with self._lock:
            if self.returncode is None:
                self._calls.append(call)
                return
        call()

    async def ended(self) -> int:
        """Wait for the end of the process without a thread."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

        self.on_end(wake)
        await done.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Record the exit code that the server reported."""
        with self._lock:
            self.returncode = code
        self._ended.set()
        for call in self._calls:
            call()


class ForkServer:
    """A client of the server, which starts with the first process that is asked for, and again after it died.

    Thread-safe. `start` blocks; the first call takes the second that the imports need.

    Args:
        environment: of the server and, unless `start` is given another one, of its processes.
        modules: imported before any fork.
        alone: whether the server becomes its first process, which is the only one.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = PRELOADED, *, alone: bool = False) -> None:
        self._environment, self._modules, self._alone = dict(environment), list(modules), alone
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._starts = 0
        self._waiting: dict[int, tuple[threading.Event, list[Forked]]] = {}
        self._running: dict[int, Forked] = {}

    def prepare(self) -> None:
        """Start the server, so that its imports are under way. Does not block. Raises OSError."""
        with self._lock:
            self._connected()

    def start(self, module: str, arguments: Sequence[str], log: BinaryIO, environment: Mapping[str, str] | None = None) -> Forked:
        """Start `python -m MODULE ARGUMENTS…` in a session of its own, without input, its output into `log`. Raises OSError.

        A process that is alone ends with the thread that started its server, by `prepare` or by this.
        """
        with self._lock:
            connection = self._connected()
            self._starts += 1
            number = self._starts
            answered, found = threading.Event(), list[Forked]()
            self._waiting[number] = answered, found
            request = {
                "start": number,
                "module": module,
                "arguments": list(arguments),
                "environment": environment,
                "alone": self._alone,
            }
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], [log.fileno()])
            except OSError:
                del self._waiting[number]
                raise
        answered.wait()
        if not found:
            raise OSError("the process that forks the others has ended")
        return found[0]

    @property
    def running(self) -> int:
        """Number of processes that are running or starting."""
        with self._lock:
            return len(self._running) + len(self._waiting)

    @property
    def taken(self) -> bool:
        """True if the server has become, or is becoming, its only process."""
        return self._alone and self._starts > 0

    def close(self) -> None:
        """End the server, and all processes that still run."""
        with self._lock:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._server is not None and self._server.pid in self._running:  # it has become that process
                self._server.kill()
        if self._reader is not None:
            self._reader.join()

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        ours, self._server = self._launch()
        self._socket = ours
        self._reader = threading.Thread(target=self._read, args=(ours, self._server), name="fork-server", daemon=True)
        self._reader.start()
        return ours

    def _launch(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The module's name is not this module's: it runs as __main__ there.
            command = [sys.executable, "-m", "onebox.fork_server", *self._modules]
            return ours, subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True, env=self._environment)

    def _read(self, connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                data = connection.recv(MAX_MESSAGE)
            except OSError:
                data = b""
            if not data:
                break
            said = json.loads(data)
            with self._lock:
                if "start" in said:
                    process = self._running[said["pid"]] = Forked(said["pid"])
                    answered, found = self._waiting.pop(said["start"])
                    found.append(process)
                    answered.set()
                    continue
                process = self._running.pop(said["pid"])
            process.end(said["code"])
        with self._lock:
            if server.pid not in self._running:
                server.kill()
        code = server.wait()
        with self._lock:
            connection.close()
            self._socket = None
            lost, waiting = list(self._running.values()), list(self._waiting.values())
            self._running.clear()
            self._waiting.clear()
        for process in lost:
            process.end(code if process.pid == server.pid else LOST)
        for answered, _ in waiting:
            answered.set()


def installed(modules: Sequence[str] = PRELOADED) -> int:
    """Return a number for the installed code of these modules' packages; it changes when a release is installed. Takes some
    milliseconds."""
    found: list[tuple[str, int, int]] = []
    for name in sorted({module.partition(".")[0] for module in modules}):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path, _, files in os.walk(folder):
                for file in files:
                    if file.endswith(".py"):
                        with contextlib.suppress(OSError):
                            stat = os.stat(os.path.join(path, file))
                            found.append((os.path.join(path, file), stat.st_mtime_ns, stat.st_size))
    return hash(tuple(sorted(found)))


class Forks:
    """Starts processes with a `ForkServer` that has imported the installed code. After a release was installed it uses a new
    server; the former one stays for the processes that it started. Methods as in `ForkServer`.

    Args:
        environment: see `ForkServer`.
        modules: see `ForkServer`.
        alone: whether each process takes the place of a server of its own, for a cluster of one process.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = PRELOADED, *, alone: bool = False) -> None:
        self._environment, self._modules, self._alone = environment, modules, alone
        self._servers = [self._server()]
        self._code, self._looked_at = self._look(), time.monotonic()
        self._lock = threading.Lock()

    def _server(self) -> ForkServer:
        return ForkServer(self._environment, self._modules, alone=self._alone)

    def _look(self) -> int:
        return installed((*self._modules, "pixiu"))

    def prepare(self) -> None:
        """See `ForkServer`."""
        self._servers[-1].prepare()

    def start(self, module: str, arguments: Sequence[str], log: BinaryIO) -> Forked:
        """See `ForkServer`."""
        with self._lock:
            now = time.monotonic()
            former, self._code = self._code, self._look() if now > self._looked_at + LOOK_S else self._code
            self._looked_at = now
            if self._code != former or self._servers[-1].taken:
                self._servers.append(self._server())
                for idle in [each for each in self._servers[:-1] if not each.running]:
                    idle.close()
                    self._servers.remove(idle)
            server = self._servers[-1]
        return server.start(module, arguments, log)

    def close(self) -> None:
        """See `ForkServer`."""
        for server in self._servers:
            server.close()


# --- in the server


class _Start(NamedTuple):
    """The task of a child."""

    module: str
    arguments: list[str]


@dataclass(slots=True)
class _Server:
    """Forks, and reports the processes that have ended."""

    connection: socket.socket

    def run(self) -> _Start | None:
        """Serve. Returns the task in the process that is to do it; returns None in the server, when no client is left."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is reading:
                        reading.recv(4096)
                        self._reap()
                        continue
                    data, files, _, _ = socket.recv_fds(self.connection, MAX_MESSAGE, 1)
                    if not data:
                        return None
                    asked = json.loads(data)
                    alone = asked["alone"]
                    die_with_parent = DieWithParent(signal.SIGKILL, os.getppid() if alone else os.getpid())
                    if alone:
                        self._say({"start": asked["start"], "pid": os.getpid()})
                    if (pid := 0 if alone else os.fork()) == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for end in (reading, writing, self.connection):
                            end.close()
                        selector.close()
                        _become_child(asked["environment"], files[0], die_with_parent)
                        return _Start(asked["module"], asked["arguments"])
                    os.close(files[0])
                    self._say({"start": asked["start"], "pid": pid})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the end comes next
            self.connection.send(json.dumps(message).encode())


def _become_child(environment: dict[str, str] | None, log: int, die_with_parent: DieWithParent) -> None:
    if os.getsid(0) != os.getpid():  # a server that becomes the process has a session
        os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for file in {nothing, log} - {0, 1, 2}:
        os.close(file)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)


def main(modules: Sequence[str]) -> None:
    """Import the modules and serve; in a child, run the requested module."""
    connection = socket.socket(fileno=os.dup(0))
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection touches, and so copies, the pages that all processes share
    start = _Server(connection).run()
    if start is None:
        os._exit(0)
    setproctitle(" ".join([sys.executable, "-m", start.module, *start.arguments]))
    sys.argv = [start.module, *start.arguments]
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
