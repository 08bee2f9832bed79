"""Options of bridges that no message could survive: they are refused with a sentence, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.catalog import read_bridges
from pixiu.errors import ConfigurationError


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('kind = "to-mqtt"\ntopic = "t"\nhost = "h"\nto = "x/#"', "a topic, without + and #; 'x/#' is none"),
        ('kind = "to-clients"\ntopic = "t"\nto = "room/x"', "clients can have; 'room/x' is none"),
        ('kind = "to-webhook"\ntopic = "t"\nurl = "http://127.0.0.1:99999/"', "such as https://host:8443/path"),
        ('kind = "to-webhook"\ntopic = "t"\nurl = "http://[::1/"', "such as https://host:8443/path"),
        ('kind = "to-webhook"\ntopic = "t"', "bridges.toml: default: [b] url"),
    ],
    ids=["mqtt-wildcard", "no-room", "port", "brackets", "missing"],
)
def test_what_can_never_work_is_refused(tmp_path: Path, table: str, said: str) -> None:
    file = tmp_path / "bridges.toml"
    file.write_text(f"[b]\n{table}\n")
    with pytest.raises(ConfigurationError) as raised:
        read_bridges(file)
    assert said in str(raised.value)
