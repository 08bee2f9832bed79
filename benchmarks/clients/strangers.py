"""Clients without a login that send packets which were valid until some of their bytes were changed.

A stranger connects, sends a stream of packets that was mutated (bytes changed, cut out, repeated, sent in pieces), reads what
comes for a moment, and goes. Its topics begin with `strangers/`, so that it publishes to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence

from cluster.mqtt.codec import PINGREQ, encode
from cluster.mqtt.packets import (
    MQTT_5,
    Connect,
    Dialect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from cluster.mqtt.properties import Property

READ_S = 0.2
EACH_S = 0.02
"""Pause of a stranger between two connections."""


def stream(rolls: random.Random) -> bytes:
    """A CONNECT and some packets after it, most of them mutated."""
    dialect = Dialect(rolls.choice((3, 4, 5)))
    five = dialect is MQTT_5
    name, topic = f"stranger-{rolls.getrandbits(32)}", f"strangers/{rolls.randrange(50)}"
    session: dict[int, object] | None = {Property.SESSION_EXPIRY: 10, Property.RECEIVE_MAXIMUM: 5} if five else None
    will = Will(topic, b"will", rolls.randrange(3), rolls.random() < 0.3) if rolls.random() < 0.5 else None
    parts = [encode(Connect(name, rolls.random() < 0.5, rolls.choice((0, 1, 600)), name, None, will, dialect, session))]
    kinds: list[Packet] = [
        Subscribe(1, ((topic, 1), ("strangers/#", 2))), Unsubscribe(2, (topic,)), Publish(topic, b"x" * rolls.randrange(300), 0),
        Publish(topic, b"kept", 1, True, False, 3), Publish(topic, b"twice", 2, False, False, 4), Pubrel(4), Puback(5), Pubrec(6),
        Pubcomp(7), Subscribe(8, ((f"$share/g/{topic}", 1),)), *([Disconnect(4)] if five else []),
    ]  # fmt: skip
    parts += [encode(rolls.choice(kinds), dialect) for _ in range(rolls.randrange(8))] + [PINGREQ]
    return b"".join(mutated(part, rolls) if rolls.random() < 0.4 else part for part in parts)


def mutated(data: bytes, rolls: random.Random) -> bytes:
    """Some bytes changed, one cut out, a piece repeated, or the end left away. The topic may change, its beginning hardly."""
    changed = bytearray(data)
    match rolls.randrange(4):
        case 0:
            for _ in range(rolls.randrange(1, 4)):
                changed[rolls.randrange(len(changed))] = rolls.randrange(256)
        case 1:
            del changed[rolls.randrange(len(changed))]
        case 2:
            at = rolls.randrange(len(changed))
            changed[at:at] = changed[at : at + rolls.randrange(1, 40)]
        case _:
            del changed[rolls.randrange(len(changed)) :]
    return bytes(changed)


async def strangers(ports: Sequence[int], seed: str, counts: Counter[str]) -> None:
    """Be one stranger after another, until it is cancelled."""
    rolls = random.Random(seed)
    while True:
        await asyncio.sleep(EACH_S)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", rolls.choice(ports))
        except OSError:
            counts["no connection"] += 1
            continue
        try:
            data = stream(rolls)
            at = rolls.randrange(len(data) + 1)
            for piece in (data[:at], data[at:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    while await reader.read(4096):
                        pass
                    counts["closed by the gateway"] += 1
                    continue
            counts["left"] += 1
        except OSError:
            counts["reset"] += 1
        finally:
            writer.close()
