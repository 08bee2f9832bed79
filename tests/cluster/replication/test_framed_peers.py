"""Messages between replicas over framed streams, and over gRPC where these are not offered, or not reached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.replication.messages import Append, Appended
from cluster.replication.model import Entry, EntryKind, MemberID, Position
from cluster.replication.wire import encode_message
from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.frames import Hello
from cluster.rpc.methods import REPLICATE
from pixiu.rpc.duplex import StreamEnded
from tests.cluster.replication.sides import A, B, Side
from tests.support.waiting import until

Pair = tuple[Side, Side]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Two replicas that know each other; the second one offers framed streams."""
    framed = Framed("xiu", 1, lambda _role: None, 4 << 20)
    one, two = Side(A, tmp_path / "a", framed), Side(B, tmp_path / "b", framed)
    two.stream_port = await two.door.bind("127.0.0.1", 0, fallback=True)
    await two.door.start()
    for side, other, member in ((one, two, B), (two, one, A)):
        await side.server.start()
        side.peers.set_live({member: other.registered()})
    yield one, two
    for side in (one, two):
        await side.peers.close()
        await side.door.close()
        await side.server.stop(None)


def append(counter: int) -> Append:
    return Append(2, A, Position(1, counter - 1), [Entry(2, counter, EntryKind.DATA, 5, b"payload")], 0, counter, 1.5)


async def test_messages_arrive_in_order_and_answers_go_back_on_the_same_stream(pair: Pair) -> None:
    one, two = pair
    for counter in range(1, 50):
        one.peers.send(B, encode_message(append(counter)))
    await until(lambda: len(two.heard) == 49)
    assert two.heard == [append(counter) for counter in range(1, 50)]
    two.peers.send(A, encode_message(Appended(2, B, 1, 49, 1.5)))
    await until(lambda: one.heard)
    assert one.heard == [Appended(2, B, 1, 49, 1.5)]
    assert (two.door.open, two.door.served, list(two.peers._outgoing)) == (1, 1, [])


@pytest.mark.slow
async def test_where_the_port_is_closed_messages_go_over_grpc(pair: Pair) -> None:
    one, two = pair
    one.peers.send(B, encode_message(append(1)))
    await until(lambda: two.heard)
    await two.door.close()

    def heard() -> bool:
        one.peers.send(B, encode_message(append(2)))
        return append(2) in two.heard

    await until(heard)
    assert two.door.served == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pixiu-partition": "4"}, "this is xiu, partition 3"),
        ({"pixiu-to": f"{0xC:016x}"}, "this is the replica"),
        ({"pixiu-from": f"{B:016x}"}, "not another replica"),
        ({"pixiu-from": "x"}, "not a MemberID"),
        (None, "this is xiu, partition 3"),
    ],
)
async def test_a_stream_that_is_meant_for_another_replica_is_refused(
    pair: Pair, changes: dict[str, str] | None, said: str
) -> None:  # fmt: skip
    one, two = pair
    words = dict(one.peers.metadata(B)) | changes if changes is not None else {}
    hello = Hello(REPLICATE, "xiu", 1, " ".join(f"{key}={value}" for key, value in words.items()))
    call: FramedCall[bytes, bytes] = FramedCall("127.0.0.1", two.stream_port, "xiu", hello, lambda: None, bytes, 1 << 20)
    async with call:
        with pytest.raises(StreamEnded, match=said):
            await call.read()
    assert two.heard == []


async def test_a_full_house_and_a_replica_that_drains_take_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    monkeypatch.setattr("cluster.replication.peers.MAX_STREAMS", 1)
    one.peers.send(B, encode_message(append(1)))
    await until(lambda: two.heard)

    async def refused(member: MemberID) -> str:
        words = dict(one.peers.metadata(B)) | {"pixiu-from": f"{member:016x}"}
        about = " ".join(f"{key}={value}" for key, value in words.items())
        call: FramedCall[bytes, bytes] = FramedCall(
            "127.0.0.1", two.stream_port, "xiu", Hello(REPLICATE, "xiu", 1, about), lambda: None, bytes, 1 << 20
        )
        async with call:
            with pytest.raises(StreamEnded) as ended:
                await call.read()
        return str(ended.value)

    assert "more than 1 streams" in await refused(MemberID(0xC))
    await two.peers.close()
    assert "draining" in await refused(A)
