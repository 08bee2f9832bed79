"""The files of traces: complete ones never change, all are bounded, a full disk is counted and passes."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.delivery import trace_files
from gateway.delivery.trace_files import TraceFiles, TraceWriter, open_traces
from pixiu.errors import ConfigurationError
from pixiu.wire.record import Kind, encode
from pixiu.wire.trace import Hop, Stamp, as_traced, with_stamp
from tests.support.clock import Clock


def trace(number: int) -> bytes:
    return with_stamp(as_traced(encode(Kind.ROOM, 42, b"secret", number)), Stamp(Hop.GATEWAY, 0, 1, 2, 3))


def files(folder: Path, clock: Clock | None = None, file_bytes: int = 1 << 20, max_files: int = 100, name: str = "g") -> TraceFiles:
    return TraceFiles(folder, name, file_bytes=file_bytes, max_files=max_files, file_s=60.0, clock_ms=clock or Clock(1_000))


def complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("traces-*.jsonl"))


def numbers(folder: Path) -> list[int]:
    lines = [line for path in complete(folder) for line in path.read_text().splitlines()]
    return [json.loads(line)["snowflake_id"] for line in lines]


def test_traces_are_read_when_their_file_is_complete(tmp_path: Path) -> None:
    written = files(tmp_path / "deep" / "folder")
    written.write([trace(1), trace(2)])
    assert complete(tmp_path / "deep" / "folder") == []
    written.complete()
    assert numbers(tmp_path / "deep" / "folder") == [1, 2]
    text = complete(tmp_path / "deep" / "folder")[0].read_text()
    assert "secret" not in text
    assert json.loads(text.splitlines()[0]) == {
        "snowflake_id": 1,
        "kind": "room",
        "key": 42,
        "stamps": [{"role": "gateway", "partition": 0, "replica": 1, "in_us": 2, "out_us": 3}],
    }


def test_a_file_is_complete_when_it_is_large_or_old(tmp_path: Path) -> None:
    clock = Clock(1_000)
    written = files(tmp_path, clock, file_bytes=1000)
    written.write([trace(number) for number in range(30)])
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    before = len(complete(tmp_path))
    assert before > 2
    written.look()
    assert len(complete(tmp_path)) == before
    clock.now += 60_000
    written.look()
    assert numbers(tmp_path) == list(range(30))
    assert len(list(tmp_path.iterdir())) == before + 1


def test_the_oldest_files_go_whoever_wrote_them(tmp_path: Path) -> None:
    clock = Clock(1_000)
    for number in range(10):
        clock.now += 1
        written = files(tmp_path, clock, max_files=3, name=f"g{number}")
        written.write([trace(number)])
        written.complete()
    assert numbers(tmp_path) == [7, 8, 9]


def test_what_a_killed_gateway_left_is_completed_without_its_torn_line(tmp_path: Path) -> None:
    alive = files(tmp_path, name="alive")
    alive.write([trace(5)])
    killed = tmp_path / ".traces-0000000000500-dead-000001.jsonl"
    killed.write_bytes(json.dumps({"snowflake_id": 77}).encode() + b'\n{"snowf')
    (tmp_path / ".traces-0000000000501-dead-000002.jsonl").write_bytes(b"")
    following = files(tmp_path, name="next")
    assert numbers(tmp_path) == [77]
    following.complete()
    alive.complete()
    assert numbers(tmp_path) == [77, 5]


def test_a_malformed_trailer_is_counted(tmp_path: Path) -> None:
    written = files(tmp_path)
    written.write([trace(1)[:-1] + b"\xc8", trace(2)])
    written.complete()
    assert (written.malformed, written.lines, numbers(tmp_path)) == (1, 1, [2])


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"gateway\.trace_dir = .*file"):
        files(tmp_path / "file")


def test_without_a_folder_nothing_is_kept() -> None:
    assert open_traces("", "g", 1, 1, 1.0) is None


class FullDisk:
    """A file that takes some bytes of a write and then nothing, until the disk has space again."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: memoryview) -> int:
        if self.full:
            self.file.write(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))


@pytest.mark.parametrize("torn", [b"", b"x" * 10, b"x" * 200_000])
def test_a_torn_line_may_be_long(torn: bytes, tmp_path: Path) -> None:
    line = b'{"snowflake_id":1}\n'
    (tmp_path / ".traces-0000000000500-dead-000001.jsonl").write_bytes(line + torn)
    (tmp_path / ".traces-0000000000501-dead-000001.jsonl").write_bytes(torn)
    following = files(tmp_path)
    assert [path.read_bytes() for path in complete(tmp_path)] == [line]
    following.complete()


async def test_a_full_disk_is_counted_and_leaves_no_torn_line(tmp_path: Path) -> None:
    written = files(tmp_path)
    written.write([trace(1)])
    disk = FullDisk(written._file)
    written._file = disk  # type: ignore[assignment]
    writer = TraceWriter(written)
    writer.put([trace(2), trace(3)])
    while not writer.failed:
        await asyncio.sleep(0.01)
    assert (writer.failed, writer.problem) == (2, "traces cannot be written: No space left on device")
    disk.full = False
    writer.put([trace(4)])
    while written.lines < 2:
        await asyncio.sleep(0.01)
    await writer.close()
    assert writer.problem == ""
    assert numbers(tmp_path) == [1, 4]


async def test_what_is_too_much_for_the_disk_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_WAITING", 5)
    writer = TraceWriter(files(tmp_path))
    writer.put([trace(number) for number in range(8)])
    await writer.close()
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    assert writer.samples() == {"traces_written_total": 5, "traces_dropped_total": 3, "traces_failed_total": 0}
