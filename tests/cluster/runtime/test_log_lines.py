"""Log lines: readable by programs or people, never forged, never a payload."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from cluster.runtime import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    log._identity.clear()
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_json_lines_carry_identity_level_time_and_values() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    log.bind_identity(role="router", partition=1)
    log.bind_identity(replica=7)
    log.get_logger().info(log.RUNNING, port=5, ratio=0.5, ok=True, nothing=None)
    found = json.loads(stream.getvalue())
    assert found.pop("timestamp").endswith("Z")
    assert found == {
        "level": "info",
        "event": "running",
        "role": "router",
        "partition": 1,
        "replica": 7,
        "port": 5,
        "ratio": 0.5,
        "ok": True,
        "nothing": None,
    }


def test_levels_below_the_configured_one_are_silent() -> None:
    stream = io.StringIO()
    log.configure("json", "warning", stream)
    log.get_logger().info(log.RUNNING)
    log.get_logger().warning(log.DRAINING)
    assert [json.loads(line)["event"] for line in lines(stream)] == ["draining"]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_value_with_control_characters_stays_on_one_line_and_cannot_forge_another(log_format: str) -> None:
    stream = io.StringIO()
    log.configure(log_format, "info", stream)
    log.get_logger().info("event\nname", client="x\n2026 error forged\x1b[31m\x7f\u2028\u202e", deep={"a": ["b\r\nc"]})
    assert len(lines(stream)) == 1
    written = stream.getvalue()
    assert all(char.isprintable() for char in written.rstrip("\n"))
    assert "forged" in written


def test_bytes_show_their_length_only() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    log.get_logger().info(log.RUNNING, body=b"payload", nested={"body": b"payload"}, view=memoryview(b"payload"))
    assert "payload" not in stream.getvalue()
    assert "<7 bytes>" in stream.getvalue()


def test_long_values_are_cut() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    log.get_logger().info(log.RUNNING, text="y" * 100_000)
    assert len(json.loads(stream.getvalue())["text"]) == log.MAX_VALUE + 1


def test_console_lines_quote_what_has_spaces_and_show_tracebacks_below() -> None:
    stream = io.StringIO()
    log.configure("console", "info", stream)
    try:
        raise ValueError("bad \x1b thing")
    except ValueError:
        log.get_logger().error(log.CRASHED, text='two "words"', empty="", exc_info=True)
    first, *rest = lines(stream)
    assert "error   crashed" in first
    assert "text=\"two 'words'\"" in first
    assert 'empty=""' in first
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: bad \\u001b thing"


def test_library_warnings_come_through_and_their_chatter_does_not() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    logging.getLogger("kazoo.client").info("chatter")
    logging.getLogger("kazoo.client").warning("lost %s\n", "connection")
    logging.getLogger("other").error("broken %d", "x")
    found = [json.loads(line) for line in lines(stream)]
    assert [(line["event"], line["level"], line["logger"], line["text"]) for line in found] == [
        ("library", "warning", "kazoo.client", "lost connection\\u000a"),
        ("library", "error", "other", "broken %d"),
    ]


def test_once_per_key_and_interval() -> None:
    once = log.OncePer()
    assert once.allow(60, "a", 0.0)
    assert not once.allow(60, "a", 59.9)
    assert once.allow(60, "b", 59.9)
    assert once.allow(60, "a", 60.0)
    assert not once.allow(60, "a", 61.0)


def test_once_per_forgets_the_oldest_key_beyond_its_limit() -> None:
    once = log.OncePer()
    for number in range(log.MAX_KEYS + 1):
        assert once.allow(60, number, 0.0)
    assert not once.allow(60, 1, 1.0)
    assert once.allow(60, 0, 1.0)


def test_the_process_wide_limiter_lets_one_through() -> None:
    assert [log.once_per(3600, "test_the_process_wide_limiter") for _ in range(3)] == [True, False, False]
