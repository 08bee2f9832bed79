"""What a gateway remembers of a client's confirmed messages, so that no older one is sent after a newer one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.contract import NEVER
from cluster.core.reading_gate import ReadingGate
from cluster.mqtt.events import CloseReason
from cluster.mqtt.reason_codes import ReasonCode
from gateway.events import Confirmable
from gateway.mqtt.publishing import LEFT_S, Publishing
from pixiu.errors import Dropped, Unavailable
from pixiu.ids import SnowflakeID

ROOM = 42


class Client:
    """An MQTT client whose messages are on their way."""

    id, uin, client_id, access, is_open, dialect = 1, 7, "c", None, True, 5

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.lost: dict[int, ReasonCode] = {}
        self.ended: list[CloseReason] = []
        self.gate = ReadingGate()

    def published(self, packet_id: int) -> None:
        self.acknowledged.append(packet_id)

    def refused(self, packet_id: int, code: ReasonCode, text: str) -> None:
        self.lost[packet_id] = code

    def end(self, reason: CloseReason, text: str) -> None:
        self.ended.append(reason)


def sending(client: Client, *keys: int) -> tuple[Publishing, list[Confirmable]]:
    """Its messages, by rooms, all under way."""
    clients: Any = SimpleNamespace(hurry=lambda: None, counters=SimpleNamespace(unroutable=0, chat_offline=0))
    publishing, messages = Publishing(client, clients), []  # type: ignore[arg-type]
    for number, key in enumerate(keys, 1):
        message = Confirmable(publishing._resolved, number, key, b"x", SnowflakeID(number))
        message.number = number
        publishing.unacknowledged[number] = SnowflakeID(number)
        count, _ = publishing._sent.get(key, (0, 0))
        publishing._sent[key] = count + 1, number
        publishing._under_way += 1
        messages.append(message)
    return publishing, messages


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_connection_published_leaves_for_a_moment_after_its_end_unless_it_was_taken_over(elsewhere: bool) -> None:
    clients: Any = SimpleNamespace(now=lambda: 5.0, publishers=SimpleNamespace(forget=lambda _: None))
    publishing = Publishing(Client(), clients)  # type: ignore[arg-type]
    assert publishing._sender.until == NEVER
    publishing.closed(elsewhere=elsewhere)
    assert publishing._sender.until == (5.0 if elsewhere else 5.0 + LEFT_S)


def test_a_message_is_not_sent_again_after_a_later_one_was_accepted() -> None:
    client = Client()
    publishing, (older, newer) = sending(client, ROOM, ROOM)
    publishing._resolved(newer, None)
    publishing._resolved(older, Dropped("lost"))
    assert (client.acknowledged, client.lost) == ([2], {1: ReasonCode.UNSPECIFIED})
    assert not publishing._again


def test_a_client_of_mqtt_3_gets_no_acknowledgement_of_a_message_that_was_refused_for_now() -> None:
    client = Client()
    client.dialect = 3
    publishing, (older, newer) = sending(client, ROOM, ROOM)
    publishing._resolved(newer, None)
    publishing._resolved(older, Unavailable("the stores do not answer"))
    assert (client.acknowledged, client.lost, client.ended) == ([2], {}, [CloseReason.PUBLISH_REFUSED])


def test_a_client_whose_messages_are_all_acknowledged_costs_nothing() -> None:
    client = Client()
    publishing, messages = sending(client, *range(1, 1001))
    for message in messages[1:]:
        publishing._resolved(message, None)
    assert len(publishing._accepted) == 999, "the first may be sent again"
    publishing._resolved(messages[0], None)
    assert not publishing._accepted
