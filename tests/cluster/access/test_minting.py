"""Keys and tokens that `pixiu token` and `pixiu up --secure` make."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.access.minting import KEYS, key_of, token
from cluster.access.tokens import TokenSettings, read_keys, verify
from pixiu.errors import ConfigurationError


def test_a_second_key_is_added_to_the_set(tmp_path: Path) -> None:
    made = [key_of(tmp_path / name) for name in ("a.pem", "b.pem", "a.pem")]
    keys = read_keys((tmp_path / KEYS).read_bytes(), KEYS)
    assert len(keys) == 2
    for key in made:
        assert verify(token(key, "alice", 7), keys, TokenSettings(), time.time()).uin == 7


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON", '{"keys": 5}', "[" * 100_000])
def test_a_set_that_is_none_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / KEYS).write_text(text)
    with pytest.raises(ConfigurationError):
        key_of(tmp_path / "a.pem")
    assert (tmp_path / KEYS).read_text() == text
    assert not (tmp_path / "a.pem").exists()
