"""Measure the mail that a relay's delivery handles per CPU second: `python -m benchmarks.cores.delivery_core`.

Estimate, written before the first run: a notice of a caught-up session costs two look-ups, a handful of comparisons, an
envelope and a row of the table, 5 µs, and its acknowledgement as much: 100 000 mails a CPU second. A mail that is fetched, 64
at a time, is planned and packed for 3 µs: 150 000 with its acknowledgement. A login costs an open, a read of four
lanes, an answer each and a timer, 40 µs: 25 000 a CPU second.

First run (2 shared cores, python 3.11): 28 000 logins, 400 000 mails fetched, 108 000 from notices with their
acknowledgements one by one.

This is the core alone: no gRPC, no Pi, no Xiu.
"""

from __future__ import annotations

import gc
import time

from cluster.core.contract import TICK
from pixiu.wire.record import Kind, encode
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries

USERS = 2000
LOGINS = 20_000
BATCH = 100
LANE = 1


def logged_in(users: int, waiting: int = 0) -> tuple[Deliveries, float]:
    """Make a table with one session for each user, each with `waiting` mails sent to it. Returns it with the CPU seconds used."""
    table = Deliveries(lambda uin: True, Limits())
    record = encode(Kind.MAIL, 1, b"x" * 100, 1)
    logins = [ev.Login(uin, 0, 101, 1) for uin in range(users)]
    entries = [(seq, seq) for seq in range(1, waiting + 1)]
    empty, full = ev.Listing([], 0, 0, 0, 0), ev.Listing(entries, 0, 0, waiting, 0)
    begin = time.process_time()
    effects = table.step(ev.LoggedIn(logins), 0.0)
    while effects:
        effect = effects.pop()
        event: ev.Event
        if isinstance(effect, ev.OpenSessions):
            event = ev.Opened([(asked, 1) for asked in effect.items])
        elif isinstance(effect, ev.ReadInboxes):
            event = ev.Listed(
                [(asked, [full if each.lane == LANE else empty for each in reads]) for asked, _, reads in effect.items]
            )
        elif isinstance(effect, ev.FetchMessages):
            event = ev.Fetched([(asked, [record] * len(ids)) for asked, ids in effect.items])
        else:
            continue
        effects += table.step(event, 0.0)
    return table, time.process_time() - begin


def acknowledged(table: Deliveries, users: range, up_to: int, now: float) -> None:
    """Acknowledge everything for these users, and have Pi confirm it."""
    items = [ev.Acknowledgement(uin, 0, 1, LANE, up_to, 0) for uin in users]
    table.step(ev.Acknowledged(9, items), now)
    for effect in table.step(TICK, now + 0.03):
        if isinstance(effect, ev.SaveCursors):
            table.step(ev.Saved(effect.number, [None] * len(effect.items)), now + 0.03)


def notices(rounds: int, run: int) -> float:
    """Return mails a CPU second from notices of `run` mails each, in batches, acknowledgements included."""
    table, _ = logged_in(USERS)
    record = encode(Kind.MAIL, 1, b"x" * 100, 1)
    batches = [
        (
            range(first, first + BATCH),
            seq + run - 1,
            [ev.Notice(uin, LANE, seq, range(seq, seq + run), [record] * run) for uin in range(first, first + BATCH)],
        )
        for seq in range(1, rounds * run + 1, run)
        for first in range(0, USERS, BATCH)
    ]
    begin = time.process_time()
    for number, (users, seq, batch) in enumerate(batches):
        now = number * 0.05
        table.step(ev.Notified(1, number, batch), now)
        acknowledged(table, users, seq, now)
    spent = time.process_time() - begin
    assert table.counters.from_notices == rounds * run * USERS
    return rounds * run * USERS / spent


def main() -> None:
    """Print a table."""
    gc.freeze()
    _, spent = logged_in(LOGINS)
    print(f"{'logins a CPU second':<60} {LOGINS / spent:>12,.0f}")
    _, spent_full = logged_in(USERS, 64)
    print(f"{'mails a CPU second, 64 to each of those who log in':<60} {USERS * 64 / spent_full:>12,.0f}")
    print(f"{'mails a CPU second from notices, acknowledged one by one':<60} {notices(20, 1):>12,.0f}")
    print(f"{'mails a CPU second from notices, ten to each user':<60} {notices(4, 10):>12,.0f}")


if __name__ == "__main__":
    main()
