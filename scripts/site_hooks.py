"""Hooks of mkdocs: pages of the site that are made of other files, and links that lead out of `docs/`.

README.md             ──▶ index.md
proto/pixiu/**.proto  ──▶ reference/protos.md
docstrings of `pixiu` ──▶ reference/pixiu.md
[x](../tests/y.py)    ──▶ the file in the repository (`repo_url`), or x alone where none is named
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
LINK: Final = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")
README, REFERENCE = "README.md", "# Python\n\n::: pixiu\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    made = {"index.md": (ROOT / README).read_text(), "reference/pixiu.md": REFERENCE, "reference/protos.md": _protos()}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that lead out of the folder of pages."""
    folder = "" if page.file.src_uri == "index.md" else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewritten(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        address, _, fragment = target.partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, address))
        own = "index.md" if place == README else place.removeprefix("docs/") if place.startswith("docs/") else ""
        if own and files.get_file_from_path(own) is not None:
            here = posixpath.dirname(page.file.src_uri)
            return f"{picture}[{text}]({posixpath.relpath(own, here or '.')}{'#' * bool(fragment)}{fragment})"
        return f"{picture}[{text}]({config.repo_url.rstrip('/')}/blob/main/{place})" if config.repo_url else text

    return LINK.sub(rewritten, markdown)


def _protos() -> str:
    parts = ["# Protos\n\nWhat clients need. `protoc` reads it in the folder `proto` of the repository.\n"]
    for path in sorted((ROOT / "proto" / "pixiu").rglob("*.proto")):
        parts.append(f"## {path.relative_to(ROOT)}\n\n```protobuf\n{path.read_text()}```\n")
    return "\n".join(parts)
