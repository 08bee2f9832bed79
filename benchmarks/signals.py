"""What does a signal cost, and what do the answers to it? `python -m benchmarks.signals`

A gateway answers each copy of each delivered signal to every proxy, whether a publisher waits or not (decision 21). The
question is whether that needs a narrower way.

Estimate, written before the first run, a signal, that is three copies, in turns of 10: proxies 3 × 3 µs (a rendezvous
order costs 2 µs), the gateway's core 3 × 2 µs, its table 3 × 2 µs, answers 3 × 0.1 µs to encode and, at each proxy,
3 × 0.1 µs to parse and look up. So a signal costs 20 µs of CPU in all, and its answers 0.6 µs more for each proxy.

First run (2 shared cores, python 3.11), turns of 10: proxies 8 µs, gateway 9 µs of which the table 2 µs, answers 0.4 µs and
0.7 µs for each proxy: with 10 proxies a third of a signal. Turns of 1, when nothing is busy: 19, 30, 4 and 5 µs. So
nothing narrower is needed below some tens of proxies.

The links are not in it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cluster.runtime.contract import END_OF_TURN, RecordsReceived, SendRecords, Settled
from gateway.core import Core as Gateway
from gateway.events import Join, Opened, ProxiesChanged, SendDelivered
from gateway.events import Replica as Peer
from gateway.signal_table import SharedTable
from gateway.signals import MemoryTable, SignalTable
from pixiu.ids import EndpointID
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import control_pb2
from proxy import events as ev
from proxy.core import Core as Proxy

SIGNALS = 30_000
COPIES = 3
ROOM = 42


def batches(per_turn: int) -> list[bytes]:
    """Signals of 140 bytes, so many in each."""
    return [
        b"".join(encode(Kind.SIGNAL, ROOM, b"x" * 100, (start + n + 1) << 10, flags=Flag.TO_ROOM, type=64) for n in range(per_turn))
        for start in range(0, SIGNALS, per_turn)
    ]


def microseconds(work: Callable[[], None]) -> float:
    """CPU time for each signal."""
    begin = time.process_time()
    work()
    return (time.process_time() - begin) / SIGNALS * 1e6


def at_proxies(data: list[bytes], per_turn: int) -> float:
    """All copies through one proxy in front of three replicas, with receipts."""
    core = Proxy(max_record_bytes=1 << 20)
    core.step(ev.BrokersChanged(1, tuple(ev.Replica(EndpointID(n), 0) for n in (11, 12, 13))), 0.0)
    core.step(ev.PublisherOpened(1), 0.0)

    def work() -> None:
        position = 1
        for batch in data:
            for copy in range(COPIES):
                effects = core.step(ev.BatchPublished(1, batch, per_turn, position, copy, True), 0.0)
                position += per_turn
                core.step(Settled([(e.token, True) for e in effects if isinstance(e, SendRecords)]), 0.0)

    return microseconds(work)


def at_gateway(data: list[bytes], per_turn: int, table: SignalTable) -> float:
    """All copies to one client of one gateway, each copy in a turn of its own."""
    core = Gateway(instance=1, generation=1, signals=table)
    core.step(ProxiesChanged((Peer(EndpointID(1), 0),)), 0.0)
    core.step(Opened(1, 7, True), 0.0)
    core.step(Join(1, 1, [(ROOM, None)]), 0.0)
    core.step(END_OF_TURN, 0.0)

    def work() -> None:
        for batch in data:
            for _ in range(COPIES):
                core.step(RecordsReceived(EndpointID(2), batch, 0, len(batch), per_turn), 0.0)
                effects = core.step(END_OF_TURN, 0.0)
                assert isinstance(effects[-1], SendDelivered)

    return microseconds(work)


def answers(per_turn: int) -> tuple[float, float]:
    """(encoding, and at each proxy parsing and looking up) of the answers to all copies."""
    turns = [[(start + n + 1) << 10 for n in range(per_turn)] for start in range(0, SIGNALS, per_turn)]
    encoded: list[bytes] = []

    def encode_all() -> None:
        for ids in turns:
            for _ in range(COPIES):
                control = control_pb2.Control(signals_delivered=control_pb2.SignalsDelivered(ids=ids))
                encoded.append(control.SerializeToString())

    core = Proxy(max_record_bytes=1 << 20)

    def parse_all() -> None:
        for message in encoded:
            ids = list(control_pb2.Control.FromString(message).signals_delivered.ids)
            core.step(ev.SignalsDelivered(ids, EndpointID(3)), 0.0)

    return microseconds(encode_all), microseconds(parse_all)


def main() -> None:
    """Print a table."""
    print("µs of CPU for a signal of three copies")
    print(f"{'in a turn':>10} {'proxies':>9} {'gateway':>9} {'with table':>11} {'answers':>9} {'a proxy more':>13}")
    for per_turn in (1, 10, 100):
        data = batches(per_turn)
        folder = Path(tempfile.mkdtemp(prefix="pixiu-benchmark-"))
        table = SharedTable(folder, 16 << 20)
        try:
            in_memory, in_table = at_gateway(data, per_turn, MemoryTable()), at_gateway(data, per_turn, table)
        finally:
            table.close(remove=True)
            shutil.rmtree(folder, ignore_errors=True)
        encoding, parsing = answers(per_turn)
        proxies = at_proxies(data, per_turn)
        print(f"{per_turn:>10} {proxies:>9.1f} {in_memory:>9.1f} {in_table:>11.1f} {encoding:>9.2f} {parsing:>13.2f}")


if __name__ == "__main__":
    main()
