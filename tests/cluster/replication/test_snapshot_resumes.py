"""A snapshot whose transfer breaks off goes on where it was, over real connections that are cut."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.replication.core.events import SnapshotReceived, SnapshotSent
from cluster.replication.model import MemberID, Position
from cluster.replication.peers.snapshots import MAX_SENDING
from pixiu.errors import Unavailable
from tests.cluster.replication.sides import A, B, Side, begin, data, end, head, log_of, parts_of
from tests.support.cut_link import CutLink
from tests.support.waiting import until

MIB = 1 << 20
SIZES = {"first": 5 * MIB + 17, "none": 0, "sub/second": 9 * MIB, "third": 10 * MIB + 1}
SIZE = sum(SIZES.values())
CUT_AT = 18 * MIB
ARRIVED = Position(1, 7)

pytestmark = pytest.mark.slow


class Far:
    """A sender, and a receiver that it reaches by a link that may be cut."""

    def __init__(self, one: Side, two: Side, link: CutLink) -> None:
        self.one, self.two, self.link = one, two, link

    async def send(self) -> SnapshotSent:
        """Ask for a snapshot; what became of it."""
        before = len(self.one.sent)
        self.one.sender.send(B, 2)
        await until(lambda: len(self.one.sent) > before)
        return self.one.sent[-1]

    async def send_and_cut(self) -> None:
        self.link.cut_at = self.link.sent + CUT_AT
        assert await self.send() == SnapshotSent(B, None)
        await until(lambda: not self.two.receiver._receiving, "the receiver notices")
        self.link.cut_at = None

    @property
    def bytes_sent(self) -> int:
        return self.one.sender.counts["snapshot_bytes_sent_total"]

    def check_whole(self) -> None:
        assert self.two.snapshots == [SnapshotReceived(2, A, ARRIVED)]
        for path, content in self.one.machine.files.items():
            assert (self.two.folder.received / path).read_bytes() == content, path
        assert not self.two.folder.incoming.exists()
        assert not list((self.one.folder.path / "outgoing").iterdir())


@pytest.fixture
async def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Far]:
    monkeypatch.setattr("cluster.replication.peers.snapshots.FAILURE_PAUSE_S", 0.01)
    one, two = Side(A, tmp_path / "a"), Side(B, tmp_path / "b")
    rng = random.Random(1)
    one.machine.files = {path: rng.randbytes(size) for path, size in SIZES.items()}
    one.sender.start(log_of(tmp_path))
    await two.server.start()
    link = CutLink(two.port)
    await link.start()
    one.peers.set_live({B: two.registered(link.port)})
    yield Far(one, two, link)
    await one.sender.close()
    await link.close()
    for side in (one, two):
        await side.receiver.close()
        await side.peers.close()
        await side.server.stop(None)


async def test_a_snapshot_that_broke_off_goes_on_where_it_was(far: Far) -> None:
    await far.send_and_cut()
    sent, held = far.link.sent, await far.two.receiver.held(A, far.one.sender._made[B].head(2))
    assert held.path == "sub/second" or held.path == "third", "most of it has arrived"
    there = sum(size for path, size in SIZES.items() if path < held.path) + held.offset
    before = far.bytes_sent
    assert await far.send() == SnapshotSent(B, ARRIVED)
    far.check_whole()
    assert far.one.machine.snapshots == 1
    assert far.bytes_sent - before == SIZE - there, "nothing is sent twice"
    assert far.link.sent - sent < SIZE - there + MIB
    assert far.one.sender.counts["snapshots_resumed_total"] == 1


async def test_a_snapshot_that_breaks_off_again_and_again_arrives(far: Far) -> None:
    for _ in range(2):
        far.link.cut_at = far.link.sent + 9 * MIB
        assert await far.send() == SnapshotSent(B, None)
        await until(lambda: not far.two.receiver._receiving, "the receiver notices")
    far.link.cut_at = None
    assert await far.send() == SnapshotSent(B, ARRIVED)
    far.check_whole()
    assert far.one.machine.snapshots == 1
    assert far.one.sender.counts["snapshots_resumed_total"] == 2


async def test_what_is_there_must_be_what_the_sender_has(far: Far) -> None:
    await far.send_and_cut()
    made = far.one.sender._made[B]
    held = await far.two.receiver.held(A, made.head(2))
    with open(made.folder / held.path, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    assert await far.send() == SnapshotSent(B, ARRIVED)
    far.check_whole()
    assert far.one.machine.snapshots == 2
    assert far.one.sender.counts["snapshots_resumed_total"] == 0


async def test_what_has_come_is_given_up_with_the_snapshot_that_nobody_goes_on_with(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.replication.peers.snapshots.KEPT_S", 0.0)
    await far.send_and_cut()
    await until(lambda: not far.two.folder.incoming.exists(), "the receiver gives it up")
    await until(lambda: not list((far.one.folder.path / "outgoing").iterdir()), "the sender gives it up")
    assert far.one.pins == {}
    assert await far.send() == SnapshotSent(B, ARRIVED)
    far.check_whole()
    assert far.one.machine.snapshots == 2


async def test_a_kept_snapshot_holds_the_log_behind_it(far: Far) -> None:
    await far.send_and_cut()
    far.one.machine.applied = 8
    assert list(far.one.pins.values()) == [7]
    await far.send()
    assert list(far.one.pins.values()) == [7]


async def test_only_so_many_snapshots_are_kept(far: Far) -> None:
    far.one.machine.files = {"state": b"x"}
    for member in (0xC, 0xD, 0xE):
        far.one.sender.send(MemberID(member), 2)
        await until(lambda member=member: SnapshotSent(MemberID(member), None) in far.one.sent)  # type: ignore[misc]
    folders = sorted(path.name for path in (far.one.folder.path / "outgoing").iterdir())
    assert folders == [f"{0xD:016x}", f"{0xE:016x}"]
    assert len(folders) == MAX_SENDING


async def test_a_receiver_that_is_given_up_has_its_file_closed_and_whole_parts_only(far: Far) -> None:
    one, two = far.one, far.two
    with pytest.raises(Unavailable):
        await one.peers.send_snapshot(B, parts_of(begin(6, id=9), data()))
    held = await two.receiver.held(A, head(6, id=9))
    assert (held.path, held.offset, held.crc) == ("state", 3, 0x352441C2)
    for stranger in (await two.receiver.held(MemberID(0xC), head(6, id=9)), await two.receiver.held(A, head(6, id=8))):
        assert stranger.path == ""
    await one.peers.send_snapshot(B, parts_of(begin(6, id=9, path="state", offset=3), data(offset=3), end(size=6)))
    assert (two.folder.received / "state").read_bytes() == b"abcabc"


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": 8, "path": "state", "offset": 3},
        {"id": 9, "path": "state", "offset": 2},
        {"id": 9, "path": "other", "offset": 3},
        {"id": 0, "path": "state", "offset": 3},
    ],
)
async def test_a_snapshot_that_goes_on_elsewhere_is_refused_and_the_next_one_is_taken(far: Far, wrong: dict[str, int]) -> None:
    with pytest.raises(Unavailable):
        await far.one.peers.send_snapshot(B, parts_of(begin(6, id=9), data()))
    with pytest.raises(Unavailable, match=r"go on|goes on"):
        await far.one.peers.send_snapshot(B, parts_of(begin(6, **wrong), data(offset=3), end(size=6)))
    assert far.two.snapshots == []
    assert (await far.two.receiver.held(A, head(6, id=9))).path == ""
    await far.one.peers.send_snapshot(B, parts_of(begin(3, id=9), data(), end()))
    assert len(far.two.snapshots) == 1


async def test_an_offer_that_cannot_be_read_is_answered_with_nothing(far: Far) -> None:
    assert (await far.one.peers.ask_held(B, head(6, id=9))).path == ""
    assert (await far.one.peers.ask_held(B, head(6, id=9, path="x" * 10_000))).path == ""
    with pytest.raises(Unavailable, match="not in the registry"):
        await far.one.peers.ask_held(MemberID(0xC), head())
