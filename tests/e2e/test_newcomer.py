"""README from top to bottom, every command and snippet as printed, as `scripts/newcomer.py --brief` plays it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.newcomer import CANNOT, PLAYED, ROOT, Step, Terminal, steps, unplayed

PATIENT_S = 540.0
README = (ROOT / "README.md").read_text()


def test_every_command_and_snippet_of_readme_is_played_or_named() -> None:
    assert unplayed(steps(README)) == []


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("```sh\npixiu frobnicate  # something\n```\n", "pixiu frobnicate: neither played nor named"),
        ("Call `pixiu frobnicate\n--soon`.\n", "pixiu frobnicate --soon: neither played nor named"),
        ("```python\nimport frob\n```\n", "import frob: neither played nor named"),
        ("```toml\n[gateway]\n```\n", "[gateway]: neither played nor named"),
        ("```toml\nmake run\n```\n", "make run: neither played nor named"),
    ],
)
def test_what_is_neither_is_found(more: str, what: str) -> None:
    (problem,) = unplayed(steps(README + more))
    assert problem.endswith(what)


def test_what_a_brief_play_leaves_out_is_played_by_a_test_that_exists() -> None:
    places = [play.elsewhere.split("::") for play in PLAYED.values() if play.elsewhere]
    assert len(places) == 3
    for file, *names in places:
        assert all(name in (ROOT / file).read_text() for name in names), file


def test_a_command_that_readme_has_no_longer_is_found() -> None:
    assert unplayed(steps(README.replace(".venv/bin/pixiu probe", ""))) == [".venv/bin/pixiu probe: is not in README.md any more"]


def test_commands_come_as_a_reader_meets_them() -> None:
    text = "Call `make a` and\n`make b`.\n\n```sh\nmake a\nmake c \\\n  X=1  # why\n# only a comment\n```\n\n```\n┌─┐\n```\n"
    commands = [Step(1, "sh", "make a"), Step(2, "sh", "make b"), Step(6, "sh", "make c     X=1")]
    assert steps(text) == [*commands, Step(12, "", "┌─┐\n")]


def test_ctrl_c_ends_a_command_where_the_suite_itself_ignores_it(tmp_path: Path) -> None:
    """As a job in the background of a shell does; what it starts inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        terminal = Terminal("sleep", "echo ready; exec sleep 600", tmp_path, dict(os.environ), tmp_path / "output")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        terminal.must_show(("ready",))
        terminal.interrupt()
    finally:
        terminal.kill()


@pytest.mark.timeout(600)
def test_readme_is_played_from_top_to_bottom() -> None:
    if not shutil.which("make") or not shutil.which("git"):
        pytest.skip("README needs git and make")
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "newcomer.py"), "--brief"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        shown, _ = script.communicate(timeout=PATIENT_S)
    finally:
        script.terminate()  # it ends what it started
        script.wait()
    if script.returncode == CANNOT:
        pytest.skip(shown.splitlines()[-1])
    assert script.returncode == 0, shown
