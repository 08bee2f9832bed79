"""What persistent sessions got after they were away, beside what was published for them. Pure.

Source: OASIS MQTT 5.0 sections 4.1, 4.3 and 4.6; docs/mqtt.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.history.mqtt.judge import Verdict


class Wanted(NamedTuple):
    """A message for a session. Numbers grow in the order of publishing. accepted: False: it may come or not. resent: its publisher
    sent it again with a new connection, so that it may come twice if its QoS is 1."""

    number: int
    topic: str
    qos: int
    accepted: bool = True
    resent: bool = False


class Came(NamedTuple):
    """A message that a session got."""

    number: int
    topic: str
    qos: int
    connection: int


def judge_backlog(wanted: Mapping[str, Sequence[Wanted]], came: Mapping[str, Sequence[Came]]) -> Verdict:
    """Compare: all that was accepted has come, QoS 2 once, nothing twice in a connection, nothing else, and each topic's in order.

    Args:
        wanted: by session.
        came: by session, in the order of arrival. `number` 0 and below is left out: messages of the test itself.
    """
    found = Verdict()
    for who, messages in wanted.items():
        by_number = {each.number: each for each in messages}
        seen: set[int] = set()
        here: set[tuple[int, int]] = set()
        last: dict[tuple[str, int], int] = {}
        for each in came.get(who, ()):
            if each.number <= 0:
                continue
            found.counts["came"] += 1
            expected = by_number.get(each.number)
            if expected is None or (expected.topic, expected.qos) != (each.topic, each.qos):
                found.violation("something else came", (who, each, expected))
                continue
            if (each.number, each.connection) in here and not (expected.resent and each.qos == 1):
                found.violation("twice within a connection", (who, each))
            here.add((each.number, each.connection))
            if each.number in seen:
                found.counts["QoS 1 again"] += 1
                if each.qos == 2:
                    found.violation("QoS 2 twice", (who, each))
                continue
            seen.add(each.number)
            before = last.get((each.topic, each.qos), 0)
            if before > each.number:
                found.violation("out of order", (who, each, before))
            last[each.topic, each.qos] = max(before, each.number)
        found.counts["wanted"] += len(messages)
        for message in messages:
            if message.number not in seen:
                if message.accepted:
                    found.violation(f"QoS {message.qos} is missing", (who, message))
                else:
                    found.counts["not accepted, did not come"] += 1
    return found
