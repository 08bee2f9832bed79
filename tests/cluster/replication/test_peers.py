"""Streams and snapshots between two replicas; what is wrong with them is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.listeners.server import server_options
from cluster.replication.core.events import SnapshotReceived, SnapshotSent
from cluster.replication.core.messages import Append, Appended, Refused
from cluster.replication.model import Entry, EntryKind, MemberID, Position
from cluster.replication.peers.peers import MAX_MESSAGE_BYTES, MAX_QUEUED, MAX_QUEUED_BYTES, new_outbox
from cluster.replication.peers.wire import encode_message
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import REPLICATE
from cluster.settings.options import ClusterOptions
from cluster.wire.v1 import replication_pb2 as pb
from pixiu.errors import Unavailable
from pixiu.rpc.duplex import StreamEnded
from tests.cluster.replication.sides import OPTIONS, A, B, Side, begin, data, end, log_of, parts_of
from tests.support.framed import framed_of
from tests.support.waiting import until

Pair = tuple[Side, Side]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Two replicas that know each other."""
    one, two = Side(A, tmp_path / "a"), Side(B, tmp_path / "b")
    for side in (one, two):
        await side.start()
    for side, other, member in ((one, two, B), (two, one, A)):
        side.peers.set_live({member: other.registered()})
    yield one, two
    for side in (one, two):
        await side.stop()


def append(sender: MemberID, counter: int) -> Append:
    return Append(2, sender, Position(1, counter - 1), [Entry(2, counter, EntryKind.DATA, 5, b"payload")], 0, counter, 1.5)


async def test_messages_arrive_in_order_and_answers_go_back_on_the_same_stream(pair: Pair) -> None:
    one, two = pair
    for counter in range(1, 50):
        one.peers.send(B, encode_message(append(A, counter)))
    await until(lambda: len(two.heard) == 49)
    assert two.heard == [append(A, counter) for counter in range(1, 50)]
    two.peers.set_live({A: one.registered(stream_port=1)})  # it cannot reach the leader by itself
    two.peers._heard[A] = (two.peers._incoming[A].outbox, float("inf"))
    two.peers.send(A, encode_message(Appended(2, B, 1, 49, 1.5)))
    await until(lambda: one.heard)
    assert one.heard == [Appended(2, B, 1, 49, 1.5)]
    assert (two.listener.open, two.listener.served, list(two.peers._outgoing)) == (1, 1, [])


async def test_a_peer_that_was_away_is_reached_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rpc.framed_listener.STOP_S", 0.05)
    one, two = pair
    one.peers.send(B, encode_message(append(A, 1)))
    await until(lambda: two.heard)
    await two.server.stop(None)
    await two.listener.close()
    with pytest.raises(Unavailable):
        await one.peers.send_snapshot(B, parts_of(b""))
    two.server, two.listener = grpc.aio.server(options=server_options(ClusterOptions())), FramedListener()
    assert two.server.add_insecure_port(two.address) == two.port
    two.peers._context = two.context()
    two.peers.serve(two.receiver.receive, two.receiver.held, two._promoted, two._clock_set)
    await two.start()

    def heard() -> bool:
        one.peers.send(B, encode_message(append(A, 2)))
        return append(A, 2) in two.heard

    await until(heard)


async def test_a_stream_that_went_silent_is_not_relied_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    one.peers.send(B, encode_message(append(A, 1)))
    await until(lambda: two.heard)
    monkeypatch.setattr("cluster.replication.peers.peers.HEARD_S", -1.0)
    two.peers.send(A, encode_message(Appended(2, B, 1, 1, 1.5)))
    await until(lambda: one.heard)
    assert two.peers._outgoing.keys() == {A}


async def test_who_is_not_reachable_or_hangs_costs_a_bounded_queue(pair: Pair) -> None:
    one, _ = pair
    one.peers.send(MemberID(0xC), b"x")
    assert one.peers.counts["messages_dropped_total"] == 1
    outbox = new_outbox()
    assert sum(outbox.put(b"x", 1) for _ in range(MAX_QUEUED + 10)) == MAX_QUEUED
    outbox.clear()
    assert sum(outbox.put(bytes(1 << 20), 1 << 20) for _ in range(100)) == MAX_QUEUED_BYTES >> 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pixiu-partition": "4"}, "this is xiu, partition 3"),
        ({"pixiu-role": "pi"}, "this is xiu, partition 3"),
        ({"pixiu-to": f"{0xC:016x}"}, "this is the replica"),
        ({"pixiu-from": f"{B:016x}"}, "not another replica"),
        ({"pixiu-from": "x"}, "not a MemberID"),
        (None, "this is xiu, partition 3"),
    ],
)
async def test_what_is_meant_for_another_replica_is_refused(pair: Pair, changes: dict[str, str] | None, said: str) -> None:
    one, two = pair
    words = dict(one.peers.metadata(B)) | changes if changes is not None else {}
    assert said in await refused(two, words)
    async with grpc.aio.insecure_channel(two.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as call:
            resume: Any = channel.unary_unary("/pixiu.v1.Replication/ResumeSnapshot")
            await resume(b"", metadata=tuple(words.items()))
    assert call.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert two.heard == []


async def refused(side: Side, words: dict[str, str]) -> str:
    """Why a stream that begins with these words is not served."""
    about = " ".join(f"{key}={value}" for key, value in words.items())
    async with framed_of("xiu").call(side.registered().node, REPLICATE, bytes, about) as call:
        with pytest.raises(StreamEnded) as ended:
            await call.read()
    return str(ended.value)


async def test_a_full_house_and_a_replica_that_drains_take_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    monkeypatch.setattr("cluster.replication.peers.peers.MAX_STREAMS", 1)
    one.peers.send(B, encode_message(append(A, 1)))
    await until(lambda: two.heard)
    words = dict(one.peers.metadata(B))
    assert "more than 1 streams" in await refused(two, words | {"pixiu-from": f"{0xC:016x}"})
    await two.peers.close()
    assert "draining" in await refused(two, words)


async def test_bytes_that_are_no_message_are_counted_and_the_stream_goes_on(pair: Pair) -> None:
    one, two = pair
    foreign = encode_message(Refused(9, MemberID(0xC)))
    for sent in (b"\xff\xff", b"", foreign, encode_message(append(A, 1))):
        one.peers.send(B, sent)
    await until(lambda: two.heard)
    assert two.heard == [append(A, 1)]
    assert two.peers.counts["messages_malformed_total"] == 3
    two.peers._take(A, bytes(MAX_MESSAGE_BYTES + 1), new_outbox())
    assert two.peers.counts["messages_malformed_total"] == 4


async def test_an_operator_must_say_who_and_why_and_name_the_member(pair: Pair) -> None:
    _, two = pair
    async with grpc.aio.insecure_channel(two.address) as channel:
        call: Any = channel.unary_unary("/pixiu.v1.Replication/Promote")
        for wrong in (
            pb.OperatorRequest(operator="ann", reason="why", member=A),
            pb.OperatorRequest(operator="", reason="why", member=B),
            pb.OperatorRequest(operator="ann", reason="y" * 600, member=B),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(wrong.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"\xff\xff")
        await call(pb.OperatorRequest(operator="ann", reason="why", member=B).SerializeToString())
        clock: Any = channel.unary_unary("/pixiu.v1.Replication/SetClock")
        for member, said in ((A, "this is the replica"), (B, "the leader is elsewhere")):
            with pytest.raises(grpc.aio.AioRpcError, match=said):
                await clock(pb.OperatorRequest(operator="ann", reason="why", member=member).SerializeToString())
    assert two.promotions == [("ann", "why")]


# --- snapshots


async def test_a_snapshot_arrives_whole(pair: Pair, tmp_path: Path) -> None:
    one, two = pair
    one.sender.start(log_of(tmp_path))
    one.sender.send(B, 2)
    one.sender.send(B, 2)  # the one under way goes on instead
    await until(lambda: one.sent)
    assert one.sent == [SnapshotSent(B, Position(1, 7))]
    assert two.snapshots == [SnapshotReceived(2, A, Position(1, 7))]
    assert (two.folder.received / "sub/state").read_bytes() == b"x" * 700_000
    assert (two.folder.received / "empty").read_bytes() == b""
    assert two.folder.received_position() == Position(1, 7)
    assert not list((one.folder.path / "outgoing").iterdir())


async def test_a_snapshot_of_a_broken_state_is_refused(pair: Pair, tmp_path: Path) -> None:
    one, two = pair
    one.sender.start(log_of(tmp_path))
    two.machine.rotten = True
    with pytest.raises(Unavailable, match="wrong CRC"):
        await one.peers.send_snapshot(B, one.sender._parts(await one.sender._make(B), 1))
    assert two.snapshots == []
    assert two.folder.received_position() is None


class Jumps:
    """A clock of the event loop that a test sets forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.ahead_s, real = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self.ahead_s)


async def test_a_snapshot_may_take_as_long_as_it_moves_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    monkeypatch.setattr("cluster.replication.peers.snapshots.PART_TIMEOUT_S", 10_000.0)
    clock = Jumps(monkeypatch)

    async def slow() -> AsyncIterator[bytes]:
        yield begin(12)
        for number in range(4):
            clock.ahead_s += OPTIONS.snapshot_timeout_s / 2
            yield data(offset=3 * number)
        yield end(size=12)

    await one.peers.send_snapshot(B, slow())
    assert len(two.snapshots) == 1


async def test_a_receiver_that_takes_nothing_of_a_snapshot_any_more_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    one, two = pair
    monkeypatch.setattr("cluster.replication.peers.snapshots.PART_TIMEOUT_S", 10_000.0)
    clock = Jumps(monkeypatch)

    async def checks_for_ever(_folder: Path) -> None:
        clock.ahead_s += 3 * OPTIONS.snapshot_timeout_s
        await asyncio.Event().wait()

    two.machine.check = checks_for_ever  # type: ignore[method-assign, assignment]
    with pytest.raises(Unavailable, match="accepted nothing of the snapshot"):
        await one.peers.send_snapshot(B, parts_of(begin(), data(), end()))
    assert two.snapshots == []


async def test_a_second_snapshot_is_refused_while_one_is_loaded(pair: Pair) -> None:
    one, two = pair
    two.installing = True
    with pytest.raises(Unavailable, match="another snapshot"):
        await one.peers.send_snapshot(B, parts_of(begin(), data(), end()))
    assert two.snapshots == []


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"\xff\xff"],
        [data(), end()],
        [begin()],
        [begin(), data()],
        [begin(), end()],
        [begin(), data(crc=1), end()],
        [begin(), data(offset=1), end()],
        [begin(), data(), data(offset=2), end()],
        [begin(2), data(), end()],
        [begin(), data(), end(files=2)],
        [begin(), data("../state"), end()],
        [begin(), data("/etc/state"), end()],
        [begin(), data("a/b/c/d/e"), end()],
        [begin(), data(".hidden"), end()],
        [begin(1 << 62), data(), end()],
        [begin(), begin(), data(), end()],
    ],
)
async def test_a_snapshot_that_is_not_whole_or_not_one_is_refused(pair: Pair, parts: list[bytes]) -> None:
    one, two = pair
    with pytest.raises(Unavailable):
        await one.peers.send_snapshot(B, parts_of(*parts))
    assert two.snapshots == []
    assert two.folder.received_position() is None
    await one.peers.send_snapshot(B, parts_of(begin(), data(), end()))  # and the next one is taken
    assert len(two.snapshots) == 1


async def test_a_snapshot_that_cannot_be_made_is_told_after_a_pause(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.replication.peers.snapshots.FAILURE_PAUSE_S", 0.01)
    one, _ = pair

    async def full(_folder: Path) -> int:
        raise OSError(28, "No space left on device")

    one.sender._machine.snapshot = full  # type: ignore[method-assign, assignment]
    one.sender.start(SimpleNamespace())  # type: ignore[arg-type]
    one.sender.send(B, 2)
    await until(lambda: one.sent)
    assert one.sent == [SnapshotSent(B, None)]
