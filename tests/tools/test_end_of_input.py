"""`--until-eof`: a pipe ends a command, and a standard input that cannot is refused in one sentence before anything starts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from cluster.core import log
from pixiu.errors import ConfigurationError
from tools import end_of_input
from tools.cli.main import main
from tools.end_of_input import on_end_of_input

UNUSABLE = "--until-eof: standard input is not a pipe, socket or terminal"
CLOSED = "--until-eof: standard input is closed; give a pipe, socket or terminal"
COMMANDS = [["probe", "--watch"], ["probe", "--watch", "--keep", "kept"], ["console", "--port", "0"], ["up"]]


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Take another descriptor for standard input, and close it in the end."""
    taken: list[int] = []

    def take(descriptor: int) -> None:
        taken.append(descriptor)
        monkeypatch.setattr(end_of_input, "STDIN", descriptor)

    yield take
    for descriptor in taken:
        os.close(descriptor)


async def test_what_is_written_is_dropped_and_its_end_is_noticed_once(stdin: Callable[[int], None]) -> None:
    ends, (reading, writing) = asyncio.Queue[None](), os.pipe()
    stdin(reading)
    on_end_of_input(lambda: ends.put_nowait(None))
    os.write(writing, b"x")
    os.close(writing)
    await asyncio.wait_for(ends.get(), 5)
    assert ends.empty()
    assert not asyncio.get_running_loop().remove_reader(reading), "nothing reads any longer"


async def test_no_pipe_is_one_sentence(stdin: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(ConfigurationError, match=UNUSABLE):
        on_end_of_input(print)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigurationError, match=CLOSED):
        on_end_of_input(print)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("closed", [False, True], ids=["null", "closed"])
def test_every_command_says_it_before_anything_starts(
    command: list[str],
    closed: bool,
    stdin: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    stdin(os.open(os.devnull, os.O_RDONLY))
    if closed:
        monkeypatch.setattr(sys, "stdin", None)
    umask = os.umask(0o022)  # `pixiu up` sets its own
    monkeypatch.setattr(log, "configure", lambda *_: None)  # it would hold for the tests that follow
    monkeypatch.setattr(sys, "argv", ["pixiu", *command, "--until-eof"])
    with pytest.raises(SystemExit) as ended:
        main()
    os.umask(umask)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err, shown.out) == (2, f"pixiu: {CLOSED if closed else UNUSABLE}\n", "")
    assert not (folder / "kept").exists()
