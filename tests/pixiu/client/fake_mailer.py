"""A proxy's mail service for tests of the SDK: confirms what it gets, or does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pixiu.wire.record import Record, decode, split
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc


class FakeMailer(mail_pb2_grpc.MailerServicer):
    """Records what comes, by stream."""

    def __init__(self) -> None:
        self.hellos: list[mail_pb2.MailHello] = []
        self.records: list[Record] = []
        self.levels: list[int] = []
        self.more: list[list[int]] = []
        """Of each record."""
        self.batches = 0
        self.holding = False
        """Take batches, answer nothing."""
        self.refuses_logins = False
        self.taking = True
        """Say what was taken."""
        self.codes: dict[bytes, str] = {}
        """Body → the code with which it is refused."""
        self.open: list[int] = []
        self.end: mail_pb2.MailEnd | None = None
        """Ends the next stream that sends something."""
        self._streams: set[asyncio.Queue[mail_pb2.MailReply | None]] = set()

    def say(self, reply: mail_pb2.MailReply | None) -> None:
        """On every stream; None: it breaks."""
        for queue in self._streams:
            queue.put_nowait(reply)

    def bodies(self) -> list[bytes]:
        """Of everything that came, as often as it came."""
        return [record.body for record in self.records]

    async def Send(self, request_iterator: Any, context: Any) -> AsyncIterator[mail_pb2.MailReply]:
        """One stream."""
        if self.refuses_logins:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token has expired")
        queue: asyncio.Queue[mail_pb2.MailReply | None] = asyncio.Queue()
        self._streams.add(queue)
        reader = asyncio.create_task(self._read(request_iterator, queue))
        try:
            while (reply := await queue.get()) is not None:
                yield reply
                if reply.HasField("end"):
                    return
        finally:
            self._streams.discard(queue)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any, queue: asyncio.Queue[mail_pb2.MailReply | None]) -> None:
        position = 1
        async for request in requests:
            if request.HasField("hello"):
                self.hellos.append(request.hello)
                queue.put_nowait(mail_pb2.MailReply(window_bytes=1 << 20))
                continue
            assert request.position == position
            position += request.count
            records = [decode(record) for record in split(request.batch, request.count)]
            more = {each.index: list(each.uins) for each in request.more}
            self.records += records
            self.levels += [request.level] * request.count
            self.more += [more.get(index, []) for index in range(request.count)]
            self.batches += 1
            if self.end is not None:
                end, self.end = self.end, None
                queue.put_nowait(mail_pb2.MailReply(end=end))
                return
            reply = mail_pb2.MailReply(taken=position - 1 if self.taking else 0)
            if not self.holding:
                for index, record in enumerate(records):
                    code = self.codes.get(record.body, "")
                    ids = [] if code else [1000 + len(self.records) - len(records) + index]
                    reply.results.add(
                        position=request.position + index, count=1, copies=2, msg_ids=ids, code=code, text="says the test",
                        open=self.open if code else [],
                    )  # fmt: skip
                reply.triples.add(pi=True, partition=0, layout_version=1, epoch=3, committed=9)
            queue.put_nowait(reply)
        queue.put_nowait(None)  # as a proxy does: a client that ends waits for it
