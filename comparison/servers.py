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
KAFKA: Final = "PIXIU_BENCH_KAFKA"
"""Environment variable: a folder whose `libs` has Kafka's jars."""
KAFKA_CLUSTER: Final = "AAAAAAAAQACAAAAAAAAAAA"
GET_KAFKA: Final = (
    f"take org.apache.kafka:kafka_2.13:4.3.1 with its dependencies from Maven Central (mvn dependency:copy-dependencies) into a "
    f"folder `libs`, and set {KAFKA} to the folder above it"
)
GET_NSQ: Final = "go install nsqd of the Go module github.com/nsqio/nsq at v1.3.0 into a folder of PATH"
ASK_RABBITMQ: Final = ("dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server")
MAIL: Final = frozenset(name for name, case in CASES.items() if case.kind == "mail")
TOPICS: Final = frozenset(name for name, case in CASES.items() if case.kind == "topics")
SYNCED: Final = frozenset(name for name in TOPICS if CASES[name].act == "write" and CASES[name].level == "replicated")


ASK_KAFKA: Final = ("sh", "-c", f"ls ${KAFKA}/libs/kafka_*.jar | sed s/.*-//")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with."""

    name: str
    program: str
    package: str
    """Package of Debian and Ubuntu, or, with spaces, how to get it."""
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
        if self.program == KAFKA:
            return bool(_kafka_jars()) and installed("java") is not None
        return RABBITMQ.exists() if self.program == RABBITMQ.name else installed(self.program) is not None

    @property
    def install(self) -> str:
        """The command that installs it."""
        return self.package if " " in self.package else f"apt-get install {self.package}"

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


def _kafka_jars() -> list[Path]:
    folder = os.environ.get(KAFKA, "")
    return sorted(Path(folder, "libs").glob("kafka*.jar")) if folder else []


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
def jetstream(folder: Path, *, synced: bool = False) -> Iterator[tuple[int, int]]:
    """Run NATS' own protocol, and JetStream in files. `synced`: before it confirms a message, from NATS 2.10 on."""
    folder.mkdir()
    port = free_port()
    (folder / "nats.conf").write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/js"' + ", sync_interval: always" * synced + " }\n"
    )
    with server([_path("nats-server"), "-c", str(folder / "nats.conf")], port, {}) as session:
        yield port, session


@contextlib.contextmanager
def kafka(folder: Path, *, synced: bool = False) -> Iterator[tuple[int, int]]:
    """Run one node that is broker and controller. `synced`: before it confirms a batch."""
    folder.mkdir()
    port, controller = free_port(), free_port()
    (folder / "server.properties").write_text(
        f"process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{controller}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\ncontroller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n"
        f"log.dirs={folder}/logs\noffsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
        + "log.flush.interval.messages=1\n"
        * synced
    )
    java = [_path("java"), "-Xms1g", "-Xmx1g", "-cp", str(Path(os.environ[KAFKA], "libs", "*"))]
    subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "-t", KAFKA_CLUSTER, "-c", str(folder / "server.properties")],
        capture_output=True, check=True, timeout=VERSION_LIMIT_S,
    )  # fmt: skip
    with server([*java, "kafka.Kafka", str(folder / "server.properties")], port, {}) as session:
        yield port, session


@contextlib.contextmanager
def nsq(folder: Path, *, synced: bool = False) -> Iterator[tuple[int, int]]:
    """Run one nsqd. `synced`: everything goes to the disk, and is synced message by message."""
    folder.mkdir()
    port, http = free_port(), free_port()
    kept = ["--mem-queue-size=0", "--sync-every=1"] if synced else []
    command = [_path("nsqd"), f"--tcp-address=127.0.0.1:{port}", f"--http-address=127.0.0.1:{http}", f"--data-path={folder}", *kept]
    with server(command, port, {}) as session:
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
        Peer("mosquitto", "mosquitto", "mosquitto", (_path("mosquitto"), "-h"), mosquitto, cases=frozenset(CASES) - TOPICS),
        Peer(
            "mosquitto-nodelay", "mosquitto", "mosquitto", (_path("mosquitto"), "-h"), partial(mosquitto, nodelay=True),
            cases=frozenset(CASES) - {"idle"} - TOPICS,
        ),
        Peer("nats", "nats-server", "nats-server", (_path("nats-server"), "--version"), nats, cases=frozenset(CASES) - TOPICS),
        Peer("rabbitmq", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, partial(rabbitmq, mqtt=True), cases=frozenset(CASES) - TOPICS),
        Peer(
            "redis", "redis-server", "redis-server", (_path("redis-server"), "--version"), redis, "redis",
            cases=frozenset({"connections", "fanout-100", "fanout-1000", "fanout-100-open", "rooms", "pair-qos0", "pair-2000"}),
        ),
        Peer(
            "jetstream", "nats-server", "nats-server", (_path("nats-server"), "--version"), jetstream, "nats",
            cases=MAIL | TOPICS - SYNCED - {"topic-ordered"} | {"topic-100"},
        ),
        Peer(
            "jetstream-synced", "nats-server", "nats-server", (_path("nats-server"), "--version"), partial(jetstream, synced=True),
            "nats", cases=SYNCED,
        ),
        Peer("kafka", KAFKA, GET_KAFKA, ASK_KAFKA, kafka, "kafka", cases=TOPICS - SYNCED - {"topic-any"} | {"topic-100"}),
        Peer("kafka-synced", KAFKA, GET_KAFKA, ASK_KAFKA, partial(kafka, synced=True), "kafka", cases=SYNCED),
        Peer(
            "nsq", "nsqd", GET_NSQ, (_path("nsqd"), "--version"), nsq, "nsq",
            cases=frozenset({"topic-write-256k", "topic-write-16k", "topic-any"}),
        ),
        Peer(
            "nsq-synced", "nsqd", GET_NSQ, (_path("nsqd"), "--version"), partial(nsq, synced=True), "nsq",
            cases=frozenset({"topic-one"}),
        ),
        Peer("rabbitmq-amqp", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, rabbitmq, "amqp", cases=MAIL),
        Peer("rabbitmq-quorum", RABBITMQ.name, RABBITMQ.name, ASK_RABBITMQ, rabbitmq, "amqp-quorum", cases=MAIL),
    )
}  # fmt: skip
"""Servers by name. Mosquitto as shipped, the one to compare with, lets the kernel join small packets (Nagle's algorithm); with
`set_tcp_nodelay` it delivers sooner, and fewer. Redis publishes by its own protocol, and neither confirms nor keeps publications.
The others take part in mail or topics only, each by its fastest protocol."""
