"""What `pixiu.testing` says where a cluster cannot be started."""

from __future__ import annotations

from pathlib import Path

import pytest

import pixiu.testing
from pixiu.errors import ConfigurationError, NotConnected


def test_without_the_servers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixiu.testing, "entry_points", lambda **_: [])
    with pytest.raises(ConfigurationError, match=r"pip install 'pixiu-sdk\[onebox\]'"), pixiu.testing.cluster():
        pass


def test_outside_of_its_block_it_has_no_target() -> None:
    cluster = pixiu.testing.cluster()
    for name in ("target", "logs", "proxies", "gateways", "mqtt"):
        with pytest.raises(NotConnected, match="does not run"):
            getattr(cluster, name)


@pytest.mark.parametrize("mail", [True, False])
def test_the_folders_that_its_processes_look_for_are_there_before_them(tmp_path: Path, mail: bool) -> None:
    arguments = pixiu.testing.cluster(gateways=2, mail=mail)._arguments(tmp_path)
    folders = [Path(each.rpartition("=")[2]) for each in arguments if "_dir=" in each]
    assert folders
    assert all(folder.is_dir() for folder in folders)
