"""Hooks of mkdocs: pages of the site that are made of other files, links that lead out of `docs/`, and a browser that stays here.

README.md             ──▶ index.md
proto/pixiu/**.proto  ──▶ reference/protos.md
docstrings of `pixiu` ──▶ reference/pixiu.md
[x](../tests/y.py)    ──▶ the file in the repository (`repo_url`), or x alone where none is named
mermaid, from npm     ──▶ assets/javascripts/mermaid.min.js: the theme would load it from another host, when a page has a drawing
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
LINK: Final = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")
README, REFERENCE = "README.md", "# Python\n\n::: pixiu\n"
MERMAID: Final = "11.17.2"
SHA256: Final = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"
PACKED: Final = ROOT / f"build/npm/mermaid-{MERMAID}.tgz"
"""Taken from npm once; `make clean` removes it."""
BASE: Final = 'JSON.parse(document.getElementById("__config").textContent).base'
"""The way from a page to the site's first folder, in the theme's words."""
SCRIPTS: Final = "assets/javascripts"
ELSEWHERE: Final = {
    '"https://unpkg.com/mermaid@11/dist/mermaid.min.js"': f'{BASE}+"/{SCRIPTS}/mermaid.min.js"',
    '_t("https://unpkg.com/resize-observer-polyfill")': "$(void 0)",  # for browsers from before 2020
}
"""Expressions of the theme's script that load a script from another host, and what stands there instead."""
FACTS: Final = 'data-md-component="source"'
"""Has the theme's script ask the repository's host for its stars."""


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


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Leave out what would ask the repository's host."""
    return output.replace(FACTS, "")


def on_post_build(config: Any) -> None:
    """Ship what the theme loads from another host. Raises `PluginError`."""
    folder = Path(config.site_dir) / SCRIPTS
    (folder / "mermaid.min.js").write_bytes(_mermaid())
    [bundle] = folder.glob("bundle.*.min.js")
    text = bundle.read_text()
    for there, here in ELSEWHERE.items():
        if there not in text:
            raise PluginError(f"{bundle.name} of the theme has no {there} any more: see scripts/site_hooks.py")
        text = text.replace(there, here)
    bundle.write_text(text)


def _mermaid() -> bytes:
    """Return the script of the pinned version."""
    if not PACKED.exists():
        PACKED.parent.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["npm", "pack", "--silent", f"mermaid@{MERMAID}"], cwd=PACKED.parent, stdout=subprocess.DEVNULL, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise PluginError(f"the site's drawings need mermaid {MERMAID} from npm: {error}") from error
    with tarfile.open(PACKED) as package:
        member = package.extractfile("package/dist/mermaid.min.js")
        found = member.read() if member else b""
    if hashlib.sha256(found).hexdigest() != SHA256:
        raise PluginError(f"{PACKED} is not the mermaid {MERMAID} that scripts/site_hooks.py names: remove it, or change SHA256")
    return found


def _protos() -> str:
    parts = ["# Protos\n\nWhat clients need. `protoc` reads it in the folder `proto` of the repository.\n"]
    for path in sorted((ROOT / "proto" / "pixiu").rglob("*.proto")):
        parts.append(f"## {path.relative_to(ROOT)}\n\n```protobuf\n{path.read_text()}```\n")
    return "\n".join(parts)
