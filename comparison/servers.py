"""Other servers, if they are installed: commands to start them, read their version, and install them.

Each has a folder of its own, keeps nothing outside it, and is configured as its distribution ships it, except as the work
requires: nobody has to log in, and no queue is bounded.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from comparison.cases import CASES
from comparison.processes import free_port, installed, server

RABBITMQ: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The server itself; the command in PATH needs a user of its own."""
VERSION_LIMIT_S: Final = 30.0
ASK_RABBITMQ: Final = ("dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server")
MAIL: Final = frozenset(name for name, case in CASES.items() if case.kind == "mail")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with."""

    name: str
    program: str
    package: str
    """Package of Debian and Ubuntu."""
    ask_version: tuple[str, ...]
    start: Callable[[Path], AbstractContextManager[tuple[int, int]]]
    """Runs the server in this new folder; yields (port, session)."""
    wire: str = "mqtt"
    topic: str = "room/{}"
    cases: frozenset[str] | None = None
    """Names of the cases that it can run; None: all."""

    @property
    def found(self) -> bool:
        """True if it is installed."""
        return RABBITMQ.exists() if self.program == RABBITMQ.name else installed(self.program) is not None

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"apt-get install {self.package}"

    def version(self) -> str:
        """Return the version that the program, or else the system's list of packages, reports."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(self.ask_version, capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=False)
            return version_in(said.stdout + said.stderr)
        return ""


def version_in(said: str) -> str:
    """Return the first version number in a program's output; empty if there is none."""
    found = re.search(r"\d+\.\d+(?:\.\d+)*", said)
    return found[0] if found else ""


def _path(program: str) -> str:
    return installed(program) or program


@contextlib.contextmanager
def mosquitto(folder: Path, *, nodelay: bool = False) -> Iterator[tuple[int, int]]:
    """Run one listener, with unbounded queues. `nodelay`: write every packet at once, which it does not by default."""
    folder.mkdir()
    port = free_port()
    (folder / "mosquitto.conf").write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
        f"persistence true\npersistence_location {folder}/\nuser root\n" + "set_tcp_nodelay true\n" * nodelay
    )
    with server([_path("mosquitto"), "-c", str(folder / "mosquitto.conf")], port, {}) as session:
        yield port, session


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[tuple[int, int]]:
    """Run MQTT on JetStream in files."""
    folder.mkdir()
    port = free_port()
    (folder / "nats.conf").write_text(
        f'listen: "127.0.0.1:{free_port()}"\nserver_name: bench\njetstream {{ store_dir: "{folder}/js" }}\n'
        f'mqtt {{ listen: "127.0.0.1:{port}" }}\n'
    )
    with server([_path("nats-server"), "-c", str(folder / "nats.conf")], port, {}) as session:
        yield port, session


@contextlib.contextmanager
def jetstream(folder: Path) -> Iterator[tuple[int, int]]:
    """Run NATS' own protocol, and JetStream in files."""
    folder.mkdir()
    port = free_port()
    with server([_path("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)], port, {}) as session:
        yield port, session


@contextlib.contextmanager
def redis(folder: Path, fsync: str = "") -> Iterator[tuple[int, int]]:
    """Run publish and subscribe without a file; with `fsync`, an append-only file with this policy (`always`, `everysec`)."""
    folder.mkdir()
    port = free_port()
    kept = ["--appendonly", "yes", "--appendfsync", fsync] if fsync else []
    command = [_path("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *kept]
    with server(command, port, {}) as session:
        yield port, session


@contextlib.contextmanager
def rabbitmq(folder: Path, *, mqtt: bool = False) -> Iterator[tuple[int, int]]:
    """Run AMQP without plugins, or MQTT by its plugin."""
    folder.mkdir()
    port, epmd, amqp = free_port(), free_port(), free_port()
    (folder / "plugins").write_text("[rabbitmq_mqtt].\n" if mqtt else "[].\n")
    (folder / "rabbitmq.conf").write_text(f"mqtt.listeners.tcp.1 = 127.0.0.1:{port}\nmqtt.allow_anonymous = true\n" if mqtt else "")
    environment = {
        "HOME": str(folder), "ERL_EPMD_PORT": str(epmd), "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"bench{port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(amqp if mqtt else port),
        "RABBITMQ_DIST_PORT": str(free_port()), "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"), "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"), "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
    }  # fmt: skip
    try:
        with server([str(RABBITMQ)], port, environment) as session:
            yield port, session
    finally:
        # Erlang's port mapper leaves the session that started it.
        subprocess.run(["epmd", "-port", str(epmd), "-kill"], env=os.environ | environment, capture_output=True, check=False)


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("mosquitto", "mosquitto", "mosquitto", (_path("mosquitto"), "-h"), mosquitto),
        Peer(
            "mosquitto-nodelay", "mosquitto", "mosquitto", (_path("mosquitto"), "-h"), partial(mosquitto, nodelay=True),
            cases=frozenset(CASES) - {"idle"},
        ),
        Peer("nats", "nats-server", "nats-server", (_path("nats-server"), "--version"), nats),
        Peer("rabbitmq", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, partial(rabbitmq, mqtt=True)),
        Peer(
            "redis", "redis-server", "redis-server", (_path("redis-server"), "--version"), redis, "redis",
            cases=frozenset({"connections", "fanout-100", "fanout-1000", "fanout-100-open", "rooms", "pair-qos0", "pair-2000"}),
        ),
        Peer(
            "jetstream", "nats-server", "nats-server", (_path("nats-server"), "--version"), jetstream, "nats",
            cases=MAIL,
        ),
        Peer("rabbitmq-amqp", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, rabbitmq, "amqp", cases=MAIL),
        Peer("rabbitmq-quorum", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, rabbitmq, "amqp-quorum", cases=MAIL),
    )
}  # fmt: skip
"""Servers by name. Mosquitto as shipped, the one to compare with, lets the kernel join small packets (Nagle's algorithm); with
`set_tcp_nodelay` it delivers sooner, and fewer. Redis publishes by its own protocol, and neither confirms nor keeps publications.
The last three take part in mail only, each by its fastest protocol."""
