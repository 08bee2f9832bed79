"""Who may say what on links: every kind is tried with every role, and the page says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.links.api import Outcome
from cluster.listeners.handler import Handler
from cluster.listeners.link_table import MAY_SAY, RECORDS, kind_of, may_say
from cluster.wire.v1 import control_pb2
from pixiu.discovery.paths import ROLES
from pixiu.ids import EndpointID

PAGE = Path(__file__).resolve().parents[3] / "docs/security.md"
KINDS = [field.name for field in control_pb2.Control.DESCRIPTOR.oneofs_by_name["body"].fields]
PEER = EndpointID(7)


def message(kind: str) -> bytes:
    control = control_pb2.Control()
    getattr(control, kind).SetInParent()
    return control.SerializeToString()


class Taken(Handler):
    """A service that takes everything and says how often."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        self.taken += len(messages)
        return Outcome.TAKEN

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        self.taken += count
        return Outcome.TAKEN


def test_every_kind_is_in_the_table() -> None:
    assert set(MAY_SAY) == {*KINDS, RECORDS}


def test_the_page_says_who_may_say_what() -> None:
    _, _, section = PAGE.read_text().partition("\n### Links\n")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    said = {(kind, sender, receiver) for kind, senders, receiver in rows for sender in senders.split(", ")}
    assert said == {
        (kind, sender, receiver) for kind, found in MAY_SAY.items() for receiver, senders in found.items() for sender in senders
    }


@pytest.mark.parametrize("receiver", sorted(ROLES))
def test_every_kind_from_every_role_and_from_a_stranger(receiver: str) -> None:
    for sender in (*sorted(ROLES), ""):
        refused: list[tuple[EndpointID, str]] = []

        def refuses(peer: EndpointID, what: str, sender: str = sender, refused: list[tuple[EndpointID, str]] = refused) -> bool:
            if not may_say(what, sender, receiver):
                refused.append((peer, what))
            return not may_say(what, sender, receiver)

        handler = Handler(refuses=refuses)
        handler.service = service = Taken()
        for kind in KINDS:
            before = service.taken
            outcome = handler.on_control(PEER, [message(kind)])
            allowed = sender in MAY_SAY[kind].get(receiver, ())
            assert (outcome is Outcome.TAKEN, service.taken > before) == (allowed, allowed), (kind, sender)
        allowed = sender in MAY_SAY[RECORDS].get(receiver, ())
        assert (handler.on_records(PEER, b"", 0, 0, 1) is Outcome.TAKEN) is allowed
        assert len(refused) == sum(sender not in found.get(receiver, ()) for found in MAY_SAY.values())


def test_one_refused_message_refuses_those_beside_it() -> None:
    handler = Handler(refuses=lambda _peer, what: what == "fenced")
    handler.service = service = Taken()
    assert handler.on_control(PEER, [message("layout_notice"), message("fenced")]) is Outcome.NOT_TAKEN
    assert service.taken == 0


def test_the_kind_is_what_the_parser_finds_whatever_stands_before_it() -> None:
    allowed, forbidden = message("layout_notice"), message("fenced")
    assert kind_of(allowed + forbidden) == control_pb2.Control.FromString(allowed + forbidden).WhichOneof("body") == "fenced"
    long = control_pb2.Control(chat_offline=control_pb2.ChatOffline(snowflake_ids=range(1 << 40, (1 << 40) + 100)))
    assert kind_of(long.SerializeToString()) == "chat_offline"
    for size in (0, 110, 125, 126, 127, 128, 200, 16_370, 16_383, 16_384, 20_000):
        batch = control_pb2.Control(publish_batch=control_pb2.PublishBatch(records=bytes(size))).SerializeToString()
        assert kind_of(batch) == "publish_batch", size
        assert kind_of(batch + forbidden) == "fenced", size
    assert kind_of(b"") == kind_of(b"\xfa\x7f\x00") == ""
    assert kind_of(b"\xff\xff") is None
