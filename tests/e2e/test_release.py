"""`make release` from the newest commit: everything that it promises is there, the same from two builds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pixiu.version import __version__
from scripts.wheels import ROOT
from tests.support.effort import in_full

COMPILED = bool(os.environ.get("PIXIU_RELEASE"))
"""Whether the compiled servers are built, too: minutes of a core, twice."""
RELEASE_S = 7200


@pytest.mark.timeout(RELEASE_S)
@pytest.mark.skipif(not COMPILED and not in_full("PIXIU_RELEASE"), reason="another run's turn: PIXIU_TURN, or PIXIU_RELEASE=1")
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_release_is_whole_signed_and_the_same_from_two_builds(tmp_path: Path) -> None:
    key, dist = tmp_path / "key", tmp_path / "dist"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "scripts.release",
        "--out",
        dist,
        "--key",
        key,
        *([] if COMPILED else ["--plain"]),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RELEASE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built twice with the same digests" in done.stdout
    names = {path.name for path in dist.iterdir()}
    native = {name for name in names if name.startswith("pixiu_cluster-") and "-none-any" not in name}
    assert len(native) == COMPILED
    assert names - native == {
        f"pixiu_sdk-{__version__}-py3-none-any.whl", f"pixiu_cluster-{__version__}-py3-none-any.whl",
        f"pixiu-{__version__}.cdx.json", "RELEASE_NOTES.md", "SHA256SUMS", "SHA256SUMS.sig",
    }  # fmt: skip
    for name in native:
        assert [each for each in zipfile.ZipFile(dist / name).namelist() if each.endswith(".so")]
    sums = {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()}
    assert sums == names - {"SHA256SUMS", "SHA256SUMS.sig"}
    pins = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split())
    found = json.loads((dist / f"pixiu-{__version__}.cdx.json").read_text())
    versions = {each["name"]: each["version"] for each in found["components"]}
    pinned = {re.sub(r"[-_.]+", "-", name): version for name, version in pins.items()}
    assert versions == {name: pinned.get(name, __version__) for name in versions}, "each is pinned"
    assert {"pixiu-sdk", "grpcio", "rocksdict", "confluent-kafka"} <= versions.keys()
