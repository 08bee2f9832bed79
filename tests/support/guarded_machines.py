"""A cluster on machines of a network, guarded in every way, whose operator exchanges all that guards it while it is used.

    master   the authority, the ring of keys, the logins of the registry, the key of tokens: what an operator has at home
    mN       what machine N has of it: tls, keys, credentials, keys.json beside access.toml
    own      what this process has: the certificate and the logins of an operator
    server   the certificate of ZooKeeper

Each exchange goes as docs/security.md says, one machine after the other, and waits on each until its
processes say that they have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

import pixiu
from cluster.access.minting import key_of, public_of, token
from cluster.trust.key_folder import add_key, drop_keys, use_key
from cluster.trust.key_ring import read_key_ring
from cluster.trust.pki import ZOOKEEPER, issue, make_authority
from onebox.embedded import EmbeddedZooKeeper
from onebox.grouping import CLIENT_ROLES, NODE, Grouping, roles_together
from pixiu.discovery import login as logins
from pixiu.discovery.login import CREDENTIALS_FILE, Login
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import PARTITIONED_ROLES, ROLES, STORES
from pixiu.discovery.target import RegistryAddress
from pixiu.discovery.view import RoleLayout, View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.rpc import tls
from registry.credentials import make_credentials, read_credentials, write_credentials
from registry.guarding import guard
from registry.layout import ensure_layout
from registry.session import read_view
from tests.support.cluster import LAYOUT, wait_for
from tests.support.namespaces import Machine, Network, network
from tests.support.waiting import until
from tools.load.mqtt import ConnectionRefused, MQTTClient

TOGETHER = roles_together(Grouping.NODES, guarded=True) if LAYOUT == "nodes" else frozenset()
"""Roles that share a node where a machine has several of them, all of partition 0."""
TESTER = 10
"""UIN of who tries whether a token is taken."""
RULES = """[jwt]
keys = "keys.json"
[[rule]]
allow = ["publish", "subscribe", "signal", "mail", "presence"]
groups = ["users"]
"""


class GuardedMachines:
    """See the module. `start` starts the roles of each machine, so many as it says."""

    def __init__(self, folder: Path, found: Network, roles: Sequence[Sequence[str]]) -> None:
        self.folder, self.network = folder, found
        self.machines = [folder / f"m{number}" for number in range(len(found.machines))]
        self._roles = roles
        self.master, self.own, self.server = folder / "master", folder / "own", folder / "server"
        self._authority = self.master / "pki"
        self._key = self.master / "jwt.pem"
        self.exchanged: list[str] = []
        """What was exchanged, and where."""
        make_authority(self._authority)
        use_key(add_key(self.master / "keys").parent)
        make_credentials(self.master / "credentials")
        key_of(self._key)
        issue(self._authority, ZOOKEEPER, self.server)
        issue(self._authority, tls.OPERATOR, self.own)
        for number, machine in enumerate(self.machines):
            for role in sorted(set(roles[number])):
                issue(self._authority, role, machine / "tls")
            shutil.copytree(self.master / "keys", machine / "keys")
            (machine / "access.toml").write_text(RULES)
            self._give_credentials(number)
            self._give_token_keys(machine, self._key)

    def start(self, registry: RegistryAddress) -> None:
        """Guard the registry, and start every process."""
        self.registry = registry
        asyncio.run(self._prepare())
        for number, (machine, roles) in enumerate(zip(self.network.machines, self._roles, strict=True)):
            shared = [role for role in roles if role in TOGETHER]
            for each, role in enumerate(roles):
                if len(shared) > 1 and role == shared[0]:
                    self._start(number, machine, NODE, f"{NODE}-{number}", f"roles={','.join(f'{role}-0' for role in shared)}")
                elif len(shared) < 2 or role not in shared:
                    self._start(number, machine, role, f"{role}-{number}-{each}")

    def _start(self, number: int, machine: Machine, role: str, name: str, *more: str) -> None:
        own = self.machines[number]
        settings = [
            f"registry={self.registry}", f"data_dir={self.folder / name}", f"cluster.tls_dir={own / 'tls'}",
            f"cluster.key_dir={own / 'keys'}", f"cluster.registry_credentials_file={own / 'credentials'}", *more,
        ]  # fmt: skip
        if role in PARTITIONED_ROLES:
            settings.append("partition=0")
        if role in CLIENT_ROLES:
            settings += [f"access_file={own / 'access.toml'}", "clients_plain=true"]  # the replay's clients speak no TLS
        if role == "gateway":
            settings += [f"mqtt_host={machine.address}", "mqtt_plain=true", f"signal_table_dir={own}"]
        if role == "xiu":
            settings += [f"table_dir={own}", "table_mb=8"]
        if role in STORES and sum(one.count(role) for one in self._roles) == 1:
            settings.append("min_in_sync=1")
        self.network.role(machine, role, self.folder / f"{name}.log", *settings, insecure=False)

    async def _prepare(self) -> None:
        counts = {role: sum(one.count(role) for one in self._roles) for role in ROLES}
        async with self.session() as zookeeper:
            await guard(zookeeper, self.registry.root, read_credentials(self.own / "credentials"))
            layout = {role: RoleLayout(1, 1, count) for role, count in counts.items() if count}
            await ensure_layout(zookeeper, self.registry.root, layout)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[ZooKeeper]:
        """A new session of an operator."""
        zookeeper = ZooKeeper(self.registry)
        await zookeeper.connect()
        try:
            yield zookeeper
        finally:
            await zookeeper.close()

    async def view(self) -> View:
        """Who is registered."""
        async with self.session() as zookeeper:
            return await read_view(zookeeper, self.registry.root)

    def all_run(self) -> bool:
        """Whether everybody is Running. Fails when one has ended."""
        assert self.network.all_run(), self.logs()
        view = asyncio.run(self.view())
        return sum(node.state is NodeState.RUNNING for node in view.nodes) == sum(map(len, self._roles))

    def logs(self) -> str:
        """Everything that processes printed."""
        return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def token_of(self, uin: int) -> str:
        """A token of now; 0: of the back end."""
        return token(key_of(self._key), f"user-{uin}", uin, ("users",))

    # --- exchanges

    async def _each(self, what: str, view: View, do: Callable[[int, Path], object], has: Callable[[Node], Awaitable[bool]]) -> None:
        """Do it on one machine after the other; the next one when all processes of the one before have it."""
        for number, (machine, folder) in enumerate(zip(self.network.machines, self.machines, strict=True)):
            await asyncio.to_thread(do, number, folder)
            for node in view.nodes:
                if node.host == machine.address:
                    await until(partial(has, node), f"{what} at {node.role} of machine {number}")
            self.exchanged.append(f"{what}, machine {number}")

    async def exchange_all(self, view: View, *, at_once: bool) -> None:
        """What no client notices, one thing after the other or all of it together."""
        steps = self.exchange_datagram_keys, self.exchange_authority, self.exchange_registry_passwords
        if at_once:
            await asyncio.gather(*(step(view) for step in steps))
            return
        for step in steps:
            await step(view)

    async def exchange_datagram_keys(self, view: View) -> None:
        """Another key signs datagrams."""
        for what, step in (("add key", add_key), ("use key", use_key)):
            await self._change_ring(view, what, step)

    async def drop_datagram_keys(self, view: View) -> None:
        """Only the key that signs is accepted. Clients that stay prove their message IDs by older ones for ten minutes."""
        await self._change_ring(view, "drop keys", drop_keys)

    async def _change_ring(self, view: View, what: str, step: Callable[[Path], object]) -> None:
        ring = self.master / "keys"
        step(ring)
        name = read_key_ring(ring).name()
        await self._each(what, view, lambda _, folder: mirror(ring, folder / "keys"), partial(has_ring, name))

    async def exchange_authority(self, view: View) -> None:
        """Another authority, with new certificates of everybody; the one before is no longer trusted."""
        old, new = self._authority, self._authority.with_name(f"{self._authority.name}+")
        make_authority(new)
        both = (old / "ca.pem").read_bytes() + (new / "ca.pem").read_bytes()

        def trust(text: bytes) -> Callable[[int, Path], None]:
            return lambda _, folder: put(folder / "tls/ca.pem", text)

        def certify(number: int, folder: Path) -> None:
            for role in sorted(set(self._roles[number])):
                issue(new, role, folder / "tls")

        put(self.server / "ca.pem", both)
        put(self.own / "ca.pem", both)
        await self._each("trust both authorities", view, trust(both), answers)
        self._authority = new
        issue(new, ZOOKEEPER, self.server)
        issue(new, tls.OPERATOR, self.own)
        await self._each("new certificates", view, certify, answers)
        only = (new / "ca.pem").read_bytes()
        put(self.server / "ca.pem", only)
        put(self.own / "ca.pem", only)
        await until(self._connects, "ZooKeeper with its new certificate")
        await self._each("trust the new authority alone", view, trust(only), answers)

    async def _connects(self) -> bool:
        try:
            async with self.session():
                return True
        except pixiu.RegistryUnavailable:
            return False

    async def exchange_registry_passwords(self, view: View) -> None:
        """Other passwords in the registry; those before are not taken any more."""
        file = self.master / "credentials"
        for renew, count in ((True, "2 passwords"), (False, "1 password")):
            wanted = make_credentials(file, renew=renew, drop=not renew)
            write_credentials(self.own / "credentials", wanted)
            has = partial(comes_with, count)
            await self._each(f"registry, {count}", view, lambda number, _: self._give_credentials(number), has)
            async with self.session() as zookeeper:
                await guard(zookeeper, self.registry.root, wanted)

    async def exchange_token_keys(self, view: View) -> None:
        """Another key signs tokens; the one before is not taken any more, and sessions of its tokens end."""
        old, new = self._key, self._key.with_name(f"next-{self._key.name}")
        key_of(new)
        said = token(key_of(new), "tester", TESTER, ("users",))

        async def takes(node: Node) -> bool:
            return node.role not in ("gateway", "proxy") or await taken(node, said) is True

        async def refuses(node: Node) -> bool:
            return node.role not in ("gateway", "proxy") or await taken(node, late) is False

        await self._each("tokens of both keys", view, lambda _, folder: self._give_token_keys(folder, old, new), takes)
        late = token(key_of(old), "tester", TESTER, ("users",))
        self._key = new  # of every login from now on
        await self._each(
            "tokens of the new key alone",
            view,
            lambda _, folder: self._give_token_keys(folder, new),
            refuses,
        )

    def _give_credentials(self, number: int) -> None:
        found = read_credentials(self.master / "credentials")
        write_credentials(self.machines[number] / "credentials", {role: found[role] for role in set(self._roles[number])})
        if not (self.own / "credentials").exists():
            write_credentials(self.own / "credentials", found)

    def _give_token_keys(self, folder: Path, *keys: Path) -> None:
        put(folder / "keys.json", json.dumps({"keys": [public_of(key_of(key)) for key in keys]}).encode())


def put(path: Path, data: bytes) -> None:
    """Exchange a file at once."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def mirror(source: Path, folder: Path) -> None:
    """Make a folder of keys like another one: what comes first, what goes last."""
    for path in sorted(source.iterdir()):
        put(folder / path.name, path.read_bytes())
    for path in sorted(folder.iterdir()):
        if not (source / path.name).exists():
            path.unlink()


def health(node: Node) -> dict[str, Any]:
    """What a process says of itself."""
    with urllib.request.urlopen(f"http://{node.host}:{node.http_port}/health", timeout=30) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


async def answers(node: Node) -> bool:
    """Whether a process lets the operator in by a new connection, and proves its role."""
    async with tls.peer_channel(node.address, node.role, tls.own()) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return True


async def has_ring(name: str, node: Node) -> bool:
    """Whether a process has a ring of datagram keys."""
    return bool((await asyncio.to_thread(health, node))["keys"] == name)


async def comes_with(passwords: str, node: Node) -> bool:
    """Whether a process has told the registry so many passwords."""
    said = (await asyncio.to_thread(health, node))["registry_login"].split(", ")  # a node logs in as each of its roles
    return f"{node.role} with {passwords}" in said and all(one.endswith(f" with {passwords}") for one in said)


async def taken(node: Node, said: str) -> bool | None:
    """Whether a gateway, by MQTT, or a proxy lets a token in; None: it did not say in time, on a busy machine."""
    try:
        if node.role == "gateway":
            client = MQTTClient(node.mqtt_host, node.mqtt_port, f"tester-{node.endpoint:x}", "tester", password=said)
            await client.connect()
            await client.close()
        else:
            async with pixiu.connect(node.client_address, uin=TESTER, token=said) as px:
                await px.room(1).send(b"tried")
    except (pixiu.NotAuthenticated, pixiu.NotAllowed, ConnectionRefused):
        return False
    except (pixiu.OutcomeUnknown, pixiu.Unreachable):
        return None
    return True


@contextlib.contextmanager
def guarded_machines(folder: Path, roles: Sequence[Sequence[str]], *, bad_by_seed: int | None = None) -> Iterator[GuardedMachines]:
    """A running cluster: machine N runs `roles[N]`. Skips the test where no network namespaces are allowed.

    bad_by_seed: as for `network`.
    """
    with network(len(roles), bad_by_seed=bad_by_seed) as found, contextlib.ExitStack() as undo:
        made = GuardedMachines(folder, found, roles)
        tls.use(tls.Tls(made.own, tls.OPERATOR))
        undo.callback(tls.use, None)
        logins.use(Login(made.own / "credentials"))
        undo.callback(logins.use, None)
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(tls.TLS_DIR, str(made.own))
        patch.setenv(CREDENTIALS_FILE, str(made.own / "credentials"))
        server = undo.enter_context(EmbeddedZooKeeper(folder / "zookeeper", host=found.address, tls_dir=made.server))
        try:
            made.start(RegistryAddress(server.address, "/guarded", tls=True))
            wait_for(made.all_run, "all processes Running")
            yield made
        finally:
            codes = found.stop()
    assert set(codes) == {0}, (codes, made.logs())
