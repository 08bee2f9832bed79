"""The text of pages: lines that a terminal shows whole, and files that exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import READ_FOR_NAMES, RECORDS, ROOT, prose

COLUMNS = 150
READ = ("README.md", "CONTRIBUTING.md", *(page for page in READ_FOR_NAMES if page.startswith("docs/")))
FOLDERS = "|".join(path.name for path in sorted(ROOT.iterdir()) if path.is_dir() and (path / "README.md").exists())
FILE = re.compile(rf"`((?:{FOLDERS})/[\w/]+\.\w+)\b")


@pytest.mark.parametrize("page", [*READ, *RECORDS])
def test_lines_are_short(page: str) -> None:
    """Except for rows of tables, which cannot be broken."""
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) >= COLUMNS and not line.startswith("|")] == []


@pytest.mark.parametrize("page", [*READ, *RECORDS])
def test_files_that_a_page_names_exist(page: str) -> None:
    assert [name for name in FILE.findall(prose(page)) if not (ROOT / name).exists()] == []
