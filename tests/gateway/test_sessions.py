"""The page of a gateway's clients."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.clients.clients import ClientSession
from gateway.clients.sessions import MAX_SHOWN, SLICE, Load, sessions


class Shown:
    """A client as the page sees it."""

    def __init__(self, number: int, **values: Any) -> None:
        self._shown = {"id": number, "client": f"sensor-{number}", "backlog": 0, "inflight": 0, "dropped": 0, **values}

    def shown(self) -> dict[str, Any]:
        return self._shown


async def ask(clients: list[Shown], **query: str) -> tuple[int, list[int]]:
    said = await sessions(lambda: cast(list[ClientSession], clients), query)
    assert said["connections"] == len(clients)
    return cast(int, said["matching"]), [each["id"] for each in cast(list[dict[str, Any]], said["sessions"])]


async def test_clients_with_the_most_of_what_is_asked_for_come_first() -> None:
    clients = [Shown(1, inflight=3), Shown(2, backlog=9), Shown(3, backlog=10, dropped=1)]
    assert await ask(clients) == (3, [3, 2, 1])
    assert await ask(clients, sort="inflight") == (3, [1, 2, 3])
    assert await ask(clients, sort="dropped", limit="1") == (3, [3])
    assert await ask(clients, client="or-2") == (1, [2])


@pytest.mark.parametrize("query", [{"sort": "payload"}, {"limit": "-1"}, {"limit": "many"}, {"limit": str(10**9)}])
async def test_a_query_that_cannot_be_is_the_usual_one(query: dict[str, str]) -> None:
    assert await ask([Shown(1), Shown(2, backlog=1)], **query) == (2, [2, 1])


async def test_the_largest_of_many_are_found_a_slice_a_turn() -> None:
    clients = [Shown(number, backlog=number) for number in range(3 * SLICE)]
    count, found = await ask(clients)
    assert count == 3 * SLICE
    assert found == list(range(3 * SLICE - 1, 3 * SLICE - 1 - MAX_SHOWN, -1))


async def test_what_waits_for_all_clients_together_is_counted() -> None:
    load = Load()
    clients = [Shown(number, backlog=number % 2 * 10, inflight=int(number < 5)) for number in range(SLICE + 10)]
    await load.look(cast(list[ClientSession], clients))
    assert load.samples() == {
        "clients_backlog_bytes": 5 * (SLICE + 10), "clients_inflight": 5, "clients_with_backlog": (SLICE + 10) // 2,
        "clients_with_inflight": 5,
    }  # fmt: skip
