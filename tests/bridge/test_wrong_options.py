"""Options of bridges that no message could survive, and processes without any: refused with a sentence, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.catalog import read_bridges
from bridge.options import Options
from bridge.service import Service
from cluster.process.host import run_role
from node.__main__ import main as node
from pixiu.errors import ConfigurationError
from registry.membership import Membership


@pytest.mark.parametrize(
    "content", [None, "", "# none yet\n", "[a]\nkind = 'to-webhook'\n"], ids=["no-file", "empty", "comment", "wrong"]
)
def test_a_process_without_bridges_does_not_start(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bridges.toml"
    given = []
    if content is not None:
        file.write_text(content)
        given = ["--set", f"bridges={file}"]
    registry = ["--set", "registry=zk://127.0.0.1:1/x"]  # where nothing is: it must end before it looks there
    assert run_role("bridge", Options, Service, [*registry, *given], membership=Membership) == 2
    errors = capsys.readouterr().err
    assert ("[bridge] bridges" in errors) if content is None else (str(file) in errors), errors
    assert node(["--set", "node.roles=bridge", *registry, *(each.replace("bridges=", "bridge.bridges=") for each in given)]) == 2
    assert capsys.readouterr().err.removeprefix("node") == errors.removeprefix("bridge")


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
