"""A proxy's streams to relays: batches out, answers in, and what becomes of a stream that ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import NOTIFY
from cluster.wire.v1 import delivery_pb2
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import Unavailable
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import Served, StreamEnded
from proxy import mail_events as ev
from proxy.notices.notice_links import NoticeLinks
from tests.support.framed import framed_of
from tests.support.waiting import until

PROXY, RELAY = EndpointID(300), EndpointID(900)


class Relay:
    """Answers as the test says."""

    def __init__(self) -> None:
        self.batches: list[delivery_pb2.NoticeBatch] = []
        self.elsewhere: list[int] = []
        self.refusals = 0
        """Batches on which the stream ends."""

    async def notify(self, handler: Served[delivery_pb2.NoticesTaken, delivery_pb2.NoticeBatch]) -> None:
        """One proxy."""
        with contextlib.suppress(StreamEnded):
            while (batch := await handler.read()) is not None:
                if self.refusals:
                    self.refusals -= 1
                    raise Unavailable("gone")
                self.batches.append(batch)
                await handler.write(delivery_pb2.NoticesTaken(number=batch.number, elsewhere=self.elsewhere))

    @property
    def uins(self) -> list[int]:
        """Told, in order."""
        return [uin for batch in self.batches for uin in batch.uins]


class Proxy:
    """Links to one relay."""

    def __init__(self, relay: Relay) -> None:
        self.listener = FramedListener()
        self.listener.serve(NOTIFY, delivery_pb2.NoticeBatch.FromString, relay.notify)
        node = Node("relay", 0, 0, NodeState.RUNNING, "127.0.0.1", 1, 0, RELAY, 1, "", "", 0)
        self._view = View(Layout(1, {}), (node,))
        self.crashes: list[BaseException] = []
        self.links = NoticeLinks(PROXY, lambda: self._view, time.monotonic, self.crashes.append, framed_of("proxy", PROXY))

    async def start(self) -> None:
        """Serve."""
        port = await self.listener.bind("127.0.0.1", 0, fallback=True)
        await self.listener.start()
        (node,) = self._view.nodes
        self._view = View(self._view.layout, (replace(node, stream_port=port),))
        self.links.runner.step(ev.OwnersChanged(1, {0: (RELAY,)}))

    async def stop(self) -> None:
        """End."""
        await self.links.stop()
        await self.listener.close()
        assert self.crashes == []

    def mail(self, *uins: int) -> None:
        """These have mail."""
        self.links.runner.step(ev.InboxesGrew(uins, [5] * len(uins), [1 << 54] * len(uins), b"record", [6], [0] * len(uins)))


@pytest.fixture
async def relay() -> Relay:
    """A relay."""
    return Relay()


@pytest.fixture
async def proxy(relay: Relay) -> AsyncIterator[Proxy]:
    """Its proxy."""
    found = Proxy(relay)
    await found.start()
    yield found
    await found.stop()


async def told(relay: Relay, *uins: int) -> None:
    """Until the relay was told of these."""

    async def all_told() -> bool:
        return relay.uins[-len(uins) :] == list(uins)

    await until(all_told, f"{uins} told")


async def forgotten(proxy: Proxy) -> None:
    """Until everything is answered, or given up."""

    async def nothing() -> bool:
        return bool(proxy.links.core.counters.notices) and not proxy.links.core.waiting

    await until(nothing, "nothing waits")


async def test_one_turn_is_one_batch_with_its_records(proxy: Proxy, relay: Relay) -> None:
    proxy.mail(7, 8)
    proxy.mail(9)
    await told(relay, 7, 8, 9)
    (batch,) = relay.batches
    assert (batch.proxy, list(batch.seqs), list(batch.sizes), batch.records) == (PROXY, [5] * 3, [6] * 3, b"record" * 3)
    proxy.mail(10)
    await told(relay, 10)
    assert relay.batches[-1].proxy == 0  # the same stream
    assert proxy.listener.served == 1
    await forgotten(proxy)


@pytest.mark.slow
async def test_a_stream_that_ends_costs_nothing_but_time(proxy: Proxy, relay: Relay) -> None:
    relay.refusals = 2
    proxy.mail(7)
    await told(relay, 7)
    await forgotten(proxy)
    assert proxy.links.core.counters.notices_retried == 2
    assert proxy.links.core.counters.notices_given_up == 0


@pytest.mark.slow
async def test_users_that_nobody_serves_are_given_up_in_the_end(proxy: Proxy, relay: Relay) -> None:
    relay.elsewhere = [7]
    proxy.mail(7)
    await forgotten(proxy)
    assert relay.uins == [7] * 4
    assert proxy.links.samples()["mail_notices_given_up_total"] == 1


@pytest.mark.slow
async def test_a_relay_that_is_not_in_the_registry_is_not_looked_for(proxy: Proxy, relay: Relay) -> None:
    proxy.links.runner.step(ev.OwnersChanged(1, {0: (RELAY + 1,)}))
    proxy.mail(7)
    await forgotten(proxy)
    assert relay.uins == []
    assert proxy.links.core.counters.notices_given_up == 1
