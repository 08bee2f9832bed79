"""A command line that is wrong is answered in one line that names the value at fault, before anything starts."""

from __future__ import annotations

import io
import sys
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from pixiu.ids import MAX_ID
from tools.cli.main import COMMAND_GROUP, main
from tools.cli.wrong_use import SERVERS

OUT_OF_RANGE = f" is out of range: a number is from -{MAX_ID} to {MAX_ID}"


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
        (["topic", "create", "a", "--retention", "9" * 16 + "d"], "must be at most 106751991d"),
        (["topic", "create", "a", "--retention", "500ms"], "'500ms' must be 0, or at least 1 second"),
        (["topic", "create", "a", "--retention-bytes", "9" * 21 + "GB"], "must be at most 8388607TiB"),
        (["topic", "create", "a", "--rate-bytes", "0.5"], "'0.5' must be 0, or at least 1 byte"),
        (["topic", "create", "a", "--rate", "9" * 20], "9" * 20 + OUT_OF_RANGE),
        (["topic", "create", "a", "--parts", "9" * 14], "must be less than or equal to 20000; see `pixiu topic create --help`"),
        (["topic", "alter", "a", "--retention", "9" * 17 + "d"], "must be at most 106751991d"),
        (["topic", "alter", "a", "--compact", "9" * 50], "must be a time such as 90, 500ms, 12h or 7d"),
        (["topic", "channel", "set", "a", "c", "--timeout", "9" * 14 + "d"], "must be from 100ms to 24h, or 0"),
        (["topic", "channel", "set", "a", "c", "--timeout", "0.0001s"], "'0.0001s' must be from 100ms to 24h, or 0"),
        (["topic", "channel", "set", "a", "c", "--max-attempts", "9" * 11], "10000; see `pixiu topic channel set --help`"),
        (["topic", "dead", "a", "c", "--after", "9" * 23], "9" * 23 + OUT_OF_RANGE),
        (["topic", "resend", "a", "c", "9" * 23, "--part", "1"], "9" * 23 + OUT_OF_RANGE),
        (["topic", "seek", "a", "c", "--to", "0001-01-01"], "'0001-01-01' must be from 1970-01-01 to 9999-12-30"),
        (["topic", "seek", "a", "c", "--to", "@" + "9" * 5000, "--part", "1"], f"an offset is at most {MAX_ID}"),
        (["topic", "read", "a", "--from", "@" + "9" * 20, "--part", "1"], f"an offset is at most {MAX_ID}"),
        (["topic", "read", "a", "--part", "9" * 10], "4294967295; see `pixiu topic read --help`"),
        (["topic", "drain-group", "128"], "less than or equal to 127; see `pixiu topic drain-group --help`"),
        (["listen", "--room", "1", "--count", "9" * 20], "9" * 20 + OUT_OF_RANGE),
        (["probe", "--interval", "inf"], "inf is out of range: a number must be finite"),
        (["pki", "renew", "--before", "1e30"], "must be less than or equal to 3650; see `pixiu pki renew --help`"),
        (["inbox", "delete", "7", "9" * 5000, "--lane", "0"], f"not '{'9' * 40}'"),
        (["topic", "create", "bad\udcff"], "b'bad\\xff' is not UTF-8: an argument is text"),
        (["topic", "channel", "set", "a", "c", "--filter", 'key == "\udcff"'], "is not UTF-8: an argument is text"),
        (["topic", "last", "profiles", "bad\udcff"], "is not UTF-8: an argument is text"),
        (["send", "--room", "1", "bad\udcff"], "is not UTF-8: an argument is text"),
        (["send", "--room", "\udcff", "x"], "see `pixiu send --help`"),
        (["replay", "nowhere/\udcff.jsonl"], "cannot be read: No such file or directory"),
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
