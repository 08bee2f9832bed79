"""A broker, and gateways with a group whose members come, go and die at random: nothing of QoS 1 is lost while a member stays."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from broker.core import Core as Broker
from cluster.core.contract import END_OF_TURN, RecordsReceived, SendControl, SendRecords
from cluster.membership import events as me
from cluster.mqtt.properties_in_records import origin_of
from cluster.wire.v1 import control_pb2
from gateway import events as ge
from gateway.core import Core as Gateway
from pixiu.ids import EndpointID, snowflake, topic_room
from pixiu.wire.record import KEY_AT, SNOWFLAKE_AT, Flag, Kind, encode, with_topic
from tests.support.effects import of

ROUTER, PROXY = EndpointID(50), EndpointID(60)
GATEWAYS = 3
NOW_MS = 1_700_000_000_000


class World:
    """One broker, and gateways whose reports reach it at once."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1.0
        self.generations = [1] * GATEWAYS
        self.broker = Broker(endpoint=EndpointID(1), partition=0, heartbeat_s=1.0, poll_interval_s=1.0, gone_gateway_s=10.0)
        self.gateways = [self.started(number) for number in range(GATEWAYS)]
        self.members: dict[tuple[int, int], dict[int, bytes]] = {}
        """(gateway, connection) → what it has not acknowledged: number → SnowflakeID."""
        self.connections = 0
        self.got: Counter[bytes] = Counter()
        self.acknowledged: set[bytes] = set()
        self.view()
        self.broker.step(me.SnapshotFinished(ROUTER, None), self.now)

    def endpoint(self, number: int) -> EndpointID:
        return EndpointID(1000 + 100 * self.generations[number] + number)

    def started(self, number: int) -> Gateway:
        core = Gateway(instance=number, generation=self.generations[number], unix_ms=lambda: NOW_MS)
        core.step(ge.RoutersChanged(1, (ge.Replica(ROUTER, 0),)), self.now)
        return core

    def view(self) -> None:
        known = tuple(me.Gateway(self.endpoint(number), number, self.generations[number], b"") for number in range(GATEWAYS))
        event = me.ClusterChanged(1, 1, (), me.NO_OTHER, known, me.OtherRole(1, 1, (me.Replica(ROUTER, 0),)), me.NO_OTHER)
        self.from_broker(self.broker.step(event, self.now))

    def join(self, number: int) -> None:
        self.connections += 1
        self.members[number, self.connections] = {}
        self.step(number, ge.Opened(self.connections, 7, 5), ge.Join(self.connections, 1, [ge.Wanted("$share/g/jobs/#", 1)]))

    def leave(self, number: int, connection: int) -> None:
        del self.members[number, connection]
        self.step(number, ge.Closed(connection, 1))

    def kill(self, number: int) -> None:
        """A gateway dies with its members, and starts again."""
        for member in [member for member in self.members if member[0] == number]:
            del self.members[member]
        dead = self.endpoint(number)
        self.from_broker(self.broker.step(me.PeerDead(dead), self.now))
        self.generations[number] += 1
        self.gateways[number] = self.started(number)
        self.view()

    def step(self, number: int, *events: ge.Event) -> None:
        core = self.gateways[number]
        self.now += 0.001
        for effect in [effect for event in (*events, END_OF_TURN) for effect in core.step(event, self.now)]:
            if isinstance(effect, ge.SendMembership):
                self.from_broker(self.broker.step(me.MessagesReceived(ROUTER, effect.messages), self.now))
                core.step(ge.Confirmed(ROUTER, [message.id for message in effect.messages]), self.now)
            elif isinstance(effect, ge.DeliverEach):
                self.take(number, effect)
            elif isinstance(effect, SendControl):
                self.outcome(number, effect)

    def take(self, number: int, effect: ge.DeliverEach) -> None:
        member = self.members.get((number, effect.connection))
        for one in effect.messages:
            identity = one.record[SNOWFLAKE_AT:KEY_AT]
            if member is not None:
                self.got[identity] += 1
                member[one.shared] = identity

    def outcome(self, number: int, effect: SendControl) -> None:
        for data in effect.messages:
            control = control_pb2.Control.FromString(data)
            if control.HasField("shared_outcome"):
                found = control.shared_outcome
                event = me.SharedOutcome(self.endpoint(number), found.taken, found.returned)
                self.from_broker(self.broker.step(event, self.now))

    def from_broker(self, effects: list[me.Effect]) -> None:
        for parcel in of(SendRecords, effects):
            for number in range(GATEWAYS):
                if parcel.peer == self.endpoint(number):
                    data = b"".join(parcel.records)
                    self.step(number, RecordsReceived(EndpointID(1), data, 0, len(data), len(parcel.records)))

    def publish(self, number: int) -> bytes:
        record = encode(
            Kind.ROOM, topic_room("jobs"), with_topic(f"jobs/{number}", b"x"), snowflake(NOW_MS, 1, 0) + number,
            flags=Flag.TO_ROOM | Flag.TOPIC, origin=origin_of(1, retain=False),
        )  # fmt: skip
        self.from_broker(self.broker.step(RecordsReceived(PROXY, record, 0, len(record), 1), self.now))
        return record[SNOWFLAKE_AT:KEY_AT]

    def acknowledge(self, member: tuple[int, int], most: int) -> None:
        numbers = list(self.members[member])[:most]
        for number in numbers:
            self.acknowledged.add(self.members[member].pop(number))
        self.step(member[0], ge.SharedAcknowledged(member[1], numbers))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_while_a_member_stays(seed: int) -> None:
    world = World(seed)
    chance = world.chance
    for number in range(GATEWAYS):
        world.join(number)
    published: set[bytes] = set()
    for number in range(400):
        published.add(world.publish(number))
        member = chance.choice(list(world.members))
        act = chance.random()
        if act < 0.5:
            world.acknowledge(member, chance.randrange(1, 6))
        elif act < 0.6:
            world.join(chance.randrange(GATEWAYS))
        elif act < 0.7 and len({each[0] for each in world.members if each != member}) > 1:
            world.leave(*member)
        elif act < 0.73 and len({each[0] for each in world.members if each[0] != member[0]}) > 1:
            world.kill(member[0])
    for member in list(world.members):
        world.acknowledge(member, 1_000)
    assert world.acknowledged == published
    assert len(world.broker.fanout.groups) == 0, "nothing waits any more"  # type: ignore[union-attr]
    assert sum(core.shared.unacknowledged for core in world.gateways) == 0


def test_each_message_comes_once_while_nothing_changes() -> None:
    world = World(1)
    for number in (0, 0, 1, 2, 2):
        world.join(number)
    published = {world.publish(number) for number in range(300)}
    assert world.got == Counter(published)
