"""The systemd units: systemd itself checks them, and what they start is what the roles take."""

from __future__ import annotations

import configparser
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cluster.process.host import EXIT_ENVIRONMENT
from cluster.settings.command import parse
from cluster.settings.options import RoleOptions, load_options
from node.options import load as load_node
from pixiu.discovery.paths import ROLES, START_ORDER
from registry.layout_change import parse_wanted

UNITS = Path(__file__).parents[2] / "deploy/systemd"
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
MOST_EXPOSED = 20
"""Tenths of the highest exposure level; 15 by systemd 252. Above 50 it calls a unit exposed."""


def service() -> configparser.SectionProxy:
    """The section [Service], each key's last value."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / "pixiu@.service")
    return parser["Service"]


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The units with a program that this machine has."""
    for path in UNITS.glob("pixiu*"):
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/pixiu/bin/python", sys.executable))
    return tmp_path


@needs_systemd
@pytest.mark.process
def test_systemd_finds_nothing_wrong(copies: Path) -> None:
    units = [str(copies / name) for name in ("pixiu@broker.service", "pixiu@node.service", "pixiu.target")]
    found = subprocess.run([str(ANALYZE), "verify", *units], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, [line for line in found.stderr.splitlines() if str(copies) in line or "pixiu" in line]) == (0, [])


@needs_systemd
@pytest.mark.process
def test_a_process_is_exposed_little(copies: Path) -> None:
    command = [str(ANALYZE), "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(copies / "pixiu@.service")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("role", [*ROLES, "node"])
def test_every_role_takes_what_its_unit_gives(role: str, tmp_path: Path) -> None:
    line = service()["ExecStart"].replace("${ROLE}", role).replace("%S", str(tmp_path)).replace("%i", role)
    python, *flags, name = re.split(r" --config", line)[0].split()
    assert (python, flags, name) == ("/opt/pixiu/bin/python", ["-P", "-m"], role)
    config = tmp_path / "pixiu.toml"
    words = line[line.index("--config") :].replace("/etc/pixiu/pixiu.toml", str(config)).split()
    registry = 'registry = "zk://10.0.0.1:2181/pubsub"\n'
    config.write_text('[node]\nroles = ["proxy", "broker-0"]\n' + registry if role == "node" else f"[{role}]\n{registry}")
    if role == "node":
        wanted = parse("node", RoleOptions, words)
        assert load_node(wanted.config, {}, wanted.overrides)
        return
    if role == "bridge":
        (tmp_path / "bridges.toml").write_text('[a]\nkind = "to-webhook"\ntopic = "t"\nurl = "http://h/"\n')
        config.write_text(f'{config.read_text()}bridges = "{tmp_path / "bridges.toml"}"\n')
    options_type = importlib.import_module(f"{role}.options").Options
    wanted = parse(role, options_type, words)
    _, options = load_options(role, options_type, wanted.config, {}, wanted.overrides, names_registry=True)
    assert options.data_dir == str(tmp_path / f"pixiu/{role}")


def test_the_guide_of_three_machines_starts_every_role_of_its_layout() -> None:
    guide = (UNITS.parents[1] / "docs/deployment.md").read_text().replace("\\\n", " ")
    section = guide[guide.index("## Three machines") : guide.index("## Containers")]
    [started] = re.findall(r"systemctl enable --now pixiu.target (.*)", section)
    [layout] = re.findall(r"pixiu layout set (.*)", section)
    wanted = parse_wanted(layout.split())
    assert [word.removeprefix("pixiu@") for word in started.split()] == [role for role in START_ORDER if role in wanted]
    for machine in (1, 2, 3):
        config = tomllib.loads((UNITS.parents[1] / f"examples/three_machines/machine{machine}.toml").read_text())
        assert set(config) - {"cluster"} == set(wanted), "which its files have"


def test_a_process_is_started_again_unless_its_configuration_is_wrong_and_has_time_to_drain() -> None:
    found = service()
    assert found["Restart"] == "always", "`pixiu rolling-restart` ends it with exit code 0"
    assert int(found["RestartPreventExitStatus"]) == EXIT_ENVIRONMENT
    assert (found["KillSignal"], found["KillMode"]) == ("SIGTERM", "mixed")
    assert int(found["TimeoutStopSec"]) > RoleOptions().drain_timeout_s
    assert int(found["LimitNOFILE"]) >= 65_536, "what `pixiu doctor` wants"
