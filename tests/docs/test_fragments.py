"""Every fragment of the changelog has a topic that `make changelog` knows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRAGMENTS = ROOT / "changelog.d"


def topics() -> dict[str, str]:
    """Return the topics of pyproject.toml, with their headings."""
    types = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    return {each["directory"]: each["name"] for each in types}


def test_every_fragment_has_a_known_topic() -> None:
    name = re.compile(rf"\+[a-z0-9-]+\.({'|'.join(topics())})\.md")
    wrong = [path.name for path in FRAGMENTS.iterdir() if path.name != "README.md" and not name.fullmatch(path.name)]
    assert not wrong, "changelog.d/README.md explains the names"


def test_the_readme_lists_the_topics() -> None:
    rows = re.findall(r"\| `(\w+)` \| (.+) \|", (FRAGMENTS / "README.md").read_text())
    assert rows == list(topics().items())
