"""A CONNECT about which the shell decides later: what stands behind it waits, and is done in order or never."""

from __future__ import annotations

import pytest

from cluster.core.reading_gate import Hold, ReadingGate
from cluster.mqtt import codec
from cluster.mqtt.events import Close, CloseReason, Connected, PublishMessages, Send
from cluster.mqtt.packets import Connack, Connect, Publish
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.server import ServerSession
from cluster.mqtt.states import State
from cluster.mqtt.terms import SessionLimits

CONNECT = codec.encode(Connect("c", user_name="7"))
PUBLISH = codec.encode(Publish("room/42", b"x"))


def waiting(gate: ReadingGate | None = None) -> ServerSession:
    return ServerSession(0.0, "assigned", SessionLimits(connect_timeout_s=5.0), lambda _: None, gate=gate)


@pytest.mark.parametrize("together", [True, False])
def test_what_comes_behind_is_done_once_the_client_is_admitted(together: bool) -> None:
    gate = ReadingGate()
    session = waiting(gate)
    parts = [CONNECT + PUBLISH] if together else [CONNECT, PUBLISH]
    effects = [effect for part in parts for effect in session.receive(part, 1.0)]
    assert (effects, gate.reasons) == ([], {Hold.LOGIN: 1.0})
    assert session.state is State.CONNECTING
    found = session.admitted(ReasonCode.SUCCESS, 2.0)
    assert [type(effect) for effect in found] == [Connected, Send, PublishMessages]
    assert gate.reads
    assert session.admitted(ReasonCode.SUCCESS, 2.0) == []


def test_who_is_not_admitted_is_told_and_nothing_behind_is_done() -> None:
    session = waiting()
    session.receive(CONNECT + PUBLISH, 1.0)
    code = ReasonCode.BAD_USER_NAME_OR_PASSWORD
    refused = [Send(codec.encode(Connack(False, 4))), Close(CloseReason.CONNECT_REFUSED, "bad user name or password")]
    assert session.admitted(code, 2.0) == refused
    assert session.admitted(ReasonCode.SUCCESS, 2.0) == []


def test_a_decision_that_never_comes_is_a_timeout_and_one_after_the_end_changes_nothing() -> None:
    session = waiting()
    session.receive(CONNECT, 1.0)
    assert session.timeout(5.0) == [Close(CloseReason.CONNECT_TIMEOUT, "no CONNECT in time")]
    assert session.admitted(ReasonCode.SUCCESS, 6.0) == []
    assert session.admitted(ReasonCode.NOT_AUTHORISED, 6.0) == []
