"""Every link of a page leads to a file that exists, and to a heading that is in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.docs.snippets import FENCE, PAGES, RECORDS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub gives a page's headings; the second of the same name has `-1` at its end."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(anchor if anchor not in found else f"{anchor}-1")
    return frozenset(found)


def problem_of(page: Path, link: str) -> str:
    """What is wrong with a link; empty when nothing is, or when it leads out of the repository."""
    if re.match(r"[a-z]+:", link):
        return ""
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.exists():
        return f"{link}: no such file"
    return f"{link}: no such heading" if anchor and target.suffix == ".md" and anchor not in anchors(target) else ""


def test_links_lead_somewhere() -> None:
    found = [
        f"{name}: {problem}"
        for name in (*PAGES, *RECORDS)
        for link in LINK.findall(FENCE.sub("", (ROOT / name).read_text()))
        if (problem := problem_of(ROOT / name, link))
    ]
    assert found == []
