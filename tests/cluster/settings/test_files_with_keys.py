"""Which files nobody else should be able to read, and whether they are so."""

from __future__ import annotations

from pathlib import Path

from cluster.listeners.clients import ClientRoleOptions
from cluster.process.host import is_open_to_all
from cluster.settings.options import ClusterOptions


def test_every_file_with_a_key_is_named(tmp_path: Path) -> None:
    for name in ("1.key", "2.next", "notes"):
        (tmp_path / name).touch()
    cluster = ClusterOptions(key_dir=str(tmp_path), tls_dir="/tls")
    assert cluster.files_with_keys("xiu") == [tmp_path / "1.key", tmp_path / "2.next", Path("/tls/xiu.pem")]
    assert ClientRoleOptions(tls_certificate="listener.pem").files_with_keys() == [Path("listener.pem")]
    assert ClientRoleOptions(tls_certificate="listener.pem", tls_key="listener.key").files_with_keys() == [Path("listener.key")]
    assert ClusterOptions().files_with_keys("xiu") == ClientRoleOptions().files_with_keys() == []


def test_what_every_user_may_read_is_open_to_all(tmp_path: Path) -> None:
    path = tmp_path / "listener.pem"
    path.touch()
    for mode, is_open in ((0o600, False), (0o640, False), (0o644, True)):
        path.chmod(mode)
        assert is_open_to_all(path) is is_open
    assert not is_open_to_all(tmp_path / "missing")
