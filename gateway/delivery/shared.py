"""Messages of shared subscriptions on one gateway: who has them, and what goes back to the broker. Pure.

    broker ── for group 7: the record ──▶ gateway ──▶ one member ── acknowledged ──▶ taken ──▶ broker forgets it
                                            │           └ gone: another member here, or else
                                            └ no member: returned ──▶ the broker gives it to another gateway

Source: MQTT 5.0 section 4.8.2; docs/subscriptions.md, "Shared subscriptions".
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from cluster.core.contract import SendControl
from cluster.mqtt.properties_in_records import qos_of, retain_of
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.delivery.fan_out import FanOut, expires_at_ms_of
from gateway.delivery.retained import topic_of
from gateway.membership.rooms import RoomIndex
from pixiu.ids import EndpointID
from pixiu.placement.filter_tree import filter_matches
from pixiu.wire.record import KEY_AT, SNOWFLAKE_AT

OUTCOME: Final = struct.Struct("<QQ")
"""SnowflakeID and number of the group."""
OUTCOMES_A_CONTROL: Final = 64


class _Given(NamedTuple):
    """A message that a member has not acknowledged."""

    broker: EndpointID
    group: int
    record: bytes
    topic: bytes


class SharedDeliveries:
    """Messages of the groups that have members here."""

    def __init__(self, index: RoomIndex, fan_out: FanOut) -> None:
        self._index, self._fan_out = index, fan_out
        self._given: dict[int, dict[int, _Given]] = {}
        """Connection → number → message that it has not acknowledged."""
        self._last = 0
        self._taken: dict[EndpointID, list[bytes]] = {}
        self._returned: dict[EndpointID, list[bytes]] = {}
        self.waits = False
        """True if brokers must be notified."""
        self.delivered = self.given_again = self.returned = 0

    @property
    def unacknowledged(self) -> int:
        """Messages that members have not acknowledged."""
        return sum(map(len, self._given.values()))

    def take(self, broker: EndpointID, number: int, record: bytes, body: bytes) -> bool:
        """Give a message to one member of a group. Returns False if it goes back, and may come again."""
        topic = topic_of(record, body)
        group = self._index.groups.get(number)
        if group is not None and not filter_matches(group.name, topic):
            self._settle(self._taken, broker, number, record)  # the room carries other topics as well
            return True
        return self._give(_Given(broker, number, record, topic))

    def acknowledged(self, connection: int, numbers: list[int]) -> None:
        """Note acknowledgements of a member."""
        given = self._given.get(connection)
        if given is None:
            return
        for number in numbers:
            found = given.pop(number, None)
            if found is not None:
                self._settle(self._taken, found.broker, found.group, found.record)
        if not given:
            del self._given[connection]

    def closed(self, connection: int) -> None:
        """Give what a member that is gone has not acknowledged to others."""
        for found in self._given.pop(connection, {}).values():
            self.given_again += 1
            self._give(found)

    def flush(self) -> list[SendControl]:
        """Build the notices for brokers."""
        taken, returned = self._taken, self._returned
        self._taken, self._returned, self.waits = {}, {}, False
        found: list[SendControl] = []
        for broker in dict.fromkeys((*taken, *returned)):
            messages = [control_pb2.SharedOutcome(taken=part) for part in _parts(taken.get(broker, []))]
            messages += [control_pb2.SharedOutcome(returned=part) for part in _parts(returned.get(broker, []))]
            found.append(SendControl(broker, [control_pb2.Control(shared_outcome=each).SerializeToString() for each in messages]))
        return found

    def _give(self, message: _Given) -> bool:
        index = self._index
        group = index.groups.get(message.group)
        chosen = None
        if group is not None:
            able = [connection for connection in group.members if not index.clients[connection].gone]
            number = int.from_bytes(message.record[SNOWFLAKE_AT:KEY_AT], "little")
            chosen = group.choose(number, able, self._given)
        if group is None or chosen is None:
            self.returned += 1
            self._settle(self._returned, message.broker, message.group, message.record)
            return False
        self.delivered += 1
        wanted = group.members[chosen].wanted
        if not index.clients[chosen].packets:
            self._fan_out.one(chosen, message.record)
            self._settle(self._taken, message.broker, message.group, message.record)
            return True
        qos, shared = min(qos_of(message.record), wanted.qos), 0
        if qos:
            self._last += 1
            shared = self._last
            self._given.setdefault(chosen, {})[shared] = message
        else:
            self._settle(self._taken, message.broker, message.group, message.record)
        identifiers = (wanted.identifier,) if wanted.identifier else ()
        retain = wanted.retain_as_published and retain_of(message.record)
        delivery = ev.Delivery(
            message.record, message.topic, qos, retain, identifiers, expires_at_ms_of(message.record), shared
        )  # fmt: skip
        self._fan_out.each(chosen, delivery)
        return True

    def _settle(self, outcomes: dict[EndpointID, list[bytes]], broker: EndpointID, group: int, record: bytes) -> None:
        outcome = OUTCOME.pack(int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little"), group)
        outcomes.setdefault(broker, []).append(outcome)
        self.waits = True


def _parts(outcomes: list[bytes]) -> list[bytes]:
    return [b"".join(outcomes[at : at + OUTCOMES_A_CONTROL]) for at in range(0, len(outcomes), OUTCOMES_A_CONTROL)]
