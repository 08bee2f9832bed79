"""The target that publishes to clients: names, IDs, headers, rounds, and what happens to what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import pixiu
from bridge.catalog import bridges_of
from bridge.connector import Verdict
from bridge.connectors.clients import ROUND_BYTES, ROUND_MESSAGES, Clients, ClientsOptions, rounds
from cluster.routes.carried import Carried
from cluster.routes.routes import routes_of
from pixiu.client.messages.drafts import Draft
from pixiu.errors import InvalidArgument, NotAllowed, Overloaded, PixiuError
from pixiu.wire.headers import decode_headers
from pixiu.wire.record import QOS_SHIFT, TYPE_NORMAL
from tests.proxy.test_routed_order import Stored


def clients(**options: Any) -> Clients:
    return Clients("b", ClientsOptions(topic="t", **options), pixiu.connect("127.0.0.1:1"))


def item(offset: int = 1, *, key: bytes | None = b"k/1", headers: dict[str, bytes] | None = None, body: bytes = b"x") -> Stored:
    return Stored(body, key, headers or {}, (3, offset), "t")


def test_an_id_follows_from_the_place_of_the_message() -> None:
    one, same, other = (clients().draft(item(offset)).derived_id for offset in (1, 1, 2))
    assert one == same != other
    assert one is not None
    assert 0 < one < 1 << 63
    own = [item(offset, headers={"pixiu-message": Carried(77).encode()}) for offset in (1, 2)]
    first, second = (clients(stored=True).draft(each).derived_id for each in own)
    assert first == second, "what routes stored twice is one message"
    first, second = (clients().draft(each).derived_id for each in own)
    assert first != second, "a program may make two of one"


def test_names_headers_and_what_a_client_of_mqtt_asked_for_come_through() -> None:
    carried = Carried(77, 5, TYPE_NORMAL | 3, 2 << QOS_SHIFT, 9)
    headers = {
        "mqtt_topic": b"chat/7", "pixiu-message": carried.encode(), "pixiu-routes": b"chat", "pixiu-extension": b"eA==", "a": b"1",
    }  # fmt: skip
    draft = clients(routes=("late", "chat")).draft(item(headers=headers))
    assert draft.body == b"\x00\x06chat/7x"
    assert (draft.origin, draft.type, draft.lifetime_min, draft.lane) == (2 << QOS_SHIFT, TYPE_NORMAL | 3, 9, 1)
    assert decode_headers(draft.extension) == {"a": "1", "pixiu-extension": "eA==", "pixiu-routes": "chat,late"}
    assert clients().draft(item()).body == b"\x00\x03k/1x"
    assert clients().draft(item(key=b"room/42")).key == 42
    assert clients(to="n/{key}/{header:a}").draft(item(headers={"a": b"z"})).body == b"\x00\x07n/k/1/zx"
    for wrong in (item(key=None), item(key=b"user/7"), item(key=b"a/+"), item(key=b"")):
        with pytest.raises(InvalidArgument):
            clients().draft(wrong)


def test_routes_make_one_bridge_for_each_durable_topic() -> None:
    route = {"filter": "chat/#", "topic": "chat", "clients": "chat"}
    (made,) = bridges_of(routes_of({"chat": route, "talk": {**route, "filter": "talk/#"}}, "routes.toml"))
    assert isinstance(made.options, ClientsOptions)
    assert (made.name, made.options.routes, made.options.stored) == ("clients-chat", ("chat", "talk"), True)
    assert made.options.ordered
    assert not [*made.options.problems()]
    assert [key for key, _ in ClientsOptions(kind="to-clients", topic="t", to="{colour}").problems()] == ["to"]


def test_rounds_keep_the_order_and_fit_into_a_batch() -> None:
    drafts = [(at, clients().draft(item(at, body=b"x" * size))) for at, size in enumerate([1] * 600 + [150_000] * 3 + [300_000, 1])]
    found = list(rounds(drafts))
    assert [at for each in found for at, _ in each] == list(range(len(drafts)))
    assert [len(each) for each in found] == [ROUND_MESSAGES, 101, 1, 1, 1, 1]
    assert all(len(each) == 1 or sum(draft.size for _, draft in each) <= ROUND_BYTES for each in found)


class Receipt:
    def __init__(self, error: PixiuError | None) -> None:
        self._error = error

    async def outcome(self) -> PixiuError | None:
        await asyncio.sleep(0)
        return self._error


class Cluster:
    """Takes drafts as a client does."""

    def __init__(self, answer: Callable[[bytes], PixiuError | None]) -> None:
        self.px, self._answer = pixiu.connect("127.0.0.1:1"), answer
        self.got: list[bytes] = []
        self.topic, self.room = self.px.topic, self.px.room

    def submit_soon(self, draft: Draft) -> Receipt:
        self.got.append(draft.body[-1:])
        return Receipt(self._answer(draft.body[-1:]))


async def test_after_one_that_is_refused_for_now_nothing_goes_to_its_room() -> None:
    cluster = Cluster(lambda body: Overloaded("later", 700) if body == b"1" else NotAllowed("no") if body == b"3" else None)
    target = Clients("b", ClientsOptions(topic="t"), cluster)  # type: ignore[arg-type]
    big = b"." * ROUND_BYTES
    batch = [
        item(1, body=b"1"), item(2, key=b"other/1", body=b"2"), item(3, key=b"third/1", body=b"3"),
        item(4, key=b"user/7", body=b"4"), item(5, body=big + b"5"), item(6, key=b"other/2", body=b"6"),
    ]  # fmt: skip
    found = await target.write(batch)
    assert [each.verdict for each in found] == [
        Verdict.AGAIN, Verdict.DONE, Verdict.NEVER, Verdict.NEVER, Verdict.AGAIN, Verdict.DONE,
    ]  # fmt: skip
    assert found[0].after_s == 0.7
    assert cluster.got == [b"1", b"2", b"3", b"6"]
