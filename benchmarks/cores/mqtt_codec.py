"""Measure the time of one small PUBLISH in the MQTT codec and in the server's session.

Estimate, before measuring, for plain Python 3.11 on the 2-core class of machine of benchmarks/README.md: a loop turn with
ten byte look-ups, two slices, a cached topic and one tuple is about 25 bytecode-heavy operations of 20 to 40 ns, so
0.7 µs to decode a PUBLISH of QoS 0 and 0.9 µs of QoS 1; 0.15 µs to encode one from a ready body; the session's judgement
(room of the topic, one append) adds 0.5 µs. The aim is below 2 µs for each. MQTT 5 parses in a function of its own, 0.3 µs more;
two properties cost a dictionary and some 1 µs each.

Run: python benchmarks/cores/mqtt_codec.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.mqtt import codec
from cluster.mqtt.outbound import Delivery, Outbound, OutboundCounters
from cluster.mqtt.packets import MQTT_5, Connect, Publish, Side
from cluster.mqtt.properties import Property
from cluster.mqtt.server import ServerSession
from cluster.mqtt.terms import SessionLimits, agree
from pixiu.wire.record import Kind, encode

MESSAGES = 2000
ROUNDS = 50
PAYLOAD = b"x" * 40


def best(what: Callable[[], object]) -> float:
    """Return the least CPU time of one call over all rounds, in seconds: the others were disturbed."""
    least = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        what()
        least = min(least, time.process_time() - start)
    return least


def main() -> None:
    """Print one line per question."""
    connect = codec.encode(Connect("benchmark"))
    topics = [f"room/{number}" for number in range(1, 101)]
    qos0 = b"".join(codec.encode_publish(topics[i % 100], PAYLOAD) for i in range(MESSAGES))
    qos1 = b"".join(codec.encode_publish(topics[i % 100], PAYLOAD, 1, i + 1) for i in range(MESSAGES))
    qos0_5 = b"".join(codec.encode(Publish(topics[i % 100], PAYLOAD), MQTT_5) for i in range(MESSAGES))
    properties: dict[int, object] = {Property.CONTENT_TYPE: "text", Property.USER: (("k", "v"),)}
    rich = b"".join(
        codec.encode(Publish(topics[i % 100], PAYLOAD, 1, False, False, i + 1, properties), MQTT_5) for i in range(MESSAGES)
    )
    ready = codec.topic_prefix(topics[0]) + PAYLOAD
    prefix = codec.topic_prefix(topics[0])

    def decode(stream: bytes) -> Callable[[], object]:
        decoder = codec.Decoder(Side.SERVER)
        decoder.feed(connect)
        return lambda: decoder.feed(stream)

    def decode_5(stream: bytes) -> Callable[[], object]:
        decoder = codec.Decoder(Side.SERVER)
        decoder.feed(codec.encode(Connect("benchmark", dialect=MQTT_5)))
        return lambda: decoder.feed(stream)

    def to_client(qos: int) -> Callable[[], object]:
        record = encode(Kind.ROOM, 1, PAYLOAD, 1)
        messages = [Delivery(record, b"room/1", qos, False)] * MESSAGES
        outbound = Outbound(agree(Connect("c", dialect=MQTT_5), SessionLimits(max_outbound=MESSAGES)), 1 << 30, OutboundCounters())

        def run() -> None:
            outbound.put(messages)
            outbound.take(1 << 30, 0.0, 0)
            for packet_id in list(outbound._flight):
                outbound.acknowledge(packet_id, 0.0)

        return run

    def session_qos0() -> Callable[[], object]:
        session = ServerSession(0.0, "assigned", SessionLimits(max_packets_a_turn=MESSAGES))
        session.receive(connect, 0.0)
        return lambda: session.receive(qos0, 0.0)

    def session_qos1() -> Callable[[], object]:
        session = ServerSession(0.0, "assigned", SessionLimits(max_packets_a_turn=MESSAGES))
        session.receive(connect, 0.0)

        def run() -> None:
            session.receive(qos1, 0.0)
            session.publish_accepted(range(1, MESSAGES + 1), 0.0)

        return run

    questions: list[tuple[str, Callable[[], object]]] = [
        ("decode, QoS 0", decode(qos0)),
        ("decode, QoS 1", decode(qos1)),
        ("decode, MQTT 5, QoS 0", decode_5(qos0_5)),
        ("decode, MQTT 5, QoS 1, with properties", decode_5(rich)),
        ("encode, ready body", lambda: [codec.publish_qos0(ready) for _ in range(MESSAGES)]),
        ("encode, prefix and payload", lambda: [codec.publish_qos0_parts(prefix, PAYLOAD) for _ in range(MESSAGES)]),
        ("session, QoS 0", session_qos0()),
        ("session, QoS 1 with PUBACK", session_qos1()),
        ("to a client, MQTT 5, QoS 0", to_client(0)),
        ("to a client, MQTT 5, QoS 1", to_client(1)),
    ]
    for name, question in questions:
        print(f"{name:40} {best(question) / MESSAGES * 1e6:6.2f} µs per message")


if __name__ == "__main__":
    main()
