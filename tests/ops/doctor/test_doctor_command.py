"""`pixiu doctor` on this machine, with a registry and processes that are there and that are not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onebox.embedded import EmbeddedZooKeeper
from ops.doctor.doctor_command import one_a_disk
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from registry.layout import ensure_layout
from registry.membership import Membership
from tests.support.pages import QuietHandler, serving
from tests.support.zookeeper import make_node
from tools.cli.main import application

pytestmark = pytest.mark.process  # Java's version
MACHINE = ["shared memory", "socket buffers", "mtu", "open files", "java"]


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and, by name, the findings."""
    words = ["doctor", "--json", *arguments]
    result = CliRunner().invoke(application(words), words)
    assert result.stdout, (result.stderr, result.exception)
    said = json.loads(result.stdout)
    assert (result.exit_code == 1) == said["failed"] == any(one["grade"] == "failure" for one in said["findings"])
    return result.exit_code, {one["check"]: one for one in said["findings"]}


class Health(QuietHandler):
    """A process whose clock is an hour ahead."""

    def do_GET(self) -> None:
        said = {"unix_ms": time.time_ns() // 1_000_000 + 3_600_000, "data_dir": str(Path(__file__).parent)}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def http_port() -> Iterator[int]:
    with serving(Health) as port:
        yield port


def test_the_machine_alone_needs_no_cluster(tmp_path: Path) -> None:
    _, found = run("--machine", "--data", str(tmp_path / "not" / "yet"))
    assert list(found) == [f"disk {tmp_path / 'not' / 'yet'}", *MACHINE]
    assert "free" in found[f"disk {tmp_path / 'not' / 'yet'}"]["said"]
    assert "17" < found["java"]["said"] < "99"


def test_a_folder_that_is_a_file_and_no_registry_are_failures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"zk://127.0.0.1:{free.getsockname()[1]}/pubsub"
        code, found = run("--target", target, "--data", str(tmp_path / "file"))
    assert code == 1
    assert found["registry"]["grade"] == found[f"disk {tmp_path / 'file'}"]["grade"] == "failure"
    assert "layout" not in found


def test_folders_of_one_disk_are_one_and_a_folder_that_is_gone_is_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert one_a_disk([tmp_path / "a", tmp_path / "b", tmp_path / "gone"]) == [tmp_path]
    assert one_a_disk([tmp_path / "a"]) == [tmp_path / "a"]


async def test_a_cluster_is_looked_at_through_its_registry_and_its_processes(
    zookeeper_server: EmbeddedZooKeeper, zookeeper: ZooKeeper, root: str, http_port: int
) -> None:
    await ensure_layout(zookeeper, root, {"proxy": RoleLayout(1, 1, 1), "broker": RoleLayout(1, 1, 1)})
    process = Membership(zookeeper, root)
    await process.register(make_node("proxy", state=NodeState.RUNNING, http_port=http_port))
    code, found = await asyncio.to_thread(run, "--target", f"zk://{zookeeper_server.address}{root}")
    await process.unregister()
    assert code == 1
    assert found["registry"]["grade"] == "ok"
    assert f"disk {Path(__file__).parent}" in found, "where the process on this machine keeps its data"
    assert found["layout"]["said"] == "broker partition 0: 0 of 1 Running"
    assert (found["answers"]["grade"], found["versions"]["grade"], found["settings"]["grade"]) == ("ok", "ok", "ok")
    assert (found["clocks"]["grade"], "+3600.0 s" in found["clocks"]["said"]) == ("failure", True)
    assert "ZooKeeper" not in found["clocks"]["said"], "on this machine it has this machine's clock"
    assert [name for name in await zookeeper.children(root) if name.startswith("doctor")] == []
