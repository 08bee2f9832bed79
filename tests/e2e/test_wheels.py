"""Both wheels are built; the SDK's alone, in an empty environment, sends a message through a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.cluster import running_cluster

ROOT = Path(__file__).resolve().parents[2]
SEND = """
import asyncio, sys
import pixiu

async def main() -> None:
    async with pixiu.connect(sys.argv[1]) as px:
        async with px.subscribe(room=42) as messages:
            await px.room(42).send(b"from the wheel")
            async for message in messages:
                print(message.payload.decode())
                return

asyncio.run(main())
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command that must succeed prints; nothing of this environment's Python paths reaches it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if environment.get("SSL_CERT_FILE") == os.devnull:
        del environment["SSL_CERT_FILE"]  # pip verifies certificates, other than the processes of tests
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tops(wheel: Path) -> set[str]:
    """The top-level names that a wheel installs, without its own metadata."""
    return {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_sdk_installs_alone_and_sends_a_message(tmp_path: Path) -> None:
    # A copy, so that a build leaves nothing in the tree.
    files = run("git", "ls-files", "-z", "-co", "--exclude-standard").split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    wheels = tmp_path / "wheels"
    for folder in ("tree/pixiu", "tree"):
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, tmp_path / folder)
    sdk, servers = sorted(wheels.glob("pixiu_sdk-*.whl"))[0], sorted(wheels.glob("pixiu_cluster-*.whl"))[0]
    assert tops(sdk) == {"pixiu"}
    assert "pixiu" not in tops(servers)
    assert {"cluster", "registry", "gateway", "xiu"} <= tops(servers)

    environment = tmp_path / "empty"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", sdk)
    installed = run(python, "-m", "pip", "list", "--format", "freeze").lower()
    assert not [name for name in ("typer", "rich", "structlog", "lmdb", "pyspark", "aiohttp") if f"{name}==" in installed]
    (tmp_path / "folder").mkdir()
    with running_cluster(tmp_path / "folder", "--proxies", "1", "--brokers", "1", "--routers", "1", "--relays", "0") as cluster:
        printed = run(python, "-I", "-c", SEND, cluster.target, cwd=tmp_path)
    assert printed == "from the wheel\n"
