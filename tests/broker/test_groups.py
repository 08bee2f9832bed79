"""A broker gives a group's message to one gateway, to another one if that has nobody or dies; all free topics to who wants all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from broker.core import Core
from broker.groups import OTHERS, OUTCOME
from cluster.core.contract import RecordsReceived, SendRecords
from cluster.membership import events as ev
from cluster.membership.map.updates import Update
from pixiu.ids import ALL_TOPICS, EndpointID, gateway_msg_id, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from pixiu.wire.uin_list import take_apart
from tests.support.effects import of

ROUTER, PROXY = EndpointID(50), EndpointID(60)
GATEWAYS = [EndpointID(1000 + instance) for instance in range(4)]
GROUP, OTHER_GROUP = 77_001, 77_002
ROOM = topic_room("jobs")


class World:
    """A broker, and gateways that report members."""

    def __init__(self) -> None:
        self.broker = Core(endpoint=EndpointID(1), partition=0, heartbeat_s=1.0, poll_interval_s=1.0, gone_gateway_s=10.0)
        self._last = 0
        self.view(GATEWAYS)
        self.broker.step(ev.SnapshotFinished(ROUTER, None), 1.0)

    def view(self, gateways: list[EndpointID]) -> list[object]:
        known = tuple(ev.Gateway(gateway, GATEWAYS.index(gateway), 1, b"") for gateway in gateways)
        routers = ev.OtherRole(1, 1, (ev.Replica(ROUTER, 0),))
        return [*self.broker.step(ev.ClusterChanged(1, 1, (), ev.NO_OTHER, known, routers, ev.NO_OTHER), 1.0)]

    def member(self, gateway: int, member: int, *, room: int = ROOM, value: int = 0, login: bool = True) -> None:
        self._last += 1
        message = Update(gateway_msg_id(gateway, 1, self._last), room, member, login, 0, value)
        self.broker.step(ev.MessagesReceived(ROUTER, [message]), 1.0)

    def publish(self, number: int, topic: str = "jobs/x") -> dict[EndpointID, list[int] | None]:
        """Gateway → the groups that it gets the record for; None: it gets the record as it is."""
        record = encode(Kind.ROOM, topic_room(topic), with_topic(topic, b"hi"), number, flags=Flag.TO_ROOM | Flag.TOPIC)
        return got(self.broker.step(RecordsReceived(PROXY, record, 0, len(record), 1), 1.0))


def got(effects: Sequence[object]) -> dict[EndpointID, list[int] | None]:
    found: dict[EndpointID, list[int] | None] = {}
    for parcel in of(SendRecords, effects):
        (record,) = parcel.records
        apart = take_apart(record, 0, len(record))
        found[parcel.peer] = list(apart[0]) if apart is not None and record[4] == Kind.ADDRESSED else None
    return found


def test_each_message_of_a_group_goes_to_one_gateway_the_same_for_every_repeat() -> None:
    world = World()
    for gateway in range(3):
        world.member(gateway, GROUP, value=1)
    world.member(3, 5)
    owners: Counter[EndpointID] = Counter()
    for number in range(1, 91):
        found = world.publish(number)
        assert found.pop(GATEWAYS[3]) is None
        ((owner, groups),) = found.items()
        assert groups == [GROUP]
        assert world.publish(number) == {GATEWAYS[3]: None, owner: [GROUP]}
        owners[owner] += 1
    assert set(owners) == set(GATEWAYS[:3])
    assert min(owners.values()) > 10, "the gateways share the work"


def test_a_gateway_with_other_members_gets_one_copy_for_all() -> None:
    world = World()
    world.member(0, GROUP, value=2)
    world.member(0, OTHER_GROUP, value=1)
    assert world.publish(1) == {GATEWAYS[0]: [GROUP, OTHER_GROUP]}
    world.member(0, 5)
    assert world.publish(2) == {GATEWAYS[0]: [GROUP, OTHER_GROUP, OTHERS]}
    world.member(0, GROUP, login=False)
    world.member(0, OTHER_GROUP, login=False)
    assert world.publish(3) == {GATEWAYS[0]: None}


def test_what_is_not_acknowledged_goes_to_another_gateway() -> None:
    world = World()
    for gateway in range(3):
        world.member(gateway, GROUP, value=2)
    ((first, _),) = world.publish(1).items()
    again = got(world.broker.step(ev.SharedOutcome(first, b"", OUTCOME.pack(1, GROUP)), 1.0))
    ((second, groups),) = again.items()
    assert (second != first, groups) == (True, [GROUP])
    ((third, _),) = got(world.broker.step(ev.PeerDead(second), 1.0)).items()
    assert {first, second, third} == set(GATEWAYS[:3])
    assert got(world.broker.step(ev.SharedOutcome(third, OUTCOME.pack(1, GROUP), b""), 1.0)) == {}
    assert got(world.view([GATEWAYS[3]])) == {}, "it was taken, and nobody gets it again"
    counters = world.broker.fanout.groups.counters  # type: ignore[union-attr]
    assert (counters.shared_given_again, counters.shared_nobody) == (2, 0)


def test_a_message_is_forgotten_when_nobody_is_there() -> None:
    world = World()
    world.member(0, GROUP, value=2)
    world.publish(1)
    assert got(world.broker.step(ev.SharedOutcome(GATEWAYS[0], b"", OUTCOME.pack(1, GROUP)), 1.0)) == {}
    assert len(world.broker.fanout.groups) == 0  # type: ignore[union-attr]


def test_a_dead_gateway_gets_no_messages_of_a_group() -> None:
    world = World()
    for gateway in range(2):
        world.member(gateway, GROUP, value=1)
    world.broker.step(ev.PeerDead(GATEWAYS[0]), 1.0)
    assert [world.publish(number) for number in range(1, 9)] == [{GATEWAYS[1]: [GROUP]}] * 8
    world.broker.step(ev.PeerAlive(GATEWAYS[0]), 1.0)
    assert {gateway for number in range(9, 40) for gateway in world.publish(number)} == set(GATEWAYS[:2])


def test_who_wants_all_free_topics_gets_each_record_once() -> None:
    world = World()
    world.member(0, 5)
    assert world.publish(1) == {GATEWAYS[0]: None}
    world.member(0, 0, room=ALL_TOPICS)
    world.member(1, 0, room=ALL_TOPICS)
    assert world.publish(2) == {GATEWAYS[0]: None, GATEWAYS[1]: None}
    assert world.publish(3, "weather/x") == {GATEWAYS[0]: None, GATEWAYS[1]: None}
    record = encode(Kind.ROOM, 42, b"hi", 4, flags=Flag.TO_ROOM)
    assert got(world.broker.step(RecordsReceived(PROXY, record, 0, len(record), 1), 1.0)) == {}, "a room is no free topic"
    world.member(1, 0, room=ALL_TOPICS, login=False)
    assert world.publish(5, "weather/x") == {GATEWAYS[0]: None}
    world.member(2, GROUP, room=ALL_TOPICS, value=1)
    assert world.publish(6, "weather/x") == {GATEWAYS[0]: None, GATEWAYS[2]: [GROUP]}
