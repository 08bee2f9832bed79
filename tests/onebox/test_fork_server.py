"""The server that forks processes: they are as if started by `python -m`, their ends are told, and none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebox import fork_server
from onebox.fork_server import LOST, Forks, ForkServer
from tests.support.waiting import until

pytestmark = pytest.mark.process
PROGRAM = """
import os, signal, sys, time
if __name__ == "__main__":
    own_session = os.getsid(0) == os.getpid()
    print("arguments", *sys.argv[1:], "session", own_session, os.environ.get("GREETING"), repr(sys.stdin.read()), flush=True)
    if sys.argv[1] == "wait":
        signal.pause()
    sys.exit(int(sys.argv[1]))
"""
WAIT_S = 60.0


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Knows the module `program`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    project = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{project}"}


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServer]:
    """One that forks."""
    found = ForkServer(environment, ["json"])
    yield found
    found.close()


def runs(pid: int) -> bool:
    """Whether a process does; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_a_process_has_its_arguments_its_log_and_its_exit_code(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code in ("0", "3"):
        with open(log, "ab") as output:
            process = server.start("program", [code, "more"], output, os.environ | {"GREETING": "hello"})
        assert process.wait(WAIT_S) == int(code)
        assert process.poll() == int(code)
    assert log.read_text() == "arguments 0 more session True hello ''\narguments 3 more session True hello ''\n"


async def test_a_signal_ends_it_and_its_name_is_that_of_the_program(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "ab") as output:
        process = server.start("program", ["wait"], output)
    await until(lambda: bool(log.read_text()), "its first line")
    assert (
        Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").strip().decode()
        == f"{sys.executable} -m program wait"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert await process.ended() == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # nobody is hit


async def test_none_outlives_the_server_and_the_next_start_begins_another_one(server: ForkServer, tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab") as output:
        process = server.start("program", ["wait"], output)
        server.close()
        assert await process.ended() == LOST
        await until(lambda: not runs(process.pid), "the end of the process")
        assert server.start("program", ["0"], output).wait(WAIT_S) == 0


async def test_one_process_alone_takes_the_place_of_its_server(environment: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    forks = Forks(environment, ["json"], alone=True)
    with open(log, "ab") as output:
        assert forks.start("program", ["3", "more"], output).wait(WAIT_S) == 3
        assert log.read_text() == "arguments 3 more session True None ''\n"
        stays = forks.start("program", ["wait"], output)
        ended = forks.start("program", ["wait"], output)
    await until(lambda: log.read_text().count("arguments wait") == 2, "their first lines")
    assert int(Path(f"/proc/{stays.pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid(), (
        "there is no server between"
    )
    ended.send_signal(signal.SIGTERM)
    assert await ended.ended() == -signal.SIGTERM
    assert stays.poll() is None
    forks.close()
    assert await stays.ended() == LOST
    assert not runs(stays.pid)


@pytest.mark.parametrize("alone", [False, True])
async def test_nobody_is_left_when_whoever_asked_is_killed(environment: dict[str, str], tmp_path: Path, alone: bool) -> None:
    asker = (
        "import os, sys\n"
        "from onebox.fork_server import ForkServer\n"
        "with open(sys.argv[1], 'ab') as log:\n"
        f"    print(ForkServer(os.environ, ['json'], alone={alone}).start('program', ['wait'], log).pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", asker, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert runs(pid)
        process.kill()
    await until(lambda: not runs(pid), "the end of the process")


def test_what_starts_after_a_release_was_installed_is_of_it_and_what_runs_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "LOOK_S", 0.0)
    monkeypatch.syspath_prepend(str(tmp_path))
    kit, log = tmp_path / "kit", tmp_path / "log"
    kit.mkdir()
    (kit / "__init__.py").write_text("")
    (kit / "release.py").write_text("NAME = 'old'\n")
    (tmp_path / "program.py").write_text(f"from kit.release import NAME\nprint(NAME)\n{PROGRAM}")
    project = str(Path(__file__).resolve().parents[2])
    forks = Forks(os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{project}"}, ["kit.release"])
    with open(log, "ab") as output:
        first = forks.start("program", ["wait"], output)
        assert forks.start("program", ["0"], output).wait(WAIT_S) == 0
        (kit / "release.py").write_text("NAME = 'newer'\n")
        second = forks.start("program", ["wait"], output)
        assert forks.start("program", ["0"], output).wait(WAIT_S) == 0
    names = [line for line in log.read_text().splitlines() if line in ("old", "newer")]
    assert set(names[:1]) == {"old"}
    assert names.count("newer") >= 1
    assert first.poll() is None
    forks.close()
    assert (first.wait(WAIT_S), second.wait(WAIT_S)) == (LOST, LOST)
