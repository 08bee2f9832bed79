"""The recorder: what it writes is what it read, and what another recorder wrote is laid between."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.history.checker import check
from tests.history.forgeries import LIMITS
from tests.history.model import play
from tests.history.record import BODIES, History, Send, Sent, load


def test_a_history_comes_back_from_its_file(tmp_path: Path) -> None:
    run = play(2)
    path = tmp_path / "history.jsonl"
    path.write_text("".join(event.line() + "\n" for event in run.history.events))
    again = load([path])
    assert again.events == run.history.events
    assert {type(event.body).__name__ for event in again.events} >= {*BODIES} - {"Acknowledged"}
    assert not check(again, LIMITS)


def test_what_is_recorded_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path=path)
    call = history.invoke("writer", Send(1, 2, (3, 4)))
    history.ok(call, Sent(5, ((3, 1), (4, 9))))
    assert load([path]).events == history.events  # not closed yet, as after a kill
    history.close()


def test_histories_of_several_recorders_are_laid_together(tmp_path: Path) -> None:
    run = play(4)
    paths = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    for number, path in enumerate(paths):
        mine = [event for event in run.history.events if (event.process.startswith("writer")) == bool(number)]
        path.write_text("".join(event.line() + "\n" for event in mine))
    together = load(paths)
    assert [event.at_us for event in together.events] == [event.at_us for event in run.history.events]
    assert not check(together, LIMITS)


@pytest.mark.parametrize("line", ["", "{", '{"at_us":1}', '{"at_us":1,"process":"p","kind":"ok","body":{"is":"Nothing"}}'])
def test_what_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"at_us":1,"process":"p","kind":"ok"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"history.jsonl:2: no event"):
        load([path])


def test_threads_record_in_one_order(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path=path)

    def sender(name: str) -> None:
        for number in range(200):
            history.ok(history.invoke(name, Send(number, 1, (2,))))

    threads = [threading.Thread(target=sender, args=(f"writer-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history.close()
    times = [event.at_us for event in history.events]
    assert times == sorted(times)
    assert len({event.call for event in history.events}) == 800
    assert load([path]).events == history.events
