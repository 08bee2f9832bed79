"""Both wheels are built; the SDK's alone, in an empty environment, sends a message, and type checkers read it as a user's do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.wheels import ROOT, build, import_all, install, run
from tests.support.cluster import running_cluster

SEND = """
import asyncio, sys
import pixiu

async def main() -> None:
    async with pixiu.connect(sys.argv[1]) as px:
        async with px.subscribe(room=42) as messages:
            await px.room(42).send(b"from the wheel")
            async for message in messages:
                print(message.payload.decode())
                return

asyncio.run(main())
"""


def tops(wheel: Path) -> set[str]:
    """The top-level names that a wheel installs, without its own metadata."""
    return {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


class Installed(NamedTuple):
    """The wheels, and the Python of an environment that has nothing but the SDK's."""

    sdk: Path
    servers: Path
    python: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, so that a build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheels")
    files = run("git", "ls-files", "-z", "-co", "--exclude-standard").split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    wheels = build(folder / "tree", folder / "wheels")
    return Installed(wheels.sdk, wheels.servers, install(folder / "empty", wheels.sdk))


def test_each_wheel_has_its_own_names(installed: Installed) -> None:
    assert tops(installed.sdk) == {"pixiu"}
    assert "pixiu" not in tops(installed.servers)
    assert {"cluster", "registry", "ops", "onebox", "tools", "gateway", "xiu"} <= tops(installed.servers)


def test_every_module_of_the_sdk_imports_without_the_servers(installed: Installed) -> None:
    imported, without = import_all(installed.python, installed.sdk)
    assert imported > 100
    assert all(name.startswith(("tools.cli", "tools")) for name in without), without


def test_the_sdk_installs_alone_and_sends_a_message(installed: Installed, tmp_path: Path) -> None:
    listed = run(sys.executable, "-m", "pip", "--python", installed.python, "list", "--format", "freeze").lower()
    assert not [name for name in ("typer", "rich", "structlog", "lmdb", "pyspark", "aiohttp") if f"{name}==" in listed]
    (tmp_path / "folder").mkdir()
    with running_cluster(tmp_path / "folder", "--relays=0", layout="small") as cluster:
        printed = run(installed.python, "-I", "-c", SEND, cluster.target, cwd=tmp_path)
    assert printed == "from the wheel\n"


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A folder with a user's programs, far from this repository: one that is right, one with five mistakes."""
    for name in ("right_use.py", "wrong_use.py"):
        (tmp_path / name).write_text(re.sub(r" *# type: ignore.*", "", (ROOT / "tests" / "typing" / name).read_text()))
    return tmp_path


def mistakes() -> list[int]:
    """The lines of `wrong_use.py` where a type checker must find something."""
    lines = (ROOT / "tests" / "typing" / "wrong_use.py").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if "# type: ignore" in line]


def test_mypy_strict_reads_the_installed_sdk(installed: Installed, application: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed.python), "--cache-dir", os.devnull]
    programs = "right_use.py", "wrong_use.py"
    done = subprocess.run([*command, *programs], cwd=application, capture_output=True, text=True, timeout=240, check=False)
    errors = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong_use.py", str(line)] for line in mistakes()], done.stdout + done.stderr


def test_pyright_strict_reads_the_installed_sdk(installed: Installed, application: Path) -> None:
    if not (importlib.util.find_spec("pyright") and shutil.which("node")):
        pytest.skip("pyright, or the node that it runs on, is not installed")
    if subprocess.run([sys.executable, "-m", "pyright", "--version"], capture_output=True, timeout=240, check=False).returncode:
        pytest.skip("pyright cannot be fetched from the package index of node")
    (application / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", str(installed.python), "--outputjson"],
        cwd=application,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [each for each in found if not each["file"].endswith("wrong_use.py")], done.stdout
    # One mistake makes it doubt more in its line and in those below that use the same name.
    assert set(mistakes()) <= {each["range"]["start"]["line"] + 1 for each in found}, done.stdout
