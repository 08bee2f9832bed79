"""The chat log's format: what is read, what is refused and how it is said."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ROOM, uin_of_name
from tools.replay.log import MAX_LINE_BYTES, Names, align_rooms, load_log, parse_line, read_events, room_of_name


def lines(*rows: dict[str, object]) -> io.BytesIO:
    return io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())


def message(ts_ms: int, room: str = "r", user: str = "u", **more: object) -> dict[str, object]:
    return {"ts_ms": ts_ms, "room": room, "user": user, "text": f"at {ts_ms}", **more}


def test_a_line_without_kind_is_a_message() -> None:
    event = parse_line(b'{"ts_ms":5,"room":"a","user":"b","text":"\xc3\xa9"}', 3)
    assert (event.ts_ms, event.room, event.kind, event.user, event.text, event.line) == (5, "a", "msg", "b", "é", 3)


def test_every_kind_is_read() -> None:
    rows = [
        {"ts_ms": 1, "room": "a", "kind": "join", "user": "b"},
        {"ts_ms": 2, "room": "a", "kind": "action", "user": "b", "text": "waves"},
        {"ts_ms": 3, "room": "a", "kind": "nick", "user": "b", "to": "c"},
        {"ts_ms": 4, "room": "a", "kind": "part", "user": "c"},
    ]
    assert [event.kind for event in read_events(lines(*rows))] == ["join", "action", "nick", "part"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"room":"a","user":"b","text":""}', "ts_ms"),
        (b'{"ts_ms":true,"room":"a","user":"b","text":""}', "ts_ms"),
        (b'{"ts_ms":-1,"room":"a","user":"b","text":""}', "ts_ms"),
        (b'{"ts_ms":1,"user":"b","text":""}', "room"),
        (b'{"ts_ms":1,"room":"a","user":"","text":""}', "user"),
        (b'{"ts_ms":1,"room":"a","user":"\\ud800","text":""}', "user"),
        (b'{"ts_ms":1,"room":"a","user":"b"}', "text"),
        (b'{"ts_ms":1,"room":"a","user":"b","text":7}', "text"),
        (b'{"ts_ms":1,"room":"a","user":"b","kind":"quit"}', "msg, action, join, part, nick"),
        (b'{"ts_ms":1,"room":"a","user":"b","kind":"nick"}', "to"),
        (b"\xff\xfe", "is not text"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (MAX_LINE_BYTES + 1), "longer than"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(line: bytes, word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"chat\.jsonl, line 7: ") as caught:
        parse_line(line, 7, "chat.jsonl")
    assert word in str(caught.value)


@given(st.binary(max_size=200))
def test_random_bytes_are_an_event_or_a_clear_error(data: bytes) -> None:
    try:
        event = parse_line(data, 1)
    except InvalidArgument:
        return
    assert event.room


def test_a_line_that_goes_back_in_time_is_refused_with_its_number() -> None:
    with pytest.raises(InvalidArgument, match="line 3: 'ts_ms' goes back from 20 to 19"):
        list(read_events(lines(message(10), message(20), message(19))))


def test_a_line_over_the_limit_is_refused_without_reading_it_whole() -> None:
    stream = io.BytesIO(b'{"ts_ms":1,"text":"' + b"x" * (3 * MAX_LINE_BYTES))
    with pytest.raises(InvalidArgument, match="line 1: longer"):
        list(read_events(stream))
    assert stream.tell() == MAX_LINE_BYTES + 1


def test_rooms_keeps_the_first_rooms_and_limit_counts_the_kept_lines() -> None:
    log = [message(1, "a"), message(2, "b"), message(3, "c"), message(4, "a"), message(5, "b")]
    assert [event.room for event in read_events(lines(*log), rooms=2)] == ["a", "b", "a", "b"]
    assert [event.ts_ms for event in read_events(lines(*log), rooms=2, limit=3)] == [1, 2, 4]


def test_gzip_and_plain_files_are_told_by_their_bytes(tmp_path: Path) -> None:
    data = lines(message(1), message(2)).getvalue()
    plain, packed = tmp_path / "plain.gz", tmp_path / "packed.jsonl"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    assert load_log(plain) == load_log(packed)
    packed.write_bytes(gzip.compress(data)[:-12])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_log(packed)
    with pytest.raises(InvalidArgument, match="No such file"):
        load_log(tmp_path / "absent")


def test_align_rooms_starts_every_room_at_zero_and_keeps_each_order() -> None:
    log = [message(100, "a"), message(100, "a"), message(900, "b"), message(950, "a"), message(950, "b")]
    aligned = align_rooms(read_events(lines(*log)))
    assert [(event.ts_ms, event.room, event.line) for event in aligned] == [
        (0, "a", 1),
        (0, "a", 2),
        (0, "b", 3),
        (50, "b", 5),
        (850, "a", 4),
    ]


def test_ids_are_stable_and_in_range() -> None:
    names = Names()
    assert names.room("DataScience") == room_of_name("DataScience") == Names().room("DataScience")
    assert 0 < names.room("x") <= MAX_ROOM
    assert names.user("u00001") == uin_of_name("u00001")
    assert names.room_names[names.room("DataScience")] == "DataScience"


def test_two_users_with_one_uin_are_refused() -> None:
    names = Names()
    names.user("7")
    with pytest.raises(InvalidArgument, match="one UIN"):
        names.user("007")
