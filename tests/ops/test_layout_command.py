"""`pixiu layout show` and `pixiu layout set`, against a registry in which nothing runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onebox.embedded import EmbeddedZooKeeper
from tools.cli.main import application

RUNNER = CliRunner()
_roots = iter(range(1_000_000))


class Command:
    """`pixiu layout …` on a root of its own."""

    def __init__(self, server: EmbeddedZooKeeper) -> None:
        self.target = f"zk://{server.address}/layout-command-{next(_roots)}"

    def __call__(self, *arguments: str) -> Result:
        words = ["layout", arguments[0], "--target", self.target, *arguments[1:]]
        return RUNNER.invoke(application(words), words)

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("show", "--json").stdout)
        return found


@pytest.fixture
def command(zookeeper_server: EmbeddedZooKeeper) -> Command:
    return Command(zookeeper_server)


def test_a_layout_is_written_and_shown_with_what_is_missing_and_how_it_is_started(command: Command) -> None:
    before = command("show")
    assert before.exit_code == 1
    assert "pixiu layout set" in before.stdout
    written = command("set", "broker=2x2", "proxy=1")
    assert (written.exit_code, written.stderr) == (0, "")
    assert "broker: 2 partitions × 2 replicas (new)" in written.stdout
    assert "version 1" in written.stdout
    shown = command("show")
    assert shown.exit_code == 0
    where = f"--config FILE --set registry={command.target}"
    assert f"broker partition 1: 0 of 2 Running; start: python -m broker {where} --set partition=1" in shown.stdout
    assert f"proxy: 0 of 1 Running; start: python -m proxy {where}\n" in shown.stdout
    assert command.shown()["missing"][0] == {"role": "proxy", "partition": -1, "running": 0, "wanted": 1}


def test_set_again_changes_wanted_replicas_and_says_when_nothing_changes(command: Command) -> None:
    command("set", "broker=2x2", "proxy=1")
    assert "nothing changes" in command("set", "broker=2x2").stdout
    said = json.loads(command("set", "broker=2x3", "--json").stdout)
    assert said["changes"] == [
        {"role": "broker", "before": {"n": 2, "next": 2, "replicas": 2}, "after": {"n": 2, "next": 2, "replicas": 3}}
    ]
    assert command.shown()["version"] == said["version"] == 2
    assert command.shown()["roles"]["proxy"]["replicas"] == 1


def test_a_dry_run_says_what_would_be_and_writes_nothing(command: Command) -> None:
    said = command("set", "broker=2x2", "--dry-run")
    assert said.exit_code == 0
    assert "(not written)" in said.stdout
    assert "would become version 1" in said.stdout
    assert command.shown()["version"] == 0


def test_what_is_refused_is_refused_whole_in_one_line(command: Command) -> None:
    command("set", "broker=2x2")
    for extra in ((), ("--dry-run",)):
        refused = command("set", "relay=1x1", "broker=4x2", *extra)
        assert refused.exit_code == 2
        assert "pixiu double broker" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert set(command.shown()["roles"]) == {"broker"}


def test_a_target_without_a_registry_is_refused() -> None:
    words = ["layout", "show", "--target", "127.0.0.1:7000"]
    refused = RUNNER.invoke(application(words), words)
    assert (refused.exit_code, "zk://HOST:PORT/ROOT" in refused.stderr) == (2, True)
