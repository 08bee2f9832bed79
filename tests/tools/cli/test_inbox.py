"""`pixiu inbox` and `pixiu send --mail`: arguments, what people and programs are shown."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pixiu.client.inbox.dead_letters import DeadLetter
from pixiu.client.messages.message import message_of
from pixiu.client.stores.pages import DeadLetterEntry, DeviceState
from pixiu.client.stores.pages import take as _take
from pixiu.ids import UIN, msg_id, snowflake
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import xiu_pb2
from tools.cli.inbox import InboxEntry, Lane, lane_json, table
from tools.cli.inbox_tables import dead_letter_json, dead_letter_table, device_table, unread_json
from tools.cli.main import application

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
        (["inbox", "list", "0"], "a UIN is from 1"),
        (["inbox", "list", "7", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], word: str) -> None:
    result = runner.invoke(application(arguments), arguments)
    assert result.exit_code == 2
    assert word in result.stderr


def test_records_find_their_entries_and_what_is_missing_says_why() -> None:
    entries = [InboxEntry(1, number, msg_id(0, 64, number)) for number in range(1, 5)]
    broken = bytearray(record(4, b"four"))
    broken[-1] ^= 1
    batch = record(1, b"one") + record(3, b"three") + bytes(broken)
    _take(entries, xiu_pb2.FetchReply(batch=batch, codes=["", "GONE", "", ""]))
    assert [entry.code for entry in entries] == ["", "GONE", "", "MALFORMED"]
    assert [entry.message.payload if entry.message else b"" for entry in entries] == [b"one", b"", b"three", b""]
    short = InboxEntry(1, 9, 9)
    _take([short], xiu_pb2.FetchReply(batch=b"\xff\xff\xff\xff", codes=[""]))
    assert short.code == "MALFORMED"


def test_a_page_is_shown_to_people_and_programs() -> None:
    late = SENT_MS + 3_600_000
    entries = [
        InboxEntry(0, 1, msg_id(0, 0, 1), "", message_of(record(1, b"a\x1b[31m"))),
        InboxEntry(0, 2, msg_id(0, 0, 2), "", message_of(record(2, b"b", lifetime_min=1))),
        InboxEntry(0, 3, msg_id(0, 0, 3), "GONE"),
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
        (["acknowledge", "7", "3", "--device", "x"], "Missing option '--lane'"),
        (["acknowledge", "7", "3", "--lane", "1"], "Missing option '--device'"),
        (["acknowledge", "7", "0", "--lane", "1", "--device", "x"], "UP_TO"),
        (["delete", "7", "3-4"], "Missing option '--lane'"),
        (["delete", "7", "four", "--lane", "1"], "range of InboxSeqs"),
        (["delete", "7", "4-3", "--lane", "1"], "starts at 1 or above"),
        (["delete", "7", "0-3", "--lane", "1"], "starts at 1 or above"),
        (["delete", "7", "--lane", "1", "--", "-3"], "range of InboxSeqs"),
        (["dead", "7", "--target", "127.0.0.1:1"], "zk://HOST:PORT/ROOT"),
    ],
)
def test_what_does_not_go_together_is_said(arguments: list[str], word: str) -> None:
    result = runner.invoke(application(["inbox", *arguments]), ["inbox", *arguments])
    assert result.exit_code == 2, result.output
    assert word in result.stderr


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        (["7"], "list 7"),
        (["7", "--lane", "1", "--after", "3"], "list 7"),
        (["7", "--unread", "--json"], "unread 7"),
        (["--unread", "7"], "unread 7"),
        (["7", "--acknowledge", "3", "--device", "x", "--lane", "1"], "acknowledge 7 UP_TO --lane L --device NAME"),
        (["7", "--drop-device", "2"], "drop-device 7 NUMBER"),
        (["7", "--delete", "3-4", "--lane", "1"], "delete 7 FROM-TO --lane L"),
        (["7", "--dead-letters"], "dead 7"),
        (["7", "--resend=all"], "resend 7 ID|all"),
        (["7", "--drop", "all", "--yes"], "drop 7 ID|all"),
        (["lsit", "7"], "list 7"),
    ],
)
def test_a_command_line_of_before_there_were_subcommands_is_told_the_one_to_use(arguments: list[str], use: str) -> None:
    result = runner.invoke(application(["inbox", *arguments]), ["inbox", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.endswith(f"it takes a subcommand: pixiu inbox {use}\n")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["delete", "7", "3-9", "--lane", "1"], ["drop", "7", "all"]])
def test_nothing_is_deleted_by_somebody_who_says_no(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("it was not to get there")

    monkeypatch.setattr("tools.cli.inbox._run", reached)
    result = runner.invoke(application(["inbox", *arguments]), ["inbox", *arguments], input="n\n")
    assert result.exit_code == 1
    assert "Delete" in result.stderr
    assert "deleted" not in result.stdout


def test_every_subcommand_shows_what_the_inbox_has(monkeypatch: pytest.MonkeyPatch) -> None:
    phone = DeviceState(2, 7, "", SENT_MS // 1000, counts=True, up_to=3, unread=4)
    lanes = [Lane(0), Lane(1, last=7, readable=7, devices=[phone])]
    monkeypatch.setattr("tools.cli.inbox._run", lambda *_: lanes)
    shown = runner.invoke(application(["inbox", "unread", "7"]), ["inbox", "unread", "7"]).stdout
    assert shown == (
        "lane 0: 0 can be read, the newest is number 0; unread: no devices yet\n"
        "lane 1: 7 can be read, the newest is number 7; unread: device 2: 4\n"
    )
    monkeypatch.setattr("tools.cli.inbox._run", lambda *_: [Lane(0), Lane(1)])
    assert runner.invoke(application(["inbox", "devices", "7"]), ["inbox", "devices", "7"]).stdout == "7 has no devices yet\n"


def test_devices_and_dead_letters_are_shown_to_people_and_programs() -> None:
    phone = DeviceState(2, 7, "", SENT_MS // 1000, counts=True, up_to=3, unread=4)
    desk = DeviceState(3, 8, "desk\x1b[31m", 0, counts=False, up_to=0, unread=7)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(device_table([Lane(0, devices=[phone, desk]), Lane(1, devices=[phone, desk])]))
    lines = captured.get().splitlines()
    assert "000000000007" in lines[1]
    assert "desk\\x1b[31m" in lines[2]
    assert "not waited for" in lines[2]
    assert unread_json(Lane(1, last=7, readable=7, devices=[phone]))["devices"] == [
        {"device": 2, "name": "", "device_id": "000000000007", "seen_s": SENT_MS // 1000, "counts": True, "up_to": 3, "unread": 4}
    ]
    letter = DeadLetter(UIN(7), 5, 6, 1, 3, 1 << 62, "it\x1b broke", b"", 70)
    dead = DeadLetterEntry(InboxEntry(1, 4, 0xAB, message=message_of(record(1, b"body"))), letter, message_of(record(1, b"x\x1b")))
    unread = DeadLetterEntry(InboxEntry(1, 5, 0xAC, "MALFORMED"))
    with console.capture() as captured:
        console.print(dead_letter_table([dead, unread]))
    text = captured.get()
    assert "\x1b" not in text
    assert "00000000000000ab" in text
    assert "MALFORMED" in text
    found = dead_letter_json(dead)
    assert (found["id"], found["reason"], found["attempts"]) == ("00000000000000ab", "it\x1b broke", 3)
    assert dead_letter_json(unread) == {"id": "00000000000000ac", "code": "MALFORMED"}
