"""Files that options name and that are wrong at a start: each process says which and why, before any socket opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.process.host import run_role
from node.__main__ import main as node
from onebox.up import UpOptions
from pixiu.errors import ConfigurationError
from proxy.options import Options
from proxy.service import Service
from registry.membership import Membership

NOWHERE = "registry=zk://127.0.0.1:1/x"
WRONG = {
    "routes": ('[chat]\nfilter = "chat/#"\ntpic = "chat"\n', '[chat]: there is no option "tpic". Did you mean topic?'),
    "routes-toml": ("[chat]\nfilter = \n", "the file of routes is not TOML: Invalid value (at line 2"),
    "access_file": ("[tokens]\nlife = 1\n", 'there is no table "tokens"'),
    "tls_certificate": ("no certificate", "must be a complete PEM file"),
}


@pytest.fixture(params=WRONG)
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """(KEY=FILE of a proxy, what must be said)."""
    content, said = WRONG[request.param]
    file = tmp_path / "wrong"
    file.write_text(content)
    return f"{request.param.partition('-')[0]}={file}", said


def test_a_process_and_a_node_end_before_they_open_anything(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given, said = wrong
    assert run_role("proxy", Options, Service, ["--set", NOWHERE, "--set", given], membership=Membership) == 2
    alone = capsys.readouterr().err
    assert said in alone
    assert given.partition("=")[2] in alone
    assert node(["--set", "node.roles=proxy,broker-0", "--set", NOWHERE, "--set", f"proxy.{given}"]) == 2
    assert capsys.readouterr().err.removeprefix("node") == alone.removeprefix("proxy")


def test_pixiu_up_says_it_before_it_starts_a_process(wrong: tuple[str, str]) -> None:
    given, said = wrong
    with pytest.raises(ConfigurationError) as caught:
        UpOptions(settings=(f"proxy.{given}",)).validate()
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none: the file of routes cannot be read: No such file"):
        UpOptions(settings=(f"proxy.routes={tmp_path / 'none'}",)).validate()
