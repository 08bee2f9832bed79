"""The sessions of two roles in one process: each with its own login."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.process.registry_session import RegistrySession
from cluster.settings.options import ClusterOptions, RoleOptions
from cluster.trust.audit import Audit
from pixiu.discovery.login import CREDENTIALS_FILE
from pixiu.errors import ConfigurationError

PASSWORDS = {"gateway": "g" * 32, "xiu": "x" * 32}


def logins(role: str, cluster: ClusterOptions) -> dict[str, tuple[str, ...]]:
    """The logins that a role's session, and whatever ends it, goes by."""
    session = RegistrySession(role, cluster, RoleOptions(), None, Audit(None))
    ends = session._new_session(connect_timeout_s=1.0)
    assert session.zookeeper.login is not None
    assert ends.login is not None
    found = session.zookeeper.login.read()
    assert ends.login.read() == found
    return found


@pytest.mark.parametrize("by", ["option", "environment"])
def test_each_takes_the_line_of_its_role(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("".join(f"{role} {password}\n" for role, password in PASSWORDS.items()))
    file.chmod(0o600)
    if by == "environment":
        monkeypatch.setenv(CREDENTIALS_FILE, str(file))
    cluster = ClusterOptions(registry_credentials_file=str(file) if by == "option" else "")
    for role, password in PASSWORDS.items():
        assert logins(role, cluster) == {role: (password,)}
    with pytest.raises(ConfigurationError, match="has no line for proxy"):
        logins("proxy", cluster)
