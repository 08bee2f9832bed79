"""The site of the documentation: its menu has every page, and where mkdocs is installed it is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pixiu

PROJECT = Path(__file__).resolve().parents[2]
MADE = {"index.md", "reference/pixiu.md", "reference/protos.md"}
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
LEFT_OUT = {"import_graph.md"}


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r"^ +- .*: (\S+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {page.name for page in (PROJECT / "docs").glob("*.md")}
    assert sorted(menu) == sorted(pages - LEFT_OUT | MADE)


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make docs installs mkdocs")
def test_the_site_has_no_dead_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    made = subprocess.run(command, cwd=PROJECT, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert (made.returncode, "WARNING" in made.stderr) == (0, False), made.stderr
    index = (tmp_path / "index.html").read_text()
    assert "topics.html" in index
    reference = (tmp_path / "reference" / "pixiu.html").read_text()
    assert [name for name in pixiu.__all__ if f'id="pixiu.{name}"' not in reference] == ["__version__"]
