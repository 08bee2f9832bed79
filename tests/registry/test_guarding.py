"""The registry's guard against a real ZooKeeper: every login at every path, as docs/security.md says; how it comes, and changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from kazoo.security import OPEN_ACL_UNSAFE

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.access import EQUAL, LOGINS, OPERATOR, RULES, Access, directories, grants_of, rule_of
from pixiu.discovery.login import Login
from pixiu.discovery.operations import Create, Delete, Set
from pixiu.discovery.target import RegistryAddress
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, RegistryDenied
from registry.credentials import make_credentials, read_credentials, write_credentials
from registry.guarding import guard, guard_first, tops
from registry.layout import ensure_layout, set_replicas
from registry.leases import InstanceLease, WorkerLeases
from registry.membership import Membership
from tests.support.zookeeper import PATIENCE_S, make_node

PAGE = Path(__file__).resolve().parents[2] / "docs/security.md"
NOBODY = "nobody"
WORDS = {"read": "r", "write": "w", "create": "c", "delete": "d"}
LAYOUT = {role: RoleLayout(1, 1, 1) for role in paths.ROLES}


class NoLogin(Login):
    """Of somebody who has none, wherever the ZooKeeper has left some."""

    def read(self) -> dict[str, tuple[str, ...]]:
        return {}


@pytest.fixture
def operators_file(tmp_path: Path) -> Path:
    file = tmp_path / "credentials"
    make_credentials(file)
    return file


def only(file: Path, who: str) -> Path:
    """A file with one login of another file, as a machine gets it."""
    copied = file.with_name(who)
    write_credentials(copied, {who: read_credentials(file)[who]})
    return copied


def address(server: EmbeddedZooKeeper, root: str) -> RegistryAddress:
    return RegistryAddress(server.address, root)


@asynccontextmanager
async def session(server: EmbeddedZooKeeper, root: str, file: Path | None) -> AsyncIterator[ZooKeeper]:
    """With the logins of a file; without one as nobody, which the registry is asked for only after it has let the session in."""
    login = Login(file) if file is not None else NoLogin(Path())
    made = ZooKeeper(address(server, root), connect_timeout_s=PATIENCE_S, login=login)
    await made.connect()
    try:
        yield made
    finally:
        await made.close()


def examples() -> dict[str, str]:
    """Paths of each rule, below the root → the rule's path."""
    found = {}
    names = {"{p}": "0", "{k}": "7", "{endpoint}": "00" * 8, "{name}": "orders"}
    for rule in RULES:
        path = rule.path.replace("…", "0000000001")
        for name, value in names.items():
            path = path.replace(name, value)
        word = re.search(r"\{(\w+)\}", path)
        roles = {"equal": EQUAL, "role": ("router", "broker"), "store": paths.STORES}
        for role in roles[word[1]] if word else ("",):
            one = re.sub(r"\{\w+\}", role, path)
            if rule_of(one)[0] is rule:
                found[one] = rule.path
    return found


def test_every_rule_has_an_example_and_the_page_shows_the_table() -> None:
    assert set(examples().values()) == {rule.path for rule in RULES}
    _, _, section = PAGE.read_text().partition("\n### Who may do what in the registry\n")
    names = {"every process": paths.ROLES}
    said: dict[str, dict[str, str]] = {}
    for path, cell in re.findall(r"^\| `(ROOT\S*)` \| (.+?) \|$", section.partition("\n## ")[0], re.MULTILINE):
        grants = said.setdefault(path.removeprefix("ROOT"), {})
        for part in cell.split("; ") if cell != NOBODY else ():
            who, _, what = part.partition(": ")
            for each in (one for name in who.split(", ") for one in names.get(name, (name,))):
                grants[each] = "".join(WORDS[word] for word in what.split(", "))
    assert said == {
        rule.path: {who: "".join(sorted(what, key="rwcd".index)) for who, what in rule.grants.items()} for rule in RULES
    }


async def allowed(do: Callable[[], Awaitable[object]]) -> bool:
    try:
        await do()
    except RegistryDenied:
        return False
    return True


async def tried(zookeeper: ZooKeeper, operator: ZooKeeper, path: str) -> str:
    """What a session may do with a node that is there."""
    child = f"{path.rstrip('/')}/tried-{zookeeper.session_id:x}"
    found = "r" if await allowed(lambda: zookeeper.get(path)) else ""
    assert await allowed(lambda: zookeeper.children(path)) == bool(found)
    data, _ = await operator.get(path)
    found += "w" if await allowed(lambda: zookeeper.transaction([Set(path, data)])) else ""
    if await allowed(lambda: zookeeper.create(child)):
        found += "c"
    else:
        await operator.create(child)
    if await allowed(lambda: zookeeper.transaction([Delete(child)])):
        found += "d"
    else:
        await operator.delete(child)
    return found


async def open_tops(operator: ZooKeeper, root: str) -> None:
    for path in tops(root):
        await operator._run(path, lambda client, path=path: client.set_acls_async(path, OPEN_ACL_UNSAFE))  # type: ignore[misc]


def test_what_is_above_a_root() -> None:
    assert tops("/pubsub") == ["/", "/zookeeper", "/zookeeper/quota"]
    assert tops("/a/b/c")[:3] == ["/", "/a", "/a/b"]


async def test_every_login_at_every_path(zookeeper_server: EmbeddedZooKeeper, root: str, operators_file: Path) -> None:
    async with AsyncExitStack() as closing:
        nobody = await closing.enter_async_context(session(zookeeper_server, root, None))
        operator = await closing.enter_async_context(session(zookeeper_server, root, operators_file))
        await guard(operator, root, read_credentials(operators_file), whole=True)
        closing.push_async_callback(open_tops, operator, root)  # others use this ZooKeeper, too
        for path in examples():
            if path and not path.endswith("0000000001") and "holder" not in path:
                await operator.ensure_path(f"{root}{path}")
            elif path:
                await operator.ensure_path(f"{root}{path.rpartition('/')[0]}")
                assert await operator.exists(f"{root}{path}") is None
                await operator.create(f"{root}{path}")
        everybody = {NOBODY: nobody}
        for who in LOGINS:
            everybody[who] = await closing.enter_async_context(session(zookeeper_server, root, only(operators_file, who)))

        async def row(who: str, zookeeper: ZooKeeper) -> dict[tuple[str, str], str]:
            return {(path, who): await tried(zookeeper, operator, f"{root}{path}") for path in examples()}

        rows = await asyncio.gather(*(row(who, zookeeper) for who, zookeeper in everybody.items()))
        above = {(path, who): await tried(one, operator, path) for path in tops(root) for who, one in everybody.items()}
        found = {key: what for one in rows for key, what in one.items()}
        access = Access.of(read_credentials(operators_file))
        changers = {
            who
            for who, zookeeper in everybody.items()
            if await allowed(partial(zookeeper.set_acl, f"{root}/layout", access, "/access"))
        }
    assert changers == {OPERATOR}
    assert {"/", "/zookeeper", "/zookeeper/quota"} <= set(tops(root))
    assert above == {
        (path, who): {NOBODY: "", OPERATOR: "rwcd"}.get(who, "r") for path, who in above
    }  # ZooKeeper's own root is no place for everybody to fill
    wanted = {
        (path, who): "".join(sorted(grants_of(path).get(who, ""), key="rwcda".index)).replace("a", "")
        for path in examples()
        for who in everybody
    }
    assert found == wanted
    assert {what for (_, who), what in found.items() if who == NOBODY} == {""}
    assert {what for (_, who), what in found.items() if who == OPERATOR} == {"rwcd"}


async def registered(server: EmbeddedZooKeeper, root: str, file: Path, closing: AsyncExitStack, role: str) -> Membership:
    """A process of a role, with its login alone."""
    zookeeper = await closing.enter_async_context(session(server, root, only(file, role)))
    membership = Membership(zookeeper, root)
    node = make_node(role, login=role)
    await membership.register(node)
    closing.push_async_callback(membership.unregister)
    return membership


async def test_processes_do_what_they_have_to_with_their_own_login(
    zookeeper_server: EmbeddedZooKeeper, root: str, operators_file: Path
) -> None:
    async with AsyncExitStack() as closing:
        operator = await closing.enter_async_context(session(zookeeper_server, root, operators_file))
        await guard_first(operator, root)
        assert await operator.access(root) is not None, "nothing was there"
        await ensure_layout(operator, root, LAYOUT)
        for role in paths.ROLES:
            membership = await registered(zookeeper_server, root, operators_file, closing, role)
            assert membership.node is not None
        for role in ("gateway", "proxy"):
            zookeeper = await closing.enter_async_context(session(zookeeper_server, root, only(operators_file, role)))
            leases = WorkerLeases(zookeeper, root, role)
            lease = await leases.acquire()
            assert (await leases.renew(lease.worker)).until_ms >= lease.until_ms
            if role == "gateway":
                instance = InstanceLease(zookeeper, root, role)
                await instance.acquire()
                assert await instance.release()
        broker = await closing.enter_async_context(session(zookeeper_server, root, only(operators_file, "broker")))
        with pytest.raises(RegistryDenied, match=f"{root}/router/partition0/n.* does not let broker do this"):
            await broker.transaction([Create(f"{root}/router/partition0/n", b"", True, True)])
        with pytest.raises(RegistryDenied):
            await set_replicas(broker, root, "broker", 2)


async def test_an_open_registry_is_guarded_while_processes_run_and_passwords_change(
    zookeeper_server: EmbeddedZooKeeper, root: str, operators_file: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as closing:
        nobody = await closing.enter_async_context(session(zookeeper_server, root, None))
        await ensure_layout(nobody, root, LAYOUT)
        stranger = Membership(nobody, root)
        await stranger.register(make_node("broker", port=7100))
        files = {role: only(operators_file, role) for role in paths.ROLES}
        processes = [await registered(zookeeper_server, root, operators_file, closing, role) for role in paths.ROLES]
        operator = await closing.enter_async_context(session(zookeeper_server, root, operators_file))
        with pytest.raises(InvalidArgument, match=r"1 processes have not logged in.*: broker at 127.0.0.1:7100; restart"):
            await guard(operator, root, read_credentials(operators_file))
        assert await operator.access(root) is None
        await stranger.unregister()
        done = await guard(operator, root, read_credentials(operators_file))
        assert done.nodes == done.changed
        assert (await guard(operator, root, read_credentials(operators_file))).changed == 0
        with pytest.raises(RegistryDenied, match="does not let nobody do this"):
            await nobody.children(f"{root}/broker/partition0")

        async def all_write() -> bool:
            return all([await one.update(one.node) for one in processes if one.node is not None])

        assert await all_write()
        before = read_credentials(operators_file)
        renewed = make_credentials(operators_file, renew=True)
        assert {who: found[1:] for who, found in renewed.items()} == before
        # Everybody has the new passwords before the registry is told, and takes them without another session.
        for role, file in files.items():
            write_credentials(file, {role: renewed[role]})
        sessions = [one._zookeeper for one in processes]
        numbers = [one.session_id for one in sessions]
        assert all([await one.log_in_again() for one in [*sessions, operator]])
        assert not any([await one.log_in_again() for one in [*sessions, operator]])
        await guard(operator, root, renewed)
        assert await all_write()
        kept = make_credentials(operators_file, drop=True)
        await guard(operator, root, kept)
        assert await all_write(), "by the new password"
        assert [one.session_id for one in sessions] == numbers
        assert [one.registrations for one in processes] == [1] * len(processes)
        old = tmp_path / "old"
        write_credentials(old, before)
        with pytest.raises(RegistryDenied, match=f"refuses the login of .* in {old}: copy the file"):
            async with session(zookeeper_server, root, old):
                pass
        with pytest.raises(RegistryDenied, match=r"requires a login: name its file in .*PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE"):
            async with session(zookeeper_server, root, None):
                pass


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("", 0o600, "has no login"),
        ("broker", 0o600, "line 1: must be a role"),
        ("king " + "x" * 64, 0o600, "line 1: must be a role"),
        ("broker short", 0o600, "line 1: the password of broker has fewer than 32 characters"),
        ("broker " + "x" * 64, 0o640, "others may read or change it: chmod 600"),
        ("\n".join(f"broker {n}{'x' * 40}" for n in range(5)), 0o600, "more than 4 passwords"),
        ("router " + "x" * 64, 0o600, "has no line for broker"),
    ],
)
def test_a_file_that_does_not_do_says_why(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    file = tmp_path / "credentials"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=problem):
        Login(file, "broker").read()
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        Login(tmp_path / "none").read()


def test_credentials_are_made_renewed_and_dropped(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "credentials"
    first = make_credentials(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert set(first) == set(LOGINS)
    assert make_credentials(file) == first == read_credentials(file)
    write_credentials(file, {who: found for who, found in first.items() if who != "pi"})
    with pytest.raises(ConfigurationError, match="has no line for pi"):
        read_credentials(file)
    assert make_credentials(file)["broker"] == first["broker"]
    for _ in range(3):
        make_credentials(file, renew=True)
    with pytest.raises(ConfigurationError, match="4 passwords already: drop"):
        make_credentials(file, renew=True)
    assert {len(found) for found in make_credentials(file, drop=True).values()} == {1}


def test_what_processes_may_not_make_is_made_for_them() -> None:
    made = {f"/{role}{below}" for role in paths.ROLES for below in ("", "/changes")}
    others = {"/drain", "/kick", "/revoke", "/worker", "/instance", "/topics", "/nsq", "/nsq/migration", "/nsq/listeners"}
    assert made | others == set(directories())


async def test_nothing_that_is_under_way_is_disturbed_by_another_login(
    zookeeper_server: EmbeddedZooKeeper, root: str, operators_file: Path
) -> None:
    """ZooKeeper answers a login before what was asked earlier, and its client takes answers in the order of questions."""
    async with session(zookeeper_server, root, operators_file) as one:
        await one.ensure_path(root)
        changes: list[object] = []
        one.add_listener(changes.append)
        number = one.session_id
        for turn in range(30):
            make_credentials(operators_file, renew=not turn % 2, drop=bool(turn % 2))
            asked = [asyncio.ensure_future(one.get(root)) for _ in range(100)]
            await asyncio.sleep(0)
            login = asyncio.ensure_future(one.log_in_again())
            asked += [asyncio.ensure_future(one.get(root)) for _ in range(100)]
            assert await login
            assert {data for data, _ in await asyncio.gather(*asked)} == {b""}
        assert (one.session_id, one.connected, changes) == (number, True, [])
