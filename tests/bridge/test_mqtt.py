"""What the bridge to a broker of MQTT may publish: brokers end the connection for some texts, and so for everything behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge.connectors.mqtt import MAX_TEXT, MqttTarget, MqttTargetOptions


def item(**fields: Any) -> Any:
    return SimpleNamespace(**{"topic": "t", "key": None, "headers": {}, "body": b"", **fields})


def target(**options: Any) -> MqttTarget:
    return MqttTarget("b", MqttTargetOptions(kind="to-mqtt", topic="t", host="h", **options))


@pytest.mark.parametrize("value", [b"\0\1\2", b"\n", b"\xff" * MAX_TEXT, "\uffff".encode(), b"plain"])
def test_headers_are_texts_of_mqtt(value: bytes) -> None:
    properties = target()._properties(item(headers={"name\n": value}))
    assert properties is not None
    properties.pack()  # type: ignore[no-untyped-call]
    ((name, text),) = properties.UserProperty  # type: ignore[attr-defined]
    assert name == "name\ufffd"
    assert (text == "plain") is (value == b"plain")
    assert not any(ord(each) < 32 or each == "\uffff" for each in text)
    assert len(text.encode()) <= MAX_TEXT


@pytest.mark.parametrize("key", [b"\1", b"a\nb", b"\0", b"a+b", "\x85".encode()])
def test_a_key_that_makes_no_topic_is_told(key: bytes) -> None:
    assert "no topic of MQTT" in target(to="devices/{key}")._check(item(key=key))[0]


def test_headers_count_for_the_size_of_a_packet() -> None:
    found = target()
    found._max_packet = 1_000
    assert found._check(item(body=b"0" * 800)) == ("", "t")
    assert "1000" in found._check(item(body=b"0" * 800, headers={"h": b"0" * 200}))[0]
