"""A gateway stamps what is traced where it leaves; MQTT clients see no trailer; finished traces are kept in order."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import events as ev
from gateway.core import Core
from gateway.delivery.traces import MAX_TRACES_A_TURN
from pixiu.ids import topic_room
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import Flag, Kind, decode, encode, split, with_topic
from pixiu.wire.trace import Hop, Stamp, Tracer, as_traced, stamps_of, with_stamp
from tests.gateway.world import arrive, fan_out, of, turn
from tests.support.clock import Clock
from tests.support.filters import wants

BROKER = Stamp(Hop.BROKER, 1, 4, 10, 20)


def gateway(packets: bool = False, vrooms: VRooms | None = None) -> Core:
    core = Core(instance=3, generation=5, vrooms=vrooms or VRooms(), tracer=Tracer(Hop.GATEWAY, Clock(100, 1), replica=lambda: 8))
    core.step(ev.Opened(1, 7, 3 * packets), 0.0)
    core.step(ev.Join(1, 1, wants(42, "a")), 0.0)
    turn(core, now=0.0)
    return core


def room(number: int, body: bytes = b"hi", kind: int = Kind.ROOM, key: int = 42, flags: int = Flag.TO_ROOM) -> bytes:
    return encode(kind, key, body, number, flags=flags)


def traced(number: int, kind: int = Kind.ROOM) -> bytes:
    return with_stamp(as_traced(room(number, kind=kind)), BROKER)


def kept(effects: list[ev.Effect]) -> list[list[Stamp] | None]:
    return [stamps_of(record) for effect in of(ev.KeepTraces, effects) for record in effect.records]


def test_a_traced_record_is_stamped_in_its_place() -> None:
    effects = arrive(gateway(), room(1), traced(2), room(3))
    (deliver,) = of(ev.Deliver, effects)
    stamps = [BROKER, Stamp(Hop.GATEWAY, 0, 8, 101, 102)]
    assert deliver.data == room(1) + with_stamp(traced(2), stamps[1]) + room(3)
    assert kept(effects) == [stamps]


def test_mqtt_clients_get_the_message_without_the_trailer() -> None:
    effects = arrive(gateway(packets=True), traced(2))
    (deliver,) = of(ev.Deliver, effects)
    assert deliver.data == of(ev.Deliver, arrive(gateway(packets=True), room(2)))[0].data
    assert len(kept(effects)) == 1


def test_a_traced_topic_message() -> None:
    body, key, flags = with_topic("a", b"hi"), topic_room("a"), Flag.TO_ROOM | Flag.TOPIC
    plain = room(5, body, key=key, flags=flags)
    assert fan_out(gateway(packets=True), as_traced(plain))[0].data == fan_out(gateway(packets=True), plain)[0].data
    effects = arrive(gateway(), as_traced(plain))
    assert kept(effects) == [[Stamp(Hop.GATEWAY, 0, 8, 101, 102)]]


def test_a_traced_signal_counts_from_the_arrival_of_its_first_copy() -> None:
    core = gateway()
    effects = arrive(core, traced(2, Kind.SIGNAL), traced(2, Kind.SIGNAL), room(3))
    assert kept(effects) == [[BROKER, Stamp(Hop.GATEWAY, 0, 8, 101, 103)]]
    data = b"".join(deliver.data for deliver in of(ev.Deliver, effects))
    assert sorted((room(3), with_stamp(traced(2, Kind.SIGNAL), Stamp(Hop.GATEWAY, 0, 8, 101, 103)))) == sorted(
        (data[: len(room(3))], data[len(room(3)) :])
    )


def test_a_repetition_is_no_second_trace() -> None:
    core = gateway()
    assert len(kept(arrive(core, traced(2), traced(2)))) == 1
    assert kept(arrive(core, traced(2))) == []


def test_a_record_for_nobody_is_no_trace() -> None:
    assert kept(arrive(gateway(), as_traced(room(2, key=43)))) == []


def test_in_a_big_room_the_copy_shows_the_room() -> None:
    core = gateway(vrooms=VRooms(1000, 1001))
    core.step(ev.Join(1, 2, wants(1000)), 0.0)
    turn(core, now=0.0)
    (deliver,) = of(ev.Deliver, arrive(core, as_traced(room(9, key=1000 * 64 + 7))))
    assert stamps_of(deliver.data) == [Stamp(Hop.GATEWAY, 0, 8, 101, 102)]
    assert int.from_bytes(deliver.data[24:32], "little") == 1000


@pytest.mark.fuzz
@settings(deadline=None)
@given(st.binary(max_size=900), st.integers(0, 255), st.sampled_from([Kind.ROOM, Kind.SIGNAL]), st.booleans())
def test_any_trailer_with_a_right_crc_is_delivered_or_dropped(body: bytes, count: int, kind: Kind, packets: bool) -> None:
    made = bytearray(as_traced(room(1, body, kind)))
    made[-1] = count
    end = len(made) - 1 - 24 * count
    if end >= 40:
        made[12:16] = crc32(made[40:end]).to_bytes(4, "little")
    core = gateway(packets)
    effects = arrive(core, bytes(made), room(2))
    fits = end >= 40
    assert core.counters.damaged == (not fits)
    assert sum(deliver.count for deliver in of(ev.Deliver, effects)) == 1 + fits
    if fits and not packets:
        (data,) = (deliver.data for deliver in of(ev.Deliver, effects))
        records = sorted(split(data, 2), key=lambda record: record[16])
        assert decode(records[0]).body == bytes(made[40:end])


def test_more_traces_than_a_turn_may_have_are_delivered_without_a_stamp() -> None:
    core = gateway()
    effects = arrive(core, *(traced(number) for number in range(1, MAX_TRACES_A_TURN + 4)))
    assert len(kept(effects)) == MAX_TRACES_A_TURN
    assert core.traces.left_out == 3
    (deliver,) = of(ev.Deliver, effects)
    assert deliver.count == MAX_TRACES_A_TURN + 3
    assert deliver.data.endswith(traced(MAX_TRACES_A_TURN + 3))
