"""Every help text: no word is lost between the source and the terminal, and each names a command that exists."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tools.cli.main import COMMANDS, application, summary_of

RUNNER = CliRunner()


def letters(text: str) -> str:
    """All but white space: lines are wrapped, also within a hyphenated word."""
    return "".join(text.split())


def paths() -> list[tuple[str, ...]]:
    """The words that name each command and subcommand."""
    root = typer.main.get_command(application())
    return [
        (name, *inner)
        for name in sorted(getattr(root, "commands"))  # noqa: B009
        for inner in ((), *((inner,) for inner in getattr(getattr(root, "commands")[name], "commands", ())))  # noqa: B009
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", paths(), ids=" ".join)
def test_no_word_of_a_help_text_is_lost(path: tuple[str, ...]) -> None:
    app = application([*path, "--help"])
    command = typer.main.get_command(app)
    for name in path:
        command = getattr(command, "commands")[name]  # noqa: B009 -- typer's own type of a group has no such name
    result = RUNNER.invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    shown = letters(result.output)
    for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
        for sentence in (text or "").split("\n\n"):
            assert letters(sentence) in shown, sentence


def test_the_list_of_commands_is_read_from_their_sources() -> None:
    listed = RUNNER.invoke(application(["--help"]), ["--help"]).output
    for name, place in COMMANDS.items():
        summary = summary_of(place)
        assert summary is not None, place
        assert f"{name} " in listed
        assert letters(summary.split(". ")[0].rstrip(".")) in letters(listed)
