"""What a subscriber gets is what the record holds, and no bytes from the network can raise."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pixiu.client.messages.message import message_of, messages_of
from pixiu.ids import snowflake, snowflake_time_ms
from pixiu.wire.record import STAMP, Flag, Kind, decode, encode, with_topic

EXTENSIONS = st.binary(max_size=40)
BODIES = st.binary(max_size=200)


def traced(record: bytes, stamps: int) -> bytes:
    longer = record[:-1] + STAMP.pack(1, 2, 0, 3, 4, 5) * stamps + bytes([stamps])
    return (len(longer) - 4).to_bytes(4, "little") + longer[4:]


@given(
    body=BODIES, extension=EXTENSIONS, topic=st.none() | st.text(max_size=20).filter(lambda name: name.isprintable()),
    type_=st.integers(0, 255), lifetime=st.integers(0, 65535), stamps=st.none() | st.integers(0, 3), derived=st.booleans(),
)  # fmt: skip
def test_a_message_agrees_with_the_record(
    body: bytes, extension: bytes, topic: str | None, type_: int, lifetime: int, stamps: int | None, derived: bool
) -> None:
    flags = Flag.TO_ROOM | (Flag.TOPIC if topic is not None else 0) | (Flag.TRACED if stamps is not None else 0)
    flags |= Flag.DERIVED_ID if derived else 0
    number = snowflake(1_700_000_000_000, 5, 6)
    content = with_topic(topic, body) if topic is not None else body
    data = encode(1, 42, content, number, sender=7, flags=flags, type=type_, lifetime_min=lifetime, extension=extension)
    if stamps is not None:
        data = traced(data, stamps)
    message, record = message_of(data), decode(data)
    assert (message.topic, message.payload) == record.topic_and_payload() == (topic, body)
    assert (message.room, message.sender, message.message_id) == (record.key, record.sender, record.snowflake_id)
    assert (message.extension, message.lifetime_min) == (record.extension, record.lifetime_min)
    assert (message.type, message.first_lane) == (type_ & 63, record.lane == 0)
    assert message.sent_at_ms == (0 if derived else snowflake_time_ms(number))


@given(data=st.binary(max_size=300), count=st.integers(0, 1 << 32))
@example(data=b"", count=0)
@example(data=bytes(300), count=1)
def test_rubbish_never_raises(data: bytes, count: int) -> None:
    messages, damaged = messages_of(data, count)
    assert messages == []
    assert damaged > 0 or (not data and count == 0)


@given(body=BODIES, topic=st.booleans(), place=st.integers(40, 1000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_content_is_noticed(body: bytes, topic: bool, place: int, bit: int) -> None:
    content = with_topic("a/b", body) if topic else body + b"x"
    good = encode(1, 42, content, 1 << 40, flags=Flag.TO_ROOM | (Flag.TOPIC if topic else 0))
    bad = bytearray(good)
    bad[40 + (place - 40) % (len(good) - 40)] ^= 1 << bit
    messages, damaged = messages_of(good + bytes(bad) + good, 3)
    assert (len(messages), damaged) == (2, 1)


@given(flags=st.integers(0, 255), length=st.integers(0, 65535), tail=st.binary(max_size=60))
def test_lengths_that_do_not_fit_are_damage(flags: int, length: int, tail: bytes) -> None:
    data = bytearray(encode(1, 42, b"x" * 10, 1 << 40) + tail)
    data[0:4] = (len(data) - 4).to_bytes(4, "little")
    data[5] = flags
    data[8:10] = length.to_bytes(2, "little")
    messages, damaged = messages_of(bytes(data), 1)
    assert len(messages) + damaged == 1


def test_a_signal_says_so() -> None:
    assert message_of(encode(Kind.SIGNAL, 42, b"go", 1, flags=Flag.TO_ROOM)).signal
    assert not message_of(encode(Kind.ROOM, 42, b"go", 1, flags=Flag.TO_ROOM)).signal
