"""The page of retained messages."""

from __future__ import annotations

from cluster.mqtt.properties_in_records import origin_of
from gateway.retained.client import Listed
from gateway.retained.page import MAX_SHOWN, retained
from pixiu.errors import Unavailable
from pixiu.ids import snowflake, topic_room
from pixiu.wire.record import ORIGIN_AT, Flag, Kind, encode, with_topic

RECORD = bytearray(
    encode(
        Kind.ROOM,
        topic_room("a/b"),
        with_topic("a/b", b"secret"),
        snowflake(1_800_000_000_000, 1, 2),
        flags=Flag.TO_ROOM | Flag.TOPIC,
    )
)
RECORD[ORIGIN_AT] |= origin_of(2, retain=True)


async def test_it_shows_sizes_and_times_but_no_payloads() -> None:
    asked: list[tuple[str, int, str]] = []

    async def listing(name: str, limit: int, after: str) -> tuple[list[Listed], str]:
        asked.append((name, limit, after))
        return [Listed("a/b", bytes(RECORD), 7)], "a/b"

    said = await retained(listing, {})
    shown = {"topic": "a/b", "bytes": len(RECORD), "qos": 2, "published_ms": 1_800_000_000_000, "expires_at_ms": 7}
    assert said == {"retained": [shown], "next": "a/b"}
    await retained(listing, {"filter": "a/+", "limit": "0", "after": "a"})
    await retained(listing, {"limit": str(10**9)})
    assert asked == [("#", MAX_SHOWN, ""), ("a/+", 1, "a"), ("#", MAX_SHOWN, "")]
    assert "error" in await retained(listing, {"filter": "a/#/b"})
    assert len(asked) == 3


async def test_routers_that_are_away_are_an_error() -> None:
    async def listing(*_: object) -> tuple[list[Listed], str]:
        raise Unavailable("no router of the partition is Running")

    assert await retained(listing, {}) == {"error": "no router of the partition is Running"}
