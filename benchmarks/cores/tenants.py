"""What does a message of QoS 0 to an MQTT client of a tenant cost a gateway, beside one to a client without a tenant?

Estimate: clients without a tenant share the bytes of a packet, so a delivery is a dictionary look-up and an append, 0.1 µs. So do
the clients of a tenant among themselves: one packet more for each message. A client that limits its packets gets one of its own: a
`Delivery`, the name inward, the meters and the packet, 12 µs.

Source: docs/tenants.md, "What it costs".
"""

from __future__ import annotations

import time

from cluster.access.tenants.names import TenantNames
from cluster.access.tenants.settings import TenantSettings
from cluster.access.tenants.use import TenantUse
from cluster.core.contract import END_OF_TURN, RecordsReceived
from cluster.mqtt import codec
from cluster.mqtt.packets import Connect
from cluster.mqtt.server import ServerSession
from gateway import events as ev
from gateway.core import Core
from gateway.tenants.packets import Insider, delivered
from pixiu.ids import EndpointID, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic

CLIENTS = 1_000
MESSAGES = 200
TOPIC = "acme/score/live"


def cost_us(tenant: bool, exact: bool = False) -> float:
    """Microseconds of CPU for each delivery: core, name, session and packet."""
    use = TenantUse(settings := TenantSettings(uins="1-1000000"), TenantNames("acme", settings), "acme", 0.0)
    inside = Insider(use, lambda: 1.0) if tenant else None
    core = Core(instance=1, generation=1)
    sessions = {number: ServerSession(0.0, f"client-{number}") for number in range(1, CLIENTS + 1)}
    for number, session in sessions.items():
        session.receive(codec.encode(Connect(f"client-{number}", True, 0)), 0.0)
        core.step(ev.Opened(number, number, 3, 0, 0, 0, True, exact=exact, inside=inside), 0.0)
        core.step(ev.Join(number, 1, [ev.Wanted(TOPIC)], False, False), 0.0)
    core.step(END_OF_TURN, 0.0)
    written: list[bytes] = []
    began = time.process_time()
    for number in range(1, MESSAGES + 1):
        body = with_topic(TOPIC, b"x" * 100)
        record = encode(Kind.ROOM, topic_room(TOPIC), body, number, flags=Flag.TO_ROOM | Flag.TOPIC)
        core.step(RecordsReceived(EndpointID(1), record, 0, len(record), 1), 1.0)
        for effect in core.step(END_OF_TURN, 1.0):
            if isinstance(effect, ev.Deliver):
                written.extend(effect.data for number in effect.connections if number in sessions)
            elif isinstance(effect, ev.DeliverEach):
                messages = delivered(use, effect.messages, 1.0)
                for sent in sessions[effect.connection].deliver(messages, 1.0, 0):
                    written.append(sent.data)  # type: ignore[union-attr]  # a delivery of QoS 0 sends at once
    used_s = time.process_time() - began
    assert len(written) == CLIENTS * MESSAGES
    return used_s / len(written) * 1e6


def main() -> None:
    """Print the cost of a delivery with and without a tenant."""
    without, within, limited = cost_us(False), cost_us(True), cost_us(True, exact=True)
    print(f"a delivery of QoS 0: {without:.2f} µs without a tenant, {within:.2f} µs with one, {limited:.2f} µs to one client alone")


if __name__ == "__main__":
    main()
