"""Measure the records that the broker's core routes per CPU second: `python -m benchmarks.cores.broker_core`.

Estimate, written before the first run: a record costs the header walk (0.12 µs), a slice (0.10 µs), a look-up in
the rooms' cache (0.05 µs), an append (0.03 µs) and about 0.2 µs of loop around them, 0.5 µs in all; an event and an
effect cost about 3 µs a batch, 0.06 µs a record at 50 records. So: 1 700 000 records a CPU second at batches of 50
with one gateway, 500 000 at batches of 1 … 2, and each further gateway adds 0.05 µs a record. The aim is 400 000.

First run (2 shared cores, python 3.11): 3 700 000 at batches of 50 with one gateway, 480 000 at batches of 1; a gateway
more costs 0.03 µs. The loop is twice as cheap as estimated; the event and effect of a batch cost 1.8 µs.

The links are not included: this is the core alone; benchmarks/README.md's budget is for the whole hop.
"""

from __future__ import annotations

import time

from broker.core import Core
from cluster.core.contract import RecordsReceived, SendRecords
from cluster.membership import events as ev
from cluster.membership.map.updates import Update
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.record import Flag, Kind, encode

ROOMS = 1000
RECORDS = 400_000
ROUTER = EndpointID(1)


def make_core(gateways: int) -> Core:
    """Make a Running broker whose every room has a member on each of this number of gateways."""
    core = Core(endpoint=EndpointID(2), partition=0, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=3600.0)
    nodes = tuple(ev.Gateway(EndpointID(100 + i), i, 1) for i in range(gateways))
    routers = ev.OtherRole(1, 1, (ev.Replica(ROUTER, 0),))
    core.step(ev.ClusterChanged(1, 1, (), ev.NO_OTHER, nodes, routers), 0.0)
    core.step(ev.SnapshotFinished(ROUTER, None), 0.0)
    changes = [Update(gateway_msg_id(i, 1, room + 1), room, 7, True) for i in range(gateways) for room in range(ROOMS)]
    core.step(ev.MessagesReceived(ROUTER, changes), 0.0)
    return core


def measure(batch: int, gateways: int) -> tuple[float, int]:
    """Return (records a CPU second, copies made) for batches of `batch` records."""
    core = make_core(gateways)
    body = b"x" * 100
    batches = [
        b"".join(encode(Kind.ROOM, (start + i) % ROOMS, body, start + i, flags=Flag.TO_ROOM) for i in range(batch))
        for start in range(0, ROOMS, batch)
    ]
    copies = 0
    rounds = max(1, RECORDS // (batch * len(batches)))
    peer = EndpointID(3)
    begin = time.process_time()
    for _ in range(rounds):
        for data in batches:
            for effect in core.step(RecordsReceived(peer, data, 0, len(data), batch), 0.0):
                if isinstance(effect, SendRecords):
                    copies += len(effect.records)
    spent = time.process_time() - begin
    return rounds * len(batches) * batch / spent, copies


def main() -> None:
    """Print a table."""
    print(f"{'batch':>6} {'gateways':>9} {'records a CPU second':>22} {'copies':>10}")
    for batch in (1, 10, 50, 200):
        for gateways in (1, 4, 16):
            rate, copies = measure(batch, gateways)
            print(f"{batch:>6} {gateways:>9} {rate:>22,.0f} {copies:>10}")


if __name__ == "__main__":
    main()
