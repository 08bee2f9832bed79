"""The SDK for TypeScript: its codec and types, its page of the docs, and its client for web pages at a cluster."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import running_cluster

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "sdk/typescript"
NPM = shutil.which("npm")
WITHOUT = NPM is None or not (SDK / "node_modules").is_dir()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(WITHOUT, reason="needs Node, and `npm ci` in sdk/typescript")]
DECLARED = """
declare function currentToken(): string;
declare function reload(): void;
declare function show(...things: unknown[]): void;
declare const rows: readonly string[];
declare const px: import("@pixiu/client").Client;
"""
"""What snippets use and do not make."""


def run(*command: str) -> str:
    """Its output; shown when it fails."""
    done = subprocess.run(command, cwd=SDK, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of what `npm run build` made."""
    run(str(NPM), "run", "--silent", "build")
    return SDK / "build"


@pytest.mark.process
def test_the_codec_agrees_with_the_vectors_of_all_languages(built: Path) -> None:
    files = [str(path) for path in sorted((built / "test").glob("*.test.js"))]
    assert "# fail 0" in run("node", "--test", "--test-reporter=tap", *files)


@pytest.mark.process
def test_the_snippets_of_the_docs_have_the_types_of_the_package(built: Path) -> None:
    snippets = re.findall(r"^```ts\n(.*?)^```", (ROOT / "docs/sdk_typescript.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) > 5
    folder = built / "docs"
    folder.mkdir(exist_ok=True)
    for number, snippet in enumerate(snippets):
        declared = DECLARED if "await using px" not in snippet else DECLARED.replace("declare const px", "declare const other")
        (folder / f"snippet{number}.ts").write_text(f"{declared}\n{snippet}\nexport {{}};\n")
    (folder / "tsconfig.json").write_text(
        '{"extends": "../../tsconfig.json", "include": ["."], "exclude": [], '
        '"compilerOptions": {"noEmit": true, "rootDir": "../..", "noUnusedLocals": false}}'
    )
    run("node_modules/.bin/tsc", "-p", str(folder))


@pytest.mark.e2e
def test_a_page_meets_programs_in_rooms_mail_and_topics(built: Path, tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        web, api = one.getsockname()[1], other.getsockname()[1]
    options = (f"--set=gateway.websocket_port={web}", f"--set=gateway.api_port={api}")
    with running_cluster(tmp_path, "--xius=1", "--pis=1", "--topics=1", *options, layout="small") as cluster:
        cluster.wait_healthy()
        proxy = cluster.processes("proxy")[0]["client_address"]
        page = str(built / "scenarios/page.js")
        assert run("node", page, proxy, f"ws://127.0.0.1:{web}/mqtt", f"http://127.0.0.1:{api}") == "ok\n"
