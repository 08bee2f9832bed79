"""Messages that routes take: stored before anybody is told, in order and once; clients get them from the log alone."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

import pytest

import pixiu
from bridge.connectors.clients import Clients, ClientsOptions
from cluster.core.contract import TICK
from cluster.routes.carried import carried
from cluster.routes.routes import MAX_HOPS, Route, RouteOptions, Routes, routes_of
from pixiu.client.messages.drafts import encode as encode_draft
from pixiu.errors import Refusal
from pixiu.ids import EndpointID, snowflake, snowflake_time_ms, topic_room
from pixiu.wire.headers import encode_headers
from pixiu.wire.record import QOS_SHIFT, Flag, Kind, decode, encode, with_topic
from proxy import events as ev
from proxy import routed_events as routed_ev
from proxy.core import Core
from proxy.routed import stage
from tests.proxy.driver import GATEWAY, failures, forward, publish, replies, sends, settle
from tests.proxy.test_routed_order import Stored

BROKER = EndpointID(1)
CHAT = '[chat]\nfilter = "chat/#"\nrooms = ["42"]\ntopic = "log"\nclients = "log"\nheaders = ["team=a"]\ntag = "t"'
AWAY = Refusal("TOPIC_AWAY", "away", 500)


def routes(text: str = CHAT) -> Routes:
    return routes_of(tomllib.loads(text), "routes.toml")


def core_with(found: Routes | None = None) -> Core:
    core = Core(max_record_bytes=1 << 20)
    core.step(ev.BrokersChanged(1, (ev.Replica(BROKER, 0),)), 0.0)
    for stream in (1, 2):
        core.step(ev.PublisherOpened(stream), 0.0)
    core.step(routed_ev.RoutesChanged(routes() if found is None else found), 0.0)
    return core


def record(number: int, topic: str = "chat/a", *, headers: dict[str, str] | None = None, flags: int = 0, origin: int = 0) -> bytes:
    body, key = with_topic(topic, b"m%d" % number), int(topic_room(topic))
    if topic.startswith("room/"):
        body, key = b"m%d" % number, int(topic.removeprefix("room/"))
    flags |= Flag.TO_ROOM if topic.startswith("room/") else Flag.TO_ROOM | Flag.TOPIC
    extension = encode_headers(headers or {})
    return encode(Kind.ROOM, key, body, number, flags=flags, sender=9, extension=extension, origin=origin, lifetime_min=2)


def storing(effects: Sequence[ev.Effect]) -> list[routed_ev.Storing]:
    return [each for effect in effects if isinstance(effect, routed_ev.StoreRouted) for each in effect.messages]


def stored(core: Core, found: Sequence[routed_ev.Storing], why: Refusal | None = None, now: float = 0.0) -> list[ev.Effect]:
    return core.step(routed_ev.RoutedStored([(each.number, why) for each in found]), now)


def test_it_is_accepted_when_it_is_replicated_and_no_broker_gets_it() -> None:
    core, number = core_with(), snowflake(1_700_000_000_000, 3, 0)
    effects = publish(core, [record(number, headers={"mqtt-x": "1", "pixiu-routes": "chat"}, origin=2 << QOS_SHIFT)])
    assert not replies(effects)
    assert not sends(effects)
    (message,) = storing(effects)
    assert (message.topic, message.key, message.tag) == ("log", b"chat/a", "t")
    assert message.body == b"m%d" % number
    assert message.expires_in_s == 120
    assert message.event_time_us == snowflake_time_ms(number) * 1000
    own = carried(message.headers)
    assert (own.message_id, own.sender, own.origin, own.lifetime_min) == (number, 9, 2 << QOS_SHIFT, 2)
    others = {name: value for name, value in message.headers.items() if name != "pixiu-message"}
    assert others == {"mqtt-x": b"1", "team": b"a", "mqtt_topic": b"chat/a", "pixiu-routes": b"chat"}
    assert core.under_way == 1
    effects = stored(core, [message])
    assert not sends(effects)
    assert [each.up_to for each in replies(effects)] == [1]
    assert not failures(effects)
    assert core.under_way == 0


def test_what_no_route_takes_goes_on_in_order_also_in_the_same_room() -> None:
    core = core_with()
    effects = publish(core, [record(1, "other/a"), record(2, "room/43"), record(3, "chat")])
    assert [decode(each).snowflake_id for parcel in sends(effects) for each in parcel.records] == [1, 2]
    assert [each.key for each in storing(effects)] == [b"chat"]
    core = core_with(routes('[one]\nfilter = "chat/a"\ntopic = "log"'))
    effects = publish(core, [record(1, "chat/b"), record(2, "chat/a"), record(3, "chat/c")])
    assert [decode(each).snowflake_id for parcel in sends(effects) for each in parcel.records] == [1, 3]
    settle(core, sends(effects), 0.0)
    assert [each.up_to for each in replies(stored(core, storing(effects)))] == [3]


def test_without_routes_nothing_is_looked_at() -> None:
    core = core_with(Routes())
    assert not core.routed.active
    assert len(sends(publish(core, [record(1)]))) == 1
    core.step(routed_ev.RoutesChanged(routes()), 0.0)
    assert len(storing(publish(core, [record(2)], 2))) == 1, "a change counts for the next message"
    core.step(routed_ev.RoutesChanged(Routes()), 0.0)
    assert len(sends(publish(core, [record(3)], 3))) == 1


def test_what_comes_from_the_log_is_delivered_and_not_stored_again() -> None:
    core, derived = core_with(), int(Flag.DERIVED_ID)
    effects = publish(core, [record(1, headers={"pixiu-routes": "chat"}, flags=derived)])
    assert len(sends(effects)) == 1
    assert not storing(effects)
    assert len(storing(publish(core, [record(2, headers={"pixiu-routes": "chat"})], 2))) == 1, "only a derived ID may say so"
    gateway = ev.GatewayPublished(9, GATEWAY, 1, record(3, headers={"pixiu-routes": "chat"}, flags=derived), 1)
    assert len(storing(core.step(gateway, 0.0))) == 1, "a client of a gateway may not say so"


def test_a_message_that_has_taken_too_many_routes_is_stopped_counted_and_told() -> None:
    core = core_with()
    way = ",".join(f"r{number}" for number in range(MAX_HOPS))
    effects = publish(core, [record(1, headers={"pixiu-routes": way}, flags=Flag.DERIVED_ID)])
    assert failures(effects) == [(1, 1, "INVALID_ARGUMENT")]
    assert not storing(effects)
    assert not sends(effects)
    assert core.routed.loops == {"chat": 1}
    assert core.routed.counters["chat"].stopped == 1
    less = ",".join(f"r{number}" for number in range(MAX_HOPS - 1))
    (message,) = storing(publish(core, [record(2, headers={"pixiu-routes": less}, flags=Flag.DERIVED_ID)], 2))
    assert message.headers["pixiu-routes"] == f"{less},chat".encode()


def test_a_repeat_is_stored_once_while_it_is_on_its_way_and_afterwards() -> None:
    core = core_with()
    first = storing(publish(core, [record(1)]))
    assert not storing(publish(core, [record(1)], stream=2))
    effects = stored(core, first)
    assert sorted(each.stream for each in replies(effects)) == [1, 2]
    effects = publish(core, [record(1)], 2)
    assert not storing(effects)
    assert [each.up_to for each in replies(effects)] == [2]
    late = 3 * stage.REMEMBER_S
    stored(core, storing(publish(core, [record(7)], 3, late)), now=late)
    assert len(storing(publish(core, [record(1)], 4, late))) == 1, "then it is forgotten"
    assert core.routed.counters["chat"].repeated == 2


def test_a_topic_that_is_away_makes_its_publisher_wait_and_then_try_again_without_a_second_copy() -> None:
    core = core_with()
    waiting = storing(publish(core, [record(1), record(2)]))
    assert core.next_deadline() == stage.TIMEOUT_S
    effects = core.step(TICK, stage.TIMEOUT_S)
    assert failures(effects) == [(1, 2, "TOPIC_AWAY")]
    assert not storing(publish(core, [record(1), record(2)], 3, 5.0)), "the first copies are still on their way"
    effects = stored(core, waiting, now=6.0)
    assert [each.up_to for each in replies(effects)] == [4]
    assert not failures(effects)


def test_what_is_refused_for_now_takes_along_what_came_after_it() -> None:
    core = core_with()
    effects = publish(core, [record(1)]) + publish(core, [record(2, "chat/b")], 2)
    one, two = storing(effects)
    assert not replies(stored(core, [two])), "the one before it is not known yet"
    effects = stored(core, [one], AWAY)
    assert failures(effects) == [(1, 1, "TOPIC_AWAY"), (2, 2, "TOPIC_AWAY")]
    again = storing(publish(core, [record(1), record(2, "chat/b")], 3))
    assert [each.key for each in again] == [b"chat/a"]
    assert not failures(stored(core, again))


def test_a_message_that_can_never_be_stored_takes_nobody_along() -> None:
    core = core_with()
    one, two = storing(publish(core, [record(1), record(2)]))
    stored(core, [one], Refusal("RECORD_TOO_LARGE", "too large"))
    assert failures(stored(core, [two])) == [(1, 1, "RECORD_TOO_LARGE")]


def test_publishers_do_not_wait_for_one_another() -> None:
    core = core_with()
    storing(publish(core, [record(1)]))
    other = storing(publish(core, [record(2)], stream=2))
    assert [each.stream for each in replies(stored(core, other))] == [2]


def test_too_many_for_one_durable_topic_are_refused_and_another_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MAX_RECORDS", 4)
    core = core_with(routes('[a]\nfilter = "a/#"\ntopic = "a"\n[b]\nfilter = "b/#"\ntopic = "b"'))
    effects = publish(core, [record(n, "a/x") for n in range(1, 4)])
    assert [each.topic for each in storing(effects)] == ["a", "a"]
    assert [each.topic for each in storing(publish(core, [record(9, "b/x")], stream=2))] == ["b"]
    assert [(first, last) for first, last, _ in failures(stored(core, storing(effects)))] == [(3, 3)]
    assert core.routed.counters["a"].refused == 1
    assert core.routed.counters["a"].waiting == 0


def test_qos_0_is_stored_too_and_a_loss_is_counted() -> None:
    core = core_with()
    lost = storing(forward(core, record(1)))
    stored(core, lost, AWAY)
    counters = core.routed.counters["chat"]
    assert (counters.refused, counters.waiting) == (1, 0)
    stored(core, storing(forward(core, record(1))))
    assert counters.stored == 1


def rounds(carry: bool) -> int:
    """How often a message is stored by two routes of which each takes what the other one delivers; `carry`: the program between
    copies headers. The file would be refused."""
    options = [RouteOptions(filter=f"{one}/#", topic=one, clients=one, to=f"{other}/x") for one, other in (("a", "b"), ("b", "a"))]
    found = Routes([Route(each.topic, each) for each in options])
    bridges = {
        each.topic: Clients(each.topic, ClientsOptions(topic=each.topic, to=each.to, routes=each.routes), pixiu.connect("h:1"))
        for each in found.deliveries
    }
    core, number, effects = core_with(found), 0, list[ev.Effect]()
    effects = publish(core, [record(1, "a/x")])
    while (messages := storing(effects)) and number < 50:
        (message,) = messages
        number += 1
        stored(core, messages)
        headers = dict(message.headers) if carry else {}
        item = Stored(message.body, message.key, headers, (1, number), message.topic)
        draft = bridges[message.topic].draft(item)
        effects = publish(core, [encode_draft(draft, draft.derived_id or 0, 0, 1 << 20)], number + 1)
    return number


def test_routes_that_feed_one_another_end_if_headers_are_carried_on() -> None:
    assert rounds(carry=True) == 2
    assert rounds(carry=False) == 50, "what a program without headers must know: nothing stops it"
