"""Traces: the trailer is outside of the CRC, bounded, and left alone when it is none; sampling agrees everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.client.messages.message import message_of
from pixiu.ids import MAX_ID
from pixiu.wire.record import MAX_STAMPS, Flag, Kind, crc_ok, decode, encode, split, with_topic
from pixiu.wire.trace import Hop, Sampler, Stamp, Tracer, as_traced, is_traced, stamps_of, trace_json, with_stamp

U8, U32, U64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
STAMPS = st.builds(Stamp, U8, U8, U32, U64, U64)
CLOCK = lambda: 1_000_000  # noqa: E731


def record(body: bytes = b"hello", flags: int = Flag.TO_ROOM, kind: int = Kind.ROOM, number: int = 7) -> bytes:
    return encode(kind, 42, body, number, flags=flags, extension=b'{"a":1}')


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(STAMPS, max_size=MAX_STAMPS))
def test_stamps_come_back_in_order_and_change_nothing_else(body: bytes, stamps: list[Stamp]) -> None:
    plain = record(body)
    made = as_traced(plain)
    for stamp in stamps:
        made = with_stamp(made, stamp)
    assert stamps_of(made) == stamps
    assert crc_ok(made)
    assert decode(made)._replace(flags=decode(plain).flags, stamps=()) == decode(plain)
    assert split(made + plain, 2) == [made, plain]


@settings(deadline=None)
@given(st.binary(max_size=100), st.integers(0, MAX_STAMPS), st.booleans())
def test_a_subscriber_sees_the_same_message_traced_or_not(body: bytes, stamps: int, topic: bool) -> None:
    plain = record(with_topic("a/b", body), Flag.TO_ROOM | Flag.TOPIC) if topic else record(body)
    made = as_traced(plain)
    for number in range(stamps):
        made = with_stamp(made, Stamp(Hop.BROKER, 1, number, 5, 6))
    assert message_of(made) == message_of(plain)


def test_a_tracer_stamps_as_its_process() -> None:
    tracer = Tracer(Hop.BROKER, CLOCK, partition=3, replica=lambda: 17)
    records = [record(), as_traced(record())]
    tracer.stamp_all(records, 999_000)
    assert records[0] == record()
    assert stamps_of(records[1]) == [Stamp(Hop.BROKER, 3, 17, 999_000, 1_000_000)]
    assert tracer.counters.traces_stamped == 1


def test_a_full_trailer_and_a_record_at_the_limit_are_left_alone() -> None:
    tracer = Tracer(Hop.PROXY, CLOCK)
    made = as_traced(record())
    for _ in range(MAX_STAMPS):
        made = tracer.stamp(made, 1, 2)
    assert tracer.stamp(made, 1, 2) == made
    assert tracer.counters.traces_full == 1
    large = as_traced(record(b"x" * 900))
    near = Tracer(Hop.PROXY, CLOCK, limit=len(large) + 23)
    assert near.stamp(large, 1, 2) == large
    assert near.counters.traces_full == 1
    assert len(Tracer(Hop.PROXY, CLOCK, limit=len(large) + 24).stamp(large, 1, 2)) == len(large) + 24


@pytest.mark.parametrize("count", [MAX_STAMPS + 1, 200, 3])
def test_a_trailer_that_is_none_is_counted_and_left_alone(count: int) -> None:
    made = as_traced(record(b"short"))[:-1] + bytes((count,))
    tracer = Tracer(Hop.PROXY, CLOCK)
    records = [made]
    tracer.stamp_all(records, 1)
    assert records == [made]
    assert tracer.counters.traces_malformed == 1
    assert stamps_of(made) is None
    assert trace_json(made) is None


@pytest.mark.fuzz
@settings(deadline=None)
@given(st.binary(min_size=40, max_size=500))
def test_any_bytes_are_stamped_or_left_alone(data: bytes) -> None:
    made = (len(data) - 4).to_bytes(4, "little") + data[4:5] + bytes((data[5] | Flag.TRACED,)) + data[6:]
    tracer = Tracer(Hop.RELAY, CLOCK)
    before = stamps_of(made)
    stamped = tracer.stamp(made, 1, 2)
    if before is not None and len(before) < MAX_STAMPS:
        assert stamps_of(stamped) == [*before, Stamp(Hop.RELAY, 0, 0, 1, 1 + 1)]
    else:
        assert stamped == made
    trace_json(made)


def test_what_is_not_traced_has_no_stamps() -> None:
    assert stamps_of(record()) is None
    assert trace_json(record()) is None


def chosen(fraction: float, ids: Sequence[int]) -> list[bool]:
    """Whether a sampler marks the message with each of these IDs."""
    batch = b"".join(record(number=each) for each in ids)
    data, start, end = Sampler(fraction).mark(batch, 0, len(batch), len(ids))
    return [is_traced(each) for each in split(data[start:end], len(ids))]


@settings(deadline=None)
@given(st.integers(0, MAX_ID))
def test_two_proxies_choose_the_same_messages(snowflake_id: int) -> None:
    assert chosen(0.3, [snowflake_id]) == chosen(0.3, [5, snowflake_id])[1:]
    assert (chosen(0.0, [snowflake_id]), chosen(1.0, [snowflake_id])) == ([False], [True])


def test_a_sampler_chooses_about_its_fraction() -> None:
    ids = [((millisecond << 12) | 5) << 10 for millisecond in range(20_000)]
    assert 0.09 < sum(chosen(0.1, ids)) / len(ids) < 0.11


def test_a_sampler_marks_a_batch_in_place_and_keeps_the_rest() -> None:
    sampler = Sampler(0.5)
    kinds = [Kind.ROOM, Kind.SIGNAL, Kind.CHAT, Kind.MAIL]
    records = [record(b"%d" % number, number=number, kind=kinds[number % 4]) for number in range(400)]
    batch = b"head" + b"".join(records) + b"tail"
    data, start, end = sampler.mark(batch, 4, len(batch) - 4, len(records))
    marked = split(data[start:end], len(records))
    wanted = {number for number in range(400) if chosen(0.5, [number]) == [True] and kinds[number % 4] is not Kind.MAIL}
    assert {number for number in range(400) if is_traced(marked[number])} == wanted
    assert all(marked[n] == (as_traced(records[n]) if n in wanted else records[n]) for n in range(400))
    assert sampler.marked == len(wanted) > 0
    again = sampler.mark(data, start, end, len(records))
    assert again == (data, start, end)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 5))
def test_a_malformed_batch_is_given_back_as_it_is(data: bytes, count: int) -> None:
    made = Sampler(1.0).mark(data, 0, len(data), count)
    if made != (data, 0, len(data)):
        assert made[2] > len(data)


def test_a_record_that_a_trailer_could_make_too_large_is_not_chosen() -> None:
    large = record(b"x" * 700)
    assert Sampler(1.0, 1000).mark(large, 0, len(large), 1) == (large, 0, len(large))


def test_a_trace_as_json() -> None:
    made = with_stamp(as_traced(record(b"secret")), Stamp(Hop.PROXY, 0, 5, 100, 130))
    assert trace_json(with_stamp(made, Stamp(99, 1, 2, 3, 4))) == {
        "snowflake_id": 7,
        "kind": "room",
        "key": 42,
        "stamps": [
            {"role": "proxy", "partition": 0, "replica": 5, "in_us": 100, "out_us": 130},
            {"role": "99", "partition": 1, "replica": 2, "in_us": 3, "out_us": 4},
        ],
    }
