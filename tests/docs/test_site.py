"""The site of the documentation: its menu has every page, and where `make docs` has brought its tools it builds without a warning.

A browser that reads it asks no other host.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import pixiu
from scripts.newcomer import steps, unplayed
from scripts.stranger import PAGE, STRANGER, steps_of_page
from tests.docs.snippets import ROOT
from tests.support.browser import CHROMIUM, Browser
from tests.support.pages import serving

MADE = {"index.md", "reference/pixiu.md", "reference/protos.md"}
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
LEFT_OUT = {"import_graph.md"}
MENU = ["Start", "Tutorial", "How to", "Operations", "Concepts", "Reference", "Decisions"]
BRINGS = 'link rel="(?:stylesheet|icon|preload|modulepreload|preconnect|dns-prefetch|manifest)"'
"""Links that a browser follows by itself."""
ABROAD = re.compile(
    rf"""<(?:script|img|iframe|source|video|object|{BRINGS})[^>]*?(?:src|href|data)="?((?:https?:)?//[^">\s]+)"""
    r"""|(?:url\(|@import )["']?((?:https?:)?//[^)"']+)"""
    r"""|(?<!href=)["'`](https?://[^"'`\s]+\.(?:m?js|css|woff2?|ttf|wasm|json)|https?://(?:unpkg|cdn|fonts)\.[^"'`\s]+)["'`]""",
)
"""A script, style, font or picture of another host, in a page, a style or a script."""
HAS_TOOLS = importlib.util.find_spec("mkdocs") is not None and bool(list((ROOT / "build/npm").glob("mermaid-*.tgz")))
needs_tools = pytest.mark.skipif(not HAS_TOOLS, reason="make docs brings mkdocs and mermaid")


def abroad(text: str) -> list[str]:
    """Addresses of other hosts from which a browser would load something."""
    return [address for found in ABROAD.findall(text) for address in found if address]


def test_the_menu_has_every_page_once() -> None:
    menu = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert sorted(menu) == sorted(pages - LEFT_OUT | MADE)


def test_the_menu_leads_from_the_tutorial_to_the_decisions() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.findall(r"^  - (.*?):", nav, re.MULTILINE) == MENU


def test_every_command_and_snippet_of_the_tutorial_is_played_or_named() -> None:
    assert unplayed(steps((ROOT / "docs/tutorial.md").read_text()), STRANGER) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        "<script async src=//cdn.example/x></script>",
        '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        '<img alt="build" src="https://badges.example/build.svg">',
        "@font-face{src:url(https://fonts.example/roboto.woff2)}",
        '@import "https://fonts.example/roboto.css";',
        'load("https://unpkg.com/mermaid@11/dist/mermaid.min.js")',
    ],
)
def test_what_another_host_would_serve_is_found(text: str) -> None:
    assert len(abroad(text)) == 1


@pytest.mark.parametrize(
    "text", ['<a href="https://mqtt.org/x.js">MQTT</a>', '<script src="assets/x.js"></script>', '"http://www.w3.org/2000/svg"']
)
def test_what_a_browser_does_not_load_is_no_request(text: str) -> None:
    assert abroad(text) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as `make docs` does, for a repository that has an address."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | QUIET | {"PIXIU_REPOSITORY": "https://github.com/example/pixiu"}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (made.returncode, "WARNING" in made.stderr) == (0, False), made.stderr
    return folder


@pytest.mark.process
@needs_tools
def test_the_site_has_no_dead_link(site: Path) -> None:
    assert "topics.html" in (site / "index.html").read_text()
    reference = (site / "reference" / "pixiu.html").read_text()
    assert [name for name in pixiu.__all__ if f'id="pixiu.{name}"' not in reference] == ["__version__"]


@pytest.mark.process
@needs_tools
def test_nothing_of_the_site_is_on_another_host(site: Path) -> None:
    loaded = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js", ".mjs", ".svg")]
    assert len(loaded) > 50
    found = {str(path.relative_to(site)): addresses for path in loaded if (addresses := abroad(path.read_text()))}
    assert found == {}


@pytest.mark.process
@needs_tools
@pytest.mark.skipif(not CHROMIUM, reason="no chromium")
async def test_a_browser_asks_no_other_host_and_draws_what_mermaid_describes(site: Path, tmp_path: Path) -> None:
    """The policy of the page has the browser report each request to another host."""

    class Guarded(SimpleHTTPRequestHandler):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words, directory=str(site))

        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'")
            super().end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with serving(Guarded) as port:
        async with Browser(tmp_path) as browser:
            await browser.open(f"http://127.0.0.1:{port}/architecture.html")
            await browser.wait("document.querySelector('div.mermaid')?.offsetHeight > 100")
            names = await browser.run("performance.getEntriesByType('resource').map(each => each.name)")
            assert any(name.endswith("mermaid.min.js") for name in names)
            assert [name for name in names if not name.startswith((f"http://127.0.0.1:{port}/", "blob:", "data:"))] == []
            assert browser.problems == []


@pytest.mark.process
@needs_tools
def test_the_page_of_the_site_has_the_steps_of_the_tutorial(site: Path) -> None:
    found = steps_of_page((site / PAGE).read_text())
    assert unplayed(found, STRANGER) == []
    written = steps((ROOT / "docs/tutorial.md").read_text())
    assert {(step.language, step.text) for step in found} == {(step.language, step.text) for step in written}
