"""One writer's stream at a proxy: its window, and its last word."""

from __future__ import annotations

import asyncio

from pixiu.wire.levels import Triple
from pixiu.wire.v1 import mail_pb2
from proxy import mail_events as ev
from proxy.mail_service import WriterStream


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
    (reply,) = [reply async for reply in stream.replies()]
    assert [result.position for result in reply.results] == [1, 2]
    assert (reply.taken, reply.end.code) == (2, "STALE_STREAM")
    assert {(triple.pi, triple.partition, triple.epoch) for triple in reply.triples} == {(True, 0, 3)}


async def test_a_stream_that_ends_while_a_reply_is_sent_says_the_rest() -> None:
    stream = WriterStream(1, 1000)
    stream.took(1, 100)
    replies = stream.replies()
    assert (await anext(replies)).taken == 1
    stream.say(mail_pb2.MailReply(draining=True))
    stream.end()
    assert [reply.draining async for reply in replies] == [True]


async def test_a_writer_with_a_full_window_is_not_read_from() -> None:
    stream = WriterStream(1, 1000)
    stream.took(1, 999)
    await stream.room()
    stream.took(2, 1)
    waiting = asyncio.create_task(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.answered(confirmed(1, 1))
    await waiting
