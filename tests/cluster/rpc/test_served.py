"""The serving side of streams: what ends them. Windows are in `tests/cluster/store/test_streams.py`."""

from __future__ import annotations

import asyncio

import pytest

from cluster.rpc.served import ServedStream, ServedStreams
from pixiu.errors import Draining, Overloaded
from tests.support.caller import Caller


class Owed:
    """One answer is owed for ever, and one waits to leave."""

    def unanswered(self) -> bool:
        return True

    def full(self) -> bool:
        return False

    def give(self) -> int | None:
        return 7


def stream(caller: Caller, left: list[bool], last_s: float | None = None) -> ServedStream[int, int]:
    def over() -> None:
        left.append(made.ended)

    made: ServedStream[int, int] = ServedStream(caller, lambda _request: None, Owed(), over, last_s)
    return made


@pytest.fixture(autouse=True)
def short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not read is not waited for."""
    monkeypatch.setattr("pixiu.rpc.duplex.CLOSE_WAIT_S", 0.01)


async def test_a_stream_that_is_cut_ends_although_its_caller_does_not_read() -> None:
    left: list[bool] = []
    cut = stream(Caller([1]), left)
    running = asyncio.create_task(cut.run())
    await asyncio.sleep(0)
    cut.cut("logged out")
    async with asyncio.timeout(10):
        await running
    assert (cut.problem, left) == ("logged out", [True])


async def test_a_caller_that_has_ended_is_answered_for_a_time() -> None:
    left: list[bool] = []
    async with asyncio.timeout(10):
        await stream(Caller([1]), left, last_s=0.01).run()
    assert left == [True]


def test_a_draining_process_and_a_full_one_take_no_streams() -> None:
    streams: ServedStreams[str] = ServedStreams(1, "this replica has %d streams")
    assert streams.enter("a") == 1
    with pytest.raises(Overloaded, match="this replica has 1 streams"):
        streams.enter("b")
    del streams[1]
    assert streams.enter("b") == 2
    streams.draining = True
    with pytest.raises(Draining):
        streams.enter("c")
