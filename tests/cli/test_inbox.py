"""`pixiu inbox` and `pixiu send --mail`: arguments, what people and programs are shown."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pixiu.cli.inbox import Entry, Lane, _take, lane_json, table
from pixiu.cli.main import app
from pixiu.client.message import message_of
from pixiu.ids import msg_id, snowflake
from pixiu.record import Kind, encode
from pixiu.wire.v1 import xiu_pb2

runner = CliRunner()
SENT_MS = 1_750_000_000_000


def record(number: int, body: bytes, lifetime_min: int = 0) -> bytes:
    return encode(Kind.MAIL, 7, body, snowflake(SENT_MS, 1, number), sender=5, lifetime_min=lifetime_min)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["send", "x", "--mail", "--room", "1"], "--mail needs --user"),
        (["send", "x", "--mail", "--user", "7", "--signal"], "--mail needs --user"),
        (["send", "x", "--user", "7", "--to", "8"], "--level and --to need --mail"),
        (["send", "x", "--mail", "--user", "7", "--level", "sure"], "a level is one of"),
        (["inbox", "0"], "a UIN is from 1"),
        (["inbox", "7", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], word: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert word in result.stderr


def test_records_find_their_entries_and_what_is_missing_says_why() -> None:
    entries = [Entry(1, number, msg_id(0, 64, number)) for number in range(1, 5)]
    broken = bytearray(record(4, b"four"))
    broken[-1] ^= 1
    batch = record(1, b"one") + record(3, b"three") + bytes(broken)
    _take(entries, xiu_pb2.FetchReply(batch=batch, codes=["", "GONE", "", ""]))
    assert [entry.code for entry in entries] == ["", "GONE", "", "MALFORMED"]
    assert [entry.message.payload if entry.message else b"" for entry in entries] == [b"one", b"", b"three", b""]
    short = Entry(1, 9, 9)
    _take([short], xiu_pb2.FetchReply(batch=b"\xff\xff\xff\xff", codes=[""]))
    assert short.code == "MALFORMED"


def test_a_page_is_shown_to_people_and_programs() -> None:
    late = SENT_MS + 3_600_000
    entries = [
        Entry(0, 1, msg_id(0, 0, 1), "", message_of(record(1, b"a\x1b[31m"))),
        Entry(0, 2, msg_id(0, 0, 2), "", message_of(record(2, b"b", lifetime_min=1))),
        Entry(0, 3, msg_id(0, 0, 3), "GONE"),
    ]
    assert [entry.expired(late) for entry in entries] == [False, True, False]
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table(entries, late))
    text = captured.get()
    assert "\\x1b[31m" in text
    assert "\x1b[31m" not in text
    assert "expired b" in text
    assert "GONE" in text
    found = lane_json(Lane(0, 0, 0, 3, 0, entries))
    assert found["last"] == 3
    assert [sorted(entry) for entry in found["entries"]] == [  # type: ignore[attr-defined]
        ["expired", "message_id", "msg_id", "sender", "sent_at_ms", "seq", "text"],
        ["expired", "message_id", "msg_id", "sender", "sent_at_ms", "seq", "text"],
        ["code", "msg_id", "seq"],
    ]
