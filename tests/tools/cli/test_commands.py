"""The command line: errors in one line, exit codes, JSON, plugins."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from comparison.processes import free_port
from onebox.up import UpOptions, check_ports
from pixiu.client.messages.message import Message
from pixiu.errors import ConfigurationError, InvalidArgument, Offline, PixiuError, Undelivered
from pixiu.ids import RoomID, SnowflakeID
from pixiu.version import __version__
from tools.cli.http import fetch, samples
from tools.cli.main import application
from tools.cli.messages import message_json, message_line
from tools.cli.output import fail, operator, print_anywhere, print_json, visible

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(application(["--version"]), ["--version"])
    assert (result.exit_code, result.output) == (0, f"pixiu {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["send", "hello"], "--room ROOM or --topic TOPIC"),
        (["send", "hello", "--room", "1", "--topic", "a"], "--room ROOM or --topic TOPIC"),
        (["listen"], "--room ROOM or --topic TOPIC"),
        (["status", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
        (["replay", "sample", "--target", "127.0.0.1:1"], "needs the registry"),
        (["probe", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
        (["probe", "--count", "2", "--failures", "3"], "raise --count"),
        (["probe", "--for", "2"], "--for needs --watch"),
        (["replay", "/nowhere/log.jsonl"], "cannot be read"),
        (["replay", "sample", "--align", "users"], "only `rooms` is known"),
        (["replay", "sample", "--speed", "0"], "speed"),
        (["replay", "sample", "--grpc-share", "2"], "grpc_share"),
    ],
)
def test_a_wrong_use_is_one_clear_line_and_exit_code_2(arguments: list[str], word: str) -> None:
    result = runner.invoke(application(arguments), arguments)
    assert result.exit_code == 2
    assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("error", "code"), [(Offline("user 7"), 1), (Undelivered("a signal"), 1), (InvalidArgument("no"), 2)])
def test_an_answer_that_is_no_is_not_taken_for_a_wrong_command(error: PixiuError, code: int) -> None:
    with pytest.raises(typer.Exit) as ended:
        fail(error)
    assert ended.value.exit_code == code


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain", "plain"), ("貔貅 😀", "貔貅 😀"), ("貔\x1b貅", "貔\\x1b貅"), ("a\tb\u202ec", "a\\tb\\u202ec"), ("", "")],
)
def test_characters_that_cannot_be_printed_are_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_output_has_no_raw_control_character_and_goes_into_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, "latin-1"))
    print_anywhere()
    print(message_line(Message(RoomID(42), "a\x1b[2Jb", 7, "café 😀".encode(), SnowflakeID(1), 0, False, 5, b"", 0)))
    print_json({"text": "😀"})
    line, value = printed.getvalue().decode("latin-1").splitlines()
    assert "a\\x1b[2Jb" in line.replace("\\[", "[")
    assert "\x1b" not in line
    assert "café \\U0001f600" in line
    assert json.loads(value) == {"text": "😀"}


def test_a_user_without_a_name_is_named_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert operator().startswith(f"uid-{os.getuid()}@")


def test_ports_that_the_cluster_itself_takes_twice_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="gateway 1 of 2 takes it for MQTT"):
        UpOptions(mqtt_port=19480, zookeeper_port=19481).validate()


def test_a_line_of_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    log.write_text('{"ts_ms":1,"room":"a","user":"b","text":"c"}\n{"ts_ms":2,"room":"a","user":"b","kind":"shout"}\n')
    result = runner.invoke(application(["replay", str(log)]), ["replay", str(log)])
    assert result.exit_code == 2
    assert "chat.jsonl, line 2: 'kind' must be one of msg, action, join, part, nick" in result.stderr


@pytest.mark.slow
def test_an_unreachable_cluster_is_exit_code_2_and_names_the_address() -> None:
    port = free_port()
    result = runner.invoke(
        application(["status", "--json", "--target", f"zk://127.0.0.1:{port}/pubsub"]),
        ["status", "--json", "--target", f"zk://127.0.0.1:{port}/pubsub"],
    )
    assert result.exit_code == 2
    assert f"127.0.0.1:{port}" in result.stderr
    assert json.loads(result.stdout)["error"]["code"] == "REGISTRY_UNAVAILABLE"


def test_commands_of_installed_packages_are_added_and_a_broken_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        EntryPoint("up", "onebox.commands:up", "pixiu.commands"),
        EntryPoint("broken", "no_such_package.commands:run", "pixiu.commands"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "pixiu.commands" else [])
    help_text = runner.invoke(application(["--help"]), ["--help"]).output
    assert "up" in help_text
    assert "broken " not in help_text.split("Commands")[1]
    assert "pixiu broken: not available" in capsys.readouterr().err


def test_a_message_is_shown_without_control_characters() -> None:
    message = Message(RoomID(42), None, 7, b"a\x1b[2Jb [red]\xff", SnowflakeID(1), 0, False, 5, b"", 0)
    line = message_line(message)
    assert "\x1b" not in line
    assert "\\x1b" in line
    assert message_json(message)["hex"] == message.payload.hex()
    assert message_json(message._replace(payload="é".encode()))["text"] == "é"


def test_metrics_pages_are_read_and_other_lines_are_left_out() -> None:
    page = b'# HELP x y\nx_total 3.0\nx{peer="broker:[::1]:7",why="a\\"b"} 1e3\nnot a sample\nx nan?\n'
    assert list(samples(page)) == [("x_total", {}, 3.0), ("x", {"peer": "broker:[::1]:7", "why": 'a\\"b'}, 1000.0)]


async def test_a_page_that_nobody_serves_is_an_os_error() -> None:
    with pytest.raises(OSError):
        await fetch("127.0.0.1", free_port(), "/health")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"brokers": 3}, "--brokers 3"),
        ({"relays": 3}, "--relays 3"),
        ({"proxies": 0}, "--proxies 0"),
        ({"mqtt_port": 65_535, "gateways": 2}, "--mqtt-port"),
        ({"brokers": 128, "broker_replicas": 4}, "at most"),
        ({"settings": ("port=1",)}, "--set port=1"),
    ],
)
def test_wrong_options_of_up_are_named(options: dict[str, int], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        UpOptions(**options).validate()  # type: ignore[arg-type]


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port {port} .*--mqtt-port"):
            check_ports([port])


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["send", "--help"],
        ["listen", "--help"],
        ["presence", "--help"],
        ["status", "--help"],
        ["status", "--target", "zk://127.0.0.1:1/none"],
        ["send", "--room", "42", "text", "--target", "127.0.0.1:1"],
        ["send", "text"],
        ["send", "--nope"],
        ["status", "--nope"],
    ],
    ids=" ".join,
)
def test_help_wrong_use_and_no_cluster_load_no_library_that_they_do_not_need(arguments: list[str]) -> None:
    heavy = ["grpc", "kazoo", "google.protobuf", "pyspark"]
    if arguments[0] != "status":
        heavy.append("rich.console")
    code = (
        "import sys; sys.argv = ['pixiu', *sys.argv[1:]]\n"
        "from tools.cli.command import main\n"
        "try: main()\n"
        f"finally: print('loaded', [name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "loaded []", result.stdout + result.stderr
