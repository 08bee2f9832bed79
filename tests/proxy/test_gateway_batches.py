"""A gateway's batch of QoS 1: routed as a publisher's, and answered by one control message once everything is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from cluster.core.contract import SendControl, Settled
from cluster.links.api import Outcome
from cluster.links.datagrams.fragments import MAX_FRAGMENTS
from cluster.links.options import MIN_MTU_BYTES
from cluster.rpc.served import ServedStreams
from cluster.wire.v1 import control_pb2
from gateway.confirming import MAX_BATCH_RECORDS
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import KIND_AT, Flag, Kind, encode
from proxy import events as ev
from proxy.core import Core
from proxy.publishers.permits import NOT_SHOWN
from proxy.publishers.sender_tickets import SenderTickets
from proxy.records.gateway_batches import MAX_TIMES
from proxy.service import Service
from tests.proxy.driver import GATEWAY, sends, settle

BROKER, SECOND = EndpointID(1), EndpointID(2)
BIG = 40


def core_with(brokers: Sequence[ev.Replica] = (ev.Replica(BROKER, 0), ev.Replica(SECOND, 1))) -> Core:
    core = Core(max_record_bytes=1000, vrooms=VRooms(40, 41), vrooms_per_s=64.0)
    core.step(ev.BrokersChanged(2, tuple(brokers)), 0.0)
    return core


def room(key: int, number: int) -> bytes:
    return encode(Kind.ROOM, key, b"hello", number, flags=Flag.TO_ROOM)


def publish(core: Core, number: int, *records: bytes, now: float = 0.0) -> list[ev.Effect]:
    """The gateway's batch `number`."""
    return core.step(ev.GatewayPublished(100 + number, GATEWAY, number, b"".join(records), len(records)), now)


def controls(effects: Sequence[ev.Effect]) -> list[SendControl]:
    return [effect for effect in effects if isinstance(effect, SendControl)]


def answers(effects: Sequence[ev.Effect]) -> list[tuple[int, list[tuple[int, int, str]]]]:
    """Number of each batch that is answered, and its failures."""
    found = []
    for effect in controls(effects):
        assert effect.peer == GATEWAY
        (message,) = effect.messages
        outcome = control_pb2.Control.FromString(message).publish_outcome
        found.append((outcome.number, [(each.first, each.last, each.code) for each in outcome.failures]))
    return found


def test_a_batch_is_answered_when_all_brokers_have_their_part() -> None:
    core = core_with()
    first, second = sends(publish(core, 7, room(4, 1), room(5, 2)))
    assert first.urgent, "somebody waits"
    assert answers(settle(core, [first], 0.1)) == []
    assert answers(settle(core, [second], 0.2)) == [(7, [])]


def test_what_a_broker_did_not_confirm_fails_alone() -> None:
    core = core_with()
    first, second = sends(publish(core, 7, room(4, 1), room(5, 2), room(4, 3)))
    settle(core, [second], 0.1)
    assert answers(settle(core, [first], 0.2, handled=False)) == [(7, [(1, 1, "DROPPED"), (3, 3, "DROPPED")])]


def test_what_nobody_serves_is_refused_at_once() -> None:
    assert answers(publish(core_with([ev.Replica(BROKER, 0)]), 7, room(5, 1))) == [(7, [(1, 1, "UNAVAILABLE")])]


def test_a_malformed_batch_is_refused_whole() -> None:
    core = core_with()
    effects = core.step(ev.GatewayPublished(1, GATEWAY, 7, room(4, 1) + b"x", 2), 0.0)
    assert answers(effects) == [(7, [(1, 2, "MALFORMED")])]


def test_no_batch_waits_for_another_ones_outcome() -> None:
    core = core_with()
    publish(core, 7, room(BIG, 1), room(BIG, 2), room(BIG, 3))
    (sent,) = sends(publish(core, 8, room(4, 4)))
    assert answers(settle(core, [sent], 0.1)) == [(8, [])]


def test_the_largest_outcome_fits_into_the_fragments_of_a_link() -> None:
    """A gateway is no peer of a proxy: nothing goes to it by stream."""
    core = Core(max_record_bytes=1000)
    core.step(ev.BrokersChanged(1024, ()), 0.0)
    (outcome,) = controls(publish(core, 7, *[room(800 + number, number) for number in range(MAX_BATCH_RECORDS)]))
    assert len(answers([outcome])[0][1]) == MAX_BATCH_RECORDS, "each has a reason of its own"
    assert len(outcome.messages[0]) < MAX_FRAGMENTS * (MIN_MTU_BYTES - 100)


def test_an_outcome_that_was_lost_is_sent_again_a_few_times() -> None:
    core = core_with()
    effects = settle(core, sends(publish(core, 7, room(4, 1))), 0.1)
    for _ in range(MAX_TIMES - 1):
        (control,) = controls(effects)
        assert core.under_way == 1, "a proxy that drains waits for it"
        effects = core.step(Settled([(control.token, False)]), 0.2)
        assert answers(effects) == [(7, [])]
    (control,) = controls(effects)
    assert core.step(Settled([(control.token, False)]), 0.3) == []
    assert core.under_way == 0


def test_an_outcome_that_arrived_is_over() -> None:
    core = core_with()
    (control,) = controls(settle(core, sends(publish(core, 7, room(4, 1))), 0.1))
    assert core.step(Settled([(control.token, True)]), 0.2) == []
    assert core.under_way == 0
    assert not core._streams
    assert not core._gateways.streams


class Taking(Service):
    """A shell that notes the batches which its links take."""

    def __init__(self, senders: SenderTickets | None = None) -> None:
        self.taken: list[ev.GatewayPublished] = []
        self.senders, self._publishers = senders, ServedStreams(0, "%d")
        self._records = cast(Any, SimpleNamespace(step=self.taken.append))
        self.late = False
        self._context = cast(Any, SimpleNamespace(is_overtaken=lambda: self.late))

    def begins(self, stream: int, count: int, position: int) -> None:
        """Note nothing."""

    def take(self, *records: bytes, count: int | None = None, sessions: Sequence[int] = ()) -> Outcome:
        """A gateway's control message."""
        count = len(records) if count is None else count
        batch = control_pb2.PublishBatch(number=7, count=count, records=b"".join(records), sessions=sessions)
        return self.on_control(GATEWAY, [control_pb2.Control(publish_batch=batch).SerializeToString()])


def test_what_came_during_a_pause_is_left_to_others() -> None:
    service = Taking()
    service.late = True
    assert service.take(room(4, 1)) is Outcome.NOT_TAKEN
    assert service.on_records(GATEWAY, room(4, 1), 0, len(room(4, 1)), 1) is Outcome.NOT_TAKEN
    assert service.taken == []


def test_each_batch_is_a_stream_of_its_own() -> None:
    service = Taking()
    assert [service.take(room(4, 1)), service.take(room(4, 2), room(4, 3))] == [Outcome.ANSWERED] * 2
    assert [(each.stream, each.number, each.count) for each in service.taken] == [(1, 7, 1), (2, 7, 2)]


def test_a_batch_names_a_session_for_each_record_or_none() -> None:
    service = Taking()
    assert service.take(room(4, 1), room(4, 2), sessions=[0, 78]) is Outcome.ANSWERED
    assert list(service.taken[0].sessions) == [0, 78]
    assert service.take(room(4, 1), room(4, 2), sessions=[78]) is Outcome.MALFORMED


def test_an_empty_batch_is_malformed() -> None:
    service = Taking()
    assert service.take(count=0) is Outcome.MALFORMED
    assert service.taken == []


def test_a_sender_whose_ticket_the_gateway_has_not_shown_is_marked() -> None:
    service = Taking(SenderTickets(lambda: (b"k" * 32,), lambda: 0.0))
    service.take(room(4, 1))
    (batch,) = service.taken
    assert batch.data[KIND_AT] == NOT_SHOWN
    (answer,) = answers(core_with().step(batch, 0.0))
    assert answer == (7, [(1, 1, "NOT_ALLOWED")])
