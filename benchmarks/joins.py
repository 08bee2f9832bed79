"""What 15,000 joins cost the router's core and the gateway's report of them, alone and while 5,000 leave.

    python -m benchmarks.joins [--joins 15000] [--leaves 5000] [--rate 2000]

A gateway's reporter and a router's core in one process, no network: the time of each is taken by the thread's CPU clock. The
clients of before leave in the order in which they came, as fast as the others come; every second there is a heartbeat with
anti-entropy, answered a turn later, while messages are under way. Rooms: one for all, a thousand, one for each user.

Estimate: a join is one message, 20 µs at the router with its confirmation and 25 µs at the gateway, wherever it goes; a leave
is the same. So 15,000 joins take 0.3 and 0.4 s, with 5,000 leavers a third more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

from rich.console import Console
from rich.table import Table

from cluster.membership.events import (
    NO_OTHER,
    AntiEntropyReceived,
    ClusterChanged,
    Gateway,
    MessagesReceived,
    StoreOpened,
    SubscriptionReply,
)
from cluster.membership.lww_map import Update, decode_messages, encode_messages
from cluster.runtime.contract import SendControl, Tick
from gateway import events as ev
from gateway.membership_reporter import MembershipReporter
from pixiu.ids import EndpointID, gateway_msg_id
from pixiu.wire.v1 import control_pb2
from router.core import Core

ROUTER, GATEWAY = EndpointID(1), EndpointID(2)
TURN_S = 0.005
"""Of the event loop, so long until an answer is in."""
HEARTBEAT_S = 1.0


class Chain:
    """The two cores and what is under way between them, with the CPU seconds of each."""

    def __init__(self) -> None:
        self.router_s = self.gateway_s = self.now = 0.0
        self._number = self._token = 0
        self.reporter = MembershipReporter(0, lambda: gateway_msg_id(0, 1, self._number), self._next_token)
        self.reporter.set_replicas(1, (ev.Replica(ROUTER, 0, True),), 0.0)
        self.router = Core(
            endpoint=ROUTER, partition=0, heartbeat_s=HEARTBEAT_S, poll_interval_s=10.0, gone_gateway_s=300.0, dead_after=3
        )
        self._to_router: deque[object] = deque()
        self._to_gateway: deque[bytes] = deque()
        view = ClusterChanged(1, 1, (), NO_OTHER, (Gateway(GATEWAY, 0, 1),))
        self._router_takes(StoreOpened(None))
        self._router_takes(view)
        self._beat = 0.0

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    def announce(self, changes: list[tuple[int, int, bool]]) -> None:
        """(room, user, whether it joins)."""
        updates = []
        for room, uin, login in changes:
            self._number += 1
            updates.append(Update(gateway_msg_id(0, 1, self._number), room, uin, login))
        begin = time.thread_time()
        self.reporter.announce(updates, self.now)
        self.gateway_s += time.thread_time() - begin

    def turn(self) -> None:
        """One turn of both."""
        self.now += TURN_S
        begin = time.thread_time()
        effects = self.reporter.flush(self.now)
        self.gateway_s += time.thread_time() - begin
        messages = [effect for effect in effects if isinstance(effect, ev.SendMembership)]
        self._to_router.extend(MessagesReceived(GATEWAY, effect.messages) for effect in messages)
        begin = time.thread_time()
        for effect in messages:
            encode_messages(effect.messages)
            self.reporter.settled(effect.token, True, self.now)
        self.reporter.next_deadline()
        self.gateway_s += time.thread_time() - begin
        if self.now >= self._beat:
            self._beat = self.now + HEARTBEAT_S
            digest = self.reporter.digest(0, 1)
            self._to_router.append(SubscriptionReply(GATEWAY, True, digest))
        for event in [self._to_router.popleft() for _ in range(len(self._to_router))]:
            self._router_takes(event)
        self._router_takes(Tick())
        for data in [self._to_gateway.popleft() for _ in range(len(self._to_gateway))]:
            begin = time.thread_time()
            control = control_pb2.Control.FromString(data)
            if control.HasField("gateway_confirm"):
                self.reporter.confirmed(ROUTER, list(control.gateway_confirm.ids))
            answers = self.reporter.answer(ROUTER, control)
            self.gateway_s += time.thread_time() - begin
            for answer in answers:
                self._to_router.extend(AntiEntropyReceived(GATEWAY, control_pb2.Control.FromString(m)) for m in answer.messages)

    def _router_takes(self, event: object) -> None:
        begin = time.thread_time()
        if isinstance(event, MessagesReceived):
            (data,) = encode_messages(event.messages) or [b""]
            begin = time.thread_time()
            event = MessagesReceived(event.peer, decode_messages(control_pb2.Control.FromString(data).gateway_messages))
        effects = self.router.step(event, self.now)  # type: ignore[arg-type]
        self.router_s += time.thread_time() - begin
        for effect in effects:
            if isinstance(effect, SendControl) and effect.peer == GATEWAY:
                self._to_gateway.extend(effect.messages)


def measure(rooms: int, joins: int, leaves: int, rate: int) -> tuple[float, float, int]:
    """CPU seconds of router and gateway for the joins and leaves, and the pages that were listed."""
    chain = Chain()
    per_turn = max(1, int(rate * TURN_S))
    waiting: deque[tuple[int, int, bool]] = deque((uin % rooms, uin, True) for uin in range(1, leaves + 1))
    while waiting or chain.reporter.unconfirmed:
        chain.announce([waiting.popleft() for _ in range(min(per_turn, len(waiting)))])
        chain.turn()
    chain.router_s = chain.gateway_s = 0.0
    going = deque((room, uin, False) for room, uin in [(uin % rooms, uin) for uin in range(1, leaves + 1)])
    waiting.extend((uin % rooms, uin, True) for uin in range(leaves + 1, leaves + joins + 1))
    while waiting or going or chain.reporter.unconfirmed:
        chain.announce([going.popleft() for _ in range(min(per_turn, len(going)))])
        chain.announce([waiting.popleft() for _ in range(min(per_turn, len(waiting)))])
        chain.turn()
    return chain.router_s, chain.gateway_s, chain.reporter.source.pages_sent


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joins", type=int, default=15_000)
    parser.add_argument("--leaves", type=int, default=5_000)
    parser.add_argument("--rate", type=int, default=2_000, help="joins, and leaves, a second")
    args = parser.parse_args()
    columns = ("rooms", "leaves", "router, CPU s", "gateway, CPU s", "router, µs a change", "gateway, µs a change", "pages")
    table = Table(*columns)
    for rooms in (1, 1_000, args.joins + args.leaves):
        for leaves in (0, args.leaves):
            router_s, gateway_s, pages = measure(rooms, args.joins, leaves, args.rate)
            spent = (router_s, gateway_s)
            each = [f"{one / (args.joins + leaves) * 1e6:.0f}" for one in spent]
            table.add_row(f"{rooms:,}", f"{leaves:,}", *(f"{one:.2f}" for one in spent), *each, str(pages))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
