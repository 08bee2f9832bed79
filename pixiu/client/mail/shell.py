"""The shell of a writer of mail.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pixiu.client.send.awaited import FailureReports
from pixiu.client.send.events import Batch, Effect, Failure, OpenStream, Outcome
from pixiu.client.send.sender import Sender
from pixiu.client.send.streams import SenderShell
from pixiu.rpc.channels import Channels
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.levels import Level, Triple
from pixiu.wire.v1 import mail_pb2, mail_pb2_grpc


def mail_call(channels: Channels, address: str) -> GrpcCall[mail_pb2.MailRequest, mail_pb2.MailReply]:
    """Open a stream of mail to a proxy."""
    return GrpcCall.over(channels, address, lambda channel: mail_pb2_grpc.MailerStub(channel).Send(metadata=channels.metadata()))


class MailShell(SenderShell[mail_pb2.MailRequest, mail_pb2.MailReply]):
    """Sends mail."""

    def __init__(
        self, core: Sender, client: str, channels: Channels, on_refresh: Callable[[], None], reports: FailureReports
    ) -> None:
        super().__init__(core, client, channels, on_refresh, partial(mail_call, channels), reports)
        self.triples: dict[tuple[str, int], Triple] = {}
        """(role, partition) → its state at its last answer."""

    def hello(self, opening: OpenStream) -> mail_pb2.MailRequest:
        """Make the first request of a stream."""
        hello = mail_pb2.MailHello(client=self.client, worker=opening.worker, generation=opening.generation)
        return mail_pb2.MailRequest(hello=hello)

    def request_of(self, batch: Batch) -> mail_pb2.MailRequest:
        """Make the request that carries a batch."""
        level = batch.level or Level.REPLICATED
        more = [mail_pb2.MailReceivers(index=index, uins=uins) for index, uins in batch.receivers]
        return mail_pb2.MailRequest(batch=batch.data, count=batch.count, position=batch.position, level=level.value, more=more)

    def heard(self, number: int, reply: mail_pb2.MailReply, now: float) -> list[Effect]:
        """Give the core a reply."""
        for triple in reply.triples:
            place = ("pi" if triple.pi else "xiu", triple.partition)
            self.triples[place] = Triple(triple.layout_version, triple.epoch, triple.committed)
        outcomes = [
            Outcome(
                result.position, result.count, Failure(result.code, result.text) if result.code else None,
                result.copies, result.msg_ids, result.open,
            )
            for result in reply.results
        ]  # fmt: skip
        largest = reply.max_batch_bytes, reply.max_batch_records
        effects = self.core.reply(number, now, 0, outcomes, reply.window_bytes, reply.draining, *largest, reply.taken)
        if reply.HasField("end"):
            end = reply.end
            effects += self.core.ended(number, now, Failure(end.code, end.text, end.retry_after_ms))
        return effects
