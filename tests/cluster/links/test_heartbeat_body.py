"""A heartbeat's body, made by hand, is what protobuf would make of it."""

from __future__ import annotations

import pytest

from cluster.links.datagrams import heartbeat
from cluster.wire.v1.control_pb2 import Heartbeat


@pytest.mark.parametrize("reply", [False, True])
@pytest.mark.parametrize("attachment", [b"", b"view"])
@pytest.mark.parametrize(("record", "control", "target"), [(1, 1, 7), (2**64 - 1, 2**63, 2**62), (0, 0, 9), (5, 0, 0)])
def test_a_body_is_what_protobuf_makes_of_it(reply: bool, attachment: bytes, record: int, control: int, target: int) -> None:
    for sent_us in (0, 1, 10**15):
        body = heartbeat.encode(
            reply=reply, sent_us=sent_us, next_record=record, next_control=control, attachment=attachment, target=target
        )
        message = Heartbeat(
            reply=reply, sent_us=sent_us, next_record=record, next_control=control, attachment=attachment, target=target
        )
        assert body == message.SerializeToString()
