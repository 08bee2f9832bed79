"""`pixiu inbox` and `pixiu send --mail`: arguments, what people and programs are shown."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pixiu.cli.inbox import Entry, Lane, lane_json, table
from pixiu.cli.inbox_tables import dead_letter_json, dead_letter_table, device_table, unread_json
from pixiu.cli.main import application
from pixiu.client.dead_letters import DeadLetter
from pixiu.client.inbox_pages import DeadLetterEntry, DeviceState
from pixiu.client.inbox_pages import take as _take
from pixiu.client.message import message_of
from pixiu.ids import UIN, msg_id, snowflake
from pixiu.wire.record import Kind, encode
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
    result = runner.invoke(application(), arguments)
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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--unread", "--dead-letters"], "at a time"),
        (["--acknowledge", "3", "--device", "x"], "--lane 0 or --lane 1"),
        (["--delete", "3-4"], "--lane 0 or --lane 1"),
        (["--acknowledge", "3", "--lane", "1"], "--device NAME"),
        (["--delete", "four", "--lane", "1"], "range of InboxSeqs"),
        (["--delete", "4-3", "--lane", "1"], "range from 1 on"),
        (["--delete", "0-3", "--lane", "1"], "range from 1 on"),
        (["--delete", "-3", "--lane", "1"], "range of InboxSeqs"),
        (["--dead-letters", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(arguments: list[str], word: str) -> None:
    result = runner.invoke(application(), ["inbox", "7", *arguments])
    assert result.exit_code == 2, result.output
    assert word in result.stderr


@pytest.mark.parametrize("arguments", [["--delete", "3-9", "--lane", "1"], ["--drop", "all"]])
def test_nothing_is_deleted_by_somebody_who_says_no(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("it was not to get there")

    monkeypatch.setattr("pixiu.cli.inbox._run", reached)
    result = runner.invoke(application(), ["inbox", "7", *arguments], input="n\n")
    assert result.exit_code == 1
    assert "Delete" in result.stderr
    assert "deleted" not in result.stdout


def test_devices_and_dead_letters_are_shown_to_people_and_programs() -> None:
    phone = DeviceState(2, b"\x00\x00\x00\x00\x00\x07", SENT_MS // 1000, counts=True, up_to=3, unread=4)
    desk = DeviceState(3, b"\0\0desk", 0, counts=False, up_to=0, unread=7)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(device_table([Lane(0, devices=[phone, desk]), Lane(1, devices=[phone, desk])]))
    lines = captured.get().splitlines()
    assert "000000000007" in lines[1]
    assert "00006465736b" in lines[2]
    assert "not waited for" in lines[2]
    assert unread_json(Lane(1, last=7, readable=7, devices=[phone]))["devices"] == [
        {"device": 2, "client_id": "000000000007", "seen_s": SENT_MS // 1000, "counts": True, "up_to": 3, "unread": 4}
    ]
    letter = DeadLetter(UIN(7), 5, 6, 1, 3, 1 << 62, "it\x1b broke", b"", 70)
    dead = DeadLetterEntry(Entry(1, 4, 0xAB, message=message_of(record(1, b"body"))), letter, message_of(record(1, b"x\x1b")))
    unread = DeadLetterEntry(Entry(1, 5, 0xAC, "MALFORMED"))
    with console.capture() as captured:
        console.print(dead_letter_table([dead, unread]))
    text = captured.get()
    assert "\x1b" not in text
    assert "00000000000000ab" in text
    assert "MALFORMED" in text
    found = dead_letter_json(dead)
    assert (found["id"], found["reason"], found["attempts"]) == ("00000000000000ab", "it\x1b broke", 3)
    assert dead_letter_json(unread) == {"id": "00000000000000ac", "code": "MALFORMED"}
