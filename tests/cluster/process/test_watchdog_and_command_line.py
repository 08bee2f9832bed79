"""The watchdog of the event loop, and the command line that all roles share."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.process.watchdog import Watchdog
from cluster.settings.command import parse
from cluster.settings.options import RoleOptions
from pixiu.errors import ConfigurationError


class Heard:
    def __init__(self) -> None:
        self.stalls: list[tuple[float, str]] = []
        self.back = asyncio.Event()
        self.lags: list[float] = []

    def stalled(self, seconds: float, stack: str) -> None:
        self.stalls.append((seconds, stack))

    def watchdog(self, limit_s: float) -> Watchdog:
        return Watchdog(limit_s, self.stalled, self.back.set, self.lags.append)


async def test_a_loop_that_hangs_is_told_once_with_its_stack_and_then_that_it_is_back() -> None:
    heard = Heard()
    watchdog = heard.watchdog(0.2)
    watchdog.start()

    def hang_here() -> None:
        until = time.monotonic() + 60
        while not heard.stalls and time.monotonic() < until:
            time.sleep(0.01)

    await asyncio.sleep(0)
    hang_here()
    await asyncio.wait_for(heard.back.wait(), 20)
    watchdog.stop()
    [(seconds, stack)] = heard.stalls
    assert seconds > 0.2
    assert "hang_here" in stack
    assert watchdog.stalls == 1
    assert max(heard.lags) > 0.1


async def test_a_process_that_was_stopped_as_a_whole_gives_its_loop_a_chance_first() -> None:
    heard = Heard()
    watchdog = heard.watchdog(100.0)
    watchdog.start()
    now = time.monotonic()
    watchdog.look(now + 5000)
    assert heard.stalls == []
    for step in range(1, 110):
        watchdog.look(now + 5000 + step)
    watchdog.stop()
    assert len(heard.stalls) == 1
    assert heard.stalls[0][0] > 100


async def test_a_stopped_watchdog_tells_nothing() -> None:
    heard = Heard()
    watchdog = heard.watchdog(100.0)
    watchdog.start()
    watchdog.stop()
    now = time.monotonic()
    for step in range(300):
        watchdog.look(now + step)
    assert heard.stalls == []


def test_config_and_set_are_read() -> None:
    command = parse("proxy", RoleOptions, ["--config", "f.toml", "--set", "port=5", "--set", "registry=zk://a:1/x=y"])
    assert (command.config, command.show_example) == ("f.toml", False)
    assert command.overrides == {"port": "5", "registry": "zk://a:1/x=y"}


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("prot", '--set prot: must be KEY=VALUE; there is no option "prot". Did you mean port?'),
        ("port", "--set port: must be port=VALUE"),
    ],
)
def test_set_without_a_value_is_told(argument: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("proxy", RoleOptions, ["--set", argument])
    assert str(caught.value).startswith(text)


def test_set_twice_for_one_key_is_told() -> None:
    with pytest.raises(ConfigurationError, match="--set port: given twice"):
        parse("proxy", RoleOptions, ["--set", "port=1", "--set", "port=2"])


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("proxy", RoleOptions, ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "  session_timeout_ms = 10000\n      Milliseconds after which ZooKeeper removes a silent process." in text
    assert "[cluster]" in text


def test_an_unknown_argument_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("proxy", RoleOptions, ["--confg", "x"])
    assert caught.value.code == 2
    assert "--confg" in capsys.readouterr().err
