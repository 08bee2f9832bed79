"""Random and damaged MQTT streams: only packets or a reason come out, whatever the cuts, and memory stays bounded."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.mqtt import codec
from cluster.mqtt.events import Close, Effect, Send, SendMessages
from cluster.mqtt.outbound import Delivery
from cluster.mqtt.packets import (
    FIRST_PACKET_BYTES,
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
    Auth,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    MalformedPacket,
    Packet,
    PacketType,
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
from cluster.mqtt.properties import RULES, Form, Property, decode_properties
from cluster.mqtt.properties_in_records import extension_for, origin_of, properties_of, qos_of, retain_of
from cluster.mqtt.reason_codes import ALLOWED, DISCONNECTS, ReasonCode
from cluster.mqtt.server import ServerSession
from cluster.mqtt.states import State
from cluster.mqtt.terms import SessionLimits
from pixiu.errors import InvalidArgument
from pixiu.wire.record import Kind, encode
from tests.support.corpus import Seed, seeds
from tests.support.effort import runs

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=100, ci=150)
pytestmark = pytest.mark.fuzz
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MAX_PACKET_BYTES = 5000
OLD = [MQTT_3_1, MQTT_3_1_1]
RECORD = encode(Kind.ROOM, 1, b"x", 1)
TYPES = (
    Publish, Connect, Connack, Puback, Pubrec, Pubrel, Pubcomp,
    Subscribe, Suback, Unsubscribe, Unsuback, Pingreq, Pingresp, Disconnect, Auth,
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
_FORMS = {
    Form.TEXT: texts,
    Form.BINARY: payloads,
    Form.PAIR: st.tuples(texts, texts),
}


def properties(packet: int, *without: Property) -> st.SearchStrategy[dict[int, object] | None]:
    """Properties that a packet may have, by the table."""
    found: dict[int, st.SearchStrategy[object]] = {}
    for which, rule in RULES.items():
        if packet not in rule.packets or which in without:
            continue
        most = min(rule.most, (1 << 8 * rule.form) - 1) if 0 < rule.form <= Form.U32 else rule.most
        one = _FORMS.get(rule.form, st.integers(rule.least, most))
        if which == Property.RESPONSE_TOPIC:
            one = topics
        most_times = 1 if packet == PacketType.SUBSCRIBE and which != Property.USER else 3
        found[which] = one if rule.times == 1 else st.lists(one, min_size=1, max_size=most_times).map(tuple)
    return st.none() | st.fixed_dictionaries({}, optional=found).map(lambda value: value or None)


names = st.none() | texts
old_connects = st.one_of(
    st.builds(Connect, texts, st.booleans(), st.integers(0, 0xFFFF), st.none(), st.none(), wills, st.sampled_from(OLD)),
    st.builds(Connect, texts, st.booleans(), st.integers(0, 0xFFFF), texts, st.none() | payloads, wills, st.sampled_from(OLD)),
)
new_wills = st.none() | st.builds(Will, topics, payloads, st.integers(0, 2), st.booleans(), properties(0))
new_connects = st.builds(
    Connect, texts, st.booleans(), st.integers(0, 0xFFFF), names, st.none() | payloads, new_wills, st.just(MQTT_5),
    properties(PacketType.CONNECT, Property.AUTHENTICATION_DATA),
)  # fmt: skip
old_requests: st.SearchStrategy[Packet] = st.one_of(
    publishes,
    acknowledgements,
    st.builds(Subscribe, packet_ids, st.lists(st.tuples(filters, st.integers(0, 2)), min_size=1, max_size=5).map(tuple)),
    st.builds(Unsubscribe, packet_ids, st.lists(filters, min_size=1, max_size=5).map(tuple)),
    st.sampled_from([Pingreq(), Disconnect()]),
)
old_answers: st.SearchStrategy[Packet] = st.one_of(
    publishes,
    acknowledgements,
    st.builds(Suback, packet_ids, st.lists(st.sampled_from([0, 1, 2, 0x80]), min_size=1, max_size=5).map(tuple)),
    st.builds(Unsuback, packet_ids),
    st.just(Pingresp()),
)
old_connacks = st.one_of(st.builds(Connack, st.booleans(), st.just(0)), st.builds(Connack, st.just(False), st.integers(1, 5)))


def coded(make: type[Packet], kind: PacketType, *first: st.SearchStrategy[object]) -> st.SearchStrategy[Packet]:
    """A packet with a reason code that it may have, and properties."""
    return st.builds(make, *first, st.sampled_from(sorted(ALLOWED[kind])), properties(kind))


def listed(make: type[Packet], kind: PacketType) -> st.SearchStrategy[Packet]:
    """A packet with a list of reason codes."""
    codes = st.lists(st.sampled_from(sorted(ALLOWED[kind])), min_size=1, max_size=5).map(tuple)
    return st.builds(make, packet_ids, codes, properties(kind))


def new_publishes(*without: Property) -> st.SearchStrategy[Packet]:
    return st.builds(lambda packet, found: packet._replace(properties=found), publishes, properties(PacketType.PUBLISH, *without))


options = st.integers(0, 0x2F).filter(lambda value: value & 3 < 3)
new_acknowledgements = st.one_of(
    coded(Puback, PacketType.PUBACK, packet_ids), coded(Pubrec, PacketType.PUBREC, packet_ids),
    coded(Pubrel, PacketType.PUBREL, packet_ids), coded(Pubcomp, PacketType.PUBCOMP, packet_ids),
)  # fmt: skip
auths = properties(PacketType.AUTH).map(lambda found: Auth(0x18, {**(found or {}), Property.AUTHENTICATION_METHOD: "m"}))
new_requests: st.SearchStrategy[Packet] = st.one_of(
    new_publishes(Property.SUBSCRIPTION_IDENTIFIER),
    new_acknowledgements,
    st.builds(
        Subscribe, packet_ids, st.lists(st.tuples(filters, options), min_size=1, max_size=5).map(tuple), st.just(False),
        properties(PacketType.SUBSCRIBE),
    ),
    st.builds(
        Unsubscribe, packet_ids, st.lists(filters, min_size=1, max_size=5).map(tuple), st.just(False),
        properties(PacketType.UNSUBSCRIBE),
    ),
    st.just(Pingreq()),
    st.builds(Disconnect, st.sampled_from(sorted(DISCONNECTS[Side.SERVER])), properties(PacketType.DISCONNECT)),
    auths,
)  # fmt: skip
new_answers: st.SearchStrategy[Packet] = st.one_of(
    new_publishes(),
    new_acknowledgements,
    listed(Suback, PacketType.SUBACK),
    listed(Unsuback, PacketType.UNSUBACK),
    st.just(Pingresp()),
    st.builds(Disconnect, st.sampled_from(sorted(DISCONNECTS[Side.CLIENT])), properties(PacketType.DISCONNECT)),
    auths,
)
new_connacks = st.one_of(
    st.builds(Connack, st.booleans(), st.just(0), properties(PacketType.CONNACK)),
    coded(Connack, PacketType.CONNACK, st.just(False)),
)


class Stream(NamedTuple):
    """What one side sends, as the other one reads it."""

    side: Side
    dialect: Dialect
    data: bytes


@st.composite
def valid(draw: st.DrawFn) -> tuple[Side, Dialect, list[Packet]]:
    """What one side may send, from its first packet on."""
    side, dialect = draw(st.sampled_from(Side)), draw(st.sampled_from(Dialect))
    new = dialect is MQTT_5
    if side is Side.SERVER:
        first = draw(new_connects if new else old_connects)
        return side, first.dialect, [first, *draw(st.lists(new_requests if new else old_requests, max_size=8))]
    return (
        side,
        dialect,
        [draw(new_connacks if new else old_connacks), *draw(st.lists(new_answers if new else old_answers, max_size=8))],
    )


@st.composite
def damaged(draw: st.DrawFn) -> Stream:
    """A valid stream with some bytes changed, inserted or cut out; or noise, with or without a good beginning."""
    side, dialect, packets = draw(valid())
    data = bytearray(b"".join(codec.encode(packet, dialect) for packet in packets))
    kind = draw(st.sampled_from(["mutate", "noise", "noise after the first"]))
    if kind == "noise":
        return Stream(side, dialect, draw(st.binary(max_size=200)))
    if kind == "noise after the first":
        return Stream(side, dialect, codec.encode(packets[0], dialect) + draw(st.binary(max_size=200)))
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
    return Stream(side, dialect, bytes(data))


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` cut at random."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def outcome(
    side: Side, parts: list[bytes], dialect: Dialect = MQTT_3_1_1
) -> tuple[list[tuple[type[Packet], Packet]], Reason | None, int, Dialect]:
    """The packets with their types, why decoding stopped, and how much is kept; checks the bound after each part."""
    decoder = codec.Decoder(side, MAX_PACKET_BYTES, dialect=dialect)
    found: list[Packet] = []
    for part in parts:
        found += decoder.feed(part)
        assert decoder.buffered_bytes <= (MAX_PACKET_BYTES if found else FIRST_PACKET_BYTES)
    assert decoder.error is None or isinstance(decoder.error, MalformedPacket)
    reason = decoder.error.reason if decoder.error else None
    return [(type(packet), packet) for packet in found], reason, decoder.buffered_bytes, decoder.dialect


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
    assert len(session.subscriptions.filters) <= 3
    sent = b"".join(effect.data for effect in effects if isinstance(effect, Send | SendMessages))
    new = len(sent) > 1 and sent[0] == 0x20 and sent[1] > 2
    answered = codec.Decoder(Side.CLIENT, dialect=MQTT_5 if new else MQTT_3_1_1)
    answered.feed(sent)
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
def test_valid_streams_come_back_whatever_the_cuts(stream: tuple[Side, Dialect, list[Packet]], data: st.DataObject) -> None:
    side, dialect, packets = stream
    raw = b"".join(codec.encode(packet, dialect) for packet in packets)
    found, reason, kept, _ = outcome(side, data.draw(pieces(raw)), dialect)
    assert found == [(type(packet), packet) for packet in packets]
    assert reason is None
    assert kept == 0


@fuzz
@given(damaged(), st.data())
def test_damaged_streams_give_the_same_whatever_the_cuts(stream: Stream, data: st.DataObject) -> None:
    side, dialect, raw = stream
    whole = outcome(side, [raw], dialect)
    assert outcome(side, data.draw(pieces(raw)), dialect) == whole
    assert outcome(side, singly(raw), dialect) == whole
    assert all(kind in TYPES or kind.__name__ == "UnacceptableConnect" for kind, _ in whole[0])


@fuzz
@given(damaged())
def test_what_is_decoded_can_be_encoded_and_is_the_same_again(stream: Stream) -> None:
    packets, _, _, dialect = outcome(stream.side, [stream.data], stream.dialect)
    for kind, packet in packets:
        if kind in TYPES:
            again = codec.decode(codec.encode(packet, dialect), stream.side, dialect)
            assert type(again) is kind
            assert again == packet


@fuzz
@given(damaged(), st.data())
def test_a_server_session_never_raises_and_closes_at_most_once(stream: Stream, data: st.DataObject) -> None:
    session = limited()
    effects: list[Effect] = []
    now = 0.0
    for part in data.draw(pieces(stream.data)):
        now += data.draw(st.floats(0.0, 20.0))
        effects += session.timeout(now)
        effects += session.receive(part, now)
        effects += session.subscription_confirmed(data.draw(packet_ids), now)
        effects += session.publish_accepted(list(data.draw(st.lists(packet_ids, max_size=3))), now)
        effects += session.publish_refused(data.draw(packet_ids), ReasonCode.NOT_AUTHORISED, "a text", now)
        effects += session.deliver([Delivery(RECORD, b"a", data.draw(st.integers(0, 2)), False, (7,), 0)], now, int(now * 1000))
        while session.has_outgoing:
            effects.append(Send(session.outgoing(100, now, int(now * 1000))))
    check_answers(session, effects)


@fuzz
@given(new_publishes(Property.SUBSCRIPTION_IDENTIFIER, Property.TOPIC_ALIAS))
def test_properties_come_out_of_a_record_as_they_went_in(packet: Publish) -> None:
    found = dict(packet.properties or {})
    try:
        extension = extension_for(found, 1)
    except InvalidArgument:
        return  # too large
    record = encode(Kind.ROOM, 1, b"x", 1, extension=extension, origin=origin_of(packet.qos, retain=packet.retain))
    assert (qos_of(record), retain_of(record)) == (packet.qos, packet.retain)
    decoded, _ = decode_properties(properties_of(record, 1), 0, PacketType.PUBLISH)
    assert (decoded or {}) == found


@fuzz
@given(st.binary(max_size=200), st.sampled_from([b"", b'{"mqtt-', b'{"a":"b"}']))
def test_properties_of_any_extension_are_sendable(extension: bytes, beginning: bytes) -> None:
    record = encode(Kind.ROOM, 1, b"x", 1, extension=beginning + extension)
    decode_properties(properties_of(record, 0), 0, PacketType.PUBLISH)
