"""Measure the records that the proxy's core routes and settles per CPU second: `python -m benchmarks.cores.proxy_core`.

Estimate, written before the first run: a record costs the header walk, a look-up in the cache of rooms, a slice and an append, as
in the broker, 0.3 µs; an event with its parcels, their settlement and the reply cost about 8 µs a batch. So: 2 000 000 records a
CPU second at batches of 50 to one room each, 120 000 at batches of 1. Clusters and rooms without kept sessions must cost the same
as before there were any: the look-ups for them are one for an event, and none for a record.

First run (2 shared cores, python 3.11): 130 000, 630 000, 1 600 000 and 2 800 000 at batches of 1, 10, 50 and 500. Seven runs in
turns with the core before kept messages had the same medians at 10 and more, and 136 000 against 129 000 at 1: 0.4 µs an event.

The links are not included: this is the core alone.
"""

from __future__ import annotations

import time

from cluster.core.contract import SendRecords, Settled
from cluster.routes.routes import routes_of
from pixiu.ids import EndpointID, topic_room
from pixiu.wire.record import Flag, Kind, encode, with_topic
from proxy import events as ev
from proxy.core import Core
from proxy.routed_events import RoutedStored, RoutesChanged, StoreRouted

ROOMS = 1000
RECORDS = 300_000
ROUTED = 20_000
FLAGS = Flag.TO_ROOM | Flag.TOPIC


def measure(batch: int) -> float:
    """Return records a CPU second for a publisher's batches of `batch` records, published, settled and answered."""
    core = Core(max_record_bytes=1 << 20)
    core.step(ev.BrokersChanged(2, tuple(ev.Replica(EndpointID(number), number % 2) for number in range(4))), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    body = b"x" * 100
    batches = [
        b"".join(encode(Kind.ROOM, start + i + 1, body, start + i, flags=Flag.TO_ROOM) for i in range(batch))
        for start in range(0, ROOMS, batch)
    ]
    rounds, position = max(1, RECORDS // (batch * len(batches))), 1
    begin = time.process_time()
    for _ in range(rounds):
        for data in batches:
            sent = core.step(ev.BatchPublished(1, data, batch, position), 0.0)
            core.step(Settled([(effect.token, True) for effect in sent if isinstance(effect, SendRecords)]), 0.0)
            core.next_deadline()
            position += batch
    spent = time.process_time() - begin
    return rounds * len(batches) * batch / spent


def measure_routed(batch: int) -> float:
    """Return records a CPU second that a route takes, up to the message for the writer of the durable topic, and the answer."""
    core = Core(max_record_bytes=1 << 20)
    core.step(ev.BrokersChanged(1, (ev.Replica(EndpointID(1), 0),)), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    table = {"filter": "devices/#", "topic": "t"}
    core.step(RoutesChanged(routes_of({"devices": table}, "routes.toml")), 0.0)
    key, rounds, position = topic_room("devices"), ROUTED // batch, 1
    batches = [
        b"".join(
            encode(Kind.ROOM, key, with_topic(f"devices/{i % 100}/heat", b"x" * 100), 1 + n * batch + i, flags=FLAGS)
            for i in range(batch)
        )
        for n in range(rounds)
    ]
    begin = time.process_time()
    for data in batches:
        effects = core.step(ev.BatchPublished(1, data, batch, position), 0.0)
        stored = [each.number for effect in effects if isinstance(effect, StoreRouted) for each in effect.messages]
        core.step(RoutedStored([(number, None) for number in stored]), 0.0)
        position += batch
    return rounds * batch / (time.process_time() - begin)


def main() -> None:
    """Print the rates."""
    for batch in (1, 10, 50, 500):
        print(f"batches of {batch:>3}: {measure(batch):>12,.0f} records a CPU second")
    for batch in (1, 50):
        print(f"routed, batches of {batch:>3}: {measure_routed(batch):>12,.0f} records a CPU second")


if __name__ == "__main__":
    main()
