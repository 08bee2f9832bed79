"""`examples/`: the programs name what is there and say how they are run; the three machines' files make one cluster."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster.access.settings import parse
from cluster.settings.options import load_options
from cluster.trust.key_folder import add_key, use_key
from pixiu.discovery.paths import PARTITIONED_ROLES, ROLES, STORES
from registry.layout_change import parse_wanted
from tests.docs.snippets import ROOT, problems_of_line, problems_of_python

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))
LAYOUT_SET = "pixiu layout set "
MACHINES = ("machine1", "machine2", "machine3")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_names_what_is_there_and_says_how_it_is_run(path: Path) -> None:
    text = path.read_text()
    assert problems_of_python(text) == []
    header = text.split('"""')[1]
    assert f"python {path.relative_to(ROOT)}" in header
    commands = [line for line in header.splitlines() if line.startswith("    ")]
    assert [problem for line in commands for problem in problems_of_line(line)] == []


def loaded(machine: str, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Role → cluster and role options of a machine, as its processes read them; the keys are the test's."""
    text = (EXAMPLES / "three_machines" / f"{machine}.toml").read_text()
    keys = folder / "keys"
    if not keys.exists():
        add_key(keys)
        use_key(keys)
    path = folder / f"{machine}.toml"
    path.write_text(text.replace("/etc/pixiu/keys", str(keys)))
    assert str(keys) in path.read_text()
    roles = [name for name in tomllib.loads(text) if name != "cluster"]
    return {role: load_options(role, importlib.import_module(f"{role}.options").Options, path, {}, {}) for role in roles}


def test_the_three_machines_make_one_cluster(tmp_path: Path) -> None:
    machines = [loaded(machine, tmp_path) for machine in MACHINES]
    readme = (EXAMPLES / "three_machines/README.md").read_text()
    [line] = [line for line in readme.splitlines() if line.startswith(LAYOUT_SET)]
    layout = parse_wanted([word for word in line.removeprefix(LAYOUT_SET).split() if "=" in word])
    assert {cluster for machine in machines for cluster, _ in machine.values()} == {machines[0]["broker"][0]}
    assert {options.registry for machine in machines for _, options in machine.values()} == {"zk://127.0.0.1:2181/three"}
    for role in ROLES:
        if role == "bridge":  # nobody needs one
            continue
        assert len({machine[role][1].host for machine in machines}) == layout[role].replicas == len(MACHINES)
        if role in PARTITIONED_ROLES:
            assert {machine[role][1].partition for machine in machines} == set(range(layout[role].n))
    for machine in machines:
        options = {role: own for role, (_, own) in machine.items()}
        assert len({own.host for own in options.values()}) == 1
        assert options["gateway"].mqtt_host == options["gateway"].host
        numbers = [port for own in options.values() for port in (own.port, own.http_port)] + [options["gateway"].mqtt_port]
        assert len(set(numbers)) == len(numbers)
        folders = [own.data_dir for own in options.values() if own.data_dir]
        assert len(set(folders)) == len(folders)
    for role in STORES:  # a majority, so that no two sides of a cut confirm writes, and one machine may be away
        assert {machine[role][1].min_in_sync for machine in machines} == {2}
        assert len({machine[role][1].data_dir for machine in machines}) == len(MACHINES)


def test_the_rules_of_the_devices_at_home_ask_about_what_is_bound_and_nothing_else() -> None:
    path = EXAMPLES / "iot" / "access.toml"
    settings = parse(path.read_text(), str(path))
    assert settings.callbacks["home"].url == "http://127.0.0.1:8088/ask"
    assert [rule.ask for rule in settings.rules] == ["", "", "home"]
