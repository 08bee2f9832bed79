"""The sessions of roles in one process: shared where they would be the same, and with the logins of their roles alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.process.host import Role, _sessions
from cluster.process.registry_session import SharedSession
from cluster.settings.options import ClusterOptions, RoleOptions
from pixiu.discovery.login import CREDENTIALS_FILE
from pixiu.errors import ConfigurationError, RegistryUnavailable

PASSWORDS = {"gateway": "g" * 32, "xiu": "x" * 32}


def logins(cluster: ClusterOptions, *roles: str) -> dict[str, tuple[str, ...]]:
    """The logins that a session, and whatever ends it, goes by."""
    session = SharedSession(roles, cluster, RoleOptions(), None)
    ends = session._new(connect_timeout_s=1.0)
    assert session.zookeeper.login is not None
    assert ends.login is not None
    found = session.zookeeper.login.read()
    assert ends.login.read() == found
    return found


@pytest.mark.parametrize("by", ["option", "environment"])
def test_each_takes_the_lines_of_its_roles(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("".join(f"{role} {password}\n" for role, password in {**PASSWORDS, "operator": "o" * 32}.items()))
    file.chmod(0o600)
    if by == "environment":
        monkeypatch.setenv(CREDENTIALS_FILE, str(file))
    cluster = ClusterOptions(registry_credentials_file=str(file) if by == "option" else "")
    for role, password in PASSWORDS.items():
        assert logins(cluster, role) == {role: (password,)}
    assert logins(cluster, *PASSWORDS) == {role: (password,) for role, password in PASSWORDS.items()}
    with pytest.raises(ConfigurationError, match="has no line for proxy"):
        logins(cluster, "gateway", "proxy")


def test_roles_share_a_session_where_registry_and_time_outs_are_the_same() -> None:
    def role(name: str, **options: Any) -> Role[RoleOptions]:
        return Role(name, ClusterOptions(), replace(RoleOptions(), **options), lambda _context: None)  # type: ignore[arg-type, return-value]

    roles = [
        role("gateway"), role("proxy"), role("broker", registry="zk://127.0.0.1:2181/other"),
        role("relay", session_timeout_ms=2000), role("router"), role("router"),
    ]  # fmt: skip
    found = _sessions(roles)
    assert len({*found.values()}) == 3
    assert len({found[roles[at]] for at in (0, 1, 4, 5)}) == 1


class ZooKeeper:
    """A session that opens when the test lets it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_open, self.error = asyncio.Event(), error
        self.opened = self.closed = 0

    async def connect(self) -> None:
        self.opened += 1
        await self.may_open.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.closed += 1


def session(zookeeper: ZooKeeper) -> SharedSession:
    found = SharedSession(["gateway"], ClusterOptions(), RoleOptions(), None)
    found.zookeeper = zookeeper  # type: ignore[assignment]
    return found


async def test_a_session_opens_with_its_first_role_and_ends_with_its_last() -> None:
    zookeeper = ZooKeeper()
    shared = session(zookeeper)
    users = [lambda: None, lambda: None, lambda: None]
    opening = [asyncio.create_task(shared.open(user)) for user in users]
    await asyncio.sleep(0)
    opening[2].cancel()  # a start that is broken off breaks nobody else's
    zookeeper.may_open.set()
    assert await asyncio.gather(*opening, return_exceptions=True) != [None, None, None]
    assert (zookeeper.opened, zookeeper.closed) == (1, 0)
    await shared.close(users[0])
    assert zookeeper.closed == 0
    await shared.close(users[1])
    assert zookeeper.closed == 1


async def test_a_registry_that_is_away_is_reported_to_every_role() -> None:
    zookeeper = ZooKeeper(RegistryUnavailable("no ZooKeeper answered"))
    shared = session(zookeeper)
    zookeeper.may_open.set()
    found = await asyncio.gather(*(shared.open(lambda: None) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in found] == [RegistryUnavailable] * 2
