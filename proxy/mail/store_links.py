"""A proxy's streams to the leaders of Xiu and Pi, as its mail core names them: each stream has its own number.

Source: docs/links.md, docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.rpc.framed import Framed
from cluster.rpc.leader_stream import LeaderStream, Reply
from pixiu.discovery.view import View
from pixiu.errors import Refusal, WrongPartition
from pixiu.wire.levels import Triple
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from proxy import mail_events as ev


class StoreLink:
    """Keeps a stream to the leader of one partition.

    Args:
        store: the partition.
        view: gives the newest view of the cluster.
        framed: opens streams.
        numbers: gives a new number for each stream.
        take: called with each event.
        crash: called with an error that is a bug here: without its link a partition would get no mail, and nobody would know why.
    """

    def __init__(
        self,
        store: ev.Store,
        view: Callable[[], View],
        framed: Framed,
        numbers: Callable[[], int],
        take: Callable[[ev.Event], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self.store = store
        self._numbers = numbers
        self._take = take
        self._number = 0
        self._stream = LeaderStream(
            store.role, store.partition, view, framed,
            up=self._up, reply=self._replied, down=self._down, crash=crash,
        )  # fmt: skip

    def send(self, effect: ev.SendStore | ev.SendAppend) -> None:
        """Send a request, if its stream is the open one."""
        if effect.link != self._number:
            return
        if isinstance(effect, ev.SendStore):
            self._stream.send(
                xiu_pb2.StoreRequest(
                    batch=effect.data, count=effect.count, position=effect.position, level=effect.level.value, epoch=effect.epoch
                )
            )
        else:
            self._stream.send(pi_pb2.PiRequest(request=effect.request, operations=effect.operations, level=effect.level.value))

    def leave(self, number: int, *, again: bool = False) -> None:
        """End a stream; the next one is opened automatically. `again`: to the same replica."""
        if number == self._number:
            self._number = 0
            self._stream.leave(again=again)

    def hurry(self) -> None:
        """Open the stream now if it is not open."""
        self._stream.hurry()

    async def close(self) -> None:
        """End the stream for good."""
        await self._stream.close()

    def _up(self, epoch: int) -> None:
        self._number = self._numbers()
        self._take(ev.LinkUp(self.store, self._number, epoch))

    def _down(self, reason: str) -> None:
        number, self._number = self._number, 0
        self._take(ev.LinkDown(self.store, number, reason))

    def _replied(self, reply: Reply) -> None:
        store, link = self.store, self._number
        triple = Triple(reply.layout_version, reply.epoch, reply.committed)
        if isinstance(reply, pi_pb2.PiReply):
            results = list(reply.results)
            partitions = reply.server.partitions if reply.code == WrongPartition.code else 0
            answer = (reply.request, results, refusal_of(reply), triple, reply.copies, partitions)
            self._take(ev.Appended(store.partition, link, *answer))
            return
        runs = [
            ev.StoredRun(run.position, run.count, run.sequence, run.msg_id, refusal_of(run), run.partitions)
            for run in reply.results
        ]
        self._take(ev.Stored(store.partition, link, runs, triple, reply.copies))


def refusal_of(answer: pi_pb2.PiReply | xiu_pb2.StoreResult) -> Refusal | None:
    """Return the refusal in an answer of a store; None: there is none."""
    return Refusal(answer.code, answer.text, answer.retry_after_ms) if answer.code else None
