"""What rules cost a message: one look at what is remembered, and a proxy's walk over a batch of somebody who has logged in.

Estimate: a look is one tuple and one dictionary entry, 0.15 µs; a record's walk is an unpack, two comparisons and a look, 0.7 µs;
a first decision among 100 rules 20 µs. Wanted: at most 1 µs a message where the answer is remembered.

    python -m benchmarks.access_rules
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.access.identity import Identity
from cluster.access.loans import Lent, Loan, owner_of, prove
from cluster.access.rules import PUBLISH, Permissions, Rule, RuleSet
from pixiu.ids import snowflake, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from proxy.permits import permitted

ROUNDS = 200_000
BATCH = 500
NOW = 1_800_000_000_000
RULES = [
    *(Rule(allow=False, actions=frozenset((PUBLISH,)), rooms=((number, number),)) for number in range(1, 100)),
    Rule(allow=True, actions=frozenset((PUBLISH,)), rooms=((1000, 10_000),), topics=("games/{uin}/#",)),
]


def best(call: Callable[[], object], times: int, rounds: int = 7) -> float:
    """Microseconds of one of `times` things that a call does, the best of some rounds."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) / times * 1e6)
    return min(found)


def main() -> None:
    """Print what each takes."""
    identity = Identity("alice", 7)
    permissions = Permissions(identity, RuleSet(RULES))

    def looks() -> None:
        allows = permissions.allows
        for _ in range(ROUNDS):
            allows(PUBLISH, 5000)

    def firsts() -> None:
        for room in range(1000, 3000):
            permissions._decide(PUBLISH, room)

    ids = [snowflake(NOW, 5, at) for at in range(BATCH)]
    rooms = b"".join(encode(Kind.ROOM, 1000 + at % 50, b"x" * 100, ids[at], sender=7, flags=Flag.TO_ROOM) for at in range(BATCH))
    body, flags = with_topic("games/7/chess", b"x" * 100), Flag.TO_ROOM | Flag.TOPIC
    topics = b"".join(encode(Kind.ROOM, topic_room("games/7/chess"), body, at + 1, sender=7, flags=flags) for at in range(BATCH))
    forged = b"".join(encode(Kind.ROOM, 1000, b"x" * 100, at + 1, sender=8, flags=Flag.TO_ROOM) for at in range(BATCH))
    print(f"a remembered answer                     {best(looks, ROUNDS):6.2f} µs")
    print(f"a first answer, the 100th rule          {best(firsts, 2000):6.2f} µs")
    for name, data in (("to rooms", rooms), ("to topics", topics), ("to a room, forged senders", forged)):
        took = best(lambda data=data: permitted(data, BATCH, permissions, 7), BATCH, 50)  # type: ignore[misc]
        print(f"a record of a batch {name:<26}  {took:4.2f} µs")
    key, owner, loan = b"k" * 32, owner_of(identity), Loan(5, NOW, NOW + 600_000)
    lent = Lent(owner, False)
    lent.show((key,), [prove(key, loan, owner)])
    for times in (1, 2, 3):
        without = best(lambda: permitted(rooms, BATCH, permissions, 7), BATCH, 50)
        checked = best(lambda: permitted(rooms, BATCH, permissions, 7, None, lent), BATCH, 50)
        print(f"to rooms, in turn, {times}: without a look at IDs {without:4.2f} µs, with {checked:4.2f} µs")
    proof = prove(key, loan, owner)
    print(f"a proof that is shown                   {best(lambda: Lent(owner, False).show((key,), [proof]), 1, 2000):6.2f} µs")


if __name__ == "__main__":
    main()
