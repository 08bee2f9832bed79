"""`pixiu support-bundle` of a cluster with a process that answers and one that is dead, and without a cluster."""

from __future__ import annotations

import asyncio
import json
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comparison.processes import free_port
from onebox.embedded import EmbeddedZooKeeper
from ops.support import bundle_command
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import ensure_layout
from registry.membership import Membership
from tests.support.pages import QuietHandler, serving
from tests.support.zookeeper import make_node
from tools.cli.main import application

pytestmark = pytest.mark.process  # Java's version
PAGES = {"/health": b'{"state": "Running", "endpoint": "%s"}', "/metrics": b"pixiu_proxy_running 1\n"}


def run(folder: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the command reports, and the files of its archive."""
    place = folder / "bundle.tar.gz"
    words = ["support-bundle", "--json", "--out", str(place), *arguments]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    with tarfile.open(place) as archive:
        found = {member.name.removeprefix("pixiu-support/"): archive.extractfile(member) for member in archive}
        files = {name: file.read() for name, file in found.items() if file is not None}
    assert sorted(json.loads(files["summary.json"])["files"] + ["summary.json"]) == sorted(files)
    return json.loads(result.stdout), files


class Pages(QuietHandler):
    """The pages of a process."""

    endpoint = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGES[self.path].replace(b"%s", self.endpoint.encode()))


@pytest.fixture
def http_port() -> Iterator[int]:
    with serving(Pages) as port:
        yield port


async def test_a_dead_process_is_named_and_the_others_are_in_the_archive(
    zookeeper_server: EmbeddedZooKeeper,
    zookeeper: ZooKeeper,
    root: str,
    http_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIXIU_TOKEN", "token-of-the-environment")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/proxy.log").write_text("first line\n" + "x" * (2 << 20) + "\nlast line, token-of-the-environment\n")
    (tmp_path / "logs/proxy.log.1").write_text("rotated\n")
    (tmp_path / "logs/data.db").write_text("a payload")
    (tmp_path / "pixiu.toml").write_text('[broker-1]\nport = 7300\n[proxy]\nkinds = ["room"]\nhots = "hunter2"\n')
    await ensure_layout(zookeeper, root, {"proxy": RoleLayout(1, 1, 1), "broker": RoleLayout(1, 1, 1)})
    alive = make_node("proxy", state=NodeState.RUNNING, http_port=http_port)
    Pages.endpoint = f"{alive.endpoint:016x}"
    dead = make_node("broker", state=NodeState.RUNNING, port=7100, http_port=free_port())
    processes = [Membership(zookeeper, root), Membership(zookeeper, root)]
    for process, node in zip(processes, (alive, dead), strict=True):
        await process.register(node)
    said, files = await asyncio.to_thread(
        run, tmp_path, "--target", f"zk://{zookeeper_server.address}{root}", "--logs", str(tmp_path / "logs"), "--log-mb", "1",
        "--config", str(tmp_path / "pixiu.toml"),
    )  # fmt: skip
    for process in processes:
        await process.unregister()
    [(name, why)] = said["silent"].items()
    assert (name.split("/")[0], name.endswith("at 127.0.0.1:7100"), "does not answer" in why) == ("broker 0", True, True)
    status = json.loads(files["status.json"])
    assert status["layout"]["proxy"] == {"n": 1, "next": 1, "replicas": 1}
    assert {one["role"]: one["healthy"] for one in status["processes"]} == {"proxy": True, "broker": False}
    [health] = [name for name in files if name.startswith("processes/") and name.endswith("health.json")]
    assert health.startswith("processes/proxy-")
    assert files[health.replace("health.json", "metrics.txt")] == PAGES["/metrics"]
    assert json.loads(files["options/pixiu.toml.json"]) == {
        "broker-1": {"port": 7300},
        "proxy": {"kinds": ["room"], "hots": "[redacted]"},
    }
    assert files["logs/proxy.log"] == b"last line, [redacted]\n", "the last MiB, from the first whole line on"
    assert files["logs/proxy.log.1"] == b"rotated\n"
    assert said["left_out"] == [f"{tmp_path / 'logs/proxy.log'}: all but the last 1 MiB"]
    machine = json.loads(files["machine.json"])
    assert "kazoo" in machine["packages"]
    assert not any(secret in data for data in files.values() for secret in (b"token-of-the-environment", b"a payload", b"hunter2"))


def test_without_a_registry_there_is_a_bundle_that_says_so(tmp_path: Path) -> None:
    said, files = run(tmp_path, "--target", f"zk://127.0.0.1:{free_port()}/pubsub")
    assert said["registry"]
    assert json.loads(files["summary.json"])["cluster_not_asked"] == said["registry"]
    assert sorted(files) == ["machine.json", "summary.json"]


def test_logs_and_configuration_wait_for_somebody_who_may_read_the_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_command, "known_secrets", lambda _: (frozenset(), {Path("keys"): "Permission denied"}))
    (tmp_path / "proxy.log").write_text("a secret of the keys\n")
    (tmp_path / "pixiu.toml").write_text('[cluster]\nkey_dir = "keys"\n')
    said, files = run(
        tmp_path, "--target", f"zk://127.0.0.1:{free_port()}/pubsub", "--logs", str(tmp_path),
        "--config", str(tmp_path / "pixiu.toml"),
    )  # fmt: skip
    assert sorted(files) == ["machine.json", "summary.json"]
    assert said["left_out"][0] == "keys: may hold secrets and cannot be read: Permission denied"
    assert [text.partition(": ")[0] for text in said["left_out"][1:]] == [str(tmp_path / "pixiu.toml"), str(tmp_path)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--target", "127.0.0.1:7000"], "the processes are in the registry; give zk://HOST:PORT/ROOT"),
        (["--out", "taken", "--target", "zk://127.0.0.1:1/pubsub"], "--out taken: cannot be made: File exists"),
        (["--logs", "taken", "--target", "zk://127.0.0.1:1/pubsub"], "--logs taken: is not a folder"),
        (["--config", "missing.toml"], "missing.toml: the configuration file cannot be read: No such file or directory"),
    ],
    ids=["proxies", "out", "logs", "config"],
)
def test_wrong_use_is_one_sentence(arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    words = ["support-bundle", *arguments]
    result = CliRunner().invoke(application(words), words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert why in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
