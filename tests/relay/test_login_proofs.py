"""A relay takes a gateway's word that a user is at it only with a login ticket."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cluster.core.contract import SendControl, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect, UnprovenLogins
from cluster.membership.map.anti_entropy import PROVEN_PAGE_ENTRIES, Source
from cluster.membership.map.devices import connected
from cluster.membership.map.digest import bucket_of
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update, decode_messages, encode_messages
from cluster.trust.tickets import MAX_TICKET_S, sign
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id, gateway_run
from relay.core import Core
from relay.login_proofs import LoginProofs
from tests.support.effects import of

ME, PEER = EndpointID(10), EndpointID(11)
GATEWAY, SECOND = EndpointID(30), EndpointID(31)
KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_800_000_000
UNTIL = NOW + 3600
CONNECTED = NOW * 1000 << 16


def run(instance: int = 3, generation: int = 1) -> int:
    return gateway_run(gateway_msg_id(instance, generation, 0))


class Bench:
    """A relay with one peer, which checks tickets."""

    def __init__(self) -> None:
        self.unix = float(NOW)
        self.keys: tuple[bytes, ...] = (KEY,)
        self.core = Core(
            endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=10.0,
            proofs=LoginProofs(lambda: self.keys, lambda: self.unix),
        )  # fmt: skip
        self.core.step(ev.StoreOpened(None), 0.0)
        gateways = (ev.Gateway(GATEWAY, 3, 1), ev.Gateway(SECOND, 4, 1))
        for peers in ((), (ev.Replica(PEER, 0, True),)):
            self.core.step(ev.ClusterChanged(1, 1, peers, ev.NO_OTHER, gateways), 0.0)

    def tell(self, *changes: Update, peer: EndpointID = GATEWAY) -> list[Effect]:
        return self.core.step(ev.MessagesReceived(peer, list(changes)), 1.0)

    def online(self, uin: int = 7) -> int:
        return self.core.presence([uin])[0].devices


def connect(ticket: bytes, uin: int = 7, counter: int = 1, time: int = CONNECTED) -> Update:
    return connected(gateway_msg_id(3, 1, counter), uin, 1, time, chat=True)._replace(ticket=ticket)


def forwarded(effects: Iterable[Effect]) -> list[Update]:
    controls = [control_pb2.Control.FromString(m) for e in of(SendControl, effects) if e.peer == PEER for m in e.messages]
    return [change for control in controls for change in decode_messages(control.gateway_messages)]


GOOD = sign(KEY, 7, run(), UNTIL)


def test_a_connect_with_a_ticket_is_taken_and_passed_on_without_it() -> None:
    bench = Bench()
    effects = bench.tell(connect(GOOD))
    assert bench.online() == 1
    assert forwarded(effects) == [connect(b"")]
    assert bench.core.unproven == 0


FORGERIES = {
    "none": b"",
    "other user": sign(KEY, 8, run(), UNTIL),
    "other gateway": sign(KEY, 7, run(4), UNTIL),
    "other run": sign(KEY, 7, run(3, 2), UNTIL),
    "ended": sign(KEY, 7, run(), NOW),
    "other key": sign(OTHER, 7, run(), UNTIL),
    "truncated": GOOD[:-1],
    "longer": GOOD + b"\0",
    "later end": (UNTIL + 1).to_bytes(4, "little") + GOOD[4:],
    "endless": sign(KEY, 7, run(), (1 << 32) - 1),
    "one bit": GOOD[:-1] + bytes((GOOD[-1] ^ 1,)),
}


@pytest.mark.parametrize("ticket", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_forged_ticket_is_neither_taken_nor_confirmed_nor_passed_on(ticket: bytes) -> None:
    bench = Bench()
    effects = bench.tell(connect(ticket))
    assert of(UnprovenLogins, effects) == [UnprovenLogins(GATEWAY, 1)]
    assert not of(SendControl, effects)
    assert (bench.online(), bench.core.unproven) == (0, 1)


def test_another_gateway_cannot_use_a_ticket_that_it_has_seen() -> None:
    bench = Bench()
    stolen = connected(gateway_msg_id(4, 1, 1), 7, 1, CONNECTED, chat=True)._replace(ticket=GOOD)
    bench.tell(stolen, peer=SECOND)
    assert (bench.online(), bench.core.unproven) == (0, 1)


def test_a_removed_key_ends_its_tickets() -> None:
    bench = Bench()
    bench.keys = (OTHER,)
    bench.tell(connect(GOOD))
    assert bench.online() == 0


def test_a_departure_needs_none_and_the_rest_of_a_batch_is_taken() -> None:
    bench = Bench()
    bench.tell(connect(GOOD), connect(b"", uin=8, counter=2))
    assert (bench.online(7), bench.online(8)) == (1, 0)
    bench.tell(Update(gateway_msg_id(3, 1, 3), 7, 1, False))
    assert bench.online() == 0


def test_a_peer_has_checked_already() -> None:
    bench = Bench()
    bench.tell(connect(b""), peer=PEER)
    assert bench.online() == 1


def test_no_connection_counts_for_longer_than_a_ticket_lasts() -> None:
    bench = Bench()
    bench.tell(connect(GOOD))
    bench.tell(connect(GOOD, counter=2, time=CONNECTED + (3600_000 << 16)))
    assert bench.core.unproven == 1, "a connect time in the future"
    bench.unix += MAX_TICKET_S / 2
    bench.core.step(Tick(), 100.0)
    assert bench.online() == 1
    bench.unix += MAX_TICKET_S
    bench.core.step(Tick(), 200.0)
    assert bench.online() == 0
    assert bench.core.devices.chat_gateways(7) == ()


@pytest.mark.parametrize("users", [1, PROVEN_PAGE_ENTRIES + 3])
def test_a_listing_of_a_gateway_heals_what_it_has_tickets_for(users: int) -> None:
    bench, own = Bench(), LwwMap(tombstone_s=0.0)
    tickets = {uin: sign(KEY, uin, run(), UNTIL) for uin in range(7, 7 + users)}
    last = gateway_msg_id(3, 1, 2 * users)
    own.apply([connect(b"", uin, counter) for counter, uin in enumerate((*tickets, 5000), 1)], 0.0)
    source = Source(own, lambda _instance, _bucket: last, lambda uin: tickets.get(uin, bytes(20)))
    for bucket in sorted({bucket_of(uin) for uin in (*tickets, 5000)}):
        request = control_pb2.ListingRequest(partition=0, partitions=1, instance=3)
        request.buckets.add(bucket=bucket)
        for page in source.answer(control_pb2.Control(listing_request=request)):
            assert len(page) < 1100, "it must fit one datagram"
            bench.core.step(ev.AntiEntropyReceived(GATEWAY, control_pb2.Control.FromString(page)), 1.0)
    assert [bench.online(uin) for uin in tickets] == [1] * users
    assert (bench.online(5000), bench.core.unproven) == (0, 1)


def test_a_listing_cannot_bring_in_whom_no_ticket_proves() -> None:
    bench, own = Bench(), LwwMap(tombstone_s=0.0)
    own.apply([connect(b"")], 0.0)
    source = Source(own, lambda _instance, _bucket: gateway_msg_id(3, 1, 9))
    request = control_pb2.ListingRequest(partition=0, partitions=1, instance=3)
    request.buckets.add(bucket=bucket_of(7))
    (page,) = source.answer(control_pb2.Control(listing_request=request))
    bench.core.step(ev.AntiEntropyReceived(GATEWAY, control_pb2.Control.FromString(page)), 1.0)
    assert (bench.online(), bench.core.unproven) == (0, 1)


def test_reports_with_tickets_fit_datagrams_and_are_read_back() -> None:
    for name in ("", "n" * 122):
        changes = [connect(GOOD, uin, uin)._replace(name=name) for uin in range(7, 47)]
        parts = encode_messages(changes)
        assert max(map(len, parts)) < 1100
        assert [
            change for part in parts for change in decode_messages(control_pb2.Control.FromString(part).gateway_messages)
        ] == changes
    without, proven = (len(encode_messages([change])[0]) for change in (connect(b""), connect(GOOD)))
    assert proven - without == 22
