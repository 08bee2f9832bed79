"""One writer's stream at a proxy: its window, and its last word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from cluster.core.turn import Turn
from cluster.settings.options import ClusterOptions
from pixiu.wire.levels import Triple
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import mail_pb2
from proxy import mail_events as ev
from proxy.mail.service import MAX_UNTOLD, MailService, WriterStream
from proxy.options import Options
from proxy.publishers.message_ids import MessageIDs


def confirmed(position: int, unconfirmed: int) -> ev.Answer:
    """One mail is confirmed."""
    return ev.Answer(1, [ev.Result(position, 1, 2, [position])], {ev.Store(True, 0): Triple(1, 3, 9)}, unconfirmed)


async def test_replies_that_wait_leave_together_and_the_last_word_ends_the_stream() -> None:
    stream = WriterStream(1, 1000)
    stream.took(2, 100)
    stream.answered(confirmed(1, 50))
    stream.answered(confirmed(2, 0))
    stream.say(mail_pb2.MailReply(end=mail_pb2.MailEnd(code="STALE_STREAM", text="x")))
    stream.end()
    finished: list[bool] = []
    stream.finish = lambda: finished.append(True)
    reply = stream.give()
    assert reply is not None
    assert not finished
    assert stream.give() is None
    assert finished == [True]
    assert [result.position for result in reply.results] == [1, 2]
    assert (reply.taken, reply.end.code) == (2, "STALE_STREAM")
    assert {(triple.pi, triple.partition, triple.epoch) for triple in reply.triples} == {(True, 0, 3)}


async def test_a_stream_that_ends_while_a_reply_is_sent_says_the_rest() -> None:
    stream = WriterStream(1, 1000)
    stream.took(1, 100)
    first = stream.give()
    assert first is not None
    assert first.taken == 1
    stream.say(mail_pb2.MailReply(draining=True))
    stream.end()
    last = stream.give()
    assert last is not None
    assert last.draining


async def test_a_writer_that_does_not_read_its_answers_is_not_read_from() -> None:
    stream = WriterStream(1, 1000)
    position, waits = 0, stream.space()
    while waits is None:
        position += 1
        stream.took(position, 10)
        stream.answered(confirmed(position, 0))
        assert position <= MAX_UNTOLD
        waits = stream.space()
    asyncio.ensure_future(waits).cancel()
    reply = stream.give()
    assert reply is not None
    assert len(reply.results) == position
    assert stream.space() is None


async def test_a_writer_with_a_full_window_is_not_read_from() -> None:
    stream = WriterStream(1, 1000)
    stream.took(1, 999)
    assert stream.space() is None
    stream.took(2, 1)
    full = stream.space()
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
    service, stream = MailService(context, MessageIDs(ClusterOptions())), WriterStream(1, 1 << 20)

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
