"""One writer's stream at a proxy: its window, and its last word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from cluster.core.turn import Turn
from cluster.settings.options import ClusterOptions
from pixiu.errors import Refusal
from pixiu.wire.levels import Triple
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import mail_pb2
from proxy import mail_events as ev
from proxy.mail.service import MAX_UNTOLD, MailService, WriterStream
from proxy.options import Options
from proxy.publishers.message_ids import MessageIDs
from tests.support.caller import Caller


def confirmed(position: int, unconfirmed: int) -> ev.Answer:
    """One mail is confirmed."""
    return ev.Answer(1, [ev.Result(position, 1, 2, [position])], {ev.Store(True, 0): Triple(1, 3, 9)}, unconfirmed)


async def ignored(*_: object) -> None: ...


def writer(window_bytes: int = 1000, caller: Caller | None = None) -> WriterStream:
    stream = WriterStream(caller or Caller(last=False), window_bytes, ignored, lambda _: None)
    stream.number = 1
    return stream


async def test_replies_that_wait_leave_together_and_the_last_word_ends_the_stream() -> None:
    caller = Caller(last=False)
    stream = writer(caller=caller)
    stream.took(2, 100)
    stream.answered(confirmed(1, 50))
    stream.answered(confirmed(2, 0))
    stream.refuse(Refusal("STALE_STREAM", "x"))
    caller.reads.release()
    async with asyncio.timeout(10):
        await stream.served.run()
    (reply,) = caller.got
    assert [result.position for result in reply.results] == [1, 2]
    assert (reply.taken, reply.end.code) == (2, "STALE_STREAM")
    assert {(triple.pi, triple.partition, triple.epoch) for triple in reply.triples} == {(True, 0, 3)}


async def test_a_stream_that_ends_while_a_reply_is_sent_says_the_rest() -> None:
    caller = Caller(last=False)
    stream = writer(caller=caller)
    stream.took(1, 100)
    running = asyncio.create_task(stream.served.run())
    while not caller.got:
        await asyncio.sleep(0)
    stream.say(mail_pb2.MailReply(draining=True))
    stream.served.end("this proxy stops")
    caller.reads.release()
    caller.reads.release()
    async with asyncio.timeout(10):
        await running
    assert [(reply.taken, reply.draining) for reply in caller.got] == [(1, False), (0, True)]


async def test_that_a_batch_was_taken_is_said_with_its_results_or_after_a_while() -> None:
    caller = Caller(last=False)
    caller.read_all()
    stream = writer(caller=caller)
    running = asyncio.create_task(stream.served.run())
    for _ in range(5):
        await asyncio.sleep(0)  # its writer has found nothing
    stream.took(1, 100)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not caller.got
    stream.answered(confirmed(1, 0))
    async with asyncio.timeout(10):
        while not caller.got:
            await asyncio.sleep(0)
        stream.took(2, 100)
        while len(caller.got) < 2:
            await asyncio.sleep(0)
        assert [(reply.taken, len(reply.results)) for reply in caller.got] == [(1, 1), (2, 0)]
        stream.served.cut("this proxy stops")
        await running
    assert not stream._taken_timer.is_set


async def test_a_writer_that_does_not_read_its_answers_is_not_read_from() -> None:
    stream = writer()
    position, waits = 0, stream.served.space()
    while waits is None:
        position += 1
        stream.took(position, 10)
        stream.answered(confirmed(position, 0))
        assert position <= MAX_UNTOLD
        waits = stream.served.space()
    asyncio.ensure_future(waits).cancel()
    reply = stream.give()
    assert reply is not None
    assert len(reply.results) == position
    assert stream.served.space() is None


async def test_a_writer_with_a_full_window_is_not_read_from() -> None:
    stream = writer()
    stream.took(1, 999)
    assert stream.served.space() is None
    stream.took(2, 1)
    full = stream.served.space()
    assert full is not None
    waiting = asyncio.ensure_future(full)
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.answered(confirmed(1, 1))
    await waiting


async def test_a_mail_costs_its_login_a_message_for_each_receiver() -> None:
    loop, spent = asyncio.get_running_loop(), list[int]()
    context: Any = SimpleNamespace(
        options=Options(), cluster=ClusterOptions(), turn=Turn(loop.time, loop.call_soon), now=loop.time, endpoint_id=1, view=None,
        crash=lambda _error: None, framed=None, metrics=SimpleNamespace(histogram=lambda *_: SimpleNamespace(add=lambda _: None)),
    )  # fmt: skip
    service, stream = MailService(context, MessageIDs(ClusterOptions())), writer(1 << 20)

    def spend(messages: int, _size: int) -> float:
        spent.append(messages)
        return 0.0

    login: Any = SimpleNamespace(spend=spend, asks=False)
    stream.access, stream.opened = login, True
    more = mail_pb2.MailReceivers(index=1, uins=range(10, 15))
    batch = b"".join(encode(Kind.MAIL, 8, b"x", number) for number in (1, 2))
    await service._request(stream, mail_pb2.MailRequest(batch=batch, count=2, position=1, more=[more]))
    assert spent == [7]
    await service.stop()
