"""A proxy's streams to relays, which carry notices that inboxes have grown. Sending mail waits for none of it.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import NOTIFY
from cluster.wire.v1 import delivery_pb2
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import Duplex, Outbox, StreamEnded
from proxy import mail_events as ev
from proxy.notices.mail_notices import Notices

MAX_WAITING: Final = 1 << 16
"""Batches in one stream's outbox; the core bounds unanswered ones, so this is never reached. Policy: a further one is lost."""


def batch_of(effect: ev.SendNotices) -> delivery_pb2.NoticeBatch:
    """Notices in their wire form, entry by entry."""
    batch = delivery_pb2.NoticeBatch(number=effect.number)
    records: list[bytes] = []
    for notice in effect.notices:
        batch.uins.extend([notice.uin] * len(notice.seqs))
        batch.seqs.extend(notice.seqs)
        batch.msg_ids.extend(notice.msg_ids)
        batch.sizes.extend(map(len, notice.records))
        records += notice.records
    batch.records = b"".join(records)
    return batch


class _Stream:
    """One stream to a relay; ends by itself when it breaks."""

    def __init__(self, relay: Node, owner: NoticeLinks) -> None:
        self.relay, self._node, self._owner = relay.endpoint, relay, owner
        self._outbox = Outbox[delivery_pb2.NoticeBatch](MAX_WAITING)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-notices-{relay.endpoint:016x}")
        self._task.add_done_callback(owner.ended)

    def send(self, batch: delivery_pb2.NoticeBatch) -> None:
        self._outbox.put(batch)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def cancel(self) -> asyncio.Task[None]:
        self._task.cancel()
        return self._task

    async def _run(self) -> None:
        call: FramedCall[delivery_pb2.NoticeBatch, delivery_pb2.NoticesTaken]
        call = self._owner.framed.call(self._node, NOTIFY, delivery_pb2.NoticesTaken.FromString)
        try:
            with contextlib.suppress(StreamEnded):  # it was not opened
                async with call:
                    # Unanswered notices are reported again at the end, by `broken`.
                    await Duplex(call, self._taken, self._outbox.give, work=self._outbox.work, over=self._over).run()
        finally:
            self._over()

    def _taken(self, reply: delivery_pb2.NoticesTaken) -> None:
        self._owner.taken(self.relay, reply)

    def _over(self) -> None:
        self._owner.broken(self)


class NoticeLinks:
    """The shell of notices: runs one `proxy.notices.mail_notices.Notices`.

    Args:
        endpoint: of this proxy.
        view: gives the newest view of the cluster.
        now: monotonic seconds.
        crash: called with an error that is a bug here.
        framed: opens streams.
    """

    def __init__(
        self,
        endpoint: EndpointID,
        view: Callable[[], View],
        now: Callable[[], float],
        crash: Callable[[BaseException], None],
        framed: Framed,
    ) -> None:
        self._endpoint, self._view, self._crash, self.framed = endpoint, view, crash, framed
        self.core = Notices()
        self.runner: Runner[ev.NoticesEvent, ev.NoticesEffect] = Runner(self.core, now, tick=TICK, end_of_turn=END_OF_TURN)
        self.runner.effects.on(ev.SendNotices, self._send)
        self.runner.effects.on(ev.LeaveRelay, self._leave)
        self._streams: dict[int, _Stream] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def taken(self, relay: int, reply: delivery_pb2.NoticesTaken) -> None:
        """Pass on a relay's answer."""
        self.runner.step(ev.NoticesTaken(relay, reply.number, reply.elsewhere))

    def broken(self, stream: _Stream) -> None:
        """Remove a stream that ended."""
        if self._streams.get(stream.relay) is stream:
            del self._streams[stream.relay]
            self.runner.step(ev.RelayLost(stream.relay))

    def ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a stream's task."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    async def stop(self) -> None:
        """End everything; unanswered notices are dropped."""
        self.runner.stop()
        await asyncio.gather(*(stream.close() for stream in list(self._streams.values())))
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        counted = totals(self.core.counters, "mail_")
        return {**counted, "mail_notices_waiting": self.core.waiting, "mail_notices_waiting_bytes": self.core.waiting_bytes}

    def _leave(self, effect: ev.LeaveRelay) -> None:
        stream = self._streams.pop(effect.relay, None)
        if stream is not None:
            task = stream.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _send(self, effect: ev.SendNotices) -> None:
        stream = self._streams.get(effect.relay)
        batch = batch_of(effect)
        if stream is None:
            node = self._view().by_endpoint(effect.relay)
            if node is None:
                self.runner.step(ev.RelayLost(effect.relay))
                return
            batch.proxy = self._endpoint
            stream = self._streams[effect.relay] = _Stream(node, self)
        stream.send(batch)
