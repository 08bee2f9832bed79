"""Fuzz of the receive path: a fuzzer and an honest peer talk to the same process; nothing raises, and the honest one's
traffic arrives. `PIXIU_FUZZ_EXAMPLES` sets the number of examples (default 50)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.links.datagrams.head import (
    ACKNOWLEDGEMENT,
    CONTROL,
    CONTROL_FRAGMENT,
    FLAG_ANY_DESTINATION,
    HEAD,
    HEAD_SIZE,
    HEARTBEAT,
    RECORD_FRAGMENT,
    RECORDS,
    Codec,
    join_control,
)
from cluster.links.peer.sender import Address
from cluster.wire.v1.control_pb2 import Heartbeat
from pixiu.ids import EndpointID
from tests.cluster.links.world import Node, World, make_record, ring_of
from tests.support.corpus import seeds
from tests.support.effort import runs

pytestmark = pytest.mark.fuzz

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=20, ci=50)
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
KEY = b"0123456789abcdef"
STRANGER: Address = ("192.0.2.66", 666)
ATTACKER = EndpointID(0x66666666_66666666)
"""A sender of the fuzzer's own, where it knows the secret (or there is none)."""

FRAMES = [seed.data for seed in seeds("datagram")]
"""Without a key, from the third node to the second one."""

u64 = st.integers(0, (1 << 64) - 1)
sequences = st.one_of(st.integers(0, 50), u64)
garbage = st.binary(max_size=300)


def honest_samples(node: Node, to: Node) -> list[bytes]:
    """Good datagrams of every type, from one honest node to another."""
    node.send(to, [make_record(1), make_record(2), make_record(3, 20_000)])
    node.control(to, [b"control", b""])
    node.core.poll(node.world.now + 10)
    node.core.flush(node.world.now)
    samples = node.take()
    samples.append(node.core.codec.pack(ACKNOWLEDGEMENT, 0, 0, 1 << 30, 0, to.id, [bytes(40)]))
    return samples


Mutation = tuple[int, list[tuple[str, int, bytes]]]
"""Which sample, and what is done to it."""


@st.composite
def mutations(draw: st.DrawFn) -> Mutation:
    steps = st.tuples(
        st.sampled_from(["flip", "cut", "insert", "overwrite"]), st.integers(0, 400), st.binary(min_size=1, max_size=12)
    )
    return draw(st.integers(0, 9)), draw(st.lists(steps, min_size=1, max_size=4))


def mutate(data: bytes, steps: list[tuple[str, int, bytes]]) -> bytes:
    for what, where, some in steps:
        at = where % (len(data) + 1)
        if what == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (some[0] or 1)]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "insert":
            data = data[:at] + some + data[at:]
        elif what == "overwrite":
            data = data[:at] + some + data[at + len(some) :]
    return data


def fields_of(frame: bytes) -> tuple[int, int, int, int, bytes]:
    """Type, flags, count, sequence and body of a datagram without a tag."""
    _, _, type_, _, flags, count, _, sequence, _, _ = HEAD.unpack_from(frame)
    return type_, flags, count, sequence, frame[HEAD_SIZE:]


def exchange(world: World, alice: Node, bob: Node) -> None:
    """The honest peer sends both ways; all of it arrives, once, and settles."""
    bob.handler.records.clear()
    alice.handler.settled.clear()
    alice.handler.records.clear()
    alice.send(bob, [make_record(number, 20_000 if number % 7 else 140) for number in range(100, 120)], token=1)
    alice.control(bob, [b"honest"], token=2)
    bob.send(alice, [make_record(number) for number in range(200, 220)])
    world.advance(0.1)
    assert bob.handler.keys() == list(range(100, 120))
    assert alice.handler.keys() == list(range(200, 220))
    assert sorted(alice.handler.settled) == [(1, True), (2, True)]


def two(key: bytes | None) -> tuple[World, Node, Node]:
    world = World()
    alice, bob = world.node(1, key=key), world.node(2, key=key)
    alice.know(bob)
    bob.know(alice)
    world.advance(0.05)
    return world, alice, bob


@FUZZ
@example(FRAMES, [])
@given(st.lists(garbage, max_size=20), st.lists(mutations(), max_size=20))
def test_with_a_key_nothing_forged_has_any_effect(junk: list[bytes], mutated: list[Mutation]) -> None:
    world, alice, bob = two(KEY)
    samples = honest_samples(alice, bob)
    alice.sent.clear()
    before = bob.core.stats()
    for data in junk:
        bob.receive(data, STRANGER)
        bob.core.receive_frame(data, None, "fuzz", world.now)
    for which, steps in mutated:
        sample = samples[which % len(samples)]
        data = mutate(sample, steps)
        if data != sample:
            bob.receive(data, alice.address)
            bob.core.receive_frame(data, alice.id, "fuzz", world.now)
    after = bob.core.stats()
    assert after.total == before.total
    assert set(after.peers) == {alice.id}
    world.advance(1.5)
    exchange(world, alice, bob)


@FUZZ
@example([frame[3:] for frame in FRAMES if frame.startswith(b"PX\x01")], [])
@given(st.lists(garbage, max_size=20), st.lists(mutations(), max_size=30))
def test_without_a_key_nothing_raises_and_another_peers_traffic_arrives(junk: list[bytes], mutated: list[Mutation]) -> None:
    world, alice, bob = two(None)
    carol = world.node(3, key=None)
    carol.know(bob)
    carol.poll()
    samples = honest_samples(carol, bob)
    carol.sent.clear()
    world.nodes.remove(carol)
    for data in junk:
        bob.receive(b"PX\x01" + data, STRANGER)
        bob.core.receive_frame(b"PX\x01" + data, None, "fuzz", world.now)
    for which, steps in mutated:
        sample = samples[which % len(samples)]
        # The honest peer's number is one byte from the fuzzer's; real ones differ in 63 random bits.
        data = mutate(sample, steps)
        if data[8:16] != alice.id.to_bytes(8, "little"):
            bob.receive(data, STRANGER)
            bob.core.receive_frame(data, None, "fuzz", world.now)
        bob.turn()
    bob.sent = [one for one in bob.sent if one[1] == alice.address]
    exchange(world, alice, bob)


@FUZZ
@example([fields_of(frame) for frame in FRAMES if len(frame) >= HEAD_SIZE])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([RECORDS, CONTROL, HEARTBEAT, ACKNOWLEDGEMENT, RECORD_FRAGMENT, CONTROL_FRAGMENT, 0, 9]),
            st.integers(0, 15),
            st.one_of(st.integers(0, 17), st.integers(0, 65_535)),
            sequences,
            st.one_of(
                garbage,
                st.lists(st.binary(max_size=60), max_size=6).map(lambda messages: b"".join(join_control(messages))),
                st.integers(0, 5).map(lambda count: make_record(1) * count),
                st.tuples(st.booleans(), u64, u64, u64, st.binary(max_size=600), st.sampled_from([2, 3, 1])).map(
                    lambda f: Heartbeat(
                        reply=f[0], sent_us=f[1], next_record=f[2], next_control=f[3], attachment=f[4], target=f[5]
                    ).SerializeToString()
                ),
                st.lists(sequences, min_size=4, max_size=12).map(
                    lambda numbers: b"".join(number.to_bytes(8, "little") for number in numbers) + bytes(8)
                ),
            ),
        ),
        max_size=30,
    )
)
def test_an_authentic_peer_with_bugs_hurts_nobody_else(datagrams: list[tuple[int, int, int, int, bytes]]) -> None:
    world, alice, bob = two(KEY)
    codec = Codec(ATTACKER, 1 << 16, 1 << 20, ring_of(KEY), "router")
    for type_, flags, count, sequence, body in datagrams:
        for dressed in (flags, flags & ~FLAG_ANY_DESTINATION, 0):
            data = codec.pack(type_, dressed, count, sequence, 0, bob.id, [body])
            bob.receive(data, STRANGER)
            bob.core.receive_frame(data, None, "fuzz", world.now)
        for fit in (1, len(body) // 140, 2):
            bob.receive(codec.pack(type_, 0, fit, sequence, 0, bob.id, [body]), STRANGER)
        bob.send(Node(world, ATTACKER, alice.core._options, KEY), [make_record(1)], token=77)
        bob.turn()
    bob.handler.settled.clear()
    exchange(world, alice, bob)
