"""Programs beside the leading admin: which, and what their report becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from admin.beside import Beside, commands
from admin.options import Options
from cluster.core import log
from cluster.settings.options import ClusterOptions
from tests.support.waiting import until


def test_none_by_default() -> None:
    assert commands(Options()) == []


def test_a_console_without_logins_only_shows() -> None:
    assert commands(Options(console_port=7080)) == [["ops.console", "--until-eof", "--port", "7080", "--look"]]
    (command,) = commands(Options(console_port=7080, console_access_file="access.toml"))
    assert command[-2:] == ["--access", "access.toml"]


def test_options_that_need_another_one() -> None:
    wrong = dict(Options(probe_interval_ms=5_000).problems()) | dict(Options(console_access_file="a").problems())
    assert set(wrong) == {"probe_file", "console_access_file"}


@pytest.mark.process
async def test_a_program_runs_while_the_admin_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of Python's that writes the file, and ends with its standard input."""
    report = {"total": {"arrived": 9, "failed": 1, "share": 0.9}, "paths": [{"path": "a", "share": 0.9}], "hops": []}
    file, ended = tmp_path / "availability", tmp_path / "ended"
    (tmp_path / "program_beside.py").write_text(
        f"import pathlib, sys\npathlib.Path({str(file)!r}).write_text({json.dumps({'report': report})!r})\n"
        f"sys.stdin.read()\npathlib.Path({str(ended)!r}).touch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("admin.beside.commands", lambda _options: [["program_beside"]])
    monkeypatch.setattr("admin.beside.READ_S", 0.05)
    beside = Beside(Options(probe_interval_ms=1_000, probe_file=str(file)), ClusterOptions(), log.get_logger())
    await beside.begin()
    await until(lambda: bool(beside.report))
    assert await beside.availability({}) == report
    samples = {each.name: each.value for each in beside.samples()}
    assert samples == {"probes_arrived": 9, "probes_failed": 1, "availability": 0.9, "path_availability": 0.9}
    await beside.end()
    assert ended.exists()
    assert cast(dict[str, object], beside.report) == {}
