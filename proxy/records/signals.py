"""Signals in a proxy: the replica for each copy, and the publishers that wait for reports of delivery. Pure.

    publisher ── copy 0 ──▶ proxy A ──▶ 1st replica in the SnowflakeID's order ──▶ gateways
              ── copy 1 ──▶ proxy B ──▶ 2nd                                    ──▶ gateways
              ── copy 2 ──▶ proxy C ──▶ 3rd                                    ──▶ gateways

The loss of one process or one datagram then takes one copy. Where a proxy and a replica share a process (a node), a copy stays in
the node of its proxy: two copies that crossed between two nodes would be lost with either. Signals have no order, so they do not
wait for a change of routes, and the change does not wait for them.

Source: PiXiu §4; docs/architecture.md, "A signal to a room". Departs from PiXiu §4 step 2 (a random broker) because other
partitions do not know the room, and random picks coincide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pixiu.placement.partition import rendezvous_order
from proxy import events as ev

AWAITED_GENERATION: Final = 32_768
"""Signals with receipts before a new generation begins; the last one or two generations are remembered, the oldest go first. Their
senders repeat for 0.8 s."""


def replica_of_copy(replicas: Sequence[ev.Replica], signal: int, copy: int) -> int:
    """Endpoint that gets a signal's copy: the usable replica in the proxy's own process, or else the copy-th in the rendezvous
    order of its SnowflakeID, usable ones first. Replicas beside other proxies, which these send to, are left out while there are
    others.

    With fewer replicas than copies some get several. Raises ZeroDivisionError if there are no replicas.
    """
    for replica in replicas:
        if replica.place is ev.Place.HERE and replica.usable:
            return replica.endpoint
    apart = [replica for replica in replicas if replica.place is ev.Place.APART]
    among = apart if any(replica.usable for replica in apart) else replicas
    usable = [replica.endpoint for replica in among if replica.usable]
    doubted = [replica.endpoint for replica in among if not replica.usable]
    order = rendezvous_order(signal, usable) + rendezvous_order(signal, doubted)
    return order[copy % len(order)]


class AwaitedSignals:
    """Signals whose delivery a stream waits for, by SnowflakeID, with the gateways already reported to it.

    Args:
        generation: signals in a generation.
        receipts: False if the gateways belong to another cluster, whose proxies alone hear from them.
    """

    def __init__(self, generation: int = AWAITED_GENERATION, *, receipts: bool = True) -> None:
        self.receipts = receipts
        self._generation = generation
        self._streams: dict[int, tuple[int, ...]] = {}
        """SnowflakeID → the stream, then the gateways reported to it."""
        self._before: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._streams) + len(self._before)

    def wait(self, signal: int, stream: int) -> None:
        """Note that a publisher waits. If it asks again, on any stream, it is answered on the newest, for every gateway again."""
        if len(self._streams) >= self._generation:
            self._before, self._streams = self._streams, {}
        self._before.pop(signal, None)
        self._streams[signal] = (stream,)

    def delivered(self, signals: Iterable[int], gateway: int) -> dict[int, list[int]]:
        """Reports to each stream that a gateway delivered these signals, once for each gateway, and only if it waits for them."""
        told: dict[int, list[int]] = {}
        for signal in signals:
            generation = self._streams if signal in self._streams else self._before
            awaited = generation.get(signal)
            if awaited is not None and gateway not in awaited[1:]:
                generation[signal] = (*awaited, gateway)
                told.setdefault(awaited[0], []).append(signal)
        return told
