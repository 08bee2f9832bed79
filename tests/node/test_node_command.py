"""The command line of a node: what it prints, and its exit codes before anything starts."""

from __future__ import annotations

import pytest

from node.__main__ import main
from pixiu.version import __version__


def test_help_has_the_tables_of_all_roles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "[node]\n" in text
    assert "  roles = [" in text
    assert "[gateway]\n" in text
    assert "  mqtt_port = 0\n" in text
    assert text.count("  session_timeout_ms = ") == 1


def test_version_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert main(["--example"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"pixiu {__version__}\n[node]\n")


def test_wrong_options_are_told_on_standard_error_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "roles=broker"]) == 2
    assert capsys.readouterr().err.startswith("node: wrong options:\n--set roles: [node] roles")
    assert main(["--set", "gateway.mqtt_prt"]) == 2
    assert "Did you mean gateway.mqtt_port?" in capsys.readouterr().err
