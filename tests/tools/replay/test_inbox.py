"""Messages to users in a replay: the file, the schedule, the bookkeeping."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID, uin_of_name
from tools.load.ledger import Judgement, Ledger
from tools.replay.inbox import Mention, inbox_of, load_mentions, read_mentions, user_of
from tools.replay.log import LogEvent, room_of_name
from tools.replay.plan import Action, make_plan
from tools.replay.run import LogChoice, load_plan

HEAD = "ts_ms,line,room,user,to_user"
ROWS = (HEAD, "1000,4,r,a,b", "1500,5,other,a,b", "2000,6,r,b,c", "9000,7,r,b,c")


def test_an_inbox_is_no_room() -> None:
    for uin in (1, MAX_ID):
        assert user_of(inbox_of(uin)) == uin
    assert user_of(room_of_name("r")) is None


@pytest.mark.parametrize("packed", [False, True])
def test_the_mentions_of_a_time_and_of_some_rooms_are_read(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "mentions.csv"
    data = "\n".join(ROWS).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    assert load_mentions(path, 1000, 2000, {"r"}) == [Mention(1000, 4, "r", "a", "b"), Mention(2000, 6, "r", "b", "c")]


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (("a,b",), "line 1"),
        ((HEAD, "x,4,r,a,b"), "line 2"),
        ((HEAD, "5,4,r,a"), "line 2"),
        ((HEAD, "5,4,r,a,b", "4,4,r,a,b"), "line 3"),
        ((HEAD, "5,4,r,,b"), "line 2"),
        ((HEAD, f"5,4,r,a,{'x' * 300}"), "line 2"),
    ],
)
def test_a_malformed_line_is_named(lines: tuple[str, ...], where: str) -> None:
    with pytest.raises(InvalidArgument, match=where):
        list(read_mentions(iter(lines)))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    for path, data in (
        (tmp_path / "none", None),
        (tmp_path / "bytes", b"\xff\xfe"),
        (tmp_path / "cut", gzip.compress(b"x" * 99)[:-9]),
    ):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(InvalidArgument, match=path.name):
            load_mentions(path, 0, 1, {"r"})


def test_mentions_wait_for_their_users_and_are_owed_to_them_alone() -> None:
    events = [LogEvent(1000, "r", "msg", "a", "hi", "", 1), LogEvent(3000, "r", "msg", "b", "ho", "", 2)]
    plan = make_plan(events, mentions=[Mention(2000, 1, "r", "a", "b"), Mention(2500, 2, "r", "b", "c")])
    assert (plan.messages, plan.chats, plan.expected, plan.users) == (4, 2, 4 + 2, 3)
    steps = plan.rooms[inbox_of(uin_of_name("b"))]
    assert [(step.at_ms, step.action, step.uin, step.number) for step in steps] == [
        (0, Action.JOIN, uin_of_name("b"), -1),
        (1000, Action.SEND, uin_of_name("a"), 2),
    ]
    assert steps[1].text == b"r:1 @b"
    ledger = Ledger()
    inbox, b = inbox_of(uin_of_name("b")), uin_of_name("b")
    ledger.joining(inbox, b, 0)
    ledger.joined(inbox, b)
    payload = ledger.send(2, inbox, uin_of_name("a"), steps[1].text, 10)
    assert ledger.deliver(room_of_name("r"), b, payload, 20)[0] is Judgement.ALIEN
    assert ledger.deliver(inbox, b, payload, 20) == (Judgement.DELIVERED, True)
    assert ledger.deliver(inbox, b, payload, 30)[0] is Judgement.REPEATED


def test_aligned_rooms_have_no_common_time_for_mentions() -> None:
    with pytest.raises(InvalidArgument, match="--align"):
        load_plan(LogChoice(path="sample", align="rooms", mentions="mentions.csv"))
