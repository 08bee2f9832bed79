"""A bot in a room: answers whoever writes to it, until Ctrl-C.

pixiu up                              # in another terminal
python examples/bot.py                # in room 42
PIXIU_TARGET=zk://127.0.0.1:2181/pubsub python examples/bot.py 43

pixiu listen --room 42                # in a third one
pixiu send --room 42 "!ping"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")
BOT = 6001
"""The bot's own UIN: it does not answer itself."""


async def main(room: int) -> None:
    """Join, and answer one message after the other; the connection is kept and made again by the SDK."""
    async with pixiu.connect(TARGET, uin=BOT, client="bot") as px, px.subscribe(room=room) as messages:

        async def answer(message: pixiu.Message) -> None:
            if message.sender != BOT and message.payload == b"!ping":
                await px.room(room).send(b"pong, user %d" % message.sender)

        print(f"listening in room {room}", flush=True)
        await messages.run(answer)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 42))
