"""What `InboxView` asks of Pi and Xiu, and what it does with their answers; the stores are a state and a dict."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from pi.events import NO_DEVICE, ReadFound, Reply
from pi.streams.streams import message_of as pi_reply_of
from pi.streams.streams import reads_of
from pixiu.client.inbox.dead_letters import dead_letter_uin, encode
from pixiu.client.stores import leaders as stores_module
from pixiu.client.stores import pages as pages
from pixiu.client.stores.leaders import Stores, refusal
from pixiu.client.stores.pages import DeadLetterEntry, InboxEntry, Lane
from pixiu.client.stores.view import InboxView
from pixiu.errors import InvalidArgument, LimitError, NotServed, OldSession, TooManyDevices, Unavailable, UnknownDevice
from pixiu.ids import device_of_name, snowflake
from pixiu.wire import inbox_operations
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    DELETE,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Clock,
    Deletes,
    DropDevices,
    Limits,
    OpenSessions,
    decode,
)
from pixiu.wire.levels import Triple
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc, xiu_pb2
from tests.pi.memory import Replica
from tests.support.pi import appends, message

TARGET = "zk://127.0.0.1:1/x"
SENT_MS = 1_750_000_000_000


def mail(number: int, body: bytes, sender: int = 5, uin: int = 7, lifetime_min: int = 0) -> bytes:
    return record_of(Kind.MAIL, uin, body, snowflake(SENT_MS, 1, number), sender=sender, lifetime_min=lifetime_min)


class Cluster(Stores):
    """A Pi's production state and a Xiu that is a dict, without processes between."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.replica = Replica()
        self.replica.apply(Clock(Limits(history_s=3600)))
        self.records: dict[int, bytes] = {}
        self.count = 0

    def put(self, uin: int, *records: bytes) -> None:
        """Store mail."""
        for record in records:
            self.count += 1
            self.records[message(self.count)] = record
            self.replica.apply(appends(1, (message(self.count), uin)))

    async def _ask(self, uin: int, request: pi_pb2.PiRequest) -> pi_pb2.PiReply:
        results = [number for found in self.replica.apply(*decode(request.operations)) for number in found]
        reads = []
        for read in reads_of(request):
            assert read.device == NO_DEVICE
            found = self.replica.state.peek(read.uin, read.lane, read.start or 0, read.num, read.before, devices=read.devices)
            reads.append(ReadFound(*found))
        return pi_reply_of(Reply(1, 1, Triple(1, 1, 1), results=results, reads=reads))

    async def fetch(self, entries: Any) -> None:
        for entry in entries:
            record = self.records.get(entry.msg_id)
            pages.take([entry], xiu_pb2.FetchReply(batch=record or b"", codes=["" if record else "GONE"]))


class Outbox:
    """In the place of a client: what was sent as whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, bytes, dict[str, Any]]] = []
        self.fails = False

    def __call__(self, target: str, *, uin: int, client: str) -> Any:
        outbox = self

        class Sender:
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

            def user(self, receiver: int) -> Any:
                async def send(payload: bytes, **options: Any) -> Any:
                    if outbox.fails:
                        raise Unavailable("nobody there")
                    outbox.sent.append((uin, receiver, payload, options))
                    return SimpleNamespace(id=len(outbox.sent))

                return SimpleNamespace(mail=send)

        return Sender()


@pytest.fixture
async def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def view(cluster: Cluster, outbox: Outbox) -> InboxView:
    made = InboxView(TARGET, connecting=outbox)
    made._stores = cluster
    return made


def bodies(lane: Lane) -> list[bytes]:
    return [entry.message.payload if entry.message else entry.code.encode() for entry in lane.entries]


def test_operations_are_those_that_lie_in_pis_log() -> None:
    tablet = device_of_name("tablet")
    assert decode(inbox_operations.encode_add_device(7, tablet)) == [AddDevice(7, inbox_operations.client_id(tablet))]
    assert decode(inbox_operations.encode_drop_device(7, 3)) == [DropDevices(USER_DEVICE.pack(7, 3))]
    assert decode(inbox_operations.encode_opens([(7, 3)])) == [OpenSessions(USER_DEVICE.pack(7, 3))]
    assert decode(inbox_operations.encode_acknowledges([(7, 3, 9, 1, 44, 0)])) == [
        Acknowledges(ACKNOWLEDGE.pack(7, 3, 1, 9, 44, 0))
    ]
    assert decode(inbox_operations.encode_delete(7, 1, 3, 9)) == [Deletes(DELETE.pack(7, 1, 3, 9))]


async def test_pages_go_forward_and_back_and_leave_out_what_was_deleted(cluster: Cluster, view: InboxView) -> None:
    cluster.put(7, *(mail(number, b"%d" % number) for number in range(1, 8)))
    assert await view.delete(7, 1, 3) == 1
    assert await view.delete(7, 1, 5, 6) == 2
    del cluster.records[message(7)]
    first, normal = await view.page(7, count=3)
    assert (first.last, first.entries) == (0, [])
    assert bodies(normal) == [b"1", b"2", b"4"]
    (back,) = await view.page(7, (1,), before=view.NEWEST, count=2)
    assert bodies(back) == [b"GONE", b"4"]
    (back,) = await view.page(7, (1,), before=back.entries[-1].seq, count=9, fetch=False)
    assert [(entry.seq, entry.message) for entry in back.entries] == [(2, None), (1, None)]
    assert normal.readable == 4
    for wrong in (view.page(0), view.page(7, (2,)), view.page(7, after=1, before=2), view.delete(7, 1, 0), view.delete(7, 1, 5, 4)):
        with pytest.raises(InvalidArgument):
            await wrong


async def test_acknowledging_is_of_a_device_of_its_own_and_unread_counts_are_of_each(cluster: Cluster, view: InboxView) -> None:
    cluster.put(7, *(mail(number, b"%d" % number) for number in range(1, 5)))
    cluster.replica.apply(OpenSessions(USER_DEVICE.pack(7, 0)))
    found = await view.acknowledge(7, 1, 3, "desk")
    assert (found.device_id, found.name, found.up_to, found.unread) == (device_of_name("desk"), "desk", 3, 1)
    assert await view.acknowledge(7, 1, 2, "desk") == found, "a cursor does not go back"
    first, normal = await view.unread(7)
    assert [(device.number, device.unread, device.counts) for device in normal.devices] == [(0, 4, True), (found.number, 1, True)]
    assert [device.unread for device in first.devices] == [0, 0]
    with pytest.raises(InvalidArgument, match="no such entry"):
        await view.acknowledge(7, 1, 5, "desk")
    for name in ("", "x" * 129):
        with pytest.raises(InvalidArgument, match="device's name"):
            await view.acknowledge(7, 1, 1, name)
    for number in range(6):
        await view.acknowledge(7, 1, 1, f"desk {number}")
    with pytest.raises(TooManyDevices):
        await view.acknowledge(7, 1, 1, "a ninth")
    await view.drop_device(7, found.number)
    with pytest.raises(UnknownDevice):
        await view.drop_device(7, found.number)


def dead(number: int, body: bytes, *, uin: int = 7, sender: int = 5, left_out: bool = False) -> bytes:
    record = mail(number, body, sender, uin, lifetime_min=9)
    limit = 200 if left_out else 1 << 20
    return mail(100 + number, encode(uin, message(number), number, 1, 3, SENT_MS + 1, f"bad {number}", record, limit=limit))


async def test_dead_letters_are_listed_with_what_they_were(cluster: Cluster, view: InboxView) -> None:
    cluster.put(7, mail(1, b"m" * 300))
    uin = dead_letter_uin(7)
    cluster.put(uin, dead(1, b"m" * 300, left_out=True), dead(9, b"x" * 300, left_out=True), dead(3, b"short"))
    cluster.put(uin, dead(4, b"of somebody else", uin=8), mail(5, b"no dead letter"))
    found = await view.dead_letters(7)
    assert [letter.original and letter.original.payload for letter in found] == [b"m" * 300, None, b"short", None, None]
    assert [letter.entry.code for letter in found] == ["", "GONE", "", "MALFORMED", "MALFORMED"]
    third = found[2].letter
    assert third is not None
    assert (third.reason, third.attempts, third.seq, third.failed_at_ms) == ("bad 3", 3, 3, SENT_MS + 1)
    assert [letter.entry.seq for letter in await view.dead_letters(7, after=(0, 3))] == [4, 5]


async def test_dead_letters_are_sent_again_by_their_senders_and_then_deleted(
    cluster: Cluster, view: InboxView, outbox: Outbox
) -> None:
    uin = dead_letter_uin(7)
    cluster.put(uin, dead(1, b"a"), dead(2, b"b", sender=6), dead(3, b"c"), mail(4, b"no dead letter"))
    outbox.fails = True
    with pytest.raises(Unavailable):
        await view.resend(7, await view.dead_letters(7))
    assert len(await view.dead_letters(7)) == 4, "what was not sent is there"
    outbox.fails = False
    assert len(await view.resend(7, await view.dead_letters(7))) == 3
    assert [sent[:3] for sent in outbox.sent] == [(5, 7, b"a"), (5, 7, b"c"), (6, 7, b"b")]
    assert outbox.sent[0][3]["expire"] == timedelta(minutes=9)
    left = await view.dead_letters(7)
    assert [letter.entry.seq for letter in left] == [4]
    assert await view.drop(7, left) == 1
    assert await view.dead_letters(7) == []
    assert await view.drop(7, [DeadLetterEntry(InboxEntry(1, 4, 4))]) == 0


async def test_letters_that_devices_filed_of_one_mail_send_it_once(cluster: Cluster, view: InboxView, outbox: Outbox) -> None:
    cluster.put(dead_letter_uin(7), dead(1, b"a"), dead(2, b"b"), dead(1, b"a"), dead(1, b"a"))
    letters = await view.dead_letters(7)
    assert len(await view.resend(7, letters[:3])) == 2
    assert await view.resend(7, letters[3:]) == [], "of the same mail, on a later page"
    assert [sent[:3] for sent in outbox.sent] == [(5, 7, b"a"), (5, 7, b"b")]
    assert await view.dead_letters(7) == []


def test_what_pi_refuses_is_an_error_of_ours() -> None:
    kinds = [type(refusal(-code)) for code in (3, 4, 5, 6, 8, 9, 77)]
    assert kinds == [UnknownDevice, OldSession, InvalidArgument, TooManyDevices, InvalidArgument, LimitError, InvalidArgument]


# --- finding the leader


class Pi(pi_pb2_grpc.PiServicer):
    """Answers what it was told to."""

    def __init__(self, *replies: pi_pb2.PiReply) -> None:
        self.replies = list(replies)
        self.asked = 0

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[pi_pb2.PiReply]:
        async for _ in request_iterator:
            self.asked += 1
            if not self.replies:
                return
            yield self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class Layouts:
    """A view with some Pis in it."""

    def __init__(self, *addresses: str, roles: tuple[str, ...] = ("pi",)) -> None:
        self.layout = SimpleNamespace(roles=roles, partitions=lambda role: 1)
        self._addresses = addresses

    def replicas(self, role: str, partition: int) -> list[Any]:
        return [SimpleNamespace(address=address, tls=False) for address in self._addresses]


async def served(*servicers: Pi) -> tuple[list[grpc.aio.Server], list[str]]:
    servers, addresses = [], []
    for servicer in servicers:
        server = grpc.aio.server()
        pi_pb2_grpc.add_PiServicer_to_server(servicer, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    return servers, addresses


async def test_the_leader_is_found_among_replicas_that_refuse_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "RETRY_S", 0.01)
    follower = Pi(pi_pb2.PiReply(code="NOT_LEADER", text="ask another"))
    leader = Pi(pi_pb2.PiReply(code="OVERLOADED"), pi_pb2.PiReply(results=[4], epoch=3))
    silent = Pi()
    servers, addresses = await served(silent, follower, leader)
    found = Stores(TARGET, leader_s=30.0)
    found._discovery = SimpleNamespace(view=Layouts(*addresses))  # type: ignore[assignment]
    try:
        assert await found.change(7, inbox_operations.encode_delete(7, 1, 1, 1)) == [4]
        assert (follower.asked, leader.asked) == (2, 2)
        leader.replies = [pi_pb2.PiReply(results=[-9])]
        with pytest.raises(LimitError):
            await found.change(7, inbox_operations.encode_delete(7, 1, 1, 1))
        leader.replies = [pi_pb2.PiReply(reads=[pi_pb2.PiReadReply(code="STATE_DAMAGED")])]
        with pytest.raises(Exception, match="STATE_DAMAGED"):
            await found.read(7, [pi_pb2.PiRead(uin=7, peek=True)])
        leader.replies = [pi_pb2.PiReply(code="DRAINING", text="going")]
        found._leader_s = 0.0
        with pytest.raises(Unavailable, match="DRAINING going"):
            await found.read(7, [pi_pb2.PiRead(uin=7, peek=True)])
        found._discovery = SimpleNamespace(view=Layouts(roles=("xiu",)))  # type: ignore[assignment]
        with pytest.raises(NotServed):
            await found.read(7, [])
    finally:
        await found._channels.close()
        for server in servers:
            await server.stop(0)
