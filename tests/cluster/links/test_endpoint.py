"""Two real endpoints in one loop: sockets, streams, timers."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.links import endpoint, pauses, stream
from cluster.links.api import Outcome, Peer, PeerState
from cluster.links.datagrams.head import DatagramRefusal
from cluster.links.endpoint import Endpoint
from cluster.links.local import MAX_BATCHES, LocalSwitch
from cluster.links.options import LinkOptions
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import LINK
from cluster.trust.key_ring import KeyRing
from pixiu.errors import ConfigurationError, InvalidArgument, NotConnected
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import StreamEnded
from tests.cluster.links.world import Recorder, make_record
from tests.support.framed import framed_of
from tests.support.waiting import until

KEY, NEXT = b"a key of the cluster", b"the next key of the cluster"
RING = KeyRing({1: KEY}, 1)
WAIT_S = 30.0


class Process:
    """An endpoint with a listener of streams, as a role's process has it."""

    def __init__(self, options: LinkOptions | None = None, ring: KeyRing | None = RING, switch: LocalSwitch | None = None) -> None:
        self.id = EndpointID(secrets.randbits(62) | 1)
        self.handler = Recorder()
        self.framed = framed_of("router", self.id)
        self.endpoint = Endpoint(
            self.id, options or LinkOptions(), self.handler, ring=ring, role="router", framed=self.framed, switch=switch
        )
        self.listener = FramedListener()
        self.port = self.stream_port = 0

    async def start(self) -> Process:
        self.port = self.endpoint.bind("127.0.0.1", 0)
        await self.listen()
        await self.endpoint.start()
        return self

    async def listen(self) -> None:
        """Take streams, at the same port as before."""
        self.listener = FramedListener()
        self.endpoint.attach(self.listener)
        self.stream_port = await self.listener.bind("127.0.0.1", self.stream_port, fallback=False, reuse=True)
        await self.listener.start()

    @property
    def peer(self) -> Peer:
        return Peer(self.id, "router", "127.0.0.1", self.port, self.stream_port)

    async def stop(self) -> None:
        try:
            await self.endpoint.close()
        finally:
            await self.listener.close()


@pytest.fixture
async def processes() -> AsyncIterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        await process.stop()


@pytest.fixture(params=["two processes", "one process"])
def switch(request: pytest.FixtureRequest) -> LocalSwitch | None:
    return LocalSwitch() if request.param == "one process" else None


async def two(
    processes: list[Process],
    options: LinkOptions | None = None,
    ring: KeyRing | None = RING,
    switch: LocalSwitch | None = None,
) -> tuple[Process, Process]:
    for _ in range(2):
        processes.append(await Process(options, ring, switch).start())
    alice, bob = processes
    alice.endpoint.set_peers([bob.peer])
    bob.endpoint.set_peers([alice.peer])
    await until(lambda: alice.endpoint.state(bob.id) is PeerState.ALIVE and bob.endpoint.state(alice.id) is PeerState.ALIVE)
    return alice, bob


@pytest.mark.parametrize("ring", [RING, None])
async def test_records_and_control_arrive_and_settle(processes: list[Process], ring: KeyRing | None) -> None:
    alice, bob = await two(processes, ring=ring)
    records = [make_record(number) for number in range(1000)]
    for start in range(0, 1000, 100):
        alice.endpoint.send_records(bob.id, records[start : start + 100], token=start + 1)
    alice.endpoint.send_control(bob.id, [b"first", b"second"], token=5000)
    await until(lambda: len(alice.handler.settled) == 11)
    assert all(handled for _, handled in alice.handler.settled)
    assert bob.handler.records == records
    assert bob.handler.control == [b"first", b"second"]
    stats = bob.endpoint.stats()
    assert stats.total.records_received == 1000
    assert stats.refused == {}
    assert stats.receive_buffer_bytes > 0
    assert stats.kernel_drops == 0
    assert stats.peers[alice.id].state is PeerState.ALIVE
    assert stats.peers[alice.id].rtt_us > 0


async def test_what_came_during_a_long_pause_is_late_and_what_comes_later_is_not(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "LEAST_DOUBT_S", 0.5)
    monkeypatch.setattr(endpoint, "DRAIN_DATAGRAMS", 1)
    alice, bob = await two(processes, LinkOptions(heartbeat_interval_ms=100))
    late: list[bool] = []
    take = bob.handler.on_records

    def on_records(peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        late.append(bob.endpoint.late)
        return take(peer, data, start, end, count) if not bob.endpoint.late else Outcome.NOT_TAKEN

    monkeypatch.setattr(bob.handler, "on_records", on_records)
    for number in range(3):
        alice.endpoint.in_turn(partial(alice.endpoint.send_records, bob.id, [make_record(number)], token=number + 1))
    time.sleep(0.7)  # the process stops; what was sent waits in the socket
    await until(lambda: len(alice.handler.settled) == 3)
    assert late == [True] * 3
    assert not any(handled for _, handled in alice.handler.settled)

    def in_time() -> bool:  # a pause of a busy machine is one too
        alice.endpoint.send_records(bob.id, [make_record(9)])
        return not late[-1]

    await until(in_time)


class Translator:
    """Stands before one endpoint: what is sent to its port goes on to the endpoint, from a port of its own for each sender."""

    def __init__(self, inside: Process) -> None:
        self._inside = ("127.0.0.1", inside.port)
        self._outside = self._bind(self._inward)
        self._ports: dict[tuple[str, int], socket.socket] = {}
        self.address: tuple[str, int] = self._outside.getsockname()

    def _bind(self, forward: Callable[[socket.socket], None]) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        asyncio.get_running_loop().add_reader(sock.fileno(), forward, sock)
        return sock

    def _inward(self, sock: socket.socket) -> None:
        data, sender = sock.recvfrom(1 << 16)
        if sender not in self._ports:
            self._ports[sender] = self._bind(lambda own: self._outward(own, sender))
        self._ports[sender].sendto(data, self._inside)

    def _outward(self, sock: socket.socket, sender: tuple[str, int]) -> None:
        self._outside.sendto(sock.recvfrom(1 << 16)[0], sender)

    def close(self) -> None:
        for sock in (self._outside, *self._ports.values()):
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()


async def test_a_peer_behind_an_address_translator_gets_datagrams_where_it_wants_them(processes: list[Process]) -> None:
    """Streams go to its own address. It does not know us, and answers to where the datagrams come from."""
    where: dict[EndpointID, tuple[str, int]] = {}
    inside, outside = Process(), Process()
    outside.endpoint = Endpoint(
        outside.id, LinkOptions(), outside.handler, ring=RING, role="router", udp_address_of=where.get, framed=outside.framed
    )  # fmt: skip
    for process in (inside, outside):
        processes.append(await process.start())
    translator = Translator(inside)
    try:
        where[inside.id] = translator.address
        outside.endpoint.set_peers([inside.peer])
        await until(lambda: outside.endpoint.state(inside.id) is PeerState.ALIVE)
        records = [make_record(1), make_record(2, 100_000), make_record(3)]
        outside.endpoint.send_records(inside.id, records, token=1)
        await until(lambda: outside.handler.settled)
        assert outside.handler.settled == [(1, True)]
        assert inside.handler.records == records
    finally:
        translator.close()


async def test_a_parcel_settles_promptly_on_an_idle_link(processes: list[Process]) -> None:
    alice, bob = await two(processes)
    for token in range(1, 21):
        alice.endpoint.send_records(bob.id, [make_record(token)], token=token)
        await until(lambda token=token: (token, True) in alice.handler.settled)  # type: ignore[misc]
    assert bob.handler.keys() == list(range(1, 21))


async def test_a_large_record_goes_by_stream_and_order_survives(processes: list[Process]) -> None:
    alice, bob = await two(processes, LinkOptions(push_back_ms=20_000))
    sizes = [140, 140, 1 << 20, 140, 9_000, 300_000, 140, 140]
    records = [make_record(number, size) for number, size in enumerate(sizes)]
    alice.endpoint.send_records(bob.id, records, token=1)
    await until(lambda: alice.handler.settled)
    assert alice.handler.settled == [(1, True)]
    assert bob.handler.records == records
    alice.endpoint.send_records(bob.id, records, token=2)
    await until(lambda: len(alice.handler.settled) == 2)
    assert alice.handler.settled[1] == (2, True)
    assert bob.handler.records == records * 2


async def test_processes_differ_in_what_need_not_agree_and_in_the_key_that_signs(processes: list[Process]) -> None:
    both = {1: KEY, 2: NEXT}
    processes.append(await Process(LinkOptions(suspect_after=3), KeyRing(both, 1)).start())
    processes.append(await Process(LinkOptions(), KeyRing(both, 2)).start())
    alice, bob = processes
    for one, other in ((alice, bob), (bob, alice)):
        one.endpoint.set_peers([other.peer])
    await until(lambda: alice.endpoint.state(bob.id) is PeerState.ALIVE and bob.endpoint.state(alice.id) is PeerState.ALIVE)
    records = [make_record(number) for number in range(1000)]
    for one, other in ((alice, bob), (bob, alice)):
        one.endpoint.send_records(other.id, records, token=1)
    await until(lambda: alice.handler.settled and bob.handler.settled)
    for one in processes:
        assert one.handler.settled == [(1, True)]
        assert one.handler.records == records
        assert one.endpoint.stats().refused == {}


@pytest.mark.slow
async def test_a_dead_peer_settles_everything_and_is_reported(processes: list[Process]) -> None:
    options = LinkOptions(heartbeat_interval_ms=100)
    alice, bob = await two(processes, options)
    processes.remove(bob)
    await bob.stop()
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    alice.endpoint.send_control(bob.id, [b"x"], token=2)
    await until(lambda: alice.endpoint.state(bob.id) is PeerState.DEAD)
    await until(lambda: len(alice.handler.settled) == 2)
    assert sorted(alice.handler.settled) == [(1, False), (2, False)]
    assert (bob.id, PeerState.DEAD) in alice.handler.states
    alice.endpoint.send_records(bob.id, [make_record(2)], token=3)
    await until(lambda: (3, False) in alice.handler.settled)


@pytest.mark.parametrize("ring", [RING, None])
@pytest.mark.slow
async def test_a_process_that_starts_anew_on_the_same_port_is_another_one(processes: list[Process], ring: KeyRing | None) -> None:
    alice, bob = await two(processes, LinkOptions(heartbeat_interval_ms=300), ring)
    processes.remove(bob)
    await bob.stop()
    again = Process(ring=ring)
    processes.append(again)
    again.port = again.endpoint.bind("127.0.0.1", bob.port)
    await again.endpoint.start()
    await until(lambda: (bob.id, PeerState.DEAD) in alice.handler.states)
    alice.endpoint.set_peers([again.peer])
    alice.endpoint.send_records(again.id, [make_record(7)], token=1)
    await until(lambda: alice.handler.settled)
    assert alice.handler.settled == [(1, True)]
    assert again.handler.keys() == [7]


async def test_a_stream_connects_again_after_the_peers_server_was_away(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.rpc.framed_listener.STOP_S", 0.05)
    alice, bob = await two(processes)
    alice.endpoint.send_records(bob.id, [make_record(1, 200_000)], token=1)
    await until(lambda: alice.handler.settled)
    await bob.listener.close()
    alice.endpoint.send_records(bob.id, [make_record(2, 200_000)], token=2)
    await until(lambda: len(alice.handler.settled) == 2)
    assert alice.handler.settled[1] == (2, False)
    await bob.listen()
    tokens = itertools.count(3)

    def again() -> bool:
        token = next(tokens)
        alice.endpoint.send_records(bob.id, [make_record(token, 200_000)], token=token)
        return any(handled for sent, handled in alice.handler.settled if sent >= 3)

    await until(again)
    handled_later = next(sent for sent, handled in alice.handler.settled if handled and sent >= 3)
    assert handled_later in [*bob.handler.keys()]


async def test_a_sender_outside_the_view_is_answered(processes: list[Process]) -> None:
    for _ in range(2):
        processes.append(await Process().start())
    alice, bob = processes
    alice.endpoint.set_peers([bob.peer])
    alice.endpoint.send_control(bob.id, [b"hello"], token=1)
    await until(lambda: alice.handler.settled)
    bob.endpoint.send_control(alice.id, [b"answer"], token=2)
    await until(lambda: bob.handler.settled)
    assert alice.handler.control == [b"answer"]
    assert bob.handler.settled == [(2, True)]


async def test_a_new_process_waits_until_a_peer_that_answers_takes_what_it_sends(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.links.endpoint.INTRODUCTION_S", WAIT_S)
    known: list[EndpointID] = []
    member = Process()
    member.endpoint = Endpoint(member.id, LinkOptions(), member.handler, ring=RING, role="router", knows=known.__contains__)
    new = Process()
    for process in (member, new):
        processes.append(await process.start())
    new.endpoint.set_peers([member.peer])
    waiting = asyncio.create_task(new.endpoint.introduced())
    await until(lambda: member.endpoint.stats().refused.get(DatagramRefusal.UNKNOWN_SENDER, 0) > 3)
    assert not waiting.done()
    known.append(new.id)  # it has read the registry
    await waiting
    new.endpoint.send_records(member.id, [make_record(1)], token=1)
    await until(lambda: new.handler.settled == [(1, True)])


async def test_a_host_name_is_looked_up_without_blocking(processes: list[Process]) -> None:
    for _ in range(2):
        processes.append(await Process(LinkOptions(push_back_ms=20_000)).start())
    alice, bob = processes
    alice.endpoint.set_peers([Peer(bob.id, "router", "localhost", bob.port)])
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    await until(lambda: alice.handler.settled)
    assert alice.handler.settled == [(1, True)]


async def test_garbage_and_oversized_datagrams_are_counted_and_traffic_goes_on(processes: list[Process]) -> None:
    alice, bob = await two(processes)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"PX", bytes(2000), bytes(20_000), secrets.token_bytes(500)):
            stranger.sendto(data, ("127.0.0.1", bob.port))
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    await until(lambda: alice.handler.settled and sum(bob.endpoint.stats().refused.values()) == 5)
    assert alice.handler.settled == [(1, True)]
    assert bob.endpoint.stats().refused["oversized"] == 1
    assert bob.endpoint.stats().refused["short"] == 2


async def test_a_flood_is_held_back_by_the_window_and_not_dropped_by_the_kernel(processes: list[Process]) -> None:
    alice, bob = await two(processes, LinkOptions(push_back_ms=20_000))
    batch = [make_record(number) for number in range(1000)]
    for token in range(1, 61):
        alice.endpoint.send_records(bob.id, batch, token=token)
    await until(lambda: len(alice.handler.settled) == 60)
    assert all(handled for _, handled in alice.handler.settled)
    assert bob.endpoint.stats().kernel_drops == 0
    assert len(bob.handler.records) == 60_000


async def test_closing_settles_what_is_left(processes: list[Process], switch: LocalSwitch | None) -> None:
    alice, bob = await two(processes, switch=switch)
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    await alice.endpoint.close()
    assert alice.handler.settled == [(1, switch is not None)], "a role of the same process has taken it"
    await until(lambda: bob.handler.records)


async def test_a_role_that_closes_is_dead_for_the_others_of_its_process(processes: list[Process]) -> None:
    alice, bob = await two(processes, switch=LocalSwitch())
    processes.remove(bob)
    bob.endpoint.send_records(alice.id, [make_record(number) for number in range(2 * 58 * MAX_BATCHES)], token=1)
    alice.endpoint.send_records(bob.id, [make_record(2)], token=2)
    await bob.stop()
    assert bob.handler.settled == [(1, False)], "it sends as much as one turn takes"
    assert alice.handler.keys()[:3] == [0, 1, 2]
    await until(lambda: (bob.id, PeerState.DEAD) in alice.handler.states)
    alice.endpoint.send_control(bob.id, [b"late"], token=3)
    await until(lambda: (3, False) in alice.handler.settled)


async def test_roles_of_one_process_talk_in_their_own_contexts_without_datagrams_or_rests(processes: list[Process]) -> None:
    role: contextvars.ContextVar[str] = contextvars.ContextVar("role")
    seen: list[str] = []
    hurried: list[float] = []
    switch = LocalSwitch()
    for name in ("gateway", "proxy"):
        process = Process(switch=switch)
        processes.append(process)

        async def start(name: str = name, process: Process = process) -> None:
            role.set(name)
            await process.start()

        await asyncio.create_task(start())
        process.endpoint.pace(lambda _: None, hurried.append)
    alice, bob = processes
    alice.endpoint.set_peers([bob.peer])
    taken = bob.handler.on_records

    def on_records(*arguments: Any) -> Outcome:
        seen.append(role.get())
        asyncio.get_running_loop().call_soon(lambda: seen.append(role.get()))
        return taken(*arguments)

    bob.handler.on_records = on_records  # type: ignore[method-assign, assignment]
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1, urgent=True)
    alice.endpoint.send_control(bob.id, [b"control"])
    await until(lambda: len(seen) == 2 and alice.handler.settled == [(1, True)])
    assert (seen, hurried) == (["proxy", "proxy"], [])
    assert alice.endpoint.role_of(bob.id) == "router"
    await alice.endpoint.introduced()
    assert alice.endpoint.stats().total.heartbeats_sent == 1
    assert alice.endpoint._core.outputs.datagrams == []


async def test_a_turn_with_local_and_other_output_loses_neither(processes: list[Process]) -> None:
    switch = LocalSwitch()
    alice, bob = await two(processes, switch=switch)
    carol = await Process().start()
    processes.append(carol)
    alice.endpoint.set_peers([bob.peer, carol.peer])
    carol.endpoint.set_peers([alice.peer])
    await until(lambda: alice.endpoint.state(carol.id) is PeerState.ALIVE)
    for act in (
        lambda: alice.endpoint.send_records(carol.id, [make_record(2)], token=2),
        lambda: alice.endpoint.send_records(EndpointID(12345), [make_record(3)], token=3),
        lambda: alice.endpoint.set_attachment(carol.id, b"new"),
        lambda: alice.endpoint.send_records(bob.id, [make_record(4)], token=4, more=True),
    ):

        def both(act: Callable[[], None] = act) -> None:
            alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
            act()

        alice.endpoint.in_turn(both)
    await until(lambda: {(2, True), (3, False), (4, True)} <= {*alice.handler.settled})
    await until(lambda: (alice.id, False, b"new") in carol.handler.heartbeats)
    assert alice.handler.settled.count((1, True)) == 4


async def test_more_than_a_turn_takes_goes_on_by_itself(processes: list[Process]) -> None:
    alice, bob = await two(processes, switch=LocalSwitch())
    number = 5 * 58 * MAX_BATCHES
    alice.endpoint.in_turn(lambda: alice.endpoint.send_records(bob.id, [make_record(each) for each in range(number)], token=1))
    assert len(bob.handler.batches) == MAX_BATCHES
    await until(lambda: alice.handler.settled == [(1, True)])
    assert bob.handler.keys() == list(range(number))


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    first, second = (Endpoint(EndpointID(number), LinkOptions(), Recorder()) for number in (1, 2))
    port = first.bind("127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match=str(port)):
        second.bind("127.0.0.1", port)
    with pytest.raises(NotConnected):
        await second.start()
    await first.close()


async def test_an_attachment_is_bounded(processes: list[Process], switch: LocalSwitch | None) -> None:
    alice, bob = await two(processes, switch=switch)
    with pytest.raises(InvalidArgument, match="512"):
        alice.endpoint.set_attachment(bob.id, bytes(513))
    alice.endpoint.set_attachment(bob.id, b"partition 3 of 8")
    await until(lambda: (alice.id, False, b"partition 3 of 8") in bob.handler.heartbeats)


async def test_what_is_sent_in_a_turn_leaves_with_it(processes: list[Process], switch: LocalSwitch | None) -> None:
    alice, bob = await two(processes, switch=switch)

    def sent() -> int:
        total = alice.endpoint.stats().total
        return total.datagrams_sent + total.local_batches_sent

    before = sent()

    def act() -> None:
        alice.endpoint.send_records(bob.id, [make_record(1)])
        alice.endpoint.send_records(bob.id, [make_record(2)])
        assert sent() == before

    alice.endpoint.in_turn(act)
    assert sent() == before + 1, "together, and without a turn of the event loop"
    await until(lambda: bob.handler.keys() == [1, 2])


async def test_what_a_handler_wants_done_at_the_end_of_the_input_is_done_before_the_acknowledgement(
    processes: list[Process], switch: LocalSwitch | None
) -> None:
    alice, bob = await two(processes, switch=switch)
    seen: list[int] = []

    def answer() -> None:
        seen.append(len(bob.handler.records))
        assert not bob.endpoint.at_end_of_input(answer), "that has ended"
        bob.endpoint.send_records(alice.id, [make_record(9)])

    taken = bob.handler.on_records

    def on_records(*arguments: Any) -> Outcome:
        assert bob.endpoint.at_end_of_input(answer)
        return taken(*arguments)

    bob.handler.on_records = on_records  # type: ignore[method-assign, assignment]
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    await until(lambda: alice.handler.settled)
    assert alice.handler.keys() == [9], "the answer left before the acknowledgement"
    assert seen == [1]
    assert not bob.endpoint.at_end_of_input(answer)


class Escape(BaseException):
    """What no guard for exceptions catches."""


async def test_an_act_that_raises_at_the_end_of_input_does_not_end_the_others(
    processes: list[Process], switch: LocalSwitch | None
) -> None:
    alice, bob = await two(processes, switch=switch)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context.get("exception")))
    done: list[int] = []
    bug = KeyError("a bug")

    def fail() -> None:
        raise bug

    class Acting(Recorder):
        def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
            assert bob.endpoint.at_end_of_input(fail)
            assert bob.endpoint.at_end_of_input(lambda: done.append(count))
            return Outcome.TAKEN

    bob.endpoint._core._handler = bob.endpoint._core.port.handler = Acting()
    alice.endpoint.send_records(bob.id, [make_record(1)], token=1)
    await until(lambda: alice.handler.settled == [(1, True)])
    assert (done, raised) == ([1], [bug])


async def test_the_input_ends_when_something_escapes_from_it(processes: list[Process], switch: LocalSwitch | None) -> None:
    alice, bob = await two(processes, switch=switch)
    in_input: list[bool] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: in_input.append(bob.endpoint.at_end_of_input(lambda: None)))

    class Escaping(Recorder):
        def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
            raise Escape

    bob.endpoint._core._handler = bob.endpoint._core.port.handler = Escaping()
    alice.endpoint.send_records(bob.id, [make_record(1)])
    await until(lambda: bool(in_input))
    assert in_input == [False]


async def test_who_paces_the_loop_is_told_when_somebody_waits() -> None:
    one, other = await Process().start(), await Process().start()
    hurried: dict[Process, list[float]] = {one: [], other: []}
    patient: list[socket.socket] = []
    for process, peer in ((one, other), (other, one)):
        process.endpoint.pace(patient.append, hurried[process].append)
        process.endpoint.set_peers([peer.peer])
    assert [sock.getsockname()[1] for sock in patient] == [one.port, other.port]
    await until(lambda: one.endpoint.state(other.id) is other.endpoint.state(one.id) is PeerState.ALIVE)
    one.endpoint.send_records(other.id, [make_record(1)])
    await until(lambda: len(other.handler.records) == 1)
    assert not hurried[one]
    assert not hurried[other]
    one.endpoint.send_records(other.id, [make_record(2)], token=1, urgent=True)
    await until(lambda: len(other.handler.records) == 2)
    await until(lambda: hurried[other])
    assert len(hurried[one]) == 1
    before = len(hurried[other])
    one.endpoint.send_control(other.id, [b"control"])
    await until(lambda: len(hurried[other]) > before)
    assert len(hurried[one]) == 2
    for process in (one, other):
        await process.stop()


async def test_streams_that_say_nothing_shut_nobody_out(processes: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes space; one on which a peer has spoken stays."""
    monkeypatch.setattr(stream, "MAX_SILENT", 4)
    alice, bob = await two(processes, LinkOptions(push_back_ms=20_000))
    alice.endpoint.send_records(bob.id, [make_record(1, 200_000)], token=1)
    await until(lambda: alice.handler.settled)
    silent = [framed_of("router").call(bob.peer, LINK, bytes) for _ in range(12)]
    ends = [asyncio.ensure_future(call.read()) for call in silent]
    await until(lambda: sum(end.done() for end in ends) == 8)
    assert bob.listener.open == 1 + 4
    alice.endpoint.send_records(bob.id, [make_record(2, 200_000)], token=2)
    await until(lambda: len(alice.handler.settled) == 2)
    assert bob.handler.keys() == [1, 2]
    for call in silent:
        await call.close()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_frames_that_are_not_for_this_process_end_their_stream(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.links.peer.sender.STREAM_WAIT_S", 0.1)
    alice, bob = await two(processes)
    async with framed_of("router").call(bob.peer, LINK, bytes) as call:
        await call.write(b"x" * 100)
        with pytest.raises(StreamEnded, match="not a frame for this process"):
            await call.read()
    alice.endpoint.set_peers([replace(bob.peer, stream_port=0)])
    alice.endpoint.send_records(bob.id, [make_record(1, 200_000), make_record(2)], token=1)
    await until(lambda: alice.handler.settled)
    assert (alice.handler.settled, bob.handler.keys()) == ([(1, False)], []), "no port is known"
