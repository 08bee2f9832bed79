"""One writer's stream at a Xiu: its window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pixiu.wire.levels import Triple
from pixiu.wire.v1 import xiu_pb2
from xiu.events import Answer, Result
from xiu.streams import MAX_WAITING_BATCHES, Stream


async def test_a_writer_that_does_not_read_its_answers_is_not_read_from() -> None:
    nothing: Any = None
    service: Any = SimpleNamespace(problem_of=lambda _: "", take=lambda *_: None, reply=len, closed=lambda _: None)
    stream = Stream(1, 1000, nothing, service)
    request = xiu_pb2.StoreRequest(position=1, count=1, batch=bytes(10))
    batches, waits = 0, None
    while waits is None and batches <= MAX_WAITING_BATCHES:
        batches += 1
        stream.answered(Answer(1, [Result(batches, 1, "")], Triple(1, 3, 9), 2))
        waits = stream._take(request)
    assert waits is not None
    waits.close()  # type: ignore[attr-defined]
    assert stream._give() == batches
    assert stream._take(request) is None
