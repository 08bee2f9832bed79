"""Our cluster: its options, and the kinds of its processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from comparison import ours
from comparison.ours import kind_of, options
from comparison.processes import cpu_seconds, family_pids, memory_bytes, switches


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/venv/bin/python -m gateway --set registry=zk://127.0.0.1:1/pubsub", "gateway"),
        ("/venv/bin/python -m node --config x", "node"),
        ("/venv/bin/python -m tools.cli.main up --json ", "supervisor"),
        ("/venv/bin/python -m onebox.fork_server gateway xiu ", "supervisor"),
        ("/venv/bin/python -m onebox.embedded --data /tmp/x ", "zookeeper"),
        ("java -cp a.jar org.apache.zookeeper.server.quorum.QuorumPeerMain /tmp/x ", "zookeeper"),
        ("/bin/sh", "supervisor"),
    ],
)
def test_a_process_is_of_the_kind_that_its_command_line_says(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_rest_is_that_of_a_cluster_as_a_user_starts_it() -> None:
    assert options("idle", "") == []


def test_a_layout_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "LAYOUTS", {"small": ("--small",)})
    assert options("idle", "small") == ["--small"]
    assert options("messages", "small")[0] == "--small"


def test_work_has_one_of_each_and_mail_has_its_roles() -> None:
    assert {"--proxies=1", "--broker-replicas=1", "--relays=0", "--xius=0", "--pis=0"} < set(options("messages", ""))
    assert options("messages", "") == options("connections", "")
    assert {"--proxies=1", "--relays=1", "--xius=1", "--pis=1"} < set(options("mail", ""))
    assert {"--topics=1", "--topic-replicas=1", "--admins=1", "--relays=0"} < set(options("topics", ""))
    assert not [word for word in options("mail", "") if word.startswith(("--xiu-replicas", "--pi-replicas"))]


@pytest.mark.process
def test_a_family_is_a_process_and_those_that_came_from_it_whatever_their_sessions() -> None:
    """Their CPU, memory and waits are read."""
    command = "import subprocess, sys; subprocess.Popen(['cat'], start_new_session=True); print(); input()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = family_pids(process.pid)
        assert family[0] == process.pid
        assert len(family) == 2
        assert cpu_seconds(family) > 0
        assert memory_bytes(family) > memory_bytes(family[:1])
        assert sum(switches(family).values()) > 0
        process.communicate(b"\n")
    assert family_pids(process.pid) == [process.pid]
