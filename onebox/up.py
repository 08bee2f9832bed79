"""`pixiu up`: a whole cluster on one machine. The shell around `onebox.supervisor`.

    ZooKeeper ─▶ layout ─▶ xius, pis, topics ─▶ routers ─▶ relays ─▶ brokers ─▶ admins ─▶ proxies ─▶ gateways   (and back)

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from cluster.trust.key_folder import add_key, use_key
from cluster.trust.pki import CALLERS, ZOOKEEPER, issue, make_authority, renew
from onebox.children import ROTATE_S, child_environment, open_log, rotate_log, tail
from onebox.embedded_child import EmbeddedChild
from onebox.fork_server import Forked, Forks
from onebox.grouping import (
    CLIENT_ROLES,
    NODE,
    NUMBERS,
    PLAIN,
    REPLICAS,
    Entry,
    Grouping,
    ProcessSpec,
    roles_beside,
    roles_together,
    wanted_processes,
)
from onebox.secure import LISTENERS
from onebox.settings_check import check_settings, overrides_for
from onebox.shared_tables import table_mb
from onebox.supervisor import (
    CONFIGURATION_EXIT,
    Effect,
    Fail,
    Kill,
    ProcessState,
    Start,
    SupervisorCore,
    Terminate,
)
from pixiu.discovery import login as logins
from pixiu.discovery.login import Login
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import PARTITIONED_ROLES, ROLES, supervisor
from pixiu.discovery.target import RegistryAddress, parse_address
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, PixiuError, Unavailable
from pixiu.placement.partition import MAX_PARTITIONS
from pixiu.rpc import tls
from registry.credentials import read_credentials
from registry.guarding import guard, guard_first
from registry.layout import ensure_layout, read_layout, set_replicas
from registry.mailbox import Mark

READY_TIMEOUT_S: Final = 180.0
"""Time limit for all processes to be Running; a loaded machine needs a minute."""
STOP_LIMIT_S: Final = 120.0
"""Seconds after which the end is forced."""
FORGET_PORTS_AFTER: Final = 2
"""After this number of failed restarts on a port somebody else has it: take any other."""
MAX_ROLES: Final = 256
"""Limit of one machine's proxies, gateways, admins and replicas, whatever their processes."""
PKI: Final = "pki"
TLS: Final = "tls"
KEYS: Final = "keys"
TICKET_KEYS: Final = "ticket_keys"
"""Folders of the authority, of certificates and of keys of datagrams, below the data folder."""
RENEW_DAYS: Final = 30.0
"""A start renews certificates that expire within this number of days."""

FOLLOWING: Final = ("websocket_port", "api_port")
"""Ports that `--set gateway.…` gives to the first gateway; the others have the following ones."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """Options of `pixiu up`. `validate()` names the option at fault."""

    grouping: Grouping = PLAIN
    proxies: int = 2
    gateways: int = 2
    brokers: int = NUMBERS[PLAIN]["brokers"]
    """Broker partitions."""
    broker_replicas: int = 2
    """Replicas of each."""
    routers: int = NUMBERS[PLAIN]["routers"]
    """Router partitions."""
    router_replicas: int = 2
    """Replicas of each."""
    relays: int = NUMBERS[PLAIN]["relays"]
    """Relay partitions; 0: a cluster without messages to users."""
    relay_replicas: int = 2
    """Replicas of each."""
    xius: int = 1
    """Xiu partitions; 0: a cluster that stores no messages."""
    xiu_replicas: int = 2
    pis: int = 1
    """Pi partitions: users' inboxes; 0: none."""
    pi_replicas: int = 2
    """Replicas of each."""
    topics: int = 1
    """Groups of durable topics; 0: a cluster without topics, and without admins."""
    topic_replicas: int = 2
    """Replicas of each."""
    admins: int = 2
    """Processes of which one changes topics and the others stand by."""
    mqtt_port: int = 1883
    """Port of the first gateway; the others have the following ones. 0: any."""
    zookeeper_port: int = 2181
    """Port of the embedded ZooKeeper; 0: any."""
    registry: str = ""
    """A ZooKeeper that runs already, zk://HOST:PORT/ROOT. Empty: an embedded one."""
    data: Path = Path("run")
    """Folder of the processes' data and logs."""
    config: Path | None = None
    """TOML file with [cluster] and role tables, given to every process."""
    settings: tuple[str, ...] = ()
    """Further options, `ROLE.KEY=VALUE` or `cluster.KEY=VALUE`."""
    secure: bool = False
    """Certificates for everybody, made below the data folder, and required at every listener of the cluster."""
    grow: bool = True
    """Run the partitions that doublings add, those of a doubling under way included."""
    defaulted: frozenset[str] = frozenset()
    """Numbers that nobody gave."""

    @classmethod
    def of(cls, grouping: Grouping, numbers: Mapping[str, int | None], **others: Any) -> UpOptions:
        """Return options; numbers that are None or left out are those of the grouping."""
        given = {name: number for name, number in numbers.items() if number is not None}
        left = frozenset(NUMBERS[grouping]) - frozenset(given)
        return cls(grouping=grouping, defaulted=left, **{**NUMBERS[grouping], **given, **others})

    def of_cluster(self, layout: Layout) -> UpOptions:
        """Return the options for a cluster that exists: it keeps its numbers of partitions where none was given."""
        kept: dict[str, Any] = {f"{role}s": layout.roles[role].n for role in PARTITIONED_ROLES if role in layout.roles}
        return replace(self, **{name: number for name, number in kept.items() if name in self.defaulted})

    def validate(self) -> None:
        """Check the options. Raises `ConfigurationError`."""
        for name in ("proxies", "gateways", "admins", *REPLICAS):
            if not 1 <= getattr(self, name) <= MAX_ROLES:
                raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be from 1 to {MAX_ROLES}")
        for name, least in (("brokers", 1), ("routers", 1), ("relays", 0), ("xius", 0), ("pis", 0)):
            count = getattr(self, name)
            if not least <= count <= 128 or count & (count - 1):
                none = "" if least else ", or 0"
                raise ConfigurationError(f"--{name} {count}: the number of partitions must be a power of two up to 128{none}")
        if not 0 <= self.topics <= MAX_PARTITIONS:
            raise ConfigurationError(f"--topics {self.topics}: the number of groups must be from 0 to {MAX_PARTITIONS}")
        entries = [entry for spec in self.specs() for entry in spec.entries]
        if len(entries) > MAX_ROLES:
            raise ConfigurationError(
                f"these are {len(entries)} proxies, gateways, admins and replicas; one machine runs at most {MAX_ROLES}"
            )
        for name, last in (("mqtt_port", self.gateways), ("zookeeper_port", 1)):
            port = getattr(self, name)
            if port and not 1 <= port <= 65_536 - last:
                raise ConfigurationError(f"--{name.replace('_', '-')} {port}: must be 0 (any) or a port")
        if self.mqtt_port and self.mqtt_port <= self.zookeeper_port < self.mqtt_port + self.gateways and not self.registry:
            number = self.zookeeper_port - self.mqtt_port
            raise ConfigurationError(
                f"--zookeeper-port {self.zookeeper_port}: gateway {number} of {self.gateways} takes it for MQTT "
                f"(--mqtt-port {self.mqtt_port}); choose another port for one of them"
            )
        for setting in self.settings:
            if "=" not in setting or "." not in setting.partition("=")[0]:
                raise ConfigurationError(f"--set {setting}: must be ROLE.KEY=VALUE or cluster.KEY=VALUE")
        check_settings(sorted({entry.role for entry in entries}), self.settings, self.config, os.environ)
        if "cluster.fanout=relay" in self.settings and not self.relays:
            raise ConfigurationError("--set cluster.fanout=relay: needs relays; give --relays 1 or more")

    def specs(self) -> list[ProcessSpec]:
        """Return every wanted process."""
        return self._specs({role: wanted.n for role, wanted in self.layout().items()})

    def _specs(self, partitions: Mapping[str, int]) -> list[ProcessSpec]:
        wanted = {role: (partitions[role], wanted.replicas) for role, wanted in self.layout().items()}
        apart = roles_beside(self.grouping, guarded=self.secure)
        return wanted_processes(wanted, roles_together(self.grouping, guarded=self.secure), apart)

    def partitions(self, role: str, layout: Layout) -> int:
        """Return the number of a role's partitions to run; 0 if it has none, or is not run."""
        configured, found = self.layout().get(role), layout.roles.get(role)
        if configured is None or role not in PARTITIONED_ROLES:
            return 0
        return max(found.n, found.next) if found is not None and self.grow else configured.n

    def grown(self, layout: Layout) -> list[ProcessSpec]:
        """Return every wanted process, with the partitions that doublings have added."""
        return self._specs({role: self.partitions(role, layout) or wanted.n for role, wanted in self.layout().items()})

    def layout(self) -> dict[str, RoleLayout]:
        """Return the layout that the registry should hold."""
        relays = {"relay": RoleLayout(self.relays, self.relays, self.relay_replicas)} if self.relays else {}
        xius = {"xiu": RoleLayout(self.xius, self.xius, self.xiu_replicas)} if self.xius else {}
        pis = {"pi": RoleLayout(self.pis, self.pis, self.pi_replicas)} if self.pis else {}
        topics = {"topic": RoleLayout(self.topics, self.topics, self.topic_replicas)} if self.topics else {}
        admins = {"admin": RoleLayout(1, 1, self.admins)} if self.topics else {}
        return {
            **relays,
            **xius,
            **pis,
            **topics,
            **admins,
            "router": RoleLayout(self.routers, self.routers, self.router_replicas),
            "broker": RoleLayout(self.brokers, self.brokers, self.broker_replicas),
            "proxy": RoleLayout(1, 1, self.proxies),
            "gateway": RoleLayout(1, 1, self.gateways),
        }


@dataclass(slots=True)
class Child:
    """One process as the operating system and the registry know it."""

    process: Forked | None = None
    nodes: dict[Entry, Node] = field(default_factory=dict)
    """Its roles in the registry."""
    log_start: int = 0
    """Offset in its log at which this run began."""
    ports: dict[Entry, dict[str, int]] = field(default_factory=dict)
    """Ports of each role, kept over restarts: port, http_port, client_port, mqtt_port."""


class LocalCluster:
    """Runs and watches the processes. Calls `changed` when something worth showing happened.

    Source: docs/operations.md.
    """

    def __init__(
        self, options: UpOptions, on_event: Callable[[str, dict[str, object]], None] = lambda _name, _fields: None
    ) -> None:
        options.validate()
        self.options = options
        self._on_event = on_event
        self.core = SupervisorCore(options.specs(), Random().random)
        self.children = {spec.name: Child() for spec in options.specs()}
        self.zookeeper: EmbeddedChild | None = None
        self.address = RegistryAddress("")
        self._session: ZooKeeper | None = None
        self._discovery: Discovery | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: PixiuError | None = None
        self._forks = Forks(child_environment(), alone=len(self.children) == 1)
        self._lock = -1
        self._mark: Mark | None = None
        self._replicas = {role: wanted.replicas for role, wanted in options.layout().items()}
        """Number of replicas of each role to run."""
        self._partitions = dict.fromkeys(self._replicas, 0)
        """Number of partitions of each role; 0 if it has none."""
        self._table_mb = 0
        """Size of each Xiu's table, where the default does not fit into shared memory."""

    @property
    def target(self) -> str:
        """The target for `pixiu.connect` and the other commands."""
        return str(self.address)

    async def start(self) -> None:
        """Bring everything up; returns when all are Running.

        Raises `ConfigurationError` (a port is taken, no Java, another `pixiu up` uses the folder, wrong options of a role)
        or `Unavailable` (a process cannot get to Running; with the end of its log).
        """
        options = self.options
        self._take_folder()
        if options.secure:
            await asyncio.to_thread(make_secure, options.data)
            tls.use(tls.Tls(options.data / TLS, tls.OPERATOR))
        self._forks.prepare()
        check_ports([options.mqtt_port + number for number in range(options.gateways)] if options.mqtt_port else [])
        if options.registry:
            self.address = parse_address(options.registry)
        else:
            port = options.zookeeper_port
            log, certificates = options.data / "logs" / "zookeeper.log", options.data / TLS if options.secure else None
            self.zookeeper = EmbeddedChild(options.data / "zookeeper", port, log, certificates)
            await self.zookeeper.start()
            self.address = parse_address(f"{'zks' if options.secure else 'zk'}://{self.zookeeper.address}/pubsub")
            logins.use(Login(self.zookeeper.credentials))
            self._on_event("zookeeper", {"address": self.zookeeper.address})
        await self._prepare_registry()
        self._fit_tables()
        self._spawn(self._tick(), "supervisor-timer")
        self._spawn(self._rotate(), "log-rotation")
        self._apply(self.core.tick(time.monotonic()))
        until = time.monotonic() + READY_TIMEOUT_S
        while not self.core.all_running:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= until:
                late = [name for name, record in self.core.processes.items() if record.state is not ProcessState.RUNNING]
                where, end = self.log_of(late[0]), self._tail(late[0])
                raise Unavailable(f"not Running after {READY_TIMEOUT_S:g} s: {', '.join(late)}. The end of {where}:\n{end}")
            await self.wait_change(1.0)
        self._on_event("running", {"registry": self.target, **self.addresses()})

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until something changed, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()

    async def stop(self) -> None:
        """End everything in `DRAIN_ORDER`, and ZooKeeper last. Leaves nothing running."""
        self._apply(self.core.stop(time.monotonic()))
        until = time.monotonic() + STOP_LIMIT_S
        while not self.core.all_stopped:
            await self.wait_change(0.5)
            if time.monotonic() >= until:
                self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._mark is not None:
            await self._mark.stop()
        if self._discovery is not None:
            await self._discovery.close()
        if self._session is not None:
            await self._session.close()
        if self.zookeeper is not None:
            await self.zookeeper.stop()
        await asyncio.to_thread(self._forks.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._on_event("stopped", {})

    def kill(self) -> None:
        """End every process at once; `stop` still has to be awaited."""
        self._apply(self.core.kill(time.monotonic()))

    def nodes(self) -> list[Node]:
        """Return every role that is in the registry."""
        return [node for child in self.children.values() for node in child.nodes.values()]

    def addresses(self) -> dict[str, list[str]]:
        """Return the addresses of clients: proxies, gateways (gRPC) and MQTT."""
        found = self.nodes()
        return {
            "proxies": [node.client_address for node in found if node.role == "proxy"],
            "gateways": [node.client_address for node in found if node.role == "gateway"],
            "mqtt": [f"{node.mqtt_host}:{node.mqtt_port}" for node in found if node.role == "gateway" and node.mqtt_port],
        }

    def log_of(self, name: str) -> Path:
        """Return the log of one process."""
        return self.options.data / "logs" / f"{name}.log"

    def _take_folder(self) -> None:
        data = self.options.data
        if data.exists() and not data.is_dir():
            raise ConfigurationError(f"--data {data}: is a file, not a folder")
        try:
            data.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.options.secure:
                data.chmod(0o700)  # one of an older run may be open to all
            self._lock = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"--data {data}: cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(f"another `pixiu up` runs in {data}; end it, or give another folder with --data DIR") from None

    async def _prepare_registry(self) -> None:
        self._session = ZooKeeper(self.address)
        await self._session.connect()
        if self.zookeeper is not None:  # nothing else of this folder runs yet
            credentials = read_credentials(self.zookeeper.credentials)
            await guard(self._session, self.address.root, credentials, force=True, whole=True)
        else:
            await guard_first(self._session, self.address.root)
        if (there := await read_layout(self._session, self.address.root)) is not None:
            self.options = self.options.of_cluster(there)
        wanted = self.options.layout()
        try:
            layout = await ensure_layout(self._session, self.address.root, wanted)
        except ConfigurationError as error:
            hint = f"; for a new cluster give an empty folder with --data DIR, or remove {self.options.data}"
            raise ConfigurationError(f"{error}{'' if self.options.registry else hint}") from None
        specs = self.options.grown(layout)
        self.core = SupervisorCore(specs, Random().random)
        self.children = {spec.name: Child() for spec in specs}
        self._partitions = {role: self.options.partitions(role, layout) for role in self._replicas}
        for role, said in wanted.items():
            if layout.roles[role].replicas != said.replicas:
                await set_replicas(self._session, self.address.root, role, said.replicas)
        self._discovery = Discovery(self._session, self.address.root, self._on_view)
        await self._discovery.start()
        self._mark = Mark(self._session, supervisor(self.address.root), f"{socket.gethostname()} (pid {os.getpid()})")
        self._mark.start()

    def _fit_tables(self) -> None:
        """Give Xius smaller tables where shared memory is small."""
        options, counts = self.options, Counter(entry.role for entry in self.core.entries())
        found = table_mb(counts["xiu"], counts["gateway"], self.address.root, options.settings, options.config, os.environ)
        if found is not None:
            self._table_mb, free_mb = found
            self._on_event("small_tables", {"table_mb": self._table_mb, "free_mb": free_mb})

    def _follow(self, view: View) -> None:
        """Start and end processes after an operator has changed the wanted replicas, or doubles the partitions."""
        for role, runs in self._replicas.items():
            found = view.layout.roles.get(role)
            if found is None:
                continue
            before, replicas = self._partitions[role], found.replicas or runs
            partitions = self.options.partitions(role, view.layout)
            if (replicas, partitions) == (runs, before):
                continue
            self._replicas[role], self._partitions[role] = replicas, partitions
            count = len(self.core.entries()) + replicas * max(partitions, 1) - runs * max(before, 1)
            if count > MAX_ROLES:
                self._on_event("replicas_refused", {"role": role, "replicas": replicas, "limit": MAX_ROLES})
                continue
            effects = self.core.set_replicas(role, replicas, time.monotonic(), partitions)
            for name in self.core.processes:
                self.children.setdefault(name, Child())
            for name in [name for name, child in self.children.items() if child.process is None]:
                if name not in self.core.processes:
                    del self.children[name]
            self._on_event("replicas", {"role": role, "replicas": replicas, "partitions": partitions})
            self._apply(effects)

    def _on_view(self, view: View) -> None:
        self._follow(view)
        places = {(node.pid, node.role, node.partition): node for node in view.nodes}
        for name, child in list(self.children.items()):
            if child.process is None or (record := self.core.processes.get(name)) is None:
                continue
            for entry in record.spec.entries:
                node = places.get((child.process.pid, entry.role, entry.partition))
                if node is not None:
                    child.nodes[entry] = node
                    ports = {key: getattr(node, key) for key in ("port", "http_port", "client_port", "mqtt_port")}
                    child.ports[entry] = {key: port for key, port in ports.items() if port or key in ("port", "http_port")}
            running = [entry for entry, node in child.nodes.items() if node.state is NodeState.RUNNING]
            if len(running) == len(record.spec.entries) and record.state is ProcessState.STARTING:
                self._apply(self.core.running(name, time.monotonic()))
                first = child.nodes[record.spec.entries[0]]
                said = {"process": name, "pid": first.pid, "address": first.address, "restarts": record.restarts}
                self._on_event("process_running", said)
        self._changed.set()

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            child = self.children[effect.name]
            if isinstance(effect, Start):
                self._spawn(self._run(effect.name), f"run {effect.name}")
            elif isinstance(effect, Terminate):
                _signal(child, signal.SIGTERM)
            elif isinstance(effect, Kill):
                _signal(child, signal.SIGKILL)
            elif isinstance(effect, Fail) and self._failure is None:
                self._failure = ConfigurationError(
                    f"{effect.name} does not start (exit code {effect.code}). The end of {self.log_of(effect.name)}:\n"
                    f"{self._tail(effect.name)}"
                )
        self._changed.set()

    def _tail(self, name: str) -> str:
        return tail(self.log_of(name), self.children[name].log_start) or "(nothing)"

    async def _run(self, name: str) -> None:
        """Run one process, from its start to its end."""
        record, child = self.core.processes[name], self.children[name]
        if record.last_code == CONFIGURATION_EXIT and record.failures >= FORGET_PORTS_AFTER:
            child.ports = {}
        log = self.log_of(name)
        child.log_start = log.stat().st_size if log.exists() else 0
        child.nodes = {}
        try:
            with open_log(log) as output:
                process = await asyncio.to_thread(
                    self._forks.start, record.spec.module, self._arguments(record.spec, child), output
                )
        except OSError as error:
            self._on_event("process_failed", {"process": name, "error": str(error)})
            self._apply(self.core.exited(name, 1, time.monotonic()))
            return
        child.process = process
        if record.state is not ProcessState.STARTING:  # the end came while it was being started
            _signal(child, signal.SIGTERM if record.state is ProcessState.STOPPING else signal.SIGKILL)
        code = await process.ended()
        child.process, child.nodes = None, {}
        asked = record.state is ProcessState.STOPPING
        self._apply(self.core.exited(name, code, time.monotonic()))
        if name not in self.core.processes:
            self.children.pop(name, None)
        if not asked and self._failure is None:
            self._on_event("process_exited", {"process": name, "pid": process.pid, "code": code})

    def _arguments(self, spec: ProcessSpec, child: Child) -> list[str]:
        values: dict[str, object] = {}
        if spec.module == NODE:
            values["node.roles"] = ",".join(entry.key for entry in spec.entries)
            for entry in spec.entries:
                for key, value in self._values(entry, child.ports.get(entry, {})).items():
                    values[key if key.startswith("cluster.") else f"{entry.key}.{key}"] = value
        else:
            (entry,) = spec.entries
            values = self._values(entry, child.ports.get(entry, {}))
            if entry.partition >= 0:
                values["partition"] = entry.partition
        config = ["--config", str(self.options.config.resolve())] if self.options.config is not None else []
        return [*config, *(part for key, value in values.items() for part in ("--set", f"{key}={value}"))]

    def _values(self, entry: Entry, ports: Mapping[str, int]) -> dict[str, object]:
        """Return the options of one role."""
        options = self.options
        values: dict[str, object] = {
            "registry": self.target,
            "data_dir": (options.data / entry.name).resolve(),
            "drain_timeout_s": 5,
        }
        if entry.role == "gateway":
            values["mqtt_port"] = options.mqtt_port + entry.number if options.mqtt_port else 0
        if entry.role == "xiu" and self._table_mb:
            values["table_mb"] = self._table_mb
        values.update(ports)
        values.update(overrides_for(entry.role, options.settings))
        if entry.role == "gateway":
            for key in FOLLOWING:  # given for the first gateway
                if str(values.get(key, "0")).isdecimal() and int(str(values.get(key, 0))):
                    values[key] = int(str(values[key])) + entry.number
        if self.zookeeper is not None:
            values["cluster.registry_credentials_file"] = self.zookeeper.credentials.resolve()
        if options.secure:
            values["cluster.tls_dir"] = (options.data / TLS).resolve()
            values["cluster.key_dir"] = (options.data / KEYS).resolve()
            values["cluster.ticket_key_dir"] = (options.data / TICKET_KEYS).resolve()
            if entry.role in CLIENT_ROLES:
                values.setdefault("tls_certificate", (options.data / LISTENERS / f"{entry.role}.pem").resolve())
            if entry.role == "gateway":
                values.setdefault("api_ca", (options.data / LISTENERS / "ca.pem").resolve())
        return values

    def _spawn(self, coroutine: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_S)
            for log in sorted((self.options.data / "logs").glob("*.log")):
                await asyncio.to_thread(rotate_log, log)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(max(self.core.next_deadline() - time.monotonic(), 0.01), 0.1))
            effects = self.core.tick(time.monotonic())
            if effects:
                self._apply(effects)


def make_secure(data: Path) -> None:
    """Make what guards a cluster's listeners, below its data folder: missing files, and new certificates for those that expire
    soon."""
    authority, folder = data / PKI, data / TLS
    if not (authority / "ca.key").exists():
        make_authority(authority)
    for role in (*sorted(ROLES), *CALLERS, ZOOKEEPER):
        if not (folder / f"{role}.pem").exists():
            issue(authority, role, folder)
    for role in CLIENT_ROLES:
        if not (data / LISTENERS / f"{role}.pem").exists():
            issue(authority, role, data / LISTENERS, hosts=("127.0.0.1", "localhost"))
    for made in (folder, data / LISTENERS):
        renew(authority, made, before_days=RENEW_DAYS)
    for keys in (data / KEYS, data / TICKET_KEYS):
        if not any(keys.glob("*.key")):
            if not any(keys.glob("*.next")):  # else a start was stopped here
                add_key(keys)
            use_key(keys)


def _signal(child: Child, number: int) -> None:
    if child.process is not None:
        child.process.send_signal(number)


def check_ports(ports: Sequence[int]) -> None:
    """Check that these ports of 127.0.0.1 are free. Raises `ConfigurationError` that names the first taken one, and a remedy."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise ConfigurationError(
                    f"port {port} on 127.0.0.1 cannot be used for MQTT ({error.strerror}); stop what listens there, "
                    "or choose another with --mqtt-port N (0 takes any)"
                ) from None
