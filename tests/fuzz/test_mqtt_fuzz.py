"""Random and damaged MQTT streams: only packets or a reason come out, whatever the cuts, and memory stays bounded."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.mqtt import codec
from cluster.mqtt.events import Close, Effect, Send
from cluster.mqtt.packets import (
    FIRST_PACKET_BYTES,
    Connack,
    Connect,
    Disconnect,
    MalformedPacket,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Reason,
    Side,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from cluster.mqtt.server import ServerSession
from cluster.mqtt.states import State
from cluster.mqtt.terms import SessionLimits
from tests.support.corpus import Seed, seeds
from tests.support.effort import runs

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=100, ci=150)
pytestmark = pytest.mark.fuzz
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MAX_PACKET_BYTES = 5000
TYPES = (
    Publish, Connect, Connack, Puback, Pubrec, Pubrel, Pubcomp,
    Subscribe, Suback, Unsubscribe, Unsuback, Pingreq, Pingresp, Disconnect,
)  # fmt: skip

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
topics = texts.map(lambda text: text.replace("#", "").replace("+", "")).filter(bool)
filters = st.one_of(
    topics, topics.map(lambda name: f"{name}/#"), st.sampled_from(["+", "#", "a/+/b", "room/1", "user/1", "$SYS/#"])
)
payloads = st.binary(max_size=60)
packet_ids = st.integers(1, 0xFFFF)
publishes = st.one_of(
    st.tuples(topics, payloads, st.just(0), st.booleans(), st.just(False), st.just(0)),
    st.tuples(topics, payloads, st.integers(1, 2), st.booleans(), st.booleans(), packet_ids),
).map(lambda fields: Publish(*fields))
acknowledgements = st.builds(lambda kind, number: kind(number), st.sampled_from([Puback, Pubrec, Pubrel, Pubcomp]), packet_ids)
wills = st.none() | st.builds(Will, topics, payloads, st.integers(0, 2), st.booleans())
connects = st.one_of(
    st.builds(Connect, texts, st.booleans(), st.integers(0, 0xFFFF), st.none(), st.none(), wills),
    st.builds(Connect, texts, st.booleans(), st.integers(0, 0xFFFF), texts, st.none() | payloads, wills),
)
requests: st.SearchStrategy[Packet] = st.one_of(
    publishes,
    acknowledgements,
    st.builds(Subscribe, packet_ids, st.lists(st.tuples(filters, st.integers(0, 2)), min_size=1, max_size=5).map(tuple)),
    st.builds(Unsubscribe, packet_ids, st.lists(filters, min_size=1, max_size=5).map(tuple)),
    st.sampled_from([Pingreq(), Disconnect()]),
)
answers: st.SearchStrategy[Packet] = st.one_of(
    publishes,
    acknowledgements,
    st.builds(Suback, packet_ids, st.lists(st.sampled_from([0, 1, 2, 0x80]), min_size=1, max_size=5).map(tuple)),
    st.builds(Unsuback, packet_ids),
    st.just(Pingresp()),
)
connacks = st.one_of(st.builds(Connack, st.booleans(), st.just(0)), st.builds(Connack, st.just(False), st.integers(1, 5)))


@st.composite
def valid(draw: st.DrawFn) -> tuple[Side, list[Packet]]:
    """What one side may send, from its first packet on."""
    side = draw(st.sampled_from(Side))
    if side is Side.SERVER:
        return side, [draw(connects), *draw(st.lists(requests, max_size=8))]
    return side, [draw(connacks), *draw(st.lists(answers, max_size=8))]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Side, bytes]:
    """A valid stream with some bytes changed, inserted or cut out; or noise, with or without a good beginning."""
    side, packets = draw(valid())
    data = bytearray(b"".join(codec.encode(packet) for packet in packets))
    kind = draw(st.sampled_from(["mutate", "noise", "noise after the first"]))
    if kind == "noise":
        return side, draw(st.binary(max_size=200))
    if kind == "noise after the first":
        return side, codec.encode(packets[0]) + draw(st.binary(max_size=200))
    for position, action, value in draw(
        st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 2), st.integers(0, 255)), max_size=5)
    ):
        if not data:
            break
        at = position % len(data)
        if action == 0:
            data[at] = value
        elif action == 1:
            data.insert(at, value)
        else:
            del data[at]
    return side, bytes(data)


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` cut at random."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def outcome(side: Side, parts: list[bytes]) -> tuple[list[tuple[type[Packet], Packet]], Reason | None, int]:
    """The packets with their types, why decoding stopped, and how much is kept; checks the bound after each part."""
    decoder = codec.Decoder(side, MAX_PACKET_BYTES)
    found: list[Packet] = []
    for part in parts:
        found += decoder.feed(part)
        assert decoder.buffered_bytes <= (MAX_PACKET_BYTES if found else FIRST_PACKET_BYTES)
    assert decoder.error is None or isinstance(decoder.error, MalformedPacket)
    return [(type(packet), packet) for packet in found], decoder.error.reason if decoder.error else None, decoder.buffered_bytes


def singly(raw: bytes) -> list[bytes]:
    """Return `raw` byte by byte."""
    return [raw[index : index + 1] for index in range(len(raw))]


def limited() -> ServerSession:
    """Return a session whose limits are low."""
    limits = SessionLimits(max_subscriptions=3, max_filters=4, max_inflight=2, max_packet_bytes=MAX_PACKET_BYTES)
    return ServerSession(0.0, "assigned", limits)


def check_answers(session: ServerSession, effects: list[Effect]) -> None:
    """A session closes once, as its last effect, and what it sent can be decoded."""
    closes = [effect for effect in effects if isinstance(effect, Close)]
    assert len(closes) == (session.state is State.DISCONNECTED)
    assert not closes or effects[-1] is closes[0]
    assert len(session.subscriptions.rooms) <= 3
    answered = codec.Decoder(Side.CLIENT)
    for effect in effects:
        if isinstance(effect, Send) and effect.data != UNSUPPORTED_VERSION:  # a packet of MQTT 5
            answered.feed(effect.data)
    assert answered.error is None
    assert answered.buffered_bytes == 0


@pytest.mark.parametrize("seed", seeds("mqtt"), ids=lambda seed: seed.name)
def test_the_corpus_gives_the_same_whatever_the_cuts_and_a_session_never_raises(seed: Seed) -> None:
    for side in Side:
        assert outcome(side, singly(seed.data)) == outcome(side, [seed.data])
    for parts in ([seed.data], singly(seed.data)):
        session = limited()
        check_answers(session, [effect for part in parts for effect in session.receive(part, 0.0)])


@fuzz
@given(valid(), st.data())
def test_valid_streams_come_back_whatever_the_cuts(stream: tuple[Side, list[Packet]], data: st.DataObject) -> None:
    side, packets = stream
    raw = b"".join(codec.encode(packet) for packet in packets)
    found, reason, kept = outcome(side, data.draw(pieces(raw)))
    assert found == [(type(packet), packet) for packet in packets]
    assert reason is None
    assert kept == 0


@fuzz
@given(damaged(), st.data())
def test_damaged_streams_give_the_same_whatever_the_cuts(stream: tuple[Side, bytes], data: st.DataObject) -> None:
    side, raw = stream
    whole = outcome(side, [raw])
    assert outcome(side, data.draw(pieces(raw))) == whole
    assert outcome(side, singly(raw)) == whole
    assert all(kind in TYPES or kind.__name__ == "UnacceptableConnect" for kind, _ in whole[0])


@fuzz
@given(damaged())
def test_what_is_decoded_can_be_encoded_and_is_the_same_again(stream: tuple[Side, bytes]) -> None:
    side, raw = stream
    for kind, packet in outcome(side, [raw])[0]:
        if kind in TYPES:
            again = codec.decode(codec.encode(packet), side)
            assert type(again) is kind
            assert again == packet


@fuzz
@given(damaged(), st.data())
def test_a_server_session_never_raises_and_closes_at_most_once(stream: tuple[Side, bytes], data: st.DataObject) -> None:
    raw = stream[1]
    session = limited()
    effects: list[Effect] = []
    now = 0.0
    for part in data.draw(pieces(raw)):
        now += data.draw(st.floats(0.0, 20.0))
        effects += session.timeout(now)
        effects += session.receive(part, now)
        effects += session.subscription_confirmed(data.draw(packet_ids), now)
        effects += session.publish_accepted(list(data.draw(st.lists(packet_ids, max_size=3))), now)
    check_answers(session, effects)
