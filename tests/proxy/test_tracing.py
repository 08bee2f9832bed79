"""A proxy stamps traced records, begins the traces that its sampler chooses, and leaves the rest as it came."""

from __future__ import annotations

from cluster.core.contract import NEVER, SendRecords, Settle, Settled
from cluster.links.api import Outcome
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.trace import Hop, Sampler, Stamp, Tracer, as_traced, stamps_of, with_stamp
from proxy import events as ev
from proxy.core import Core
from tests.proxy.driver import forward, sends
from tests.support.clock import Clock

A, B = EndpointID(1001), EndpointID(1002)


def proxy(fraction: float = 0.0, vrooms: VRooms | None = None) -> Core:
    core = Core(
        max_record_bytes=2000,
        vrooms=vrooms or VRooms(),
        tracer=Tracer(Hop.PROXY, Clock(1000, 10), replica=lambda: 5),
        sampler=Sampler(fraction) if fraction else None,
    )
    core.step(ev.BrokersChanged(2, (ev.Replica(A, 0), ev.Replica(B, 1))), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    return core


def room(key: int, number: int, kind: int = Kind.ROOM, type: int = 64) -> bytes:
    return encode(kind, key, b"body", number, flags=Flag.TO_ROOM, type=type)


def sent(core: Core, *records: bytes) -> list[SendRecords]:
    effects = core.step(ev.BatchPublished(1, b"".join(records), len(records), 1), 0.0)
    return sends(effects)


def test_only_traced_records_get_a_stamp() -> None:
    traced = with_stamp(as_traced(room(4, 2)), Stamp(Hop.PUBLISHER, 0, 0, 1, 1))
    (first,) = sent(proxy(), room(4, 1), traced, room(4, 3))
    assert [first.records[0], first.records[2]] == [room(4, 1), room(4, 3)]
    assert stamps_of(first.records[1]) == [Stamp(Hop.PUBLISHER, 0, 0, 1, 1), Stamp(Hop.PROXY, 0, 5, 1010, 1020)]


def test_a_traced_signal_and_the_first_lane_are_stamped_as_well() -> None:
    parcels = sent(proxy(), as_traced(room(4, 1, Kind.SIGNAL)), as_traced(room(4, 2, type=0)), as_traced(room(5, 3)))
    assert [len(stamps_of(record) or ()) for parcel in parcels for record in parcel.records] == [1, 1, 1]


def test_the_sampler_begins_traces_and_positions_stay() -> None:
    core = proxy(1.0)
    first, second = sent(core, room(4, 1), room(5, 2), room(4, 3))
    assert [len(stamps_of(record) or ()) for record in first.records + second.records] == [1, 1, 1]
    effects = core.step(Settled([(first.token, True), (second.token, False)]), 0.1)
    (reply,) = (effect for effect in effects if isinstance(effect, ev.Reply))
    assert (reply.up_to, [(f.first, f.last) for f in reply.failures]) == (3, [(2, 2)])


def test_what_gateways_forward_is_sampled_too() -> None:
    data = b"head" + room(4, 1) + b"tail"
    (send,) = forward(proxy(1.0), data, start=4, end=len(data) - 4)
    assert isinstance(send, SendRecords)
    assert stamps_of(send.records[0]) == [Stamp(Hop.PROXY, 0, 5, 1010, 1020)]


def test_every_copy_to_a_big_room_has_the_stamp() -> None:
    core = proxy(vrooms=VRooms(100, 101))
    parcels = sent(core, as_traced(room(100, 1)))
    now = 0.0
    while (deadline := core.next_deadline()) != NEVER:
        now = max(deadline, now)
        effects = core.step(Settled([(parcel.token, True) for parcel in parcels[-2:]]), now)
        parcels += sends(effects)
    copies = [record for parcel in parcels for record in parcel.records]
    assert len(copies) == 64
    assert all(len(stamps_of(record) or ()) == 1 for record in copies)


def test_a_malformed_batch_is_refused_with_a_sampler_too() -> None:
    core = proxy(1.0)
    assert forward(core, b"x" * 50) == [Settle(Outcome.MALFORMED)]
    assert core.counters.batches_malformed == 1
