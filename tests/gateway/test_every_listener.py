"""What one listener checks, every listener checks: rows are rules, columns are where clients come in or messages go out."""

from __future__ import annotations

import pytest

from cluster.mqtt import codec
from cluster.mqtt.packets import Puback, Publish, Pubrec
from gateway import events as ev
from gateway.core import Core
from pixiu.client.messages.drafts import draft
from pixiu.client.messages.message import message_of
from pixiu.client.stores.pages import InboxEntry
from pixiu.errors import RecordTooLarge
from pixiu.ids import snowflake
from pixiu.wire.envelope import Delivery
from pixiu.wire.record import MAX_RECORD_BYTES, Flag, Kind, encode, has_expired
from tests.gateway.test_mail import NUMBER, UIN, Gateway, ack
from tests.gateway.world import World, fan_out, mqtt_client, of, turn
from tests.support.clock_steps import NOW_MS, STEPS_MS
from tests.support.filters import wants

MINUTE_MS = 60_000


def record(kind: Kind, number: int, lifetime_min: int, *, key: int = UIN, flags: int = 0) -> bytes:
    to_room = Flag.TO_ROOM if kind is Kind.ROOM or (kind is Kind.SIGNAL and key == 42) else 0
    return encode(
        kind, key, b"%d" % number, snowflake(NOW_MS, 1, number), flags=flags | to_room, lifetime_min=lifetime_min
    )  # fmt: skip


# --- a lifetime that is over


@pytest.mark.parametrize("packets", [False, True], ids=["gRPC", "MQTT"])
@pytest.mark.parametrize("kind", [Kind.ROOM, Kind.CHAT, Kind.SIGNAL], ids=lambda kind: kind.name)
def test_a_real_time_message_is_delivered_until_the_last_millisecond_of_its_lifetime(kind: Kind, packets: bool) -> None:
    now_ms = NOW_MS
    core = Core(instance=3, generation=5, unix_ms=lambda: now_ms, through_relays=False)
    turn(core, ev.Opened(1, UIN, 3 * packets), ev.Join(1, 1, wants(42)), ev.Join(1, 2, [], chat=True))
    key = UIN if kind is Kind.CHAT else 42
    now_ms += MINUTE_MS - 1
    assert fan_out(core, record(kind, 1, 1, key=key))
    now_ms += 1
    assert not fan_out(core, record(kind, 2, 1, key=key))
    assert fan_out(core, record(kind, 3, 0, key=key))
    assert fan_out(core, record(kind, 4, 1, key=key, flags=Flag.DERIVED_ID)), "a derived ID says no time"
    assert core.counters.expired == 1


def test_expired_mail_does_not_reach_an_mqtt_client_and_holds_nothing_up() -> None:
    gateway = Gateway()
    now_ms = NOW_MS + MINUTE_MS
    gateway.core.mail._unix_ms = lambda: now_ms
    gateway.connect(1, packets=True)
    lifetimes = {1: 1, 2: 0, 3: 1, 4: 1, 5: 2, 6: 1}
    items = [Delivery(1000 + seq, seq, UIN, 1, NUMBER, 1, 0, record(Kind.MAIL, seq, life)) for seq, life in lifetimes.items()]
    assert [seq for _, seq, _, _ in gateway.seqs(*items)] == [2, 5]
    assert gateway.said() == [ack(1, 0b10110)]
    gateway.acknowledge((1, 2, 2), (1, 5, 5))
    assert gateway.said()[-1].up_to == 6
    assert (gateway.core.mail.counters.expired, gateway.core.mail.counters.delivered) == (4, 2)
    assert gateway.core.mail.unacknowledged == 0


def test_expired_mail_of_the_sdk_is_a_gap_that_its_application_hears_of() -> None:
    gateway = Gateway()
    gateway.core.mail._unix_ms = lambda: NOW_MS + MINUTE_MS
    gateway.connect(1)
    item = Delivery(1001, 1, UIN, 1, NUMBER, 1, 0, record(Kind.MAIL, 1, 1))
    assert [seq for _, seq, _, _ in gateway.seqs(item)] == [1], "its own core decides: see tests/pixiu/client/test_inbox_core.py"


@pytest.mark.parametrize("step_ms", [*STEPS_MS, 0])
@pytest.mark.parametrize(("lifetime_min", "flags"), [(0, 0), (1, 0), (600, 0), (1, int(Flag.DERIVED_ID))])
def test_every_reader_of_a_lifetime_has_the_same_answer(step_ms: int, lifetime_min: int, flags: int) -> None:
    made = record(Kind.MAIL, 1, lifetime_min, flags=flags)
    shown = InboxEntry(1, 1, 1, message=message_of(made))
    over = bool(lifetime_min and not flags and step_ms >= lifetime_min * MINUTE_MS)
    assert has_expired(b"xy" + made, 2, NOW_MS + step_ms) is over
    assert shown.expired(NOW_MS + step_ms) is over


# --- a message above the cluster's limit


@pytest.mark.parametrize("topic", ["room/42", "user/7", "weather/north"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_above_the_limit_is_never_answered_with_a_yes(topic: str, qos: int) -> None:
    world = World()
    world.clients.max_record_bytes = 1_000
    connection, wire = mqtt_client(world)
    fits = Publish(topic, bytes(500), qos, packet_id=1 if qos else 0)
    large = Publish(topic, bytes(2_000), qos, packet_id=2 if qos else 0)
    connection.data_received(codec.encode(fits) + codec.encode(large))
    world.clients.deliveries.flush()
    assert not [packet for packet in wire.packets() if isinstance(packet, Puback | Pubrec) and packet.packet_id == 2]
    assert world.clients.counters.unroutable == 1
    assert world.closed_for == (["publish_refused"] if qos else [])
    assert len(world.published) + len(of(ev.Publish, world.events)) == 1, "what came before it is sent on"


def test_the_sdk_refuses_it_before_it_is_sent() -> None:
    with pytest.raises(RecordTooLarge):
        draft(int(Kind.ROOM), 42, bytes(MAX_RECORD_BYTES), MAX_RECORD_BYTES)
