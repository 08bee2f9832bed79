"""The availability: counts by day and hour, bounded, whole over a restart."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path as FilePath

import pytest
from rich.console import Console

from pixiu.errors import ConfigurationError, MalformedData
from tools.probe import keep
from tools.probe.availability import DAY_S, DAYS, HOUR_S, HOURS, MAX_HOPS, MAX_PATHS, NO_PATH, OTHERS, Availability
from tools.probe.availability_command import _render
from tools.probe.keep import Keeper
from tools.probe.paths import Member, Path, PathState, Prober

NOW = 20_000 * DAY_S + 12 * HOUR_S


def path(replica: int, address: str = "127.0.0.1:1") -> Path:
    return Path(Member("proxy", -1, 0, 1, address), Member("broker", 0, replica, 2, address), Member("gateway", -1, 1, 3, address))


def test_a_share_is_of_what_arrived_and_what_failed() -> None:
    found = Availability()
    found.count("a", 99, 1, NOW)
    found.count("b", 0, 100, NOW)
    report = found.report(NOW)
    assert report["total"] == {"arrived": 99, "failed": 101, "share": 0.495}
    assert [(each["path"], each["share"]) for each in report["paths"]] == [("b", 0.0), ("a", 0.99)]
    assert Availability().report(NOW)["total"]["share"] is None


def test_a_prober_is_counted_once_and_again_when_its_path_comes_back() -> None:
    prober, found = Prober(3, 2.0), Availability()
    prober.paths[path(0)] = PathState(arrived=5, failed=1)
    found.note(prober, NOW)
    found.note(prober, NOW)
    assert found.report(NOW)["total"]["arrived"] == 5
    prober.paths[path(0)].arrived = 7
    found.note(prober, NOW)
    prober.paths = {path(0, "127.0.0.1:2"): PathState(arrived=2)}
    found.note(prober, NOW)
    report = found.report(NOW)
    assert report["paths"] == [{"path": "proxy 0 > broker 0/0 > gateway 1", "arrived": 9, "failed": 1, "share": 0.9}]
    found.begin()
    prober.paths = {path(0): PathState(arrived=2)}
    found.note(prober, NOW)
    assert found.report(NOW)["total"]["arrived"] == 11


def test_no_path_at_all_is_a_failure() -> None:
    found = Availability()
    found.note(Prober(3, 2.0), NOW)
    assert found.report(NOW)["paths"] == [{"path": NO_PATH, "arrived": 0, "failed": 1, "share": 0.0}]


def test_thirty_days_stay() -> None:
    found = Availability()
    for day in range(DAYS + 5):
        found.count("a", 1, 0, NOW + day * DAY_S)
    end = NOW + (DAYS + 4) * DAY_S
    report = found.report(end)
    assert (report["total"]["arrived"], len(report["days"])) == (DAYS, DAYS)
    assert found.report(end + DAYS * DAY_S)["total"]["arrived"] == 0
    for hour in range(HOURS + 5):
        found.count("a", 1, 0, NOW + hour * HOUR_S)
    assert len(found.report(NOW + (HOURS + 4) * HOUR_S)["hours"]) == HOURS


def test_what_is_kept_is_bounded() -> None:
    found = Availability()
    for number in range(MAX_PATHS + 50):
        found.count(str(number), 1, 0, NOW)
    report = found.report(NOW)
    assert len(report["paths"]) == MAX_PATHS + 1
    assert {each["path"]: each["arrived"] for each in report["paths"]}[OTHERS] == 50
    for number in range(MAX_HOPS + 5):
        found.note_hops({str(number): 1})
    assert len(found.report(NOW)["hops"]) == MAX_HOPS


def test_times_of_hops_are_a_histogram() -> None:
    found = Availability()
    for time_us in (-5, 250, 251, 3_000_000):
        found.note_hops({"total": time_us})
    (hop,) = found.report(NOW)["hops"]
    assert (hop["count"], hop["sum_s"]) == (4, 3.000501)
    buckets = hop["buckets"]
    assert (buckets["0.00025"], buckets["0.0005"], buckets["2.5"], buckets["+Inf"]) == (2, 3, 3, 4)


def test_it_is_the_same_after_a_restart() -> None:
    found = Availability()
    found.count("a", 3, 1, NOW)
    found.note_hops({"total": 700})
    again = Availability.restored(json.loads(json.dumps(found.saved())))
    assert again.report(NOW) == found.report(NOW)


@pytest.mark.parametrize(
    "saved", [None, {}, [], {"version": 9}, {"version": 1, "days": 1}, {"version": 1, "days": {"x": {}}}], ids=str
)
def test_what_cannot_be_restored_is_said(saved: object) -> None:
    with pytest.raises(MalformedData):
        Availability.restored(saved)


def test_a_file_keeps_it(tmp_path: FilePath) -> None:
    file, prober = tmp_path / "folder" / "availability.json", Prober(3, 2.0)
    prober.paths[path(0)] = PathState(arrived=4)
    keeper = Keeper(file)
    keeper.watch(prober)
    prober.on_hops({"total": 5})
    keeper.note(prober)
    keeper.note_no_path()
    keeper.save()
    Keeper(file).save()
    report = json.loads(file.read_text())["report"]
    assert (report["total"]["arrived"], report["total"]["failed"], report["hops"][0]["count"], report["alarms"]) == (4, 1, 1, [])
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""), ("{", ""), ("[" * 100_000, ""), ("[]", ""), ('{"a": 1}', ""),
        ('{"saved": 1}', " (other fields than those that are saved)"),
        ('{"saved": {"version": 9}}', " (version 9, and this one reads 1)"),
    ],
    ids=["empty", "half", "deep", "list", "other", "fields", "version"],
)  # fmt: skip
def test_a_wrong_file_is_called_so(text: str, why: str, tmp_path: FilePath) -> None:
    file = tmp_path / "notes"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Keeper(file)
    assert str(caught.value) == f"{file}: holds no availability of `pixiu probe`{why}; name another file, or move it away"
    assert file.read_text() == text


def test_a_full_disk_is_one_line_and_what_was_counted_is_written_later(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: FilePath, _: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(keep, "WRITE_S", 0.0)
    file = tmp_path / "availability.json"
    keeper = Keeper(file)
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(FilePath, "write_text", full)
            keeper.note_no_path()
            keeper.alarm([])
            why = f"{file}: the availability cannot be written there: No space left on device"
            assert capsys.readouterr().err == f"{why}; it is kept in memory, and written when that works again\n"
            assert [each.name for each in tmp_path.iterdir()] == [file.name]
        keeper.note_no_path()
    assert json.loads(file.read_text())["report"]["total"]["failed"] == 4
    monkeypatch.setattr(FilePath, "write_text", full)
    with pytest.raises(ConfigurationError, match="cannot be written there"):
        Keeper(file)
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_before_the_first_count_there_are_no_probes_yet() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(_render({**Availability().report(NOW), "alarms": []}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("availability, 0 of 30 days: no probes yet, as of 2024-")
