"""A command line that is wrong is answered in one line that names the value at fault, before anything starts."""

from __future__ import annotations

import io
import sys
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from tools.cli.main import COMMAND_GROUP, main
from tools.cli.wrong_use import SERVERS


def answer(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["pixiu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["send", "--room", "abc", "x"], "--room abc: must be an integer; see `pixiu send --help`"),
        (["inbox", "list", "abc"], "UIN abc: must be an integer; see `pixiu inbox list --help`"),
        (["up", "--for", "-1"], "--for -1: must be greater than or equal to 0; see `pixiu up --help`"),
        (["up", "--zebra"], "there is no option --zebra; see `pixiu up --help`"),
        (["up", "--mqtt-prt", "3"], "there is no option --mqtt-prt. Did you mean --mqtt-port? See `pixiu up --help`"),
        (["up", "--config", "missing.toml"], "'--config': path 'missing.toml' does not exist; see `pixiu up --help`"),
        (["presence"], "Missing argument 'UIN…'; see `pixiu presence --help`"),
        (
            ["promote", "broker", "0", "1", "--reason", "x", "--force"],
            "broker has no replicas that elect a leader; name one of xiu, pi, topic",
        ),
        (["up", "--replay", "missing.jsonl"], "missing.jsonl: cannot be read: No such file or directory"),
        (["up", "--data", __file__], "is a file, not a folder"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = answer(arguments, monkeypatch, capsys)
    assert code == 2
    assert shown.startswith("pixiu: ")
    assert shown.endswith(f"{said}\n")
    assert shown.count("\n") == 1


def test_a_command_that_there_is_not_names_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = answer(["statsu"], monkeypatch, capsys)
    assert code == 2
    assert shown.startswith("pixiu: there is no command statsu; known: ")
    assert {"inbox", "listen", "status"} <= set(shown.partition("known: ")[2].partition(". Did")[0].split(", "))
    assert shown.endswith(". Did you mean status? See `pixiu --help`\n")


def test_a_command_that_cannot_be_loaded_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {entry.name for entry in entry_points(group=COMMAND_GROUP)} == SERVERS
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    code, shown = answer(["doctor", "--machine"], monkeypatch, capsys)
    assert code == 2
    assert shown.startswith("pixiu: doctor needs packages of the servers: pip install 'pixiu-sdk[server]'")


def test_a_command_of_the_sdk_looks_for_no_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def found(**_: object) -> None:
        raise AssertionError("reads what every installed package says of itself")

    monkeypatch.setattr(metadata, "entry_points", found)
    assert answer(["status", "--nope"], monkeypatch, capsys)[0] == 2


@pytest.mark.parametrize("option", ["", "--mail"])
def test_bytes_that_are_no_log_are_called_so(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b'\x8a\x00{"')
    code, shown = answer([*filter(None, ["replay", option]), str(tmp_path / "log")], monkeypatch, capsys)
    assert code == 2
    assert "is not text" in shown
    assert "codec" not in shown


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inbox", "--help"]])
def test_what_is_asked_for_is_exit_code_0(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(arguments, monkeypatch, capsys) == (0, "")


def test_where_nobody_can_be_asked_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def asks() -> None:
        typer.confirm("Promote it?", abort=True)

    monkeypatch.setattr("tools.cli.main.application", lambda _: app)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, shown = answer([], monkeypatch, capsys)
    assert code == 1
    assert shown.endswith("pixiu: nothing was done: the question was not answered; use --yes where there is no terminal\n")
