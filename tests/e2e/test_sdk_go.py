"""The SDK in Go: its own tests with the vectors of all languages, and its page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tests.clients.scenarios.driver import LANGUAGES
from tests.clients.scenarios.table import ROOT
from tests.docs.snippets import snippets

GO = shutil.which("go")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_its_page_names_what_is_there() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "sdk/go").glob("*.go"))
    names = set(re.findall(r"^func (?:\(\w+ \*?\w+\) )?([A-Z]\w*)|^type ([A-Z]\w*)|^\t([A-Z]\w*)", sources, re.MULTILINE))
    known = {name for each in names for name in each if name}
    used = {name for found in snippets() if found.language == "go" for name in re.findall(r"\.([A-Z]\w*)", found.text)}
    assert len(used) > 20
    assert used - known == {"Is", "Println", "Second"}


@pytest.mark.skipif(GO is None, reason="needs Go")
def test_its_own_tests_pass_and_its_codec_makes_the_vectors() -> None:
    folder = LANGUAGES["go"].folder
    done = subprocess.run(["go", "mod", "download"], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"Go's modules cannot be had: {done.stderr[-200:]}")
    environment = {**os.environ, "PIXIU_VECTORS": str(ROOT / "proto/vectors.json")}
    command = ["go", "test", ".", "./internal/codec"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
