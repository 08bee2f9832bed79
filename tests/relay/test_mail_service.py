"""The shell of a relay's deliveries, over real streams, with stores and a gateway that the test has in its hands."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.wire.v1 import delivery_pb2
from pixiu.ids import EndpointID, msg_id
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.envelope import GAP, REDELIVERED, encode
from relay.delivery.events import Asked, Chunk, Fetched, FetchMessages
from relay.mail import core as mail_core
from relay.mail import events as mail_events
from tests.relay.mail_world import GATEWAY, RELAY, UIN, World
from tests.support.waiting import until


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A relay that owns everybody."""
    found = await World().start()
    yield found
    await found.stop()


async def seen(world: World, *seqs: int) -> None:
    """Until the gateway has got these, in this order."""

    async def came() -> bool:
        return world.gateway.seqs[-len(seqs) :] == list(seqs)

    await until(came, f"{seqs} at the gateway")


async def saved(world: World, up_to: int) -> None:
    """Until Pi has the cursor."""

    async def there() -> bool:
        return world.cursor() == up_to and not world.service.core.deliveries.unsaved

    await until(there, f"cursor {up_to}")


def batch(number: int, *mails: tuple[int, int, bytes], uin: int = UIN) -> delivery_pb2.NoticeBatch:
    """A proxy's."""
    return delivery_pb2.NoticeBatch(
        number=number, uins=[uin] * len(mails), seqs=[seq for seq, _, _ in mails], msg_ids=[each for _, each, _ in mails],
        sizes=[len(record) for _, _, record in mails], records=b"".join(record for _, _, record in mails), proxy=300,
    )  # fmt: skip


@pytest.mark.slow
async def test_what_waits_comes_at_login_and_is_acknowledged(world: World) -> None:
    for _ in range(3):
        world.store()
    world.login()
    await seen(world, 1, 2, 3)
    await saved(world, 3)
    assert world.gateway.devices == [(UIN, 70, 5, 1)]
    assert world.gateway.relays == [RELAY]
    assert world.gateway.got[0].record == world.xiu.records[world.gateway.got[0].msg_id]
    assert world.service.health()["sessions"] == 1


@pytest.mark.slow
async def test_notices_are_sent_on_as_they_are_and_answered(world: World) -> None:
    world.login()
    world.store()
    await seen(world, 1)
    await saved(world, 1)
    fetches = world.xiu.fetches
    call = world.notices()
    await call.write(batch(4, world.store()))
    answer = await call.read()
    assert answer is not None
    assert answer.number == 4
    await seen(world, 2)
    assert world.xiu.fetches == fetches
    seq, number, _ = world.store()
    await call.write(batch(5, (seq, number, b"")))
    await seen(world, 3)
    assert world.xiu.fetches == fetches + 1
    _, number, _ = world.store()
    await call.write(batch(6, (0, number, b"")))  # confirmed below level replicated: nobody knows its number
    await seen(world, 4)
    await saved(world, 4)
    await call.close()


async def test_a_partition_of_xiu_that_does_not_answer_holds_up_no_mail_of_another(world: World) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    beside = replace(world.view.nodes[1], partition=1, port=port, endpoint=EndpointID(202))
    assert beside.role == "xiu"
    world.view = replace(world.view, nodes=(*world.view.nodes, beside))
    (_, number, record), missing = world.store(), msg_id(1, 64, 1)
    answers: list[Fetched] = []

    class Listening:
        """The core, and what it is told of fetches."""

        next_deadline = world.service.core.next_deadline

        @staticmethod
        def step(event: mail_events.Event, now: float) -> list[mail_events.Effect]:
            answers.extend([event] if isinstance(event, Fetched) else [])
            return world.service.core.step(event, now)

    world.service.runner.core = Listening()
    world.service.runner.effects.performs[FetchMessages](FetchMessages([(Asked(7, 1, 1), [number]), (Asked(8, 1, 2), [missing])]))

    async def answered() -> bool:
        return len(answers) > 0

    await until(answered, "an answer")
    assert answers[0].answers == [(Asked(7, 1, 1), [record])]
    silent.close()


async def test_other_relays_users_and_malformed_notices(world: World) -> None:
    call = world.notices()
    world.owners = (RELAY + 1,)
    world.service.look_around()
    await call.write(batch(1, (1, 1 << 54, b"")))
    first = await call.read()
    while first is not None and first.number != 1:
        first = await call.read()
    assert first is not None
    assert first.elsewhere == [UIN]
    wrong = batch(2, (1, 1 << 54, b""))
    wrong.sizes[0] = 9
    await call.write(wrong)
    with pytest.raises(StreamEnded, match="lists of the same length"):
        await call.read()
    await call.close()


@pytest.mark.slow
async def test_a_stream_that_breaks_is_opened_again_and_what_was_not_acknowledged_comes_again(world: World) -> None:
    world.gateway.acknowledges = False
    for _ in range(3):
        world.store()
    world.login()
    await seen(world, 1, 2, 3)
    before, devices = len(world.gateway.got), len(world.gateway.devices)
    world.gateway.acknowledges = True
    world.gateway.end_streams()
    await seen(world, 1, 2, 3, 1, 2, 3)
    assert all(delivery.flags & REDELIVERED for delivery in world.gateway.got[before:])
    await saved(world, 3)
    assert len(world.gateway.devices) > devices
    assert world.service.samples()["mail_gateway_streams_broken_total"] != 0


async def test_streams_that_are_cut_leave_no_error_that_nobody_looks_at() -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))
    world = await World().start()
    world.login()
    world.store()
    await seen(world, 1)
    await world.stop()
    gc.collect()
    assert errors == []


@pytest.mark.slow
async def test_what_a_gateway_does_not_take_is_bounded_and_its_stream_opened_anew() -> None:
    world = await World(mail_waiting_mb=1).start()
    try:
        world.login()
        world.store()
        await seen(world, 1)
        world.gateway.acknowledges = False
        world.gateway.reads.clear()
        streams = world.service._gateways
        large = encode(1, 2, UIN, 1, 1, 1, GAP, bytes(200_000))
        taken = [streams.deliver(GATEWAY, [Chunk(UIN, 1, 1, large)]) for _ in range(10)]
        assert taken == [True] * 6 + [False] * 4
        assert streams.waiting_bytes <= (1 << 20) + len(large) or not len(streams)
        world.store()
        world.login(at=9)
        world.gateway.reads.set()
        await seen(world, 2)
        assert streams.broken == 1
        assert len(world.gateway.relays) == 2
    finally:
        await world.stop()


@pytest.mark.slow
async def test_a_leader_that_goes_or_does_not_answer_is_looked_for_again(world: World) -> None:
    world.store()
    world.pi.leads = False
    world.login()

    async def asked() -> bool:
        return world.pi.streams > 2

    await until(asked, "the leader is looked for")
    world.pi.leads = True
    await seen(world, 1)
    await saved(world, 1)
    world.pi.mute = True
    world.store()
    world.login(at=9)
    before = world.pi.streams

    async def again() -> bool:
        return world.pi.streams > before

    await until(again, "another stream")
    world.pi.mute = False
    await seen(world, 2)
    await saved(world, 2)
    assert world.gateway.devices[-1] == (UIN, 70, 9, 1)


@pytest.mark.slow
async def test_fetches_go_on_where_an_answer_was_full_and_wait_for_what_is_not_there_yet(world: World) -> None:
    world.xiu.most = 2
    mails = [world.store() for _ in range(5)]
    late = world.xiu.records.pop(mails[4][1])
    world.login()
    await seen(world, 1, 2, 3, 4)
    world.xiu.records[mails[4][1]] = late
    await seen(world, 1, 2, 3, 4, 5)
    await saved(world, 5)


@pytest.mark.slow
async def test_a_change_of_partitions_is_no_end(world: World) -> None:
    world.store()
    world.view = world.view_of(world.port, pis=2)
    world.service.look_around()
    world.login()
    await seen(world, 1)
    assert world.service.health()["pi_partitions"] == 2
    world.view = world.view_of(world.port, pis=1)
    world.service.look_around()
    world.store()
    world.login(at=9)
    await seen(world, 1, 2)
    await saved(world, 2)


@pytest.mark.slow
async def test_draining_saves_and_delivers_no_more(world: World) -> None:
    world.store()
    world.login()
    await seen(world, 1)
    await world.service.drain()
    assert world.cursor() == 1
    assert world.service.core.deliveries.sessions == {}
    world.login(at=9)
    await asyncio.sleep(0.01)
    assert world.service.core.deliveries.sessions == {}


@pytest.mark.slow
async def test_a_logout_ends_the_session_and_the_stream_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_core, "HEARTBEAT_S", 0.05)
    world = await World().start()
    try:
        world.login()
        world.store()
        await seen(world, 1)
        await saved(world, 1)
        world.logout()

        def gone() -> bool:
            return not world.service.core.deliveries.sessions and not world.service.samples()["mail_gateway_streams"]

        await until(gone, "nobody is served")
    finally:
        await world.stop()
