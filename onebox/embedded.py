"""A real ZooKeeper for one machine, from the jars that pyspark includes.

`python -m onebox.embedded --data DIR --port N --host ADDRESS` runs one in the foreground until SIGINT or SIGTERM. At its first
start it makes logins for guarding a cluster in it (`credentials` in its folder), and leaves a link to them for all programs of
this user.

Source: docs/operations.md, "One machine".
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from onebox.java import find_java
from onebox.secure import PRIVATE_UMASK
from pixiu.discovery import login as logins
from pixiu.errors import ConfigurationError, PixiuError, RegistryUnavailable
from registry.credentials import make_credentials

HOST: Final = "127.0.0.1"
JARS: Final = ("zookeeper-3*.jar", "zookeeper-jute-*.jar", "slf4j-api-*.jar", "metrics-core-*.jar", "snappy-java-*.jar")
TLS_JARS: Final = (
    "netty-buffer-4*.jar", "netty-codec-4*.jar", "netty-codec-base-4*.jar", "netty-common-4*.jar", "netty-handler-4*.jar",
    "netty-resolver-4*.jar", "netty-transport-4*.jar", "netty-transport-classes-epoll-4*.jar",
    "netty-transport-native-unix-common-4*.jar",
)  # fmt: skip
"""Additional jars for TLS."""
ROLE: Final = "zookeeper"
"""Role in its certificate."""
MAIN_CLASS: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
JVM_FLAGS: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmx768m",  # a limit: it keeps the last 500 changes in memory, twice, and allows no fewer; a topic's node has up to 512 KiB
    "-Xmn8m",  # what it may fill before it collects: by default hundreds of MiB, however little of it lives
    "-Djute.maxbuffer=1048576",  # limit of one request; the largest node has 512 KiB
    "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.4lw.commands.whitelist=srvr,ruok,mntr",
)
LOGIN_FLAGS: Final = ("-Dzookeeper.enforce.auth.enabled=true", "-Dzookeeper.enforce.auth.schemes=digest")
"""End sessions without a login."""
MAX_CONNECTIONS: Final = 2000
"""Connections from one address: here all come from the same one, and ZooKeeper's default is 60."""
TICK_MS: Final = 500
"""A session lasts at least two ticks: 1 s."""
MAX_SESSION_MS: Final = 120_000
"""Upper limit of a role's `session_timeout_ms`. ZooKeeper's own limit is twenty ticks, to which it cuts silently."""
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
KILL_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.02
PORT_TRIES: Final = 5
LOG_TAIL_BYTES: Final = 2_000
ANSWER_BYTES: Final = 4_096
EXIT_REASONS: Final = {
    1: "it met an unexpected error (its port may have been taken in between)",
    2: "it refused its configuration",
    3: "it cannot read or write its data folder",
    4: "its admin server failed",
}
"""Meanings of ZooKeeper's exit codes."""


def escaped(value: str) -> str:
    """Escape a value for a Java properties file, which is Latin-1: other characters as UTF-16 units, backslashes doubled."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    numbers = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join(chr(number) if 0x20 < number < 0x7F else f"\\u{number:04x}" for number in numbers)


def find_jars(*, tls: bool = False) -> list[Path]:
    """Find ZooKeeper's jars in pyspark, without importing it: five, more with TLS. Raises `ConfigurationError`."""
    wanted = (*JARS, *TLS_JARS) if tls else JARS
    spec = importlib.util.find_spec("pyspark")
    folders = [Path(folder) / "jars" for folder in (spec.submodule_search_locations or [])] if spec else []
    missing = list(wanted)
    for folder in folders:
        found = [next(iter(sorted(folder.glob(pattern))), None) for pattern in wanted]
        missing = [pattern for pattern, jar in zip(wanted, found, strict=True) if jar is None]
        if not missing:
            return [jar for jar in found if jar is not None]
    where = ", ".join(map(str, folders)) or "pyspark is not installed"
    raise ConfigurationError(
        f"the embedded ZooKeeper needs {', '.join(missing)} of pyspark ({where}); install them with "
        "`pip install 'pixiu-cluster[onebox]'`, or use a ZooKeeper of your own"
    )


def four_letter_word(port: int, word: str, timeout_s: float = 1.0, host: str = HOST, context: ssl.SSLContext | None = None) -> str:
    """Ask the ZooKeeper at a port: `srvr`, `ruok` or `mntr`; by TLS with a context. Empty when it does not answer."""
    try:
        with contextlib.ExitStack() as closing:
            link = closing.enter_context(socket.create_connection((host, port), timeout_s))
            if context is not None:
                from pixiu.discovery.kazoo_client import TLS_NAME

                link = closing.enter_context(context.wrap_socket(link, server_hostname=TLS_NAME))
            link.settimeout(timeout_s)
            link.sendall(word.encode())
            parts: list[bytes] = []
            while (part := link.recv(ANSWER_BYTES)) and sum(map(len, parts)) < ANSWER_BYTES:
                parts.append(part)
            return b"".join(parts).decode(errors="replace")
    except OSError:
        return ""


class EmbeddedZooKeeper:
    """One ZooKeeper server on 127.0.0.1, in a process group of its own. Its calls block: use a thread from asyncio.

    Args:
        data_dir: its folder: configuration, data and log. The data stays after `stop`.
        port: TCP port; 0 takes a free one, which is then kept over restarts of this object.
        host: address of this machine that it listens on.
        tls_dir: folder of certificates, with its own `zookeeper.pem`: it then accepts only TLS with client certificates.

    Source: docs/operations.md, "One machine".
    """

    def __init__(self, data_dir: str | Path, port: int = 0, host: str = HOST, tls_dir: Path | None = None) -> None:
        self._folder = Path(data_dir)
        self._host = host
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._tls_dir = tls_dir
        self._left: Path | None = None

    @property
    def credentials(self) -> Path:
        """The file of logins that was made at the first start."""
        return self._folder / "credentials"

    @property
    def port(self) -> int:
        """The TCP port; 0 before the first start with a free one."""
        return self._port

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process; 0 when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def log_path(self) -> Path:
        """The server's output."""
        return self._folder / "zookeeper.log"

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server and wait until it serves.

        Raises `ConfigurationError` (no Java, no jars, port taken, data folder in use or not writable) or
        `RegistryUnavailable` (it ended or is not ready in time; with the end of its log).
        """
        if self.pid:
            return
        java, jars = find_java().path, find_jars(tls=self._tls_dir is not None)
        # The server inherits the lock: as long as it lives, even without us, nobody else uses its data.
        lock = self._lock()
        try:
            make_credentials(self.credentials)
            for left in reversed(range(PORT_TRIES if self._port == 0 else 1)):
                with _reserve(self._port, self._host) as reservation:
                    port = int(reservation.getsockname()[1])
                    self._launch(java, jars, port, lock)
                    try:
                        self._wait_until_ready(port, timeout_s)
                    except BaseException as error:
                        ended = self._process is not None and self._process.poll() is not None
                        self.kill()
                        if not (left and ended and isinstance(error, RegistryUnavailable)):
                            raise
                        continue
                self._port = port
                self._left = logins.leave(self.address, self.credentials)
                (self._folder / "zookeeper.pid").write_text(f"{self.pid}\n")
                return
        finally:
            os.close(lock)

    def stop(self) -> None:
        """End the server in order; kill it when it does not end within 10 s."""
        process = self._process
        if process is None:
            self._forget_logins()
            return
        if process.poll() is None:
            self._signal(signal.SIGTERM)
            # A stopped process handles a signal only after it continues.
            self._signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self.kill()
        self._forget_logins()

    def kill(self) -> None:
        """Kill the server at once, as in a crash."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGKILL)
        process.wait(KILL_TIMEOUT_S)
        self._process = None

    def _forget_logins(self) -> None:
        if self._left is not None:
            with contextlib.suppress(OSError):
                self._left.unlink()
            self._left = None

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the server to end by itself. Returns True if it did."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_tail(self) -> str:
        """Return the end of the server's output."""
        try:
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    def __enter__(self) -> EmbeddedZooKeeper:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        # Only before it is reaped: after that the number may be another's process group.
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _lock(self) -> int:
        try:
            (self._folder / "data").mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"ZooKeeper's data folder {self._folder} cannot be used: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            with contextlib.suppress(OSError):
                pid = (self._folder / "zookeeper.pid").read_text().strip()
                raise ConfigurationError(
                    f"a ZooKeeper (process {pid} when it started) still uses {self._folder}; stop it or take another folder"
                ) from None
            raise ConfigurationError(f"another process uses {self._folder}; stop it or take another folder") from None
        return lock

    def _launch(self, java: Path, jars: list[Path], port: int, lock: int) -> None:
        configuration = self._folder / "zoo.cfg"
        lines = {
            "dataDir": "data",
            "clientPort": str(port),
            "clientPortAddress": self._host,
            "tickTime": str(TICK_MS),
            "maxSessionTimeout": str(MAX_SESSION_MS),
            "maxClientCnxns": str(MAX_CONNECTIONS),
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr,ruok,mntr",
            "autopurge.snapRetainCount": "3",
            "autopurge.purgeInterval": "1",
        }
        if self._tls_dir is not None:
            del lines["clientPort"], lines["clientPortAddress"]
            folder = self._tls_dir.resolve()
            lines |= {
                "secureClientPort": str(port),
                "secureClientPortAddress": self._host,
                "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
                "ssl.keyStore.location": f"{folder}/{ROLE}.pem",
                "ssl.keyStore.type": "PEM",
                "ssl.trustStore.location": f"{folder}/ca.pem",
                "ssl.trustStore.type": "PEM",
                "ssl.clientAuth": "need",
                "client.certReload": "true",
            }
        configuration.write_bytes("".join(f"{key}={escaped(value)}\n" for key, value in lines.items()).encode())
        flags = (*JVM_FLAGS, *LOGIN_FLAGS) if self._tls_dir is not None else JVM_FLAGS
        command = [str(java), *flags, "-cp", os.pathsep.join(map(str, jars)), MAIN_CLASS, configuration.name]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, "LC_ALL": "C.UTF-8"},  # in another one Java cannot name every folder
                start_new_session=True,
                pass_fds=(lock,),
            )

    def _wait_until_ready(self, port: int, timeout_s: float) -> None:
        assert self._process is not None
        context = None
        if self._tls_dir is not None:
            from pixiu.rpc.tls import Tls

            context = Tls(self._tls_dir, ROLE).client_context()
        until = time.monotonic() + timeout_s
        while True:
            code = self._process.poll()
            if code is not None:
                reason = EXIT_REASONS.get(code, "it was ended from outside" if code < 0 else "for a reason of its own")
                raise RegistryUnavailable(f"ZooKeeper ended with code {code}: {reason}. {self._log_text()}")
            # `ruok` answers before requests are served.
            if "Mode:" in four_letter_word(port, "srvr", host=self._host, context=context) and self._process.poll() is None:
                return
            if time.monotonic() >= until:
                raise RegistryUnavailable(
                    f"ZooKeeper is not ready at {self._host}:{port} after {timeout_s:g} s; the machine may be too loaded. "
                    f"{self._log_text()}"
                )
            time.sleep(POLL_S)

    def _log_text(self) -> str:
        return f"The end of its log {self.log_path}:\n{self.log_tail() or '(nothing)'}"


def _reserve(port: int, host: str) -> socket.socket:
    """Bind a port without listening on it. Nobody else gets the port before ZooKeeper, which may share it, listens."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port))
    except OSError as error:
        reservation.close()
        raise ConfigurationError(
            f"port {port} on {host} cannot be used for ZooKeeper ({error.strerror}); stop what listens there, or choose another "
            "port (0 takes a free one)"
        ) from None
    return reservation


def main(arguments: list[str] | None = None) -> int:
    """Run one in the foreground. Returns 0 after SIGINT or SIGTERM, 1 if it could not start or ended by itself."""
    parser = argparse.ArgumentParser(prog="python -m onebox.embedded", description="Run a ZooKeeper for one machine.")
    parser.add_argument("--data", required=True, metavar="DIR", help="its folder; created if missing")
    parser.add_argument("--port", type=int, default=2181, metavar="N", help="TCP port; 0 takes a free one (default 2181)")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS", help=f"address that it listens on (default {HOST})")
    parser.add_argument("--tls-dir", type=Path, metavar="DIR", help="take TLS alone, with zookeeper.pem and ca.pem in this folder")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65_535:
        parser.error(f"--port {options.port}: a port is 0 to 65535")
    # A flag, and not an Event: a signal that arrives while another's handler holds the Event's lock would wait for ever.
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    os.umask(PRIVATE_UMASK)
    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    server = EmbeddedZooKeeper(options.data, options.port, options.host, options.tls_dir)
    try:
        server.start()
        print(f"ZooKeeper serves {server.address}, data in {options.data}", flush=True)
        while not asked:
            if server.wait(0.2):
                print(f"ZooKeeper ended by itself.\n{server.log_tail()}", file=sys.stderr)
                return 1
    except PixiuError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
