"""`python -m tests.support.room_listener TARGET ROOM…`: prints a line when it has joined the rooms, and one for each message:
room, number, size, and whether its bytes are those that were sent (`body_of`)."""

from __future__ import annotations

import asyncio
import sys

import pixiu

NUMBER_BYTES = 4


def body_of(number: int, size: int) -> bytes:
    """What a message holds."""
    return (number.to_bytes(NUMBER_BYTES, "big") * (size // NUMBER_BYTES + 1))[:size]


async def main(target: str, rooms: list[int]) -> None:
    """Listen until the input ends."""
    async with pixiu.connect(target) as px, px.subscribe(rooms=rooms) as messages:
        print("joined", flush=True)
        async for message in messages:
            number = int.from_bytes(message.payload[:NUMBER_BYTES], "big")
            good = message.payload == body_of(number, len(message.payload))
            print(message.room, number, len(message.payload), int(good), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [int(room) for room in sys.argv[2:]]))
