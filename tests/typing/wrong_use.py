"""What is wrong in a user's program, and found: mypy reports every `type: ignore` of this file that hides no error."""

from __future__ import annotations

import pixiu


async def wrong() -> None:
    async with pixiu.connect("127.0.0.1:7000", publish_timeout=5.0) as px:  # type: ignore[call-arg]
        await px.room("42").send(b"x")  # type: ignore[arg-type]
        await px.room(42).send("text")  # type: ignore[arg-type]
        async for message in px.subscribe(room=42):
            print(message.body)  # type: ignore[attr-defined]
