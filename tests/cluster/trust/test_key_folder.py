"""The folder of keys of datagrams: what cannot be changed is said, and a start that was stopped goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.trust.key_folder import add_key, drop_keys, use_key
from cluster.trust.key_ring import read_key_ring
from onebox.up import KEYS, make_secure
from pixiu.errors import ConfigurationError


def test_a_folder_that_cannot_be_changed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        add_key(tmp_path)
        use_key(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(ConfigurationError, match="cannot be changed: Permission denied"):
        drop_keys(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        add_key(tmp_path)
    (tmp_path / "3.next").write_text("00" * 32)
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        use_key(tmp_path)
    monkeypatch.setattr("pixiu.durable.os.open", refused)
    os.replace(tmp_path / "3.next", tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        add_key(tmp_path)


def test_a_secure_start_that_was_stopped_between_two_steps_goes_on(tmp_path: Path) -> None:
    added = add_key(tmp_path / KEYS).read_text()
    make_secure(tmp_path)
    assert (tmp_path / KEYS / "1.key").read_text() == added
    make_secure(tmp_path)
    assert set(read_key_ring(tmp_path / KEYS).keys) == {1}
