"""Who is not of the cluster gets no answer to data, no more back than it sent, and costs no memory."""

from __future__ import annotations

import pytest

from cluster.links.api import Peer, PeerState
from cluster.links.datagrams import heartbeat
from cluster.links.datagrams.head import (
    CONTROL,
    FLAG_ANY_DESTINATION,
    HEAD_SIZE,
    HEARTBEAT,
    RECORDS,
    Codec,
    DatagramRefusal,
    join_control,
)
from cluster.links.link import LinkCore
from cluster.links.options import LinkOptions
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID
from tests.cluster.links.world import Recorder, make_record

OWN, STRANGER, MEMBER = EndpointID(0x1111111122222222), EndpointID(0x3333333344444444), EndpointID(0x5555555566666666)
ADDRESS = ("127.0.0.9", 7009)
FENCED = control_pb2.Control(fenced=control_pb2.Fenced(floor=1)).SerializeToString()


def core(knows: bool) -> tuple[LinkCore, Recorder]:
    handler = Recorder()
    handler.answer = b"what only members are told" * 10
    return LinkCore(OWN, LinkOptions(), handler, knows=lambda id_: knows or id_ == MEMBER), handler


def datagram(sender: EndpointID, type_: int, body: list[bytes], flags: int = 0, count: int = 1) -> bytes:
    return Codec(sender, 8192, 300_000).pack(type_, flags, count, 1, 0, OWN, body)


def beat(target: EndpointID) -> list[bytes]:
    return [heartbeat.encode(reply=False, sent_us=5, next_record=9, next_control=9, attachment=b"", target=target)]


@pytest.mark.parametrize(("type_", "body"), [(CONTROL, join_control([FENCED])), (RECORDS, [make_record(1)])])
def test_one_datagram_of_a_stranger_does_nothing_and_is_not_answered(type_: int, body: list[bytes]) -> None:
    for knows in (False, True):
        links, handler = core(knows)
        for _ in range(3):
            links.receive(datagram(STRANGER, type_, body), ADDRESS, 1.0)
            links.flush(1.0)
            links.acknowledge(1.0, every=True)
        assert bool(handler.control or handler.records) is knows
        assert bool(links.outputs.datagrams) is knows
        assert (links.refusals.counts.get(DatagramRefusal.UNKNOWN_SENDER, 0) == 3) is not knows


@pytest.mark.parametrize("target", [OWN, EndpointID(99)])
def test_a_strangers_heartbeat_gets_back_no_more_than_it_was(target: EndpointID) -> None:
    asked = datagram(STRANGER, HEARTBEAT, beat(target), FLAG_ANY_DESTINATION, 0)
    links, handler = core(knows=False)
    links.receive(asked, ADDRESS, 1.0)
    links.acknowledge(1.0, every=True)
    ((answer, where),) = links.outputs.datagrams
    assert where == ADDRESS
    assert len(answer) <= len(asked)
    body = heartbeat.decode(answer, HEAD_SIZE, len(answer))
    assert body is not None
    assert (body.reply, body.sent_us, body.attachment) == (True, 5, b"")
    assert handler.heartbeats == []


def test_strangers_take_no_memory_and_a_member_is_answered_in_full() -> None:
    links, handler = core(knows=False)
    for number in range(1, 3000):
        links.receive(datagram(EndpointID(number << 20), HEARTBEAT, beat(OWN), FLAG_ANY_DESTINATION, 0), ADDRESS, 1.0)
    assert dict(links.stats().peers) == {}
    links.outputs.datagrams.clear()
    links.receive(datagram(MEMBER, HEARTBEAT, beat(OWN), FLAG_ANY_DESTINATION, 0), ADDRESS, 1.0)
    body = heartbeat.decode(links.outputs.datagrams[0][0], HEAD_SIZE, len(links.outputs.datagrams[0][0]))
    assert body is not None
    assert body.attachment == handler.answer


def test_a_process_hears_whether_its_peer_knows_it_before_it_sends_data_that_would_be_refused() -> None:
    known: list[EndpointID] = []
    peer = LinkCore(MEMBER, LinkOptions(), Recorder(), knows=known.__contains__)
    new = LinkCore(OWN, LinkOptions(), Recorder())
    new.set_peers({MEMBER: (Peer(MEMBER, "broker", *ADDRESS), ADDRESS)}, 1.0)

    def exchange(now: float) -> None:
        for source, to in ((new, peer), (peer, new)):
            source.acknowledge(now)
            sent, source.outputs.datagrams = source.outputs.datagrams, []
            for data, _ in sent:
                to.receive(data, ADDRESS, now)

    assert not new.introduce(1.0, unanswered=False)  # nobody is there as far as it knows
    assert new.introduce(1.0, unanswered=True)
    exchange(1.0)
    assert new.state(MEMBER) is PeerState.ALIVE
    assert new.introduce(1.1, unanswered=False)  # there is, and refuses what it does not know
    exchange(1.1)
    known.append(OWN)
    assert new.introduce(1.2, unanswered=False)
    exchange(1.2)
    assert not new.introduce(1.3, unanswered=True)
    assert not new.outputs.datagrams
