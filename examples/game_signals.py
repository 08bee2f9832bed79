"""Game signalling: a match service tells the players in a room what happens, and learns that it was delivered.

    pixiu up                              # in another terminal
    python examples/game_signals.py       # three players and the service
    PIXIU_TARGET=zk://127.0.0.1:2181/pubsub python examples/game_signals.py 101

A signal travels in three copies through different processes, so that the loss of any one of them is not noticed; players get it
once. Signals have no order among each other: what must be in order carries a number.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")
EVENTS = [b"1 the match begins", b"2 goal for blue", b"3 goal for red", b"4 the match is over"]
PLAYERS = (5001, 5002, 5003)


async def play(uin: int, room: int, joined: asyncio.Barrier) -> None:
    """A player: joins the room, and stays until every event is there."""
    async with pixiu.connect(TARGET, uin=uin) as px, px.subscribe(room=room) as messages:
        await joined.wait()  # what is sent from now on arrives
        seen: set[bytes] = set()
        async for message in messages:
            seen.add(message.payload)
            if len(seen) == len(EVENTS):
                break
    print(f"player {uin} saw", *(event.decode() for event in sorted(seen)), sep="\n  ")


async def referee(room: int, joined: asyncio.Barrier) -> None:
    """The match service. A signal that nobody in the room gets raises `pixiu.Undelivered` after three repeats."""
    async with pixiu.connect(TARGET, client="match-service") as px:
        await joined.wait()
        for event in EVENTS:
            await px.room(room).signal(event, receipt=True)
        print(f"{len(EVENTS)} signals were delivered")


async def main(room: int) -> None:
    """Players and service, each with a connection of its own, as in programs of their own."""
    joined = asyncio.Barrier(len(PLAYERS) + 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(referee(room, joined))
        for uin in PLAYERS:
            group.create_task(play(uin, room, joined))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 101))
