"""Sessions' state over real streams to a Pi with its production state: batches, changes of leaders, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.rpc.framed import FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import EXCHANGE
from gateway.sessions.store import SessionStore
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import LimitError, OldSession, Overloaded, Unavailable
from pixiu.ids import EndpointID
from pixiu.wire.inbox_operations import MAX_NOTE_BYTES, decode
from pixiu.wire.v1 import pi_pb2
from tests.pi.memory import Replica
from tests.support.framed import framed_of
from tests.support.pi import appends, message
from tests.support.waiting import until

UIN, LANE = 7, 1


class Pi:
    """A partition, whose replicas share a state. One leads."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.listeners = FramedListener(), FramedListener()
        self.ports: list[int] = []
        self.leader = 0
        self.requests: list[pi_pb2.PiRequest] = []
        self.code = ""

    async def start(self) -> Pi:
        for number, listener in enumerate(self.listeners):
            listener.serve(EXCHANGE, pi_pb2.PiRequest.FromString, partial(self.exchange, number))
            self.ports.append(await listener.bind("127.0.0.1", 0, fallback=False, reuse=True))
            await listener.start()
        return self

    def view(self) -> View:
        nodes = tuple(
            Node("pi", 0, number, NodeState.RUNNING, "127.0.0.1", port - 3, 0, EndpointID(200 + number), 1, "", "", 0,
                 stream_port=port)
            for number, port in enumerate(self.ports)
        )  # fmt: skip
        return View(Layout(1, {"pi": RoleLayout(1), "xiu": RoleLayout(1)}), nodes)

    async def exchange(self, number: int, handler: FramedHandler[pi_pb2.PiReply, pi_pb2.PiRequest]) -> None:
        while (request := await handler.read()) is not None:
            leads = number == self.leader
            reply = pi_pb2.PiReply(request=request.request, epoch=int(leads), code=self.code if leads else "NOT_LEADER")
            if request.request:
                self.requests.append(request)
            if leads and not self.code:
                reply.results.extend(each for found in self.replica.apply(*decode(request.operations)) for each in found)
                for read in request.reads:
                    self._read(read, reply)
            await handler.write(reply)

    def _read(self, read: pi_pb2.PiRead, reply: pi_pb2.PiReply) -> None:
        assert read.peek
        assert not read.num
        found = self.replica.state.peek(read.uin, read.lane, 0, 0)
        notes, generation = self.replica.state.notes.of(read.uin) if read.notes else ([], 0)
        shown = reply.reads.add(last=found.last, unread=found.unread, dropped=found.dropped, notes_generation=generation)
        for note in notes:
            shown.notes.add(name=note.name, generation=note.generation, value=note.value)

    async def close(self) -> None:
        for listener in self.listeners:
            await listener.close()


@pytest.fixture
async def pi() -> AsyncIterator[Pi]:
    found = await Pi().start()
    yield found
    await found.close()


def crash(error: BaseException) -> None:
    raise error


def store_of(pi: Pi, view: View | None = None, timeout_s: float = 60.0) -> SessionStore:
    context: Any = SimpleNamespace(view=view if view is not None else pi.view(), crash=crash, framed=framed_of("gateway"))
    store = SessionStore(context, timeout_s=timeout_s)
    store.on_view()
    return store


@pytest.fixture
async def store(pi: Pi) -> AsyncIterator[SessionStore]:
    found = store_of(pi)
    yield found
    await found.close()


async def test_what_is_written_is_read_and_a_clear_leaves_the_fence(pi: Pi, store: SessionStore) -> None:
    assert await store.read(UIN) == ({}, 0, (0, 0, 0, 0), 0, 0, False)
    await store.write(UIN, 0, 5, b"filters")
    await store.write(UIN, 2, 5, b"released")
    pi.replica.apply(appends(1, *((message(number), UIN) for number in range(1, 4))))
    assert await store.read(UIN) == ({0: (5, b"filters"), 2: (5, b"released")}, 5, (0, 3, 0, 0), 3, 0, True)
    await store.clear(UIN, 6)
    assert await store.read(UIN) == ({}, 6, (0, 3, 0, 0), 0, 0, False)
    with pytest.raises(OldSession):
        await store.write(UIN, 1, 5, b"late")
    with pytest.raises(LimitError):
        await store.write(UIN, 1, 9, bytes(MAX_NOTE_BYTES + 1))


async def test_the_calls_of_a_turn_are_one_request(pi: Pi, store: SessionStore) -> None:
    await store.read(UIN)
    pi.requests.clear()
    await asyncio.gather(*(store.write(uin, 0, 1, b"x") for uin in range(1, 101)))
    assert len(pi.requests) == 1
    states = await asyncio.gather(*(store.read(uin) for uin in range(1, 101)))
    assert len(pi.requests) == 2
    assert all(state.exists for state in states)


async def test_a_new_leader_is_found(pi: Pi, store: SessionStore) -> None:
    await store.write(UIN, 0, 1, b"before")
    pi.leader = 1
    await store.write(UIN, 0, 1, b"after")
    assert (await store.read(UIN)).notes == {0: (1, b"after")}
    pi.leader = 0
    assert (await store.read(UIN)).notes == {0: (1, b"after")}


async def test_refusals_and_their_absence(pi: Pi) -> None:
    store = store_of(pi, timeout_s=0.5)

    async def connected() -> bool:
        return bool(store.samples()["session_pi_leaders"])

    await until(connected, "the stream to the leader")
    pi.code = "OVERLOADED"
    with pytest.raises(Overloaded):
        await store.write(UIN, 0, 1, b"x")
    pi.leader = 9
    with pytest.raises(Unavailable):
        await store.read(UIN)
    late = asyncio.create_task(store.write(UIN, 0, 1, b"x"))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(Unavailable):
        await late
    assert store.samples()["session_calls_failed_total"] == 3
    with pytest.raises(Unavailable):
        await store.read(UIN)


async def test_a_cluster_without_inboxes_has_no_sessions(pi: Pi) -> None:
    store = store_of(pi, View(Layout(1, {"router": RoleLayout(1)}), ()))
    assert not store.available
    with pytest.raises(Unavailable):
        await store.read(UIN)
    await store.close()
