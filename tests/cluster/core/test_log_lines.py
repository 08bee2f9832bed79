"""Log lines: readable by programs or people, never forged, never a payload."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import LineTooLong
from google.protobuf.message import DecodeError

from cluster.core import log
from pixiu.wire.v1 import wire_pb2


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    log._current.set(None)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_json_lines_carry_identity_level_time_and_values() -> None:
    stream = io.StringIO()
    log.configure("json", "info", stream)
    identity = log.Identity(role="router", partition=1)
    identity.bind(replica=7)
    log.act_as(identity)
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


def test_a_call_that_was_cut_off_is_no_error_of_a_library() -> None:
    """gRPC reports each that is open when the loop ends, with a traceback."""
    stream = io.StringIO()
    log.configure("json", "info", stream)
    for cause in (asyncio.CancelledError(), ValueError("broken")):
        try:
            raise cause
        except BaseException:
            logging.getLogger("grpc._cython.cygrpc").exception("not handled")
    assert [json.loads(line)["exception"].splitlines()[-1] for line in lines(stream)] == ["ValueError: broken"]


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


def test_what_a_caller_sent_that_nobody_can_read_is_one_line_without_its_words() -> None:
    out = io.StringIO()
    log.configure("json", "info", out)
    for _ in range(3):
        try:
            b"Bearer secret\xff".decode()
        except UnicodeDecodeError:
            logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"Bearer secret\xff")
        try:
            wire_pb2.ClusterReply.FromString(b"\xff")
        except DecodeError:
            logging.getLogger("grpc._cython.cygrpc").exception("Unexpected [DecodeError] raised by servicer method [/x/y]")
        try:
            raise LineTooLong("secret", "1")
        except LineTooLong:
            logging.getLogger("aiohttp.server").exception("Error handling request from 127.0.0.1")
        try:
            raise ClientConnectionResetError("Cannot write to closing transport")
        except ClientConnectionResetError:
            logging.getLogger("aiohttp.server").exception("Error handling request from 127.0.0.1")
    logging.getLogger("grpc._cython.cygrpc").error("broken")
    found = [json.loads(line) for line in lines(out)]
    assert [line["event"] for line in found] == ["call_unreadable"] * 4 + ["library"]
    assert "secret" not in out.getvalue()
    assert "Traceback" not in out.getvalue()


async def test_each_role_of_a_loop_has_its_identity_in_its_tasks_timers_and_threads() -> None:
    stream = io.StringIO()
    log.configure("json", "debug", stream)
    loop, made = asyncio.get_running_loop(), {}

    async def live(role: str) -> None:
        log.act_as(log.Identity(role=role))
        made[role] = log.get_logger()
        log.get_logger().info("task")
        done = asyncio.Event()

        def timer() -> None:
            log.get_logger().info("timer")
            done.set()

        loop.call_later(0.002, timer)
        await done.wait()
        await asyncio.to_thread(lambda: logging.getLogger("kazoo.client").warning("in a thread"))

    await asyncio.gather(live("gateway"), live("xiu"))
    found = [json.loads(line) for line in lines(stream)]
    assert sorted((line["event"], line["role"]) for line in found) == [
        (event, role) for event in ("library", "task", "timer") for role in ("gateway", "xiu")
    ]
    log.act_as(log.Identity(role="gateway"))
    made["xiu"].info("a call that the gateway makes")
    assert json.loads(lines(stream)[-1])["role"] == "xiu", "a logger remembers whose it is"
    log.get_logger().info("not in any role's logger")
    assert json.loads(lines(stream)[-1])["role"] == "gateway"


def test_each_role_of_a_process_has_its_log_level_and_its_limits() -> None:
    stream = io.StringIO()
    log.configure("json", "debug", stream)
    quiet, loud = log.Identity("warning", role="quiet"), log.Identity("debug", role="loud")
    for identity in (quiet, loud):
        log.act_as(identity)
        log.get_logger().debug("debug")
        log.get_logger().warning("warning")
        assert [log.once_per(3600, "a limit of each role") for _ in range(2)] == [True, False]
    assert [(line["role"], line["event"]) for line in map(json.loads, lines(stream))] == [
        ("quiet", "warning"), ("loud", "debug"), ("loud", "warning"),
    ]  # fmt: skip
    loud.set_level("error")
    log.get_logger().warning("no longer")
    quiet.set_level("debug")
    log.act_as(quiet)
    log.get_logger().debug("now")
    assert [json.loads(line)["event"] for line in lines(stream)[3:]] == ["now"]
